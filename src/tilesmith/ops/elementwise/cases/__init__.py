"""Example inputs of the elementwise family, and the bytes they must move."""

from tilesmith.ops.elementwise.cases import activations, dropout

CASES = {**activations.CASES, **dropout.CASES}
bytes_moved = {**activations.bytes_moved, **dropout.bytes_moved}
