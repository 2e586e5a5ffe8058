"""`explain` names the device kernels of attention that a profiler then shows, forward and backward."""

import random
import re
from functools import partial

import pytest
import torch

import tilesmith
from kernels_of_calls import KernelsOfCalls
from tilesmith import ops
from tilesmith.engine import cases
from tilesmith.engine import ops as declared
from tilesmith.engine.backends import triton_missing
from tilesmith.ops.attn.cases.groups import UNEVEN_GROUPS
from tilesmith.ops.attn.cases.windows import WINDOW_PACKED
from tilesmith.ops.attn.schedule import tile_heads
from tilesmith.validate.cases import check_each

if not torch.cuda.is_available() or torch.version.hip or triton_missing() is not None:
    pytest.skip("needs an NVIDIA GPU and Triton", allow_module_level=True)

KNOWN = re.compile(r"^_?(attention|query_tiles|key_tiles|list_tiles|list_key_tiles)\w*_kernel$")


def _calls(count):
    """Arguments of calls in few forms, so that few kernels are compiled, and of many sizes."""
    r = random.Random(0)
    for number in range(count):
        dim, group = r.choice((64, 128)), r.choice((1, 4))
        kv_heads, batch = r.choice((1, 2, 4)), r.choice((1, 2, 3))
        tokens = r.choice((r.randint(1, 700), 1024, 2048, 4096))
        given = {"mask": ops.Mask(causal=r.random() < 0.5), "deterministic": r.random() < 0.5}
        kind = ("train", "train", "decode", "window", "packed")[number % 5]
        keys = tokens
        if kind == "decode":
            tokens, keys = r.choice((1, 4, 16)), r.choice((1000, 8192, 30_000))
        elif kind == "window":
            given["mask"] = ops.Mask(causal=True, window=(128, 0))
        elif kind == "packed":
            batch, cut = 1, r.randint(0, tokens)
            lengths = torch.tensor([0, cut, tokens], dtype=torch.int32, device="cuda")
            given |= {"cu_seqlens_q": lengths, "cu_seqlens_k": lengths}
        sizes = ((group * kv_heads, tokens), (kv_heads, keys), (kv_heads, keys))
        q, k, v = (torch.randn(batch, h, t, dim, dtype=torch.bfloat16, device="cuda") for h, t in sizes)
        yield (q, k, v), given, kind


def _named(choice) -> set[str]:
    return {word for word in re.findall(r"^\s+\d+\. (\w+_kernel) ", str(choice), re.MULTILINE) if KNOWN.match(word)}


def test_explain_names_the_kernels_that_a_profiler_shows():
    told = []
    with KernelsOfCalls() as shown:
        for number, (tensors, given, kind) in enumerate(_calls(220)):
            told.append((number, kind, tilesmith.explain("attention", *tensors, **given)))
            shown.call(partial(ops.attention, **given), *tensors)
            if kind == "decode":
                continue
            tensors = [x.requires_grad_() for x in tensors]
            told.append((number, kind, tilesmith.explain("attention", *tensors, gradient=True, **given)))
            out, _ = ops.attention(*tensors, **given)
            shown.call(torch.autograd.grad, out, tensors, torch.randn_like(out))
    for (number, kind, choice), names in zip(told, shown.names, strict=True):
        assert {name for name in names if KNOWN.match(name)} == _named(choice), (number, kind, str(choice))


GROUPED = (
    "d128_causal_sections", "d96_tiles", "d192_128_window", "d192_128_more_queries", "d192_128_packed", "d256_tiles",
    "d128_deterministic", "d64_causal_turns", "packed_tiles", "packed_cross_window", "dropout_many",
    "d128_window_sinks", "d64_lists_causal", "d128_more_queries", "d256_deterministic", "d128_group_of_7",
    "d64_group_of_3",
)  # fmt: skip


def _grouped():
    """Groups of cases in parts that are alike, and, of three heads and more, in parts of which some have one fewer."""
    for case in (case for case in cases("attention") if case.name in (*GROUPED, *UNEVEN_GROUPS)):
        given = case.build(torch.device("meta"), torch.bfloat16, case.generator("cpu"))
        group = given["q"].shape[1] // given["k"].shape[1]
        if case.name in GROUPED:
            yield case.name, f"group_parts={next(n for n in range(2, group + 1) if group % n == 0)}"
        yield from ((case.name, f"group_parts={n}") for n in (2, 3, 7) if n < group and group % n)


NARROW_BLOCKS = [
    (name, f"group_parts={parts}:block_q={block}:stages={stages}")
    for name in ("d64_group_of_7", "d64_group_of_71")
    for parts in (0, 2, 3)
    for block, stages in ((128, 2), (64, 3))
]


def _check(name, dtype, *pins):
    """A case by pinned kernels, (forward, backward) of each."""
    op, case = declared()["attention"], next(case for case in cases("attention") if case.name == name)
    pinned = [{"attention": forward, "attention_vjp": backward} for forward, backward in pins]
    results = list(check_each(op, ("hopper",), case, "cuda", dtype, pinned=pinned))
    wrong = [f"{pin}: {r.message}" for pin, r in zip(pins, results, strict=True) if not r.passed or r.message]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("name", "config"), [*_grouped(), *NARROW_BLOCKS])
def test_groups_whose_parts_have_tiles_of_their_own(name, config):
    _check(name, torch.bfloat16, ("hopper", f"hopper:{config}"))


def _check_heads(name, dtype, heads):
    """By tiles of the queries of so many heads, for each of `heads`. All have one oracle and one backward, which tests
    of their own, on as many processes, would compute and compile again."""
    _check(name, dtype, *((f"hopper:heads={n}", "hopper") for n in heads))


def _packs():
    """Windows of groups, and the numbers of heads whose queries a tile may hold."""
    return [(name, tile_heads(sizes[1] // sizes[2])[1:]) for name, (sizes, _) in WINDOW_PACKED.items()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("name", "heads"), _packs(), ids=list(WINDOW_PACKED))
def test_tiles_of_windows_that_hold_queries_of_several_heads(name, heads, dtype):
    _check_heads(name, dtype, heads)


SHARED = (
    "d128_causal_tiles", "d64_two_programs", "d64_shares", "d96_tiles", "d88_group_of_3", "d80_group_of_5",
    "d128_whole_more_queries", "d64_causal_turns", "d128_group_of_7", "d64_group_of_3", "d256_group_of_7",
    "d256_many_tiles", "d256_more_queries", "d64_group_of_7", "d72_key_shares_behind", "d128_key_shares_softcap",
    "d256_many_tiles_full", "d192_128_grouped", "d192_128_more_queries",
)  # fmt: skip


def _shared():
    """Calls without a window, and the numbers of heads whose queries a tile may hold."""
    known, meta, found = {case.name: case for case in cases("attention")}, torch.device("meta"), []
    for name in SHARED:
        given = known[name].build(meta, torch.bfloat16, known[name].generator("cpu"))
        found.append((name, tile_heads(given["q"].shape[1] // given["k"].shape[1])[1:]))
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("name", "heads"), _shared(), ids=SHARED)
def test_tiles_without_a_window_that_hold_queries_of_several_heads(name, heads, dtype):
    _check_heads(name, dtype, heads)


BOTH_JOINED = (
    "d96_tiles", "d80_tiles", "d88_group_of_3", "d80_whole_more_queries", "d80_group_of_5", "d80_key_shares",
    "d88_both_joined",
)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", BOTH_JOINED)
def test_tiles_whose_keys_are_no_power_of_two(name, dtype):
    """Also where a model of the schedule chooses others."""
    _check(name, dtype, ("hopper:consumers=3:block_n=96:stages=3", "hopper"))


NARROW_BLOCKS_OF_192 = ("d192_128_tiles", "d192_128_grouped", "d192_128_more_queries", "d192_128_whole")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("name", NARROW_BLOCKS_OF_192)
def test_blocks_of_64_keys_of_192_columns(name, dtype):
    _check(name, dtype, ("hopper:consumers=2:block_n=64:stages=3:q_stages=1", "hopper"))
