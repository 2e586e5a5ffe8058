"""Example inputs of the norm family, and the bytes they must move."""

from tilesmith.ops.norm.cases import dropout, gated, norm, softmax

CASES = {**norm.CASES, **gated.CASES, **dropout.CASES, **softmax.CASES}
bytes_moved = {**norm.bytes_moved, **gated.bytes_moved, **dropout.bytes_moved, **softmax.bytes_moved}
