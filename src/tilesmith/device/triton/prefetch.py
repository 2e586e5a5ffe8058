"""Asking NVIDIA's L2 cache for a vector that a kernel loads later, in Triton."""

import triton
import triton.language as tl


@triton.jit
def prefetch_vector(ptr, cols, BLOCK_COLS: tl.constexpr):
    """Ask the L2 cache for a vector of `cols` elements, BLOCK_COLS at most; nothing of None. ptxas puts loads off until
    just before what keeps it from it, a barrier, to save registers; this takes none."""
    if ptr is not None:
        LINE: tl.constexpr = 1024 // ptr.dtype.element_ty.primitive_bitwidth  # elements of 128 bytes
        LINES: tl.constexpr = (BLOCK_COLS + LINE - 1) // LINE
        at = tl.minimum(tl.arange(0, LINES) * LINE, cols - 1)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [(ptr + at).to(tl.int64)], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
