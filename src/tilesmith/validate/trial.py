"""One small case of a kernel, against its reference: `python -m tilesmith.validate.trial attention hopper cuda:0`.

Names of device kernels behind that, a dtype and a number of columns, `attention_fwd_wide_kernel bfloat16 512`, ask for
the smallest case that launches just these, of that dtype and that many columns if there is one. Where none does, the
cases are run that together launch all of them, as far as there are such.

`engine.trial` runs this for a release of Triton that is not known to serve the kernel. The last line that it prints
says what was found; it exits with 0 if the values are right, 75 if something else than the kernel was in the way.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator

import torch

from tilesmith.engine import Case, Op, cases, ops
from tilesmith.engine.arguments import dtype_name
from tilesmith.engine.backends import REFERENCE
from tilesmith.engine.case import T
from tilesmith.engine.choice import launches
from tilesmith.engine.launcher import next_power_of_2
from tilesmith.engine.trial import FAILED, PASSED, PREVENTED, Launches
from tilesmith.hardware.detect import arch_of, assuming
from tilesmith.validate.cases import check_each

_TAGS = ({"interpret", "compile"}, {"test"})  # the smallest first
_CHECKED = {"interpret", "compile", "test", "gpu"}  # other cases are timed alone, and their oracles may fill a GPU
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_WHOLE = Launches()  # no device kernels are asked for
_LARGEST = 2**24  # elements of a case's tensors; the oracle of a larger one takes longer than the kernel's compiler
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


def served_cases(
    name: str, backend: str, device: torch.device | str, wanted: Launches
) -> Iterator[tuple[Case, torch.dtype, Launches]]:
    """The cases that the kernel takes, the smallest first, in the wanted dtype if they have it; what each launches."""
    for case in sorted(cases(whole(name).name), key=_size):
        dtype = min(case.dtypes, key=lambda d: (dtype_name(d) != wanted.dtype, *_place(d)), default=None)
        if dtype is None or _size(case) > _LARGEST or not case.tags & _CHECKED:
            continue
        launched = launched_by(name, backend, device, case, dtype)
        if launched is not None:
            yield case, dtype, launched


def like_cases(
    name: str, backend: str, device: torch.device | str, wanted: Launches
) -> Iterator[tuple[Case, torch.dtype]]:
    """The cases that launch just the wanted device kernels, the smallest first: those of the wanted dtype and columns,
    then the others by what they share with it."""
    others = []
    for case, dtype, launched in served_cases(name, backend, device, wanted):
        if launched.kernels != wanted.kernels:
            continue
        apart = launched.dtype != wanted.dtype, _apart(launched.columns, wanted.columns)
        if any(apart):
            others.append((apart, case, dtype))
        else:
            yield case, dtype
    yield from ((case, dtype) for _, case, dtype in sorted(others, key=lambda row: row[0]))


def covering_cases(
    name: str, backend: str, device: torch.device | str, wanted: Launches
) -> tuple[list[tuple[Case, torch.dtype]], set[str]]:
    """Few small cases that together launch the wanted device kernels, and those that no small case launches."""
    served = list(served_cases(name, backend, device, wanted))
    left, chosen = set(wanted.kernels or ()), []
    while served and left:
        case, dtype, launched = max(served, key=lambda row: len(left.intersection(row[2].kernels or ())))
        if left.isdisjoint(launched.kernels or ()):
            break
        chosen.append((case, dtype))
        left.difference_update(launched.kernels or ())
    return chosen, left


def _size(case: Case) -> int:
    """Elements of all tensors."""
    return sum(math.prod(t.shape) for t in case.args.values() if isinstance(t, T))


def launched_by(name: str, backend: str, device: torch.device | str, case: Case, dtype: torch.dtype) -> Launches | None:
    """What a case, or its gradient, launches on `device`; None where the kernel rejects it."""
    op, asked = whole(name), ops()[name]
    args, arch = op.bind((), case.build(torch.device(device), dtype, case.generator())), arch_of(device)
    with assuming(arch):
        args = args if asked is op else op.gradient.arguments(args)
        kernel = asked.kernel(backend)
        return None if kernel.rejects(asked._describe(*args)._replace(arch=arch)) else launches(kernel, args)


def _place(dtype: torch.dtype) -> tuple[bool, int]:
    """The place of a dtype among `_DTYPES`, behind them for another one."""
    return dtype not in _DTYPES, _DTYPES.index(dtype) if dtype in _DTYPES else 0


def _apart(columns: int, wanted: int) -> int:
    """0 for as many columns, 1 for as many rounded up to a power of two, which is mostly the width of a tile."""
    return 0 if columns == wanted else 1 if next_power_of_2(columns) == next_power_of_2(wanted) else 2


def attempt(name: str, backend: str, device: torch.device | str, wanted: Launches = _WHOLE) -> tuple[int, str]:
    """The exit code and what to say."""
    try:
        return _attempt(name, backend, device, wanted)
    except RuntimeError as problem:  # errors of CUDA are such
        if not any(words in str(problem) for words in _OF_THE_DEVICE):
            raise
        return PREVENTED, f"{type(problem).__name__}: {problem}"


def _attempt(name: str, backend: str, device: torch.device | str, wanted: Launches) -> tuple[int, str]:
    def ran(case: Case, dtype: torch.dtype) -> tuple[int, str] | None:
        """The outcome of a case; None where the kernel does not take it."""
        result = next(check_each(whole(name), (backend,), case, device, dtype, pinned=(pins(name, backend),)))
        if result.message.startswith("rejects"):
            return None
        words = f"case {case.name} in {dtype_name(dtype)}: {result.message or 'right'}"
        return (PASSED if result.passed else FAILED), words

    instead = ""
    if wanted.kernels:
        for case, dtype in like_cases(name, backend, device, wanted):
            outcome = ran(case, dtype)
            if outcome is not None:
                return outcome
        chosen, left = covering_cases(name, backend, device, wanted)
        outcomes = [outcome for case, dtype in chosen if (outcome := ran(case, dtype)) is not None]
        instead = " (no small case launches just these device kernels"
        instead += f", none launches {', '.join(sorted(left))})" if left else ")"
        if outcomes:
            return max(code for code, _ in outcomes), ", ".join(words for _, words in outcomes) + instead
    for case, dtype in small_cases(name):
        outcome = ran(case, dtype)
        if outcome is not None:
            return outcome[0], outcome[1] + instead
    return PREVENTED, f"no small case of {name} is one that {backend} takes"


def main(name: str, backend: str, device: str, kernels: str = "", dtype: str = "", columns: str = "0") -> int:
    """Try the kernel and print what was found."""
    wanted = Launches(tuple(sorted(kernels.split(","))) if kernels else None, dtype, int(columns))
    code, words = attempt(name, backend, device, wanted)
    sys.stdout.write(" ".join(words.split()) + "\n")
    sys.stdout.flush()
    return code


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tilesmith.validate.trial", description=__doc__)
    for name in ("name", "backend", "device"):
        parser.add_argument(name)
    for name, default in (("kernels", ""), ("dtype", ""), ("columns", "0")):
        parser.add_argument(name, nargs="?", default=default)
    sys.exit(main(**vars(parser.parse_args())))
