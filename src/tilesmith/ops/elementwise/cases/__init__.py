"""Example inputs of the elementwise family, and the bytes they must move."""

from tilesmith.ops.elementwise.cases import activations, dropout, xielu

CASES = {**activations.CASES, **dropout.CASES, **xielu.CASES}
bytes_moved = {**activations.bytes_moved, **dropout.bytes_moved, **xielu.bytes_moved}
