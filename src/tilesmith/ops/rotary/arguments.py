"""All arguments of an op of the rotary family as one named tuple, for its checks, fakes and launchers."""

from tilesmith.engine.arguments import together
from tilesmith.ops.rotary import norm_reference, reference

rope_arguments = together(reference.rope)
rope_vjp_arguments = together(reference.rope_vjp)
rms_norm_rope_arguments = together(norm_reference.rms_norm_rope)
rms_norm_rope_vjp_arguments = together(norm_reference.rms_norm_rope_vjp)
