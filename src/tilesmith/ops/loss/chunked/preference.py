"""linear_preference in plain PyTorch, block by block in place, on any device."""

from torch import Tensor

from tilesmith.engine import register_kernel
from tilesmith.ops.loss import preference_chunks
from tilesmith.ops.loss.arguments import linear_preference_arguments, linear_preference_vjp_arguments
from tilesmith.ops.loss.chunked.cross_entropy import KEEPING_STEPS
from tilesmith.ops.loss.chunks import source_tells
from tilesmith.ops.loss.reduction import check_labels


@register_kernel("linear_preference", backend="chunked", rank=10)
@linear_preference_arguments
def linear_preference(call) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Two sweeps over each chunk's logits, the formula between them."""
    check_labels(call.target, call.weight.shape[0], call.ignore_index)
    return preference_chunks.linear_preference(KEEPING_STEPS, call)


@register_kernel(
    "linear_preference_vjp",
    backend="chunked",
    rank=10,
    tells=linear_preference_vjp_arguments(source_tells),
)
@linear_preference_vjp_arguments
def linear_preference_vjp(call) -> tuple[Tensor, Tensor, Tensor]:
    """The saved gradients times the loss's, or the chunks again with their lse known."""
    return preference_chunks.linear_preference_vjp(KEEPING_STEPS, call)
