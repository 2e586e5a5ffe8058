"""What the devices are: a table of facts, limits for portable kernels, detection. The bottom layer."""

from tilesmith._lazy import lazy_names

_HOMES = {
    "Arch": "tilesmith.hardware.detect",
    "Facts": "tilesmith.hardware.facts",
    "Limits": "tilesmith.hardware.limits",
    "arch_named": "tilesmith.hardware.detect",
    "arch_of": "tilesmith.hardware.detect",
    "detect_available_devices": "tilesmith.hardware.detect",
    "HardwareAbstractionLayer": "tilesmith.models.sizing.hardware_layer",
    "MemoryMonitor": "tilesmith.models.sizing.memory_monitor",
    "Capacity": "tilesmith.hardware.capacity",
    "capacity_of": "tilesmith.hardware.capacity",
    "facts_of": "tilesmith.hardware.facts",
    "limits_of": "tilesmith.hardware.limits",
}

__all__ = sorted(_HOMES)
__getattr__, __dir__ = lazy_names(globals(), _HOMES)
