"""Read PTX: lanes of a packed pair that spill into their neighbour, a fault of LLVM that Triton 3.6 inherits.

LLVM's SLP vectorizer joins `tid & 31` and `(tid & 3) << 3` into one shift of two lanes, of which it uses one. The
other, `tid << 31`, is poison, but both share a 64-bit register, and a product of 64 bits computes it: its high bits
land in the lane that is used. An address then depends on bits of the thread that it should not; the kernel reads
elsewhere, or ends in a misaligned address.
"""

from __future__ import annotations

import re

_THREADS = 1 << 10  # a product of a thread's index and less than 2**32 / this stays within its lane
_PRODUCT = re.compile(r"mul\.wide\.u32\s+(%rd\d+), (%r\d+), (\d+);")
_JOINED = re.compile(r"or\.b64\s+(%rd\d+), (%rd\d+), (%rd\d+);")
_SPLIT = re.compile(r"mov\.b64\s+\{[^}]*\}, (%rd\d+);")


def spilling_lanes(ptx: str) -> list[str]:
    """The products whose high half is joined with another lane and then read as that lane; empty where all is well."""
    wide = {m[1]: m[0] for m in _PRODUCT.finditer(ptx) if int(m[3]) * _THREADS > 1 << 32}
    joined = {m[1]: wide.get(m[2]) or wide.get(m[3]) for m in _JOINED.finditer(ptx)}
    return [joined[m[1]] for m in _SPLIT.finditer(ptx) if joined.get(m[1])]
