"""Who made a GPU, from what its driver says, and the attention preset that suits it."""

from __future__ import annotations

from tilesmith.kernels.flash_attention import FlashAttentionConfig, TunedConfigs

_PCI = {0x10DE: "nvidia", 0x1002: "amd", 0x1022: "amd", 0x106B: "apple", 0x8086: "intel", 0x5143: "qualcomm"}
_PCI |= {0x13B5: "arm", 0x10005: "software", 0x1AE0: "software"}  # Mesa's lavapipe, SwiftShader
_WORDS = {
    "software": ("llvmpipe", "lavapipe", "swiftshader"),
    "nvidia": ("nvidia", "geforce", "rtx", "gtx", "quadro", "tesla", "hopper", "ampere"),
    "amd": ("amd", "radeon", "gfx"),
    "apple": ("apple",),
    "intel": ("intel", "arc "),
    "qualcomm": ("adreno", "qualcomm"),
    "arm": ("mali", "immortalis"),
}
VENDORS = (*_WORDS, "unknown")
_HOPPER = ("h100", "h200", "h800", "gh200")
_OLDER = ("gtx", "rtx 20", "titan", "v100", "p100", "tesla t4", "quadro")  # before sm_80, which the CUDA printer needs
_RDNA3 = ("rx 7", "gfx110", "gfx115", "780m", "880m", "890m", "pro w7")


def detect_vendor(name: str = "", vendor_id: int | None = None) -> str:
    """One of `VENDORS`: by the PCI id that Vulkan and WebGPU report, else by words in the device's name."""
    if not isinstance(name, str):
        raise TypeError(f"name must be what a driver calls its device, got {name!r}")
    if vendor_id is not None and (isinstance(vendor_id, bool) or not isinstance(vendor_id, int)):
        raise TypeError(f"vendor_id must be a PCI id as an int, such as 0x10DE, or None, got {vendor_id!r}")
    if vendor_id in _PCI:
        return _PCI[vendor_id]
    lower = name.lower()
    return next((vendor for vendor, words in _WORDS.items() if any(w in lower for w in words)), "unknown")


def preset_named(name: str, vendor_id: int | None = None) -> FlashAttentionConfig:
    """The preset of `TunedConfigs` for a device by its driver's name, such as "NVIDIA H100 80GB HBM3".

    RTX 40xx gets Ampere's: the one published for it, Hopper's, needs more shared memory than Ada has.
    """
    vendor, lower = detect_vendor(name, vendor_id), name.lower()
    if vendor == "nvidia" and not any(word in lower for word in _OLDER):
        return TunedConfigs.hopper if any(word in lower for word in _HOPPER) else TunedConfigs.ampere
    if vendor == "amd" and any(word in lower for word in _RDNA3):
        return TunedConfigs.rdna3
    return TunedConfigs.apple if vendor == "apple" else TunedConfigs.fallback
