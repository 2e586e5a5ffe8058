"""What each device kernel of a choice of blocks takes on one GPU, in several forms.

    TILESMITH_REPLAY=0 python benchmarks/block_choice.py results.json [--tokens 32768,65536]

Tokens of DYNAMIC_THRESHOLD's choice (16 heads of 128) and of LEARNED's (4 index heads of 64, a target of 32/4 heads of
128, the best 16 blocks). The forms of a kernel must agree, those of the largest scores and of lists in every bit;
otherwise it exits with 1. Several processes compile what is timed, since that takes longer than to run it.
"""

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any
from unittest import mock

import torch
from common import DEVICE, provenance, save, say
from sparse_attention import kernels, tensors
from torch import Tensor

from tilesmith import ops, use
from tilesmith.attention import estimated_shares
from tilesmith.attention.budget import Budget, budget
from tilesmith.attention.estimate import chosen_blocks
from tilesmith.engine import ops as declared
from tilesmith.ops.attn.triton import block_choice, block_shares
from tilesmith.settings import settings

PROCESSES = 8
LARGEST = {"four warps": {"num_warps": 4, "max_registers": 168}, "eight warps": {"num_warps": 8, "max_registers": 128}}
SUMS = {
    "one tile of 64 x 128 a program": {"block_m": 64, "block_n": 128, "num_warps": 8, "run": 1},
    "four of 64 x 128": {"block_m": 64, "block_n": 128, "num_warps": 8, "run": 4},
    "eight of 64 x 64": {"block_m": 64, "block_n": 64, "num_warps": 4, "run": 8},
}


@contextlib.contextmanager
def form(**patched: Any) -> Iterator[None]:
    """The forms of lists and means that no configuration chooses."""
    homes = {"has_words": block_choice, "MEANS": block_shares}
    with contextlib.ExitStack() as stack:
        for name, value in patched.items():
            stack.enter_context(mock.patch.object(homes[name], name, value))
        yield


def within(context: Callable[[], Any], call: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        with context():
            return call()

    return run


def pinned(call: Callable[[], Any], op: str, forms: dict[str, dict[str, int]]) -> dict[str, Callable[[], Any]]:
    """The call with each configuration of an op pinned."""
    pins = {
        name: "triton:" + ":".join(f"{field}={value}" for field, value in fields.items())
        for name, fields in forms.items()
    }
    return {name: within(partial(use, **{op: text}), call) for name, text in pins.items()}


def kept(plan: Budget, lists: int) -> Tensor:
    """A table of blocks, as many in each row as its budget and among those that it sees; not by our kernels, so that
    processes compile their own forms alone."""
    rows = plan.counts.shape[0]
    score = torch.rand(1, lists, rows, rows, device=DEVICE)
    score = torch.where(torch.arange(rows, device=DEVICE) < plan.visible[:, None], score, -1.0)
    return score.argsort(-1, descending=True).argsort(-1) < plan.counts[:, None]


def dynamic(tokens: int) -> dict[str, dict[str, Callable[[], Any]]]:
    """Forms of the parts of DYNAMIC_THRESHOLD's choice at 90 %: part -> form -> call."""
    q, k, _ = (x.detach() for x in tensors(tokens, 16, 16))
    plan = budget(tokens, tokens, 128, True, 0.9, DEVICE)
    keep = kept(plan, 16)
    shares = torch.randn(keep.shape, device=DEVICE).mul(2.0).softmax(-1)

    def estimate() -> Tensor:
        return estimated_shares(q, k)

    def lists() -> tuple[Tensor, ...]:
        return ops.block_lists(keep, keep.shape[1] * plan.total, plan.counts)

    bytewise = within(partial(form, has_words=lambda _: False), lists)
    means = within(partial(form, MEANS=16), within(partial(use, block_shares="triton"), estimate))
    return {
        "estimate": {**pinned(estimate, "block_shares", SUMS), "16 means a program": means},
        "selection": {"": lambda: ops.block_select(shares, plan.counts, plan.visible, 1.0, 1, 1)},
        "lists": {"bytes": bytewise, "words": lists},
        "all": {"": lambda: chosen_blocks(estimate(), plan, 128, first=1)},
    }


def learned(tokens: int) -> dict[str, dict[str, Callable[[], Any]]]:
    """Forms of the parts of LEARNED's choice and loss."""
    q, k, _ = (x.detach() for x in tensors(tokens, 32, 4))
    index_q, index_k = (torch.randn(1, 4, tokens, 64, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    plan = budget(tokens, tokens, 128, True, 0.9, DEVICE, 16)
    keep, lse = kept(plan, 4), torch.zeros(1, 32, tokens, device=DEVICE)
    offsets = torch.zeros(1, 4, keep.shape[2] + 1, dtype=torch.int32, device=DEVICE)
    ends = keep.sum(-1).flatten().cumsum(0).view(1, 4, -1)
    offsets[:, :, 1:], offsets[:, 1:, 0] = ends, ends[:, :-1, -1]
    indices = keep.nonzero()[:, 3].int()
    dscores = torch.where(keep, torch.randn(keep.shape, device=DEVICE), 0.0)
    gradient = declared()["block_max_scores_vjp"]

    def scored() -> Tensor:
        return ops.block_max_scores(index_q, index_k, None, True, 128, 128)

    def target() -> Tensor:
        return ops.block_mass(q, k, lse, offsets, indices, None, True, query_stride=8)

    def places() -> tuple[Tensor, ...]:
        seen = torch.where(keep, 0.0, float("-inf"))
        return gradient(dscores, index_q, index_k, seen, None, True, 128, 128, [True, True])

    return {
        "largest scores": pinned(scored, "block_max_scores", LARGEST),
        "gradient": {"": places},
        "target": {"": target},
    }


KINDS = {"dynamic": dynamic, "learned": learned}
EXACT = {"largest scores", "lists", "gradient"}


def warmed(kind: str, tokens: int, part: str, name: str) -> None:
    """Compile one form, in a process of its own."""
    KINDS[kind](tokens)[part][name]()
    torch.cuda.synchronize()


def differences(part: str, calls: dict[str, Callable[[], Any]]) -> list[str]:
    """Forms of a part that do not find what its first one does."""
    first, *others = calls
    wanted, wrong = calls[first](), []
    for name in others:
        found = calls[name]()
        for x, y in zip(*((z,) if isinstance(z, Tensor) else z for z in (found, wanted))):
            same = torch.equal(x, y) if part in EXACT else torch.allclose(x, y, rtol=1e-3, atol=1e-6)
            wrong += [] if same else [f"{part}, {name}: not what {first!r} finds"]
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    parser.add_argument("--tokens", default="32768,65536", help="of DYNAMIC_THRESHOLD's choice and of LEARNED's")
    args = parser.parse_args()
    if settings().replay != "0":
        parser.error("set TILESMITH_REPLAY=0: a launcher that is replayed does not see that its form has changed")
    began = time.perf_counter()
    jobs = list(zip(KINDS, map(int, args.tokens.split(","))))
    names = {kind: {part: list(calls) for part, calls in KINDS[kind](tokens).items()} for kind, tokens in jobs}
    with ProcessPoolExecutor(PROCESSES, mp_context=get_context("spawn")) as pool:
        compiled = [
            pool.submit(warmed, kind, tokens, part, name)
            for kind, tokens in jobs for part, forms in names[kind].items() for name in forms
        ]  # fmt: skip
        for future in compiled:
            future.result()
    found: dict[str, Any] = {**provenance(), "wrong": []}
    found["seconds of compiling"] = round(time.perf_counter() - began, 1)
    for kind, tokens in jobs:
        parts = KINDS[kind](tokens)
        rows = found[f"{kind}, {tokens} tokens, us"] = {}
        for part, calls in parts.items():
            found["wrong"] += differences(part, calls)
            rows[part] = {name: kernels(call) for name, call in calls.items()}
            say(kind, part, json.dumps(rows[part], indent=1))
    found["seconds"] = round(time.perf_counter() - began, 1)
    save(args.out, found)
    for line in [*found["wrong"], f"{found['seconds']} s, of compiling {found['seconds of compiling']}"]:
        say(line)
    return 1 if found["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
