"""Registration with transformers, for models that choose the library by name."""

from tilesmith.models.attention.interface import register_attention
from tilesmith.models.layers.experts import register_experts


def register_for_transformers() -> None:
    """Register attn_implementation="tilesmith" and experts_implementation="tilesmith" with transformers.

        tilesmith.register_for_transformers()
        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="tilesmith")

    or, for an existing model, `model.set_attn_implementation("tilesmith")`. Its attention modules then call
    `ops.attention`; masks of padding, windows, caches and packed documents reach it as arguments of a few numbers a row
    (`attention.masks.key_mask`), others as dense masks. On devices for which the library has no kernel, they call
    PyTorch's attention, or, for soft caps and sinks, the model's own. Outputs at padding positions may differ from
    those of other implementations. Under torch.compile transformers treats any call without a mask as possibly packed,
    and its mask is dense. `optimize` does all this and more; in a compiled model it treats a call as packed only if
    position_ids are given. Raises ImportError without transformers, naming the oldest supported version.
    """
    register_attention()
    register_experts()
