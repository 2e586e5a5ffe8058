"""Where a tile lies, for the TMA: also one that must end where its document does."""

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
