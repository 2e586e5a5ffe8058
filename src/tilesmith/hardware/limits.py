"""What one workgroup may use on each backend of the portable kernels. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from tilesmith.hardware.facts import facts_of


@dataclass(frozen=True)
class Limits:
    """Limits of one workgroup: bytes of shared memory, total threads, threads along x, y and z."""

    backend: str
    shared_memory: int
    threads: int
    size: tuple[int, int, int]

    def refuses(self, shared_memory: int, size: tuple[int, int, int]) -> list[str]:
        """Why a workgroup of `size` threads with `shared_memory` bytes cannot run; empty means it can."""
        reasons = []
        if shared_memory > self.shared_memory:
            reasons.append(f"needs {shared_memory:,} bytes of shared memory; {self.backend} has {self.shared_memory:,}")
        threads = size[0] * size[1] * size[2]
        if threads > self.threads:
            reasons.append(f"needs {threads} threads a workgroup; {self.backend} allows {self.threads}")
        for axis, wanted, allowed in zip("xyz", size, self.size):
            if wanted > allowed:
                reasons.append(f"needs {wanted} threads along {axis}; {self.backend} allows {allowed}")
        return reasons


# Vulkan: what the specification guarantees is lower (16 KiB, 128 threads); these are the smallest that desktop drivers
# report (lavapipe and SwiftShader 32 KiB, NVIDIA 48 KiB, RADV 64 KiB). WebGPU: the default limits every adapter grants.
_LIMITS = {
    "cuda": Limits("cuda", 49_152, 1024, (1024, 1024, 64)),
    "metal": Limits("metal", 32_768, 1024, (1024, 1024, 1024)),
    "vulkan": Limits("vulkan", 32_768, 1024, (1024, 1024, 64)),
    "webgpu": Limits("webgpu", 16_384, 256, (256, 256, 64)),
}


def limits_of(backend: str, arch: str | None = None) -> Limits:
    """The limits of `backend`; with `arch` (a name in arch.toml) CUDA's opt-in shared memory of that GPU.

    Raises ValueError for a backend or an arch that the library does not know.
    """
    if backend not in _LIMITS:
        raise ValueError(f"backend must be one of {', '.join(_LIMITS)}, got {backend!r}")
    limits = _LIMITS[backend]
    if arch is None or backend != "cuda":
        return limits
    row = facts_of(arch)
    if row is None or row.kind not in ("cuda", "hip"):
        raise ValueError(f"arch must name an NVIDIA or AMD GPU of arch.toml, got {arch!r}")
    return Limits(f"cuda on {arch}", row.shared_memory, limits.threads, limits.size)
