"""Philox4x32-10: the published known-answer vectors, the mapping from element index to bits, and Triton's agreement."""

import pytest
import torch

from tilesmith.engine.backends import interpreting, triton_missing
from tilesmith.ops import philox

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


def test_index_is_the_low_half_of_the_counter_and_offset_the_high_half():
    counter, _, result = KNOWN[2]
    low, high = _words(counter)[:2]
    # an index has 63 bits, so the counter's top bits are cut
    index = (low + (high % 2**29 << 32)) * 4 + torch.arange(4)
    words = philox.philox(
        tuple(map(torch.tensor, [low, high % 2**29, *_words(counter)[2:]])),
        tuple(map(torch.tensor, _words(KNOWN[2][1]))),
    )
    assert philox.random_bits(SEED, index).tolist() == [int(word) for word in words]
    assert philox.random_bits(torch.zeros(2, dtype=torch.int64), torch.arange(4)).tolist() == _words(KNOWN[0][2])


def test_keep_mask_follows_the_linear_index():
    whole = philox.keep_mask(SEED, (3, 5, 7), 0.4)
    bits = philox.random_bits(SEED, torch.arange(105)).view(3, 5, 7)
    assert torch.equal(whole, bits >= round(0.4 * 2**32))
    assert torch.equal(philox.keep_mask(SEED, (7,), 0.4), whole.flatten()[:7])


def test_keep_mask_keeps_all_at_zero_and_the_right_share_between():
    assert philox.keep_mask(SEED, (1000,), 0.0).all()
    share = philox.keep_mask(SEED, (100_000,), 0.25).double().mean().item()
    assert abs(share - 0.75) < 5 * (0.25 * 0.75 / 100_000) ** 0.5


def test_threshold_fits_a_word():
    assert philox.threshold(0.5) == 2**31
    assert philox.threshold(1.0 - 2**-40) == 2**32 - 1


def test_draw_seed_follows_the_generator():
    torch.manual_seed(7)
    first, second = philox.draw_seed(torch.device("cpu")), philox.draw_seed(torch.device("cpu"))
    torch.manual_seed(7)
    assert torch.equal(first, philox.draw_seed(torch.device("cpu")))
    assert first.dtype == torch.int64 and first.shape == (2,) and not torch.equal(first, second)


@pytest.mark.skipif(triton_missing() is not None, reason="Triton is not installed")
@pytest.mark.skipif(not (torch.cuda.is_available() or interpreting()), reason="needs a GPU or TRITON_INTERPRET=1")
@pytest.mark.parametrize("start", [0, 3, 2**33 + 5])
def test_triton_draws_the_same_bits(start):
    import triton
    import triton.language as tl

    from tilesmith.ops import philox_triton

    @triton.jit
    def kernel(seed_ptr, out_ptr, by_four_ptr, start, random_bits: tl.constexpr, random_bits_by_four: tl.constexpr):
        index = start.to(tl.int64) + tl.arange(0, 64)
        tl.store(out_ptr + tl.arange(0, 64), random_bits(seed_ptr, index).to(tl.int64))
        row = tl.arange(0, 4)[:, None]
        counter = (start.to(tl.int64) // 4) * 4 + row * 4 + tl.arange(0, 4)[None, :]
        place = row * 16 + tl.arange(0, 16)[None, :]
        tl.store(by_four_ptr + place, random_bits_by_four(seed_ptr, counter).to(tl.int64))

    device = "cuda" if torch.cuda.is_available() else "cpu"
    seed = SEED.to(device)
    out, by_four = (torch.empty(64, dtype=torch.int64, device=device) for _ in range(2))
    kernel[(1,)](seed, out, by_four, start, philox_triton.random_bits, philox_triton.random_bits_by_four)
    every = torch.arange(64, dtype=torch.int64, device=device)
    assert torch.equal(out, philox.random_bits(seed, start + every))
    assert torch.equal(by_four, philox.random_bits(seed, start // 4 * 16 + every))


@pytest.mark.skipif(triton_missing() is not None, reason="Triton is not installed")
@pytest.mark.skipif(not (torch.cuda.is_available() or interpreting()), reason="needs a GPU or TRITON_INTERPRET=1")
@pytest.mark.parametrize("lanes", [4, 8])
@pytest.mark.parametrize(("start", "short"), [(0, True), (8, True), (2**34 - 64, True), (2**34 - 32, False)])
def test_triton_draws_the_same_bits_by_wide_products(start, short, lanes):
    import triton
    import triton.language as tl

    from tilesmith.ops import philox_triton

    @triton.jit
    def kernel(
        seed_ptr, out_ptr, start, load: tl.constexpr, draw: tl.constexpr, LANES: tl.constexpr, SHORT: tl.constexpr
    ):
        row = tl.arange(0, 2)[:, None]
        bits = draw(load(seed_ptr), start.to(tl.int64) + 32 * row.to(tl.int64), 32, LANES, SHORT)
        tl.store(out_ptr + 32 * row + tl.arange(0, 32)[None, :], bits.to(tl.int64))

    device = "cuda" if torch.cuda.is_available() else "cpu"
    out = torch.empty(64, dtype=torch.int64, device=device)
    kernel[(1,)](SEED.to(device), out, start, philox_triton.load_key, philox_triton.random_bits_wide, lanes, short)
    every = torch.arange(64, dtype=torch.int64, device=device)
    assert torch.equal(out, philox.random_bits(SEED.to(device), start + every))
