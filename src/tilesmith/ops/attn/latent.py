"""Values that are the first columns of the keys, as in multi-head latent attention with absorbed projections."""

from torch import Tensor


def values_in_keys(k: Tensor, v: Tensor) -> bool:
    """Whether v is `k[..., :Dv]` in memory, so that a kernel that has read k has read v."""
    alike = v.stride() == k.stride() and v.dtype == k.dtype and v.shape[:3] == k.shape[:3]
    if not alike or v.shape[3] > k.shape[3]:
        return False
    if k.device.type == "meta":  # no address tells
        return v.untyped_storage() is k.untyped_storage() and v.storage_offset() == k.storage_offset()
    return v.data_ptr() == k.data_ptr()
