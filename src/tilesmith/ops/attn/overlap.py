"""Whether two strided tensors, as caches of keys and of values, have an element in the same memory."""

from torch import Tensor

Dims = tuple[tuple[int, int], ...]  # (bytes from one index to the next, indices), the widest first
MOST = 10_000  # placements that are looked at: beyond them tensors count as overlapping


def distance(a: Tensor, b: Tensor) -> int | None:
    """Bytes from the first element of a to that of b; None where they have storages of their own."""
    storage, other = a.untyped_storage(), b.untyped_storage()
    # Tensors on "meta" have no address; neither have fake ones, though their own device is another.
    if storage.device.type == "meta":
        if other is not storage:
            return None
        return b.storage_offset() * b.element_size() - a.storage_offset() * a.element_size()
    return b.data_ptr() - a.data_ptr() if other.data_ptr() == storage.data_ptr() else None


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether some byte belongs to an element of both. Those of one may lie between those of the other, as in a cache
    [B, S, 2, G, D] of both."""
    gap = distance(a, b)
    if gap is None or not a.numel() or not b.numel():
        return False
    return _meet(*_dims(a), *_dims(b), gap, [MOST])


def _dims(x: Tensor) -> tuple[Dims, int]:
    """The dims of x, and the bytes that lie densely at each of their places."""
    size = x.element_size()
    dims = [(stride * size, n) for n, stride in zip(x.shape, x.stride()) if n > 1 and stride]
    dims.sort()
    block = size
    while dims and dims[0][0] == block:
        block *= dims.pop(0)[1]
    return tuple(reversed(dims)), block


def _span(dims: Dims, block: int) -> int:
    return block + sum(step * (n - 1) for step, n in dims)


def _meet(a: Dims, a_block: int, b: Dims, b_block: int, gap: int, left: list[int]) -> bool:
    """Whether blocks of a and of b meet, b beginning `gap` bytes behind a: the widest dim is taken off, of both where
    they have it in common, since then only the difference of their indices counts."""
    left[0] -= 1
    if left[0] < 0:
        return True
    if not -_span(b, b_block) < gap < _span(a, a_block):
        return False
    if not a and not b:
        return True
    step = max(dims[0][0] for dims in (a, b) if dims)
    low = high = 0
    if a and a[0][0] == step:
        low, a = 1 - a[0][1], a[1:]
    if b and b[0][0] == step:
        high, b = b[0][1] - 1, b[1:]
    # of all shifts those that leave b's span within a's reach
    low = max(low, -((_span(b, b_block) + gap - 1) // step))
    high = min(high, (_span(a, a_block) - gap - 1) // step)
    return any(_meet(a, a_block, b, b_block, gap + shift * step, left) for shift in range(low, high + 1))
