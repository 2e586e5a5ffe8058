"""Block lists: made from a table of blocks, transposed, and what they mean."""

import pytest
import torch

from tilesmith.ops import attention
from tilesmith.ops.attn import block_lists as lists
from tilesmith.ops.attn.mask import Blocks, Mask


def _table(shape: tuple[int, ...], share: float) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) < share


@pytest.mark.parametrize("shape", [(1, 1, 4, 7), (2, 3, 5, 2), (1, 2, 1, 1), (3, 1, 2, 9), (0, 2, 3, 4), (2, 1, 0, 3)])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_lists_are_the_table(shape, share):
    table = _table(shape, share)
    blocks = Blocks.of(table, 3, 2)
    tokens, keys = max(3 * shape[2] - 1, 0), 2 * shape[3] - 1
    seen = Mask(blocks=blocks).materialize(tokens, keys, batch=shape[0], heads=3 * shape[1])
    wanted = table.repeat_interleave(3, 2).repeat_interleave(2, 3)[:, :, :tokens, :keys].repeat_interleave(3, 1)
    assert torch.equal(seen, wanted)
    assert blocks.offsets.dtype == blocks.indices.dtype == torch.int32


@pytest.mark.parametrize("shape", [(1, 1, 4, 7), (2, 3, 5, 2), (1, 2, 1, 1), (0, 2, 3, 4), (2, 1, 0, 3)])
def test_transposed_twice_is_the_same(shape):
    table = _table(shape, 0.5)
    offsets, indices = lists.compressed(table)
    offsets_t, indices_t = lists.transposed(offsets, indices, shape[3])
    wanted = lists.compressed(table.transpose(2, 3).contiguous())
    assert torch.equal(offsets_t, wanted[0]) and torch.equal(indices_t, wanted[1])
    again = lists.transposed(offsets_t, indices_t, shape[2])
    assert torch.equal(again[0], offsets) and torch.equal(again[1], indices)


def test_entries_behind_the_last_list_stay_there():
    offsets, indices = lists.compressed(_table((1, 2, 3, 4), 0.5))
    longer = torch.cat((indices, torch.full((5,), 7, dtype=torch.int32)))
    wanted = lists.transposed(offsets, indices, 4)
    found = lists.transposed(offsets, longer, 4)
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1][: len(indices)], wanted[1])
    assert len(found[1]) == len(longer)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indices": [0, 2]}, "block_indices holds 2; there are 2 blocks, so it must be 0 to 1"),
        ({"indices": [-1, 1]}, "block_indices holds -1"),
        ({"offsets": [[[0, 3]]]}, r"block_offsets must ascend from 0 to at most 2, .* got \[0, 3\]"),
        ({"offsets": [[[1, 2]]]}, r"block_offsets must ascend from 0"),
        ({"offsets_t": [[[0, 2, 1]]]}, r"block_offsets_t must ascend from 0"),
        ({"indices_t": [0, 1]}, "block_indices_t holds 1; there are 1 blocks, so it must be 0 to 0"),
        ({"indices": [1, 0]}, r"block_indices must ascend in each row, .* holds 0 after 1"),
        ({"indices": [1, 1]}, r"block_indices must ascend in each row, .* holds 1 after 1"),
    ],
)
def test_lists_of_blocks_that_are_not_there_are_refused_on_a_cpu(changes, message):
    x, blocks = torch.randn(1, 2, 6, 16), Blocks.of(torch.ones(1, 1, 1, 2, dtype=torch.bool), 8, 4)
    assert torch.equal(attention(x, x, x, Mask(blocks=blocks))[0], attention(x, x, x)[0])
    wrong = {name: torch.tensor(values, dtype=torch.int32) for name, values in changes.items()}
    with pytest.raises(ValueError, match=message):
        attention(x, x, x, Mask(blocks=blocks._replace(**wrong)))


def test_rows_begin_anew():
    """What ascends is each row, not the list of all."""
    x, table = torch.randn(1, 2, 6, 16), torch.ones(1, 2, 2, 3, dtype=torch.bool)
    assert torch.equal(attention(x, x, x, Mask(blocks=Blocks.of(table, 4, 2)))[0], attention(x, x, x)[0])


@pytest.mark.parametrize(
    ("table", "block_q", "error", "message"),
    [
        (torch.ones(1, 1, 2, 2), 8, TypeError, "Blocks: dense must be bool, got torch.float32"),
        (torch.ones(2, 2, dtype=torch.bool), 8, ValueError, r"Blocks: dense must be \[B, heads, .*\], got \[2, 2\]"),
        ([[True]], 8, TypeError, "Blocks: dense must be a tensor, got list"),
        (torch.ones(1, 1, 2, 2, dtype=torch.bool), 0, ValueError, "Blocks: block_q must be at least 1, got 0"),
        (torch.ones(1, 1, 2, 2, dtype=torch.bool), 8.0, TypeError, "Blocks: block_q must be an int, got 8.0"),
    ],
)
def test_a_table_that_is_none_is_refused(table, block_q, error, message):
    with pytest.raises(error, match=message):
        Blocks.of(table, block_q, 8)


@pytest.mark.parametrize("changes", [{"block_q": 8.0}, {"block_k": 8.0}])
def test_block_sizes_are_ints_whatever_call_came_before(changes):
    x, blocks = torch.randn(1, 2, 6, 16), Blocks.of(torch.ones(1, 1, 1, 1, dtype=torch.bool), 8, 8)
    attention(x, x, x, Mask(blocks=blocks))
    with pytest.raises(TypeError, match=f"Blocks: {next(iter(changes))} must be an int, got 8.0"):
        attention(x, x, x, Mask(blocks=blocks._replace(**changes)))
