"""All arguments of linear_distillation as one named tuple, for functions that take them all."""

from tilesmith.engine.arguments import together
from tilesmith.ops.loss import distill_reference as reference

linear_distillation_arguments = together(reference.linear_distillation)
linear_distillation_vjp_arguments = together(reference.linear_distillation_vjp)
