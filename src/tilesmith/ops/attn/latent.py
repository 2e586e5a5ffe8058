"""Values that are the first columns of the keys, as in multi-head latent attention with absorbed projections."""

from torch import Tensor


def values_in_keys(k: Tensor, v: Tensor) -> bool:
    """Whether v is `k[..., :Dv]` in memory, so that a kernel that has read k has read v."""
    alike = v.stride() == k.stride() and v.dtype == k.dtype and v.shape[:3] == k.shape[:3]
    return alike and v.shape[3] <= k.shape[3] and begin_together(k, v)


def begin_together(a: Tensor, b: Tensor) -> bool:
    """Whether the first elements of two tensors are one in memory."""
    storage = a.untyped_storage()
    # Tensors on "meta" have no address; neither have fake ones, though their own device is another.
    if storage.device.type == "meta":
        return b.untyped_storage() is storage and b.storage_offset() == a.storage_offset()
    return b.data_ptr() == a.data_ptr()
