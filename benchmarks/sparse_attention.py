"""Block-sparse attention on one GPU: values first, then times beside cuDNN and compiled FlexAttention.

    python benchmarks/sparse_attention.py results.json [--tokens 32768,65536] [--part values] [--rows static,dynamic]

Exits with 1, and measures nothing, where a kernel's values are wrong. --part: values or times. Values are looked at by
several processes, since compiling their kernels takes longer than running them. --ops: those that are looked at.
--rows: of static, metadata, dynamic and learned. --without-flex: FlexAttention takes longer to compile than to run.
--few: of DYNAMIC_THRESHOLD and LEARNED only what they are judged by, without the parts and the alternatives.
Rows hold, besides medians, what each device kernel of a part takes, by torch's profiler.
"""

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from common import DEVICE, profiled, provenance, save, say, spent
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tilesmith import explain, ops, use
from tilesmith.attention import BlockIndexer, SparsePattern, estimated_shares, pattern_blocks, to_block_mask
from tilesmith.attention.budget import budget
from tilesmith.attention.estimate import chosen_blocks
from tilesmith.attention.indexer import indexer_loss
from tilesmith.attention.patterns import CLOSED, _blocks
from tilesmith.engine import cases
from tilesmith.engine import ops as declared
from tilesmith.engine.timing import measure, wall_time
from tilesmith.ops.attn.mask import Blocks, Mask
from tilesmith.validate import check

OPS = (
    "block_scores", "block_max_scores", "block_mass", "block_shares", "block_select", "block_lists", "block_pattern",
)  # fmt: skip
PROCESSES = 8
FEW = 3  # small cases of each op; the tests have all of them
CAUSAL = Mask(causal=True)
SHARES = ("64,64,4", "64,128,8", "128,64,4", "128,128,8", "32,128,4")  # block_m, block_n, warps
KEY_SAMPLES = (32, 64, 128)
MAX_SCORES = ((4, 0), (8, 0), (8, 128))  # warps, and registers of a thread; 0: as many as the compiler likes


def values(names: Iterable[str]) -> list[str]:
    """What is wrong: of the ops on their cases, and of attention on chosen blocks beside a dense mask."""
    jobs = [(name, case.name) for name in names for case in some_cases(name)]
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        found = [pool.submit(chosen_attention, 4, 2), pool.submit(chosen_attention, 16, 2)]
        found += [pool.submit(value, *job) for job in jobs]
        return [what for future in found for what in future.result()]


def some_cases(name: str) -> list[Any]:
    """Few small cases of an op, and those for GPUs."""
    small = [case for case in cases(name) if "interpret" in case.tags][:FEW]
    return [*small, *(case for case in cases(name) if "gpu" in case.tags)]


def value(name: str, case_name: str) -> list[str]:
    """What is wrong with an op on one of its cases."""
    case = next(case for case in some_cases(name) if case.name == case_name)
    result = check(declared()[name], "triton", case, DEVICE, case.dtypes[-1])
    return [] if result.passed else [f"{name} {case.name}: {result.message}"]


def chosen_attention(heads: int, kv_heads: int) -> list[str]:
    """What is wrong with attention on chosen blocks, of which all rows have the first one, and with its gradients: in
    groups of eight heads dk and dv come from parts of the groups."""
    q, k, v = tensors(2048, heads, kv_heads)
    plan = budget(2048, 2048, 128, True, 0.6, DEVICE)
    keep, blocks = chosen_blocks(estimated_shares(q, k), plan, 128, first=1)
    dense = keep.repeat_interleave(128, 2).repeat_interleave(128, 3).repeat_interleave(heads // kv_heads, 1)
    out, _ = ops.attention(q, k, v, Mask(causal=True, blocks=blocks))
    seen = dense & CAUSAL.materialize(2048, 2048, device=DEVICE)
    wide = [x.detach().float().requires_grad_() for x in (q, k, v)]
    wanted = F.scaled_dot_product_attention(*wide, attn_mask=seen, enable_gqa=True)
    dout = torch.randn_like(out)
    found = (out, *torch.autograd.grad(out, (q, k, v), dout))
    exact = (wanted, *torch.autograd.grad(wanted, wide, dout.float()))
    wrong = []
    for name, x, y in zip(("out", "dq", "dk", "dv"), found, exact):
        error = float((x.detach().float() - y.detach()).norm() / y.detach().norm())
        if not error < 2.0**-6:
            wrong.append(f"{name} of attention on chosen blocks, {heads}/{kv_heads} heads, is off by {error}")
    return wrong


def tensors(tokens: int, heads: int, kv_heads: int, dim: int = 128, structured: bool = True) -> tuple[Tensor, ...]:
    """q, k and v in bf16 that ask for gradients. structured: stretches of 64 tokens share one of 32 topics, so that the
    attention has something to find."""
    generator = torch.Generator(DEVICE).manual_seed(tokens + heads)

    def draw(count: int) -> Tensor:
        x = torch.randn(1, count, tokens, dim, device=DEVICE, generator=generator)
        if structured:
            topics = torch.randn(32, dim, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1))
            which = torch.randint(0, 32, (1, count, -(-tokens // 64)), device=DEVICE, generator=generator)
            x = 0.7 * x + topics[which.repeat_interleave(64, 2)[:, :, :tokens]]
        return x.bfloat16().requires_grad_()

    return draw(heads), draw(kv_heads), draw(kv_heads)


def both(forward: Callable[[], Tensor], inputs: tuple[Tensor, ...]) -> Callable[[], object]:
    dout = torch.randn_like(forward())
    return lambda: torch.autograd.grad(forward(), inputs, dout)


def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def times(variants: dict[str, Callable[[], object]], rounds: int = 5) -> dict[str, float]:
    found = measure(variants, DEVICE, rounds=rounds, budget_ms=30.0, warmup=2)
    return {name: round(timing.median_us, 1) for name, timing in found.items()}


def walled(call: Callable[[], object], runs: int = 20) -> float:
    """Median µs of a call and of waiting for it."""
    return round(statistics.median(wall_time(call, DEVICE) for _ in range(runs)), 1)


def kernels(call: Callable[[], object], runs: int = 5) -> dict[str, float]:
    """µs that each device kernel takes in one call, by torch's profiler; the longest first."""
    found: Counter[str] = Counter()
    for name, us in spent(profiled(call, calls=runs), runs).items():
        found[name.split("<")[0].removeprefix("void ")] += us
    return {name: round(us, 1) for name, us in found.most_common() if us >= 1.0}


def fresh(pattern: SparsePattern, tokens: int, heads: int) -> Blocks:
    """Lists that no cache had."""
    _blocks.cache_clear()
    return pattern_blocks(pattern, tokens, tokens, 0.9, heads=heads, device=DEVICE)


def static(tokens: int, options: argparse.Namespace) -> dict:
    """RANDOM and BLOCK_SPARSE at 90 %, 16 heads, beside dense cuDNN and FlexAttention on the same blocks."""
    q, k, v = inputs = tensors(tokens, 16, 16, structured=False)
    rows = {"work": f"static, {tokens} tokens, 16 heads, D 128"}
    every = tokens // 128 * (tokens // 128 + 1) // 2
    forward: dict[str, Callable[[], object]] = {"cudnn": lambda: cudnn(q, k, v)}
    backward = {"cudnn": both(forward["cudnn"], inputs)}
    flex = torch.compile(flex_attention, dynamic=False)
    for pattern in (SparsePattern.RANDOM, SparsePattern.BLOCK_SPARSE):
        kept = pattern_blocks(pattern, tokens, tokens, 0.9, heads=16, device=DEVICE)
        per_list = int(kept.offsets.diff(dim=-1).sum()) // kept.offsets.shape[1]
        assert 10 * per_list <= every, f"{pattern}: {per_list} of {every} blocks are more than a tenth"
        rows[f"{pattern.value} kept"] = per_list / every

        def ours(pattern=pattern):
            return ops.attention(q, k, v, Mask(causal=True, blocks=fresh(pattern, tokens, 16)))[0]

        def cached(kept=kept):
            return ops.attention(q, k, v, Mask(causal=True, blocks=kept))[0]

        calls = {pattern.value: ours, f"{pattern.value}, lists kept": cached}
        if not options.without_flex:
            block_mask = to_block_mask(kept, tokens, tokens, causal=True)
            calls[f"flex, {pattern.value}"] = lambda mask=block_mask: flex(q, k, v, block_mask=mask)
        forward |= calls
        backward |= {name: both(call, inputs) for name, call in calls.items()}
        rows[f"{pattern.value} kernel"] = str(explain("attention", q, k, v, Mask(causal=True, blocks=kept)))[:200]
    with torch.no_grad():
        rows["forward us"] = times(forward)
    rows["forward and backward us"] = times(backward)
    return rows


def metadata(tokens: int, options: argparse.Namespace) -> dict:
    """Lists of the patterns in closed form, 16 heads, beside create_block_mask: with the Python around them, by the op
    alone, and by the op in a CUDA graph."""
    rows: dict[str, Any] = {"work": f"metadata, {tokens} tokens, 16 heads"}
    window, seed = tokens // 10, torch.zeros(1, dtype=torch.int64, device=DEVICE)
    make = torch.compile(create_block_mask)

    def seen(b, h, i, j):
        return (j <= i) & (j >= i - window)

    calls: dict[str, Callable[[], object]] = {p.value: (lambda p=p: fresh(p, tokens, 16)) for p in CLOSED}
    calls["create_block_mask, compiled"] = lambda: make(seen, None, None, tokens, tokens, device="cuda")
    for p in CLOSED:
        calls[f"{p.value}, op"] = alone = lambda p=p: ops.block_pattern(seed, p.value, tokens, tokens, 0.9, 16)
        calls[f"{p.value}, graph"] = recorded(alone)
    rows["us, of the device"] = times(calls)
    rows["kernels us"] = {p.value: kernels(calls[p.value]) for p in CLOSED}
    rows["us, of the host and the device"] = {name: walled(call) for name, call in calls.items()}
    return rows


def recorded(call: Callable[[], object]) -> Callable[[], object]:
    """The replay of a CUDA graph of the call."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def dynamic(tokens: int, options: argparse.Namespace) -> dict:
    """DYNAMIC_THRESHOLD at 90 %: times of its parts, and the attention that its blocks hold beside those of others."""
    q, k, v = tensors(tokens, 16, 16)
    plan = budget(tokens, tokens, 128, True, 0.9, DEVICE)

    def choose(key_samples: int | None = None):
        return chosen_blocks(estimated_shares(q, k, key_samples=key_samples), plan, 128, first=1)

    def attend(blocks):
        return ops.attention(q, k, v, Mask(causal=True, blocks=blocks))[0]

    with torch.no_grad():
        shares, (keep, blocks) = estimated_shares(q, k), choose()
        calls: dict[str, Callable[[], object]] = {
            "cudnn": lambda: cudnn(q, k, v), "sparse": lambda: attend(choose()[1]),
            "attention alone": lambda: attend(blocks), "estimate and choice": choose,
        }  # fmt: skip
        if not options.few:
            room = keep.shape[1] * plan.total
            calls |= {
                "estimate": lambda: estimated_shares(q, k), "choice": lambda: chosen_blocks(shares, plan, 128, first=1),
                "selection": lambda: ops.block_select(shares, plan.counts, plan.visible, 1.0, 1, 1),
                "lists": lambda: ops.block_lists(keep, room, plan.counts),
            }  # fmt: skip
            for count in KEY_SAMPLES:
                calls[f"estimate and choice, {count} keys"] = lambda count=count: choose(count)
            for config in SHARES:
                fields = ("block_m", "block_n", "num_warps")
                pin = "triton:" + ":".join(f"{name}={n}" for name, n in zip(fields, config.split(",")))
                calls[f"estimate, {config}"] = pinned(lambda: estimated_shares(q, k), block_shares=pin)
        found = times(calls)
        row = {"work": f"dynamic, {tokens} tokens, 16 heads, D 128", "forward us": found}
        row["share of the estimate and the choice"] = round(1 - found["attention alone"] / found["sparse"], 4)
        row["kernels us"] = kernels(calls["sparse"])
        top, total = ops.attention_stats(q, k, None, True)
        lse = top + total.log()

        def held(lists: Blocks) -> float:
            return float(ops.block_mass(q, k, lse, lists.offsets, lists.indices, None, True).sum(-1).mean())

        means = [x.unflatten(2, (-1, 128)).mean(3) for x in (q, k)]
        one_mean = chosen_blocks(ops.block_scores(*means, None, True, 1, 1), plan, 128, first=1)[1]
        row["retained mass"] = {"one mean a block": held(one_mean)}
        for count in KEY_SAMPLES:
            row["retained mass"][f"16 queries, {count} keys"] = held(choose(count)[1])
        every = chosen_blocks(ops.block_shares(q, k, None, True), plan, 128, first=1)[1]
        row["retained mass"]["all queries and keys"] = held(every)
        for pattern in (SparsePattern.RANDOM, SparsePattern.LOCAL_GLOBAL):
            row["retained mass"][pattern.value] = held(pattern_blocks(pattern, tokens, tokens, heads=16, device=DEVICE))
    return row


def learned(tokens: int, options: argparse.Namespace) -> dict:
    """LEARNED, the best 16 blocks of 128 keys, 32 / 4 heads of 128: a step of the attention and of its indexer."""
    q, k, v = inputs = tensors(tokens, 32, 4)
    torch.manual_seed(0)
    x = torch.randn(1, tokens, 1024, device=DEVICE, dtype=torch.bfloat16)
    indexer = BlockIndexer(1024, 4, 64, device=DEVICE, dtype=torch.bfloat16)
    plan = budget(tokens, tokens, 128, True, 0.9, DEVICE, 16)
    parameters = tuple(indexer.parameters())
    dout = torch.randn_like(q)

    def choose():
        scores = indexer(x)
        return scores, *chosen_blocks(scores.detach(), plan, 128, first=1)

    def loss(scores, keep, blocks, lse):
        with torch.no_grad():
            target = ops.block_mass(q, k, lse.detach(), blocks.offsets, blocks.indices, None, True, query_stride=8)
        return indexer_loss(scores, target, keep)

    def step():
        scores, keep, blocks = choose()
        out, lse = ops.attention(q, k, v, Mask(causal=True, blocks=blocks))
        found = loss(scores, keep, blocks, lse)
        return torch.autograd.grad((out, found), (*inputs, *parameters), (dout, torch.ones_like(found)))

    with torch.no_grad():
        scores, keep, blocks = choose()
        lse = ops.attention(q, k, v, Mask(causal=True, blocks=blocks))[1]

    def indexer_alone():
        scores, keep, blocks = choose()
        return torch.autograd.grad(loss(scores, keep, blocks, lse), parameters)

    def attend(blocks):
        return lambda: ops.attention(q, k, v, Mask(causal=True, blocks=blocks))[0]

    calls = {
        "cudnn": both(lambda: cudnn(q, k, v), inputs), "sparse": step, "indexer and its loss": indexer_alone,
        "attention alone": both(attend(blocks), inputs),
    }  # fmt: skip
    if not options.few:
        with torch.no_grad():
            unforced = chosen_blocks(scores, plan, 128)[1]
        # a block of keys that all rows chose is one tile's work in the backward, for all query heads that share it
        calls["attention alone, first block not forced"] = both(attend(unforced), inputs)
        for count in (1, 4):
            pin = f"hopper:group_parts={count}"
            calls[f"attention alone, groups in {count} parts"] = pinned(both(attend(blocks), inputs), attention_vjp=pin)
    found = times(calls)
    row = {"work": f"learned, top 16, {tokens} tokens, 32/4 heads, D 128", "forward and backward us": found}
    row["share of the indexer"] = round(1 - found["attention alone"] / found["sparse"], 4)
    row["kernels us"] = {name: kernels(calls[name], 3) for name in ("attention alone", "indexer and its loss")}
    if not options.few:
        with torch.no_grad():
            parts = learned_parts(x, indexer, q, k, lse, blocks, lambda: choose()[2], attend(blocks))
            row["parts us"] = times(parts | index_scores(tokens, scores, keep))
    per_list = blocks.offsets_t.diff(dim=-1)
    row["rows that chose a block of keys, most and mean"] = [int(per_list.max()), float(per_list.float().mean())]
    return row


def learned_parts(x, indexer, q, k, lse, blocks, choose, attend) -> dict[str, Callable[[], object]]:
    """The parts of a forward pass, and what the target would take without a sample."""
    lists = blocks.offsets, blocks.indices
    return {
        "projections and scores": lambda: indexer(x), "projections, scores and choice": choose,
        "target": lambda: ops.block_mass(q, k, lse, *lists, None, True, query_stride=8),
        "target, all queries": lambda: ops.block_mass(q, k, lse, *lists, None, True),
        "attention forward": attend,
    }  # fmt: skip


def index_scores(tokens: int, scores: Tensor, keep: Tensor) -> dict[str, Callable[[], object]]:
    """The scores of blocks alone, in several forms, and their gradient for the blocks that are kept."""
    q, k = (torch.randn(1, 4, tokens, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    dscores = torch.where(keep, torch.randn_like(scores), 0.0)

    def of_blocks() -> Tensor:
        return ops.block_max_scores(q, k, None, True, 128, 128)

    calls = {"index scores": of_blocks}
    for warps, registers in MAX_SCORES:
        pin = f"triton:num_warps={warps}:max_registers={registers}"
        calls[f"index scores, {warps} warps, {registers} registers"] = pinned(of_blocks, block_max_scores=pin)
    gradient = declared()["block_max_scores_vjp"]
    calls["index scores, gradient"] = lambda: gradient(dscores, q, k, scores, None, True, 128, 128, [True, True])
    return calls


def pinned(call: Callable[[], object], **pins: str) -> Callable[[], object]:
    """The call with kernels or configurations pinned."""

    def run():
        with use(**pins):
            return call()

    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("--tokens", default="32768,65536")
    parser.add_argument("--part", choices=("values", "times"))
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--rows", default="static,metadata,dynamic,learned")
    parser.add_argument("--without-flex", action="store_true")
    parser.add_argument("--few", action="store_true")
    args = parser.parse_args()
    found: dict[str, Any] = {**provenance(), "wrong": [], "rows": []}
    if args.part != "times":
        began = time.perf_counter()
        found["wrong"] = values(args.ops.split(","))
        found["seconds of values"] = round(time.perf_counter() - began, 1)
    known = {"static": static, "metadata": metadata, "dynamic": dynamic, "learned": learned}
    chosen = [known[name] for name in args.rows.split(",")]
    jobs = [(kind, tokens) for tokens in map(int, args.tokens.split(",")) for kind in chosen]
    for kind, tokens in [] if found["wrong"] or args.part == "values" else jobs:
        began = time.perf_counter()
        found["rows"].append(kind(tokens, args))
        found["rows"][-1]["seconds"] = round(time.perf_counter() - began, 1)
        say(json.dumps(found["rows"][-1]))
        save(args.out, found)
    if found["wrong"]:
        say("\n".join(found["wrong"]))
    save(args.out, found)
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
