"""All arguments of an op of the moe family as one named tuple, for launchers that take them all."""

from tilesmith.engine.arguments import together
from tilesmith.ops.moe import reference

experts_arguments = together(reference.experts)
experts_vjp_arguments = together(reference.experts_vjp)
