"""Where a tile lies, for the TMA and for stores from registers: also one that must end where its document does."""

from tilesmith.device.gluon.shim import gl, gluon

# In a tensor packed with documents a tile must end where its document ends: nothing may be written behind, and nothing
# read, since it may be NaN. TMA only knows the bounds of a dim, so the token dim is 2**30 long, entered so
# that the document's end is its end, and a dim of the same stride moves that end to where the document ends. The first
# dim takes the 2**30 tokens off again, modulo 2**64. See `triton.tools.ragged_tma`, which this is learned from.
FAR = gl.constexpr(1 << 30)


@gluon.jit
def corner(place, head, token, length, PACKED: gl.constexpr):
    """Coordinates of a tile. place: the batch, or with PACKED where the document ends; length: the document's."""
    return at(place, head, inside(token, length, PACKED), PACKED)


@gluon.jit
def inside(token, length, PACKED: gl.constexpr):
    """The coordinate of a token."""
    if PACKED:
        token = FAR - length + token
    return token


@gluon.jit
def at(place, head, row, PACKED: gl.constexpr):
    """Coordinates of a tile, from the coordinate of its first token."""
    there = (place, head, row, 0)
    if PACKED:
        there = (FAR, place, head, row, 0)
    return there


@gluon.jit
def store_rows(x, x_ptr, strides, place, head, row, length, FIRST: gl.constexpr, DIM: gl.constexpr,
               PACKED: gl.constexpr):  # fmt: skip
    """Store a tile from registers, in the dtype of x_ptr [B, heads, T, DIM], whose last stride is 1. place, head, row:
    as of `at`; length: rows of a head, not read with PACKED; FIRST: the tile's first column."""
    rows = row + gl.arange(0, x.shape[0], gl.SliceLayout(1, x.type.layout))
    col = FIRST + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
    if PACKED:
        held = rows < FAR
        token = place + (rows - FAR)
        x_ptr += head.to(gl.int64) * strides[1]
    else:
        held = rows < length
        token = rows
        x_ptr += place.to(gl.int64) * strides[0] + head.to(gl.int64) * strides[1]
    x_ptr += (token.to(gl.int64) * strides[2])[:, None] + col[None, :]
    gl.store(x_ptr, x.to(x_ptr.dtype.element_ty), mask=held[:, None] & (col < DIM)[None, :])
