"""Flash attention: its configurations, what they need of a GPU, and the kernels they make.

Sources: Dao et al., arXiv:2205.14135; Dao, arXiv:2307.08691.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilesmith.codegen import KernelIR
from tilesmith.kernels import attention_matrix, attention_scalar, checks
from tilesmith.kernels.rows import MAX_GROUPS

if TYPE_CHECKING:
    from tilesmith.hardware.limits import Limits


@dataclass(frozen=True)
class FlashAttentionConfig:
    """A flash attention kernel.

    block_size_q, block_size_kv: queries of a workgroup, and keys that it stages at a time. head_dim: elements of a
    head. use_half: q, k, v and out have 16 bits an element, else f32; sums are f32. causal: query i sees the keys
    j <= i + n_kv - n_q. return_lse: also write the logarithm of each row's sum of exponentials.

    matrix: whose matrix units to use: "cuda", "vulkan", "vulkan-nv" (through Vulkan, where a device has
    VK_NV_cooperative_matrix2), "metal"; or "none", which runs on every backend. With them use_half must be True, and a
    subgroup of 32 owns 16 (Metal: 8) queries. half: which 16 bits, "f16", or "bf16" where the target has it. strided:
    tensors lie in memory as the launch says. ahead: a kernel with matrix units holds the next keys and values in
    registers while it computes.
    """

    block_size_q: int = 32
    block_size_kv: int = 32
    head_dim: int = 64
    use_half: bool = False
    causal: bool = False
    return_lse: bool = False
    matrix: str = "none"
    half: str = "f16"
    strided: bool = False
    ahead: bool = False

    def __post_init__(self) -> None:
        checks.positive(self, "block_size_q", "block_size_kv", "head_dim")
        checks.flags(self, "use_half", "causal", "return_lse", "strided", "ahead")
        checks.half(self)
        checks.one_of(self, "block_size_q", 16, 32, 64, 128, 256)
        checks.one_of(self, "block_size_kv", 16, 32, 64, 128, 256)
        checks.one_of(self, "matrix", "none", "cuda", "vulkan", "vulkan-nv", "metal")
        step = {"none": 4, "metal": 8}.get(self.matrix, 16)
        if self.head_dim % step or self.head_dim > 256:
            units = "" if self.matrix == "none" else f" with {self.matrix}'s matrix units"
            checks.fail(self, f"head_dim must be a multiple of {step} up to 256{units}, got {self.head_dim}")
        if self.matrix != "none" and not self.use_half:
            checks.fail(self, f"matrix units of {self.matrix} multiply f16; set use_half=True, or matrix='none'")
        if self.matrix in ("vulkan", "vulkan-nv") and self.half == "bf16":
            checks.fail(self, f"matrix units through Vulkan multiply f16; with matrix={self.matrix!r} set half='f16'")
        if self.threads > 1024:
            blocks = f"{self.block_size_q} x {self.block_size_kv}"
            checks.fail(self, f"blocks of {blocks} need {self.threads} threads; a workgroup has at most 1024")

    @property
    def lanes(self) -> int:
        """Elements of a vector of q, k and v, in which their steps are counted."""
        return 4 if self.matrix == "none" else 8

    @property
    def out_lanes(self) -> int:
        """Elements of a vector of out."""
        return 4 if self.matrix == "none" else 1

    @property
    def threads(self) -> int:
        """Threads of a workgroup."""
        if self.matrix == "none":
            return self.block_size_q * self.block_size_kv // attention_scalar.OWN**2
        return 32 * (self.block_size_q // attention_matrix.TILES[self.matrix])

    def grid(self, n_q: int, heads: int, batch: int = 1) -> tuple[int, int, int]:
        """The workgroups for `batch` x `heads` x `n_q` queries. Raises ValueError where a grid cannot hold them."""
        checks.counts(self, n_q=n_q, heads=heads, batch=batch)
        size = (-(-n_q // self.block_size_q), heads, batch)
        if max(size) > MAX_GROUPS:
            checks.fail(self, f"a grid of {size} is larger than {MAX_GROUPS} along an axis; launch it in parts")
        return size


@checks.builds_from(FlashAttentionConfig)
def create_flash_attention_kernel(config: FlashAttentionConfig) -> KernelIR:
    """out = softmax(scale · q · kᵀ) · v, in tiles, so that the scores never reach memory.

    Tensors q, out: [batch, heads, n_q, head_dim]; k, v: [batch, kv_heads, n_kv, head_dim]; all contiguous, of at most
    2³² elements; with `return_lse` lse: f32 [batch, heads, n_q], after out. Scalars: n_q, n_kv, heads, kv_heads (a
    divisor of heads), scale (of q · k). Any n_q and n_kv. Grid: `config.grid(n_q, heads, batch)`.

    With matrix units q, k and v are read as u32 words, and start at multiples of 16 bytes.

    With `strided` batches, heads and rows lie as far apart as the further scalars q_batch, q_head, q_row, k_batch, ...,
    v_batch, ..., out_batch, ... say, in vectors of `config.lanes` elements, those of out of `config.out_lanes`.

    A query that sees no key gives 0, and -3e38 in lse; a key whose score is NaN counts as one that it does not see.
    Source: Dao, arXiv:2307.08691.
    """
    return (attention_scalar if config.matrix == "none" else attention_matrix).create(config)


def required_shared_memory(config: FlashAttentionConfig) -> int:
    """Bytes of shared memory that a workgroup of this configuration's kernel uses."""
    return create_flash_attention_kernel(config).shared_bytes


def validate_config(config: FlashAttentionConfig, gpu_max_shared_memory: int) -> None:
    """Raise ValueError, in words, where the kernel needs more shared memory than a workgroup of the GPU may use."""
    needs = required_shared_memory(config)
    told = gpu_max_shared_memory
    if isinstance(told, bool) or not isinstance(told, (int, float)) or told != told:  # the last: NaN
        raise TypeError(f"gpu_max_shared_memory must be a number of bytes, got {gpu_max_shared_memory!r}")
    if needs > gpu_max_shared_memory:
        checks.fail(
            config,
            f"blocks of {config.block_size_q} x {config.block_size_kv} with head_dim {config.head_dim} need {needs:,} "
            f"bytes of shared memory; the GPU allows {gpu_max_shared_memory:,}. Use smaller blocks, or a preset of "
            "TunedConfigs for this backend",
        )


default_config = FlashAttentionConfig()
"""Runs on every backend that grants 23 KiB of shared memory: 64 threads, f32."""


class TunedConfigs:
    """Presets. The first five are as published for an architecture, the others fit what each backend grants.

    hopper needs 136 KiB of shared memory, which H100 and A100 have and RTX 40xx (Ada, 99 KiB) has not.
    """

    ampere = FlashAttentionConfig(128, 128, 64, use_half=True, matrix="cuda")
    hopper = FlashAttentionConfig(128, 256, 128, use_half=True, matrix="cuda")
    rdna3 = FlashAttentionConfig(64, 64, 64, use_half=True, matrix="vulkan")
    apple = FlashAttentionConfig(64, 64, 64, use_half=True, matrix="metal")
    fallback = FlashAttentionConfig(32, 32, 64)
    cuda = FlashAttentionConfig(64, 64, 64, use_half=True, matrix="cuda")
    metal = apple
    vulkan = FlashAttentionConfig(32, 32, 64, use_half=True)
    webgpu = FlashAttentionConfig(16, 32, 64)


_BLOCKS = ((128, 128), (128, 64), (64, 64), (64, 32), (32, 32), (16, 32), (16, 16))
_SCALAR_BLOCKS = ((64, 64), (32, 64), (32, 32), (16, 32), (16, 16))


def preset_for(
    limits: Limits,
    head_dim: int = 64,
    *,
    use_half: bool = True,
    causal: bool = False,
    return_lse: bool = False,
    matrix: str | None = None,
) -> FlashAttentionConfig:
    """The largest blocks that fit `limits` (see `tilesmith.hardware.limits_of`).

    matrix: as in FlashAttentionConfig; None: that of the backend where it is sure to be there (CUDA, Metal) and
    multiplies such heads. Raises ValueError where nothing fits.
    """
    checks.limits(limits, "limits")
    if matrix is None:
        step = {"cuda": 16, "metal": 8}.get(limits.backend.partition(" ")[0])
        sure = use_half and step is not None and head_dim % step == 0
        matrix = limits.backend.partition(" ")[0] if sure else "none"
    for blocks in _BLOCKS if matrix != "none" else _SCALAR_BLOCKS:
        config = FlashAttentionConfig(*blocks, head_dim, use_half, causal, return_lse, matrix)
        if config.threads <= limits.threads and not limits.refuses(
            required_shared_memory(config), (config.threads, 1, 1)
        ):
            return config
    raise ValueError(
        f"no flash attention with head_dim {head_dim} and matrix {matrix!r} fits {limits.backend}, which grants "
        f"{limits.shared_memory:,} bytes of shared memory and {limits.threads} threads"
    )


createFlashAttentionKernel = create_flash_attention_kernel
requiredSharedMemory = required_shared_memory
validateConfig = validate_config
