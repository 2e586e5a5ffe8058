"""Values that are the first columns of the keys, as in multi-head latent attention with absorbed projections."""

from torch import Tensor


def values_in_keys(k: Tensor, v: Tensor) -> bool:
    """Whether v is `k[..., :Dv]` in memory, so that a kernel that has read k has read v. Tensors on "meta" have no
    memory, and theirs never are."""
    return (
        v.shape[3] <= k.shape[3]
        and v.stride() == k.stride()
        and v.dtype == k.dtype
        and v.shape[:3] == k.shape[:3]
        and k.device.type != "meta"
        and v.data_ptr() == k.data_ptr()
    )
