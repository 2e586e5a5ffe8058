"""What the launchers of the rotary family share: rows of a batch in a grid, and in tables of angles."""

from torch import Tensor

from tilesmith.engine import cdiv


def rows_grid(rows: int) -> tuple[int, int]:
    """The second and third dim of a grid that has a program for each of `rows`, of which a dim takes 65,535."""
    return min(rows, 65_535), cdiv(rows, 65_535)


def row_stride(x: Tensor, ndim: int) -> int:
    """The stride over batch rows, 0 where all rows share x."""
    return x.stride(0) if x.ndim == ndim and x.shape[0] > 1 else 0
