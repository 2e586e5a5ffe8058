"""The rewrite of models that generate: their `_sample`, which transformers calls for greedy decoding and sampling."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from tilesmith.models.blocks import BlockForm
from tilesmith.models.generation.decoding import Decoding
from tilesmith.rewrite import Replace, Rule, Site, Skip, original_class

_DECODING = "_tilesmith_decoding"
_WAYS = (
    "_sample", "_prefill", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation",
    "_optimize_model_for_decode", "_supports_logits_to_keep",
)  # fmt: skip


@dataclass(frozen=True)
class DecodingForm(BlockForm):
    """A model whose tokens are chosen by recorded steps where they give what its own loop gives."""

    state: ClassVar[tuple[str, ...]] = (_DECODING,)

    def namespace(self, base: type) -> dict[str, Any]:
        plain = base._sample

        @functools.wraps(plain)
        def _sample(self: nn.Module, input_ids: Any, **given: Any) -> Any:
            decoding = self.__dict__.get(_DECODING)
            if decoding is None:
                return plain(self, input_ids, **given)
            return decoding.sample(plain, self, input_ids, **given)

        return {"_sample": _sample}


class DecodingRule(Rule):
    """Models of transformers that generate by its own loop. record: what they have recorded, for the report."""

    name = "generate"
    form = DecodingForm

    def __init__(self) -> None:
        self.record = Decoding()

    def match(self, site: Site) -> Replace | Skip | None:
        cls = original_class(type(site.module))
        mixin = next((c for c in cls.__mro__ if c.__name__ == "GenerationMixin"), None)
        if mixin is None or not mixin.__module__.startswith("transformers."):
            return None
        why = _unfit(site.module, cls, mixin)
        if why:
            return Skip(f"generate runs as before: {why}", wanted=False)
        return Replace(DecodingForm(), (), "with a static cache, generate replays one CUDA graph a token")

    def attach(self, module: nn.Module) -> None:
        """Have a swapped model tell this rule's `record`."""
        module.__dict__[_DECODING] = self.record


def _unfit(model: nn.Module, cls: type, mixin: type) -> str:
    """Why a model does not make its tokens as the steps do, "" if it does."""
    if any(not hasattr(mixin, name) for name in _WAYS):
        return "this version of transformers generates in another way"
    if model.config.is_encoder_decoder:
        return "it has an encoder"
    own = [name for name in _WAYS if getattr(cls, name) is not getattr(mixin, name)]
    return f"it has a {own[0]} of its own" if own else ""
