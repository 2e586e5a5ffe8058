"""From tokens to the loss: which labels are valid, which tokens count, and what divides their sum."""

import torch
from torch import Tensor


def check_labels(target: Tensor, classes: int, ignore_index: int) -> None:
    """Raise ValueError for a label that is no class. On a CPU only: elsewhere asking would wait for the device."""
    if target.device.type != "cpu":
        return
    wrong = (target != ignore_index) & ((target < 0) | (target >= classes))
    if wrong.any():
        raise ValueError(wrong_label(int(target[wrong].flatten()[0]), classes, ignore_index))


def wrong_label(label: int, classes: int, ignore_index: int) -> str:
    """What is said of a label that is no class."""
    return (
        f"target holds the label {label}; it must be 0 … {classes - 1}, or ignore_index = {ignore_index} for a token "
        "that does not count"
    )


def divisors_of(
    target: Tensor, weight: Tensor | None, ignore_index: int, classes: int, dtype: torch.dtype, reduction: str
) -> Tensor:
    """For "mean": (sum of the counted tokens' class weights, number of counted tokens); else an empty tensor."""
    if reduction != "mean":
        return target.new_empty(0, dtype=dtype)
    counted = target != ignore_index
    number = counted.sum().to(dtype)
    if weight is None:
        return torch.stack((number, number))
    weights = weight.to(dtype)[target.clamp(0, classes - 1).long()]
    return torch.stack((torch.where(counted, weights, 0.0).sum(), number))


def reduce_losses(losses: Tensor, lse: Tensor, divisors: Tensor, z_loss: float, reduction: str) -> Tensor:
    """The loss from the tokens' cross-entropies (without their z term) and lse, which is 0 where ignored."""
    if reduction == "none":
        return losses + z_loss * lse * lse
    squares = z_loss * (lse * lse).sum() if z_loss else None
    if reduction == "sum":
        return losses.sum() if squares is None else losses.sum() + squares
    mean = losses.sum() / divisors[0]
    return mean if squares is None else mean + squares / divisors[1]


def loss_factor(dloss: Tensor, divisors: Tensor, reduction: str) -> Tensor:
    """What the gradient of the undivided sum is multiplied by; 0 for a mean over no tokens, as torch has it."""
    if reduction != "mean":
        return dloss
    return torch.where(divisors[1] > 0, dloss / divisors[0], 0.0)


def row_factors(factors: Tensor, dloss: Tensor, divisors: Tensor) -> Tensor:
    """`loss_factor` times factors [N], of which those that are the divisor itself become just dloss."""
    if not divisors.numel():
        return factors * dloss
    return torch.where(divisors[1] > 0, factors / divisors[0] * dloss, 0.0)


def token_grads(dloss: Tensor, divisors: Tensor, shape: torch.Size, reduction: str) -> tuple[Tensor, Tensor]:
    """The loss's gradient with respect to each token's cross-entropy and each token's z term."""
    if reduction == "none":
        return dloss, dloss
    if reduction == "sum":
        return dloss.expand(shape), dloss.expand(shape)
    return (dloss / divisors[0]).expand(shape), (dloss / divisors[1]).expand(shape)


def undivided_token_grads(losses: Tensor, divisors: Tensor) -> tuple[Tensor, Tensor]:
    """As `token_grads` for the loss times its first divisor (so that no half-precision gradient underflows)."""
    one = losses.new_ones(()).expand(losses.shape)
    return one, (divisors[0] / divisors[1]).expand(losses.shape) if divisors.numel() else one
