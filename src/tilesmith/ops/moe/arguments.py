"""All arguments of an op of the moe family as one named tuple, for launchers that take them all."""

from tilesmith.engine.arguments import together
from tilesmith.ops.moe import fp8_reference, reference

experts_arguments = together(reference.experts)
experts_vjp_arguments = together(reference.experts_vjp)
experts_fp8_arguments = together(fp8_reference.experts_fp8)
experts_vjp_fp8_arguments = together(fp8_reference.experts_vjp_fp8)
