"""All arguments of a loss as one named tuple, for its checks, fakes and launchers."""

from tilesmith.engine.arguments import together
from tilesmith.ops.loss import preference_reference, reference, token_stats_reference

cross_entropy_arguments = together(reference.cross_entropy)
cross_entropy_vjp_arguments = together(reference.cross_entropy_vjp)
linear_cross_entropy_arguments = together(reference.linear_cross_entropy)
linear_cross_entropy_vjp_arguments = together(reference.linear_cross_entropy_vjp)
linear_preference_arguments = together(preference_reference.linear_preference)
linear_preference_vjp_arguments = together(preference_reference.linear_preference_vjp)
token_stats_arguments = together(token_stats_reference.token_stats)
token_stats_vjp_arguments = together(token_stats_reference.token_stats_vjp)
linear_token_stats_arguments = together(token_stats_reference.linear_token_stats)
linear_token_stats_vjp_arguments = together(token_stats_reference.linear_token_stats_vjp)
