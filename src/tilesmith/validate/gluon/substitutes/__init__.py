"""What is PTX on the device, as it is on a CPU: HELPERS by module and name, PTX in a kernel by what it contains."""

from typing import Any

from tilesmith.validate.gluon.substitutes import attention, device, fp8, rows
from tilesmith.validate.gluon.values import plain, value

HELPERS = device.HELPERS | attention.HELPERS | rows.HELPERS
PTX = device.PTX | attention.PTX | fp8.PTX | rows.PTX


def inline_asm_elementwise(asm: Any, constraints: Any, args: Any, dtype: Any, is_pure: Any, pack: Any) -> Any:
    """PTX in the middle of a kernel."""
    asm = str(plain(asm))
    for known, compute in PTX.items():
        if known in asm:
            return compute(*(value(x) for x in args))
    raise NotImplementedError(f"no substitute for this PTX: {asm[:200]}")
