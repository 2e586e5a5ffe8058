"""All arguments of a distance between distributions as one named tuple, for its checks, fakes and launchers."""

from tilesmith.engine.arguments import together
from tilesmith.ops.loss import distill_reference as reference

kl_div_arguments = together(reference.kl_div)
kl_div_vjp_arguments = together(reference.kl_div_vjp)
jsd_arguments = together(reference.jsd)
jsd_vjp_arguments = together(reference.jsd_vjp)
tvd_arguments = together(reference.tvd)
tvd_vjp_arguments = together(reference.tvd_vjp)
linear_distillation_arguments = together(reference.linear_distillation)
linear_distillation_vjp_arguments = together(reference.linear_distillation_vjp)
