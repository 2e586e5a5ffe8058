"""Philox4x32-10: the published known-answer vectors, the mapping from element index to bits, Triton's agreement, and
when an op draws a seed."""

import pytest
import torch

from devices import DEVICE, ON_GPU
from tilesmith import ops
from tilesmith.device import philox
from tilesmith.engine import ops as declared
from tilesmith.engine.backends import interpreting

# Random123, tests/kat_vectors, lines "philox4x32 10": counter, key, result
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
SEED = torch.tensor([0x299F31D0A4093822, 0x0370734413198A2E])  # of the third vector: key, high half of the counter


def _words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN)
def test_known_answers(counter, key, result):
    words = philox.philox(tuple(map(torch.tensor, _words(counter))), tuple(map(torch.tensor, _words(key))))
    assert [int(word) for word in words] == _words(result)


def _halves(text: str) -> list[int]:
    return [half for word in _words(text) for half in (word & 0xFFFF, word >> 16)]


def test_index_is_the_low_half_of_the_counter_and_offset_the_high_half():
    counter, _, result = KNOWN[2]
    low, high = _words(counter)[:2]
    # an index has 63 bits, so the counter's top bits are cut
    index = (low + (high % 2**28 << 32)) * 8 + torch.arange(8)
    words = philox.philox(
        tuple(map(torch.tensor, [low, high % 2**28, *_words(counter)[2:]])),
        tuple(map(torch.tensor, _words(KNOWN[2][1]))),
    )
    halves = [half for word in words for half in (int(word) & 0xFFFF, int(word) >> 16)]
    assert philox.random_bits(SEED, index).tolist() == halves
    assert philox.random_bits(torch.zeros(2, dtype=torch.int64), torch.arange(8)).tolist() == _halves(KNOWN[0][2])


def test_keep_mask_follows_the_linear_index():
    whole = philox.keep_mask(SEED, (3, 5, 7), 0.4)
    bits = philox.random_bits(SEED, torch.arange(105)).view(3, 5, 7)
    assert torch.equal(whole, bits >= round(0.4 * 2**16))
    assert torch.equal(philox.keep_mask(SEED, (7,), 0.4), whole.flatten()[:7])


def test_keep_mask_goes_on_where_a_piece_ends(monkeypatch):
    whole = philox.keep_mask(SEED, (100,), 0.4)
    monkeypatch.setattr(philox, "PIECE", 32)
    assert torch.equal(philox.keep_mask(SEED, (100,), 0.4), whole)


@pytest.mark.parametrize("p", [0.0, 2**-18])
def test_keep_mask_keeps_all_at_zero_and_what_rounds_to_it(p):
    assert philox.keep_mask(SEED, (1000,), p).all() and philox.keep_scale(p) == 1.0


def test_keep_mask_keeps_the_right_share_between():
    share = philox.keep_mask(SEED, (100_000,), 0.25).double().mean().item()
    assert abs(share - 0.75) < 5 * (0.25 * 0.75 / 100_000) ** 0.5


def test_p_below_1_never_means_to_drop_all():
    assert philox.threshold(1.0 - 2**-40) == 2**16 - 1
    assert philox.keep_scale(1.0 - 2**-40) == 2**16


@pytest.mark.parametrize("p", [0.1, 0.5, 1.0 - 2**-40])
def test_the_expectation_is_exact(p):
    every = torch.arange(2**16)  # the numbers that 16 bits may be
    assert (every >= philox.threshold(p)).double().mean().item() * philox.keep_scale(p) == 1.0
    assert abs(philox.threshold(p) / 2**16 - p) <= (2**-17 if p < 1.0 - 2**-16 else 2**-16)


def test_draw_seed_follows_the_generator():
    torch.manual_seed(7)
    first, second = philox.draw_seed(torch.device("cpu")), philox.draw_seed(torch.device("cpu"))
    torch.manual_seed(7)
    assert torch.equal(first, philox.draw_seed(torch.device("cpu")))
    assert first.dtype == torch.int64 and first.shape == (2,) and not torch.equal(first, second)


@pytest.mark.usefixtures("needs_triton")
@pytest.mark.skipif(not (interpreting() or ON_GPU), reason="needs a GPU or TRITON_INTERPRET=1")
@pytest.mark.parametrize("lanes", [1, 4, 8])
@pytest.mark.parametrize(("start", "short"), [(0, True), (8, True), (12, True), (3, True), (2**35 - 64, True),
                                              (2**35 - 32, False), (2**60 + 5, False)])  # fmt: skip
def test_triton_draws_the_same_bits(start, short, lanes):
    import triton
    import triton.language as tl

    from tilesmith.device.triton import philox as philox_triton

    @triton.jit
    def kernel(
        seed_ptr, out_ptr, start, load: tl.constexpr, draw: tl.constexpr, LANES: tl.constexpr, SHORT: tl.constexpr
    ):
        row = tl.arange(0, 2)[:, None]
        bits = draw(load(seed_ptr), start.to(tl.int64) + 32 * row.to(tl.int64), 32, LANES, SHORT)
        tl.store(out_ptr + 32 * row + tl.arange(0, 32)[None, :], (bits >> 16).to(tl.int64))

    start -= start % lanes
    out = torch.empty(64, dtype=torch.int64, device=DEVICE)
    kernel[(1,)](SEED.to(DEVICE), out, start, philox_triton.load_key, philox_triton.random_bits, lanes, short)
    every = torch.arange(64, dtype=torch.int64, device=DEVICE)
    assert torch.equal(out, philox.random_bits(SEED.to(DEVICE), start + every))


@pytest.mark.parametrize("first", [0, 5, 2**30 + 3, 2**32 - 40])
@pytest.mark.parametrize("lanes", [1, 2, 4, 8])
def test_portable_kernels_draw_the_same_bits(first, lanes):
    """Also of a tensor with more elements than a u32 counts: it may have 2**32 vectors."""
    from tilesmith.codegen import In, Out, Scalar, build, interpret, tid, u32, unroll
    from tilesmith.kernels.functions import random_bits

    def draw(seed: In[u32], out: Out[u32], first: Scalar[u32]):
        bits = random_bits(first + tid(0), lanes, seed)
        for j in unroll(lanes):
            out[tid(0) * lanes + j] = bits[j] >> 16

    out = torch.zeros(32 * lanes, dtype=torch.int32)
    tensors = {"seed": SEED.numpy().view("uint32"), "out": out.numpy().view("uint32")}
    interpret(build(draw, (32, 1, 1)), (1, 1, 1), tensors, {"first": first})
    assert torch.equal(out.long(), philox.random_bits(SEED, first * lanes + torch.arange(32 * lanes)))


@pytest.mark.parametrize("name", ["attention", "dropout_add_norm", "softmax_dropout", "bias_dropout"])
def test_a_repeated_call_is_not_checked_again(name, monkeypatch):
    """Each call draws its own seed; a call that is given one is the same call."""
    x, q = torch.ones(3, 40), torch.ones(1, 2, 5, 16)
    calls = {
        "attention": lambda **seed: ops.attention(q, q, q, dropout_p=0.5, **seed)[0],
        "dropout_add_norm": lambda **seed: ops.dropout_add_norm(x, x, p=0.5, **seed)[1],
        "softmax_dropout": lambda **seed: ops.softmax_dropout(x, 0.5, **seed),
        "bias_dropout": lambda **seed: ops.bias_dropout(x, p=0.5, **seed),
    }
    torch.manual_seed(5)
    first, second, op = calls[name](), calls[name](), declared()[name]
    monkeypatch.setattr(op, "check", None)
    third = calls[name]()
    torch.manual_seed(5)
    seeds = [philox.draw_seed(torch.device("cpu")) for _ in range(3)]
    assert not torch.equal(first, second) and not torch.equal(second, third)
    for drawn, seed in zip((first, second, third), seeds):
        assert torch.equal(drawn, calls[name](seed=seed))


class _Sub(torch.Tensor):
    """A tensor that its subclass alone tells from others: such calls go through torch's dispatcher."""


def test_a_call_that_the_dispatcher_has_to_see_is_not_kept_for_all_such_calls():
    op = declared()["softmax_dropout"]
    op._recent.clear()
    ops.softmax_dropout(torch.ones(3, 40).as_subclass(_Sub), 0.5)
    assert None not in op._recent
    with pytest.raises(ValueError, match="p must be in"):
        ops.softmax_dropout(torch.ones(5, 8).as_subclass(_Sub), 1.5)
