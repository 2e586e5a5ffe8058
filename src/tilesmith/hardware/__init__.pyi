# Written by: python -m tilesmith.validate.stubs

from tilesmith.hardware.capacity import Capacity as Capacity
from tilesmith.hardware.capacity import capacity_of as capacity_of
from tilesmith.hardware.detect import Arch as Arch
from tilesmith.hardware.detect import arch_named as arch_named
from tilesmith.hardware.detect import arch_of as arch_of
from tilesmith.hardware.detect import detect_available_devices as detect_available_devices
from tilesmith.hardware.facts import Facts as Facts
from tilesmith.hardware.facts import facts_of as facts_of
from tilesmith.hardware.limits import Limits as Limits
from tilesmith.hardware.limits import limits_of as limits_of
from tilesmith.models.sizing.hardware_layer import HardwareAbstractionLayer as HardwareAbstractionLayer
from tilesmith.models.sizing.memory_monitor import MemoryMonitor as MemoryMonitor
