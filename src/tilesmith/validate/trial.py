"""One small case of a kernel, against its reference: `python -m tilesmith.validate.trial attention hopper cuda:0`.

`engine.trial` runs this for a release of Triton that is not known to serve the kernel. The last line that it prints
says what was found; it exits with 0 if the values are right, 75 if something else than the kernel was in the way.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from tilesmith.engine import Case, Op, cases, ops
from tilesmith.engine.backends import REFERENCE
from tilesmith.engine.trial import FAILED, PASSED, PREVENTED
from tilesmith.validate.cases import check_each

_TAGS = ({"interpret", "compile"}, {"test"})  # the smallest first
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# What CUDA and PyTorch say of a device that is full, busy or not to be had. A kernel's own faults (an illegal access, a
# launch that failed) have other words.
_OF_THE_DEVICE = (
    "out of memory", "busy or unavailable", "initialization error", "initialization failed", "no CUDA-capable device",
    "No CUDA GPUs", "CUBLAS_STATUS_ALLOC_FAILED", "CUBLAS_STATUS_NOT_INITIALIZED", "system not yet initialized",
)  # fmt: skip


def whole(name: str) -> Op:
    """The op that is called, of an op that may be its gradient."""
    return next((op for op in ops().values() if op.vjp is not None and op.vjp.name == name), ops()[name])


def pins(name: str, backend: str) -> dict[str, str]:
    """Of an op and its gradient, the one that is tried on its backend, the other on the reference."""
    op = whole(name)
    both = [op] if op.vjp is None else [op, op.vjp]
    return {each.name: backend if each.name == name else REFERENCE for each in both}


def small_cases(name: str) -> Iterator[tuple[Case, torch.dtype]]:
    """The cases to try an op on, in turn until its kernel takes one."""
    left = cases(whole(name).name)
    for tags in _TAGS:
        chosen = [case for case in left if case.tags & tags]
        left = [case for case in left if case not in chosen]
        dtypes = [next((d for d in _DTYPES if d in case.dtypes), None) for case in chosen]
        yield from ((case, dtype) for case, dtype in zip(chosen, dtypes) if dtype is not None)


def attempt(name: str, backend: str, device: torch.device | str) -> tuple[int, str]:
    """The exit code and what to say."""
    for case, dtype in small_cases(name):
        try:
            result = next(check_each(whole(name), (backend,), case, device, dtype, pinned=pins(name, backend)))
        except RuntimeError as problem:  # errors of CUDA are such
            if not any(words in str(problem) for words in _OF_THE_DEVICE):
                raise
            return PREVENTED, f"{type(problem).__name__}: {problem}"
        if not result.message.startswith("rejects"):
            return (PASSED if result.passed else FAILED), f"case {case.name}: {result.message or 'right'}"
    return PREVENTED, f"no small case of {name} is one that {backend} takes"


def main(name: str, backend: str, device: str) -> int:
    """Try the kernel and print what was found."""
    code, words = attempt(name, backend, device)
    sys.stdout.write(" ".join(words.split()) + "\n")
    sys.stdout.flush()
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
