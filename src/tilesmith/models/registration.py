"""Registration with transformers, for models that choose the library by name."""

from tilesmith.models.attention.interface import register_attention
from tilesmith.models.layers.experts import register_experts


def register_for_transformers() -> None:
    """Make attn_implementation="tilesmith" and experts_implementation="tilesmith" known to transformers.

        tilesmith.register_for_transformers()
        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="tilesmith")

    or, for a model that is there, `model.set_attn_implementation("tilesmith")`. Its attention modules then call
    `ops.attention`; masks of padding, windows, caches and packed documents reach it as arguments of a few numbers a row
    (`attention.masks.key_mask`), others as dense masks. Where no kernel of the library is, they call PyTorch's
    attention, or for soft caps and sinks the model's own. What padding itself attends to may differ from other
    implementations. Under torch.compile transformers takes any call without a mask for one that may be packed, and its
    mask is dense. `optimize` does all this, tells a compiled model by whether its caller gives position_ids, and does
    more. Raises ImportError without transformers, and names the oldest that is supported.
    """
    register_attention()
    register_experts()
