"""Which probabilities attention drops, one by one, in each of its outputs: those that `philox.keep_mask` drops.

Scores are 0, so that a query's visible keys share one probability. Rows of an identity matrix then show single ones: as
values in out, as dout in dv, and, where dout and values have one column, as queries in dk and as keys in dq. Beside
random numbers a wrong bit is lost in what rounding costs; here an output is 0 or it is not.
"""

import random
from typing import NamedTuple

import pytest
import torch

from devices import DEVICE, ON_GPU
from op_runs import runnable
from tilesmith.device.philox import draw_seed, keep_mask, keep_scale
from tilesmith.engine import ops
from tilesmith.ops.attn.visibility import visibility

OP = ops()["attention"]
DTYPE = torch.bfloat16 if ON_GPU else torch.float32


class Sizes(NamedTuple):
    """group: heads of q that share one of k and v. documents: where those of q and those of k end, or none."""

    batch: int
    heads: int
    group: int
    tokens: int
    keys: int
    dim: int
    p: float
    causal: bool = False
    left: int = -1
    right: int = -1
    documents: tuple = ()

    def options(self):
        lengths = {}
        if self.documents:
            named = zip(("cu_seqlens_q", "cu_seqlens_k"), self.documents)
            lengths = {name: torch.tensor((0, *ends), dtype=torch.int32, device=DEVICE) for name, ends in named}
        return {"causal": self.causal, "window_left": self.left, "window_right": self.right, **lengths}


def _drawn(number):
    """Sizes of a number: small ones, of any kind."""
    draw = random.Random(number)
    longest = 700 if ON_GPU else 24
    dim = draw.choice((64, 96, 128)) if ON_GPU else 16
    tokens, keys = (draw.choice((draw.randint(1, longest), 8 * draw.randint(1, longest // 8))) for _ in range(2))
    group, batch, causal = draw.choice((1, 2, 3)), draw.choice((1, 2)), draw.random() < 0.5
    left, right = (draw.choice((-1, draw.randint(0, keys))) for _ in range(2))
    documents = ()
    if batch == 1 and draw.random() < 0.5:
        cuts = draw.randint(1, 3)
        documents = tuple((*sorted(draw.randint(0, n) for _ in range(cuts)), n) for n in (tokens, keys))
    p = draw.choice((0.1, 0.5, 0.97, 1e-3))
    return Sizes(batch, group * 2, group, tokens, keys, dim, p, causal, left, -1 if causal else right, documents)


# more tiles than programs, each of which then makes several; rows of even and of odd length
LARGE = (
    Sizes(1, 64, 1, 2048, 2048, 128, 0.1, causal=True),
    Sizes(1, 8, 1, 8192, 8192, 128, 0.1, causal=True),
    Sizes(1, 64, 8, 1280, 1280, 64, 0.1, causal=True),
    Sizes(2, 32, 2, 1111, 1533, 128, 0.6),
    Sizes(1, 48, 1, 1801, 1801, 64, 0.2, causal=True, documents=((900, 901, 1801), (900, 901, 1801))),
    Sizes(1, 40, 1, 1500, 1500, 128, 0.3, causal=True, left=300),
)


def _rows_of_identity(shape, first, member=0, group=1):
    """[B, H, N, D]: in one head of each group rows first, first + 1, ... of N have a one in column 0, 1, ..."""
    x = torch.zeros(shape, dtype=DTYPE, device=DEVICE)
    ones = torch.eye(min(shape[3], shape[2] - first), shape[3], dtype=DTYPE, device=DEVICE)
    x[:, member::group, first : first + len(ones)] = ones
    return x


def _first_column(shape, member=0, group=1):
    x = torch.zeros(shape, dtype=DTYPE, device=DEVICE)
    x[:, member::group, :, 0] = 1
    return x


def _shown(sizes, backend, options, lse, output):
    """Of blocks of keys or queries: the output, and where in [B, H, T, S] the probabilities are that it shows. Only
    that output is computed."""
    batch, heads, group, tokens, keys, dim, *_ = sizes
    wide, narrow = (batch, heads, tokens, dim), (batch, heads // group, keys, dim)
    nothing, none = (torch.zeros(shape, dtype=DTYPE, device=DEVICE) for shape in (wide, narrow))

    def gradient(number, q, k, v, dout):
        mask = tuple(i == number for i in range(5))
        named = dict(zip(OP.parameters, OP.bind((q, k, v), options)))
        named |= {"dout": dout, "out": nothing, "lse": lse, "output_mask": mask}
        return OP.vjp.run(OP.vjp.bind((), {"dlse": None, **named}), backend)[number]

    everything = slice(None), slice(None), slice(None)
    if output in ("out", "dq"):
        for first in range(0, keys, dim):
            ones, width = _rows_of_identity(narrow, first), min(dim, keys - first)
            if output == "out":
                shown = OP.run(OP.bind((nothing, none, ones), options), backend)[0]
            else:
                shown = gradient(0, nothing, ones, _first_column(narrow), _first_column(wide))
            yield shown[..., :width], (*everything, slice(first, first + width)), False
    else:
        for first in range(0, tokens, dim):
            for member in range(group):
                ones, width = _rows_of_identity(wide, first, member, group), min(dim, tokens - first)
                if output == "dv":
                    shown = gradient(2, nothing, none, none, ones)
                else:
                    shown = gradient(1, ones, none, _first_column(narrow), _first_column(wide, member, group))
                here = slice(None), slice(member, None, group), slice(first, first + width)
                yield shown[..., :width], here, True


def _wrong(sizes, backend, output, deterministic=False):
    """How many of an output's numbers are wrong; None where the kernel refuses. backend "": the one that is chosen."""
    batch, heads, _, tokens, keys, *_ = sizes
    options, shape = sizes.options(), (batch, heads, tokens, keys)
    visible = visibility(*shape, DEVICE, **options)[2]
    lse = visible.sum(-1).log().float().expand(shape[:3]).contiguous()
    seed = draw_seed(DEVICE)
    kept = keep_mask(seed, shape, sizes.p) & visible
    options |= {"dropout_p": sizes.p, "seed": seed, "scale": 1.0, "deterministic": deterministic}
    wrong = 0
    try:
        for shown, here, turned in _shown(sizes, backend, options, lse, output):
            some = kept[here]
            want = torch.where(some, (-lse).exp()[here[:3]][..., None] * keep_scale(sizes.p), 0)
            want = want.transpose(2, 3) if turned else want
            wrong += int(((shown.float() - want).abs() > want / 64).sum())
    except NotImplementedError:
        return None
    return wrong


OUTPUTS = ("out", "dq", "dk", "dv")


@pytest.mark.parametrize("backend", runnable(OP.backends()))
@pytest.mark.parametrize("number", range(8 if ON_GPU else 2))
def test_each_output_drops_what_the_mask_drops(number, backend):
    assert not any(_wrong(_drawn(number), backend, output, number % 2 == 1) for output in OUTPUTS)


@pytest.mark.skipif(not ON_GPU, reason="large sizes need a GPU")
@pytest.mark.parametrize("sizes", LARGE)
def test_so_does_a_call_of_many_tiles(sizes):
    assert [_wrong(sizes, "", output) for output in OUTPUTS] == [0, 0, 0, 0]


def test_a_wrong_bit_is_seen(monkeypatch):
    right = keep_mask

    def with_a_wrong_bit(seed, shape, p):
        kept = right(seed, shape, p)
        kept[0, 1, 13, 7] ^= True
        return kept

    monkeypatch.setitem(globals(), "keep_mask", with_a_wrong_bit)
    sizes = Sizes(1, 2, 1, 20, 30, 16, 0.5, causal=True)
    assert [_wrong(sizes, "reference", output) for output in OUTPUTS] == [1, 1, 1, 1]
