"""All arguments of the attention ops as one named tuple, `call.window_left`, for functions that take them all."""

from tilesmith.engine.arguments import together
from tilesmith.ops.attn import reference

attention_arguments = together(reference.attention)
attention_vjp_arguments = together(reference.attention_vjp)
