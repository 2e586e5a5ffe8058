"""All arguments of an op of the gemm family as one named tuple, for launchers that take them all."""

from tilesmith.engine.arguments import together
from tilesmith.ops.gemm import reference

linear_act_vjp_arguments = together(reference.linear_act_vjp)
