"""Runs of tokens that travel between ranks, in plain PyTorch: copied to where they are read, added where they land."""

from collections.abc import Iterator, Sequence

from torch import Tensor

Run = tuple[slice, slice]


def copy_runs(a: Tensor, b: Tensor, into_a: Tensor, into_b: Tensor, runs: Sequence[int]) -> None:
    """Copy runs of tokens of two tensors, such as keys and values, into two others, which keep the rest of theirs.

    a, b [B, H, T, D], whose D may differ, also be 0 where there is one tensor alone; into_a, into_b [B, H, N, D] of
    their dtypes. runs: (first token, first token where it goes, tokens) of each, one after another; no two may go to
    one place. Raises ValueError or TypeError for what does not fit, and for tensors that require a gradient.
    """
    for x, into in ((a, into_a), (b, into_b)):
        for source, target in _slices(runs):
            into[:, :, target].copy_(x[:, :, source])


def add_runs(
    a: Tensor, b: Tensor, more_a: Tensor, more_b: Tensor, into_a: Tensor, into_b: Tensor, runs: Sequence[int]
) -> None:
    """Add runs of tokens to two sums, such as gradients of keys and of values, and round what comes of it.

    a, b [B, H, T, D]: the sums; D may differ, also be 0 where there is one sum alone. more_a, more_b [B, H, N, D]: what
    is added. into_a, into_b [B, H, T, D]: the sums with it; they may be a and b, of which then only tokens that a run
    meets are read and written; else a and b are not written. Each fp64, fp32, fp16 or bf16. runs: (first token of
    more, first token of the sum, tokens) of each, one after another; runs that share tokens of the sum are added in
    their order, each addition rounded to the sum's dtype. Raises ValueError or TypeError for what does not fit, and for
    tensors that require a gradient.
    """
    for x, more, into in ((a, more_a, into_a), (b, more_b, into_b)):
        total = x if into is x else x.clone()
        for source, target in _slices(runs):
            total[:, :, target].add_(more[:, :, source])
        if total is not into:
            into.copy_(total)


def each_run(runs: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first token, first token where it goes, tokens) of each run."""
    return zip(runs[::3], runs[1::3], runs[2::3])


def _slices(runs: Sequence[int]) -> Iterator[Run]:
    for at, to, tokens in each_run(runs):
        yield slice(at, at + tokens), slice(to, to + tokens)
