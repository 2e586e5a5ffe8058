"""What is PTX on the device, as it is on a CPU: HELPERS by module and name, PTX in a kernel by what it contains."""

from tilesmith.validate.gluon.substitutes import attention, device, fp8, rows

HELPERS = device.HELPERS | attention.HELPERS | rows.HELPERS
PTX = device.PTX | attention.PTX | fp8.PTX | rows.PTX
