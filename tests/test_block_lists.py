"""Block lists: made from a table of blocks, transposed, and what they mean."""

import pytest
import torch

from tilesmith.ops.attn import block_lists as lists
from tilesmith.ops.attn.mask import Blocks, Mask


def _table(shape: tuple[int, ...], share: float) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) < share


@pytest.mark.parametrize("shape", [(1, 1, 4, 7), (2, 3, 5, 2), (1, 2, 1, 1), (3, 1, 2, 9)])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_lists_are_the_table(shape, share):
    table = _table(shape, share)
    blocks = Blocks.of(table, 3, 2)
    tokens, keys = 3 * shape[2] - 1, 2 * shape[3] - 1
    seen = Mask(blocks=blocks).materialize(tokens, keys, batch=shape[0], heads=3 * shape[1])
    wanted = table.repeat_interleave(3, 2).repeat_interleave(2, 3)[:, :, :tokens, :keys].repeat_interleave(3, 1)
    assert torch.equal(seen, wanted)
    assert blocks.offsets.dtype == blocks.indices.dtype == torch.int32


@pytest.mark.parametrize("shape", [(1, 1, 4, 7), (2, 3, 5, 2), (1, 2, 1, 1)])
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
