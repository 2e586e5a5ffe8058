"""Runs kernels written in Gluon on a CPU: their own source, on small tensors, in one of many possible orders.

A kernel's Python is executed as it stands; the names that it takes from Gluon and from `device.gluon.shim` are those of
`language`. Programs and warp partitions are fibers of which one runs at a time (`fibers`), and what is asynchronous on
the device (TMA, WGMMA) happens here at any moment that its barriers and waits allow, drawn by a seed. So a tile that is
overwritten while somebody may still read it, a product used before it was waited for, and a barrier that nobody
completes show as wrong values, errors and deadlocks, without a GPU. So does a missing fence before TMA or WGMMA. Not
modelled: other fences, layouts, limits of registers and shared memory, how exact the device's functions are.
"""

from tilesmith.validate.gluon.compare import check, computed
from tilesmith.validate.gluon.fibers import Deadlock
from tilesmith.validate.gluon.run import interpreted

__all__ = ["Deadlock", "check", "computed", "interpreted"]
