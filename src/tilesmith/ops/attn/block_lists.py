"""Block lists in other forms: made from a dense table of blocks, and transposed, both on the tensor's own device."""

import torch
from torch import Tensor

from tilesmith.engine import cdiv
from tilesmith.engine.argument_checks import readable


def compressed(dense: Tensor) -> tuple[Tensor, Tensor]:
    """Offsets int32 [B|1, H|G|1, rows + 1] and indices int32 of a bool table [B|1, H|G|1, rows, columns].

    How many entries there are is asked of the device, which the host waits for.
    """
    counts = dense.sum(-1).flatten().cumsum(0)
    ends = torch.nn.functional.pad(counts, (1, 0))
    rows = torch.arange(dense.shape[2] + 1, device=dense.device)
    starts = torch.arange(dense.shape[0] * dense.shape[1], device=dense.device)[:, None] * dense.shape[2]
    offsets = ends[starts + rows].view(*dense.shape[:2], len(rows))
    return offsets.int(), dense.nonzero()[:, 3].int()


def check_lists(
    tokens: tuple[int, int],
    offsets: Tensor | None,
    indices: Tensor | None,
    offsets_t: Tensor | None,
    indices_t: Tensor | None,
    block_q: int,
    block_k: int,
) -> None:
    """Raise ValueError for lists that contradict the tokens, of queries and of keys. On a CPU only."""
    if offsets is not None and indices is not None:
        check_contents(offsets, indices, cdiv(tokens[1], block_k))
    if offsets_t is not None and indices_t is not None:
        check_contents(offsets_t, indices_t, cdiv(tokens[0], block_q), "_t")


def check_contents(
    offsets: Tensor, indices: Tensor, columns: int, side: str = "", of: str = "attention", name: str = "block_"
) -> None:
    """Raise ValueError for lists that do not ascend or name blocks that are not there, where the host can read them. A
    kernel would count a block that a row names twice twice. of: the op; name, side: what the names of its arguments
    begin and end with."""
    if not offsets.numel() or not (readable(offsets) and readable(indices)):
        return
    ends, count = offsets.flatten(), indices.numel()
    if int(ends[0]) != 0 or bool((ends.diff() < 0).any()) or int(ends[-1]) > count:
        raise ValueError(
            f"{of}: {name}offsets{side} must ascend from 0 to at most {count}, the length of "
            f"{name}indices{side}, got {ends[:8].tolist()}; make the lists by Blocks.of"
        )
    named = indices[: int(ends[-1])]
    wrong = named[(named < 0) | (named >= columns)]
    if wrong.numel():
        raise ValueError(
            f"{of}: {name}indices{side} holds {int(wrong[0])}; there are {columns} blocks, so it must be 0 to "
            f"{columns - 1}; make the lists by Blocks.of"
        )
    begins = torch.zeros(len(named) + 1, dtype=torch.bool)
    begins[ends.long()] = True
    falls = ((named.diff() <= 0) & ~begins[1:-1]).nonzero()
    if falls.numel():
        place = int(falls[0])
        raise ValueError(
            f"{of}: {name}indices{side} must ascend in each row, no block twice, and one holds "
            f"{int(named[place + 1])} after {int(named[place])}; make the lists by Blocks.of"
        )


def by_keys(call) -> tuple[Tensor, Tensor]:
    """The lists of a call by blocks of keys, made where they are not given."""
    if call.block_offsets_t is not None:
        return call.block_offsets_t, call.block_indices_t
    return transposed(call.block_offsets, call.block_indices, cdiv(call.k.shape[2], call.block_k))


def transposed(offsets: Tensor, indices: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """The lists of the other side: offsets [B|1, H|G|1, columns + 1] and indices, as long as the given ones.

    Entries behind the last list stay behind it. The host waits for nothing.
    """
    rows = offsets.shape[2] - 1
    lists = offsets.shape[0] * offsets.shape[1]
    ends = offsets[..., 1:].flatten().long()
    entry = torch.arange(indices.numel(), device=offsets.device)
    row = torch.searchsorted(ends, entry, right=True)
    of_list = torch.div(row, max(rows, 1), rounding_mode="floor")
    key = (of_list * columns + indices.long()) * rows + (row - of_list * rows)
    key = torch.where(row < lists * rows, key, lists * columns * rows).sort().values
    starts = torch.arange(lists, device=offsets.device)[:, None] * columns
    starts = (starts + torch.arange(columns + 1, device=offsets.device)) * rows
    offsets_t = torch.searchsorted(key, starts).view(*offsets.shape[:2], columns + 1)
    return offsets_t.int(), (key % max(rows, 1)).int()
