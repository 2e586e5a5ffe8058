"""Which kernel would serve a call on a GPU that is not here, from the facts of its architecture and the metadata.

Nothing runs and no device is asked. It is what `choice.choose` would say on such a device with the Triton that this
process has; where kernels cannot be imported for want of Triton, that is their reason.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilesmith.engine.backends import REFERENCE, triton_missing
from tilesmith.engine.choice import Choice, ranked
from tilesmith.engine.kernel import Kernel
from tilesmith.engine.metadata import TensorFacts
from tilesmith.hardware.detect import Arch, assuming

# A driver that is not here cannot be asked, as rules do of tensors on cuda; of meta tensors they know as much as fits.
_TYPES = {"mps": "mps", "cpu": "cpu"}


def choice_on(op: Any, args: tuple, arch: Arch) -> Choice:
    """The choice for a call of `op` with arguments like these, if its tensors were on a device of `arch`.

    args: as the op takes them by position, on any device; fake and meta tensors do.
    """
    device = torch.device(_TYPES.get(arch.kind, "meta"))
    with assuming(arch):
        call = op._describe(*args)
        moved = [f._replace(device=device) if isinstance(f, TensorFacts) else f for f in call]
        choice = ranked(op, type(call)(*moved), lambda backend: _absent(backend, arch))
        return _noted(choice, args, arch)


def _absent(backend: str, arch: Arch) -> str | None:
    """Why no device of `arch` can be asked for `backend`."""
    if backend == REFERENCE:
        return None
    if backend.startswith("hopper") and (arch.kind != "cuda" or arch.capability != (9, 0)):
        return f"{arch.name}; Hopper kernels need an NVIDIA GPU of compute capability 9.0"
    if backend.startswith("triton") and arch.kind not in ("cuda", "hip", "xpu"):
        return f"{arch.name}; Triton kernels need a GPU that Triton reaches"
    if backend == "portable" and arch.kind != "mps":
        return f"{arch.name}; where Triton reaches a GPU portable kernels serve it only when pinned"
    if backend.startswith(("hopper", "triton")) and triton_missing() is not None:
        return f"its rules cannot be read here: {triton_missing()}"
    return None


def _noted(choice: Choice, args: tuple, arch: Arch) -> Choice:
    """The choice with the configuration that its kernel would have, where it has one to choose."""
    configure = getattr(choice.kernel.fn, "configure", None)
    if configure is None:
        return choice
    config = _configuration(choice.kernel, args, arch)
    fields = ", ".join(f"{name} {value}" for name, value in config._asdict().items())
    return Choice(choice.kernel, choice.because, choice.rejected, f"configuration: {fields}", choice.lower)


def _configuration(kernel: Kernel, args: tuple, arch: Arch) -> Any:
    configure = kernel.fn.configure
    first = next(a for a in args if isinstance(a, Tensor))
    return configure.configuration_on(args, arch, first)
