"""`generate` of a model of transformers: which calls recorded steps serve, and the loop around the steps.

The host runs ahead of the device: it queues steps, and every few of them looks at what it asked some steps ago, whether
rows are left. Steps beyond the end are cut off. All else is transformers' own loop, and the report counts why.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tilesmith.engine import torch_private
from tilesmith.engine.choice import pins
from tilesmith.models.blocks import observer
from tilesmith.models.cache_argument import CACHE_NAMES, cache_name
from tilesmith.models.capture import CudaRecorder
from tilesmith.models.generation.recording import RecordedSteps, StepRecorder
from tilesmith.models.generation.scores import StaticProcessor, stand_in
from tilesmith.models.generation.token_state import TokenState
from tilesmith.models.reach import all_observed, has_own_hooks
from tilesmith.rewrite.report import counted

RECORDER: Callable[[], StepRecorder] = CudaRecorder
LOOK_EVERY = 8
"""Steps between two looks at whether rows are left. The device is at most twice as many steps ahead of a look."""
MOST_KINDS = 2
"""Kinds of calls whose cache and graph are kept."""
ASK = "pass cache_implementation='static' to generate"
_TOLD = (*CACHE_NAMES, "attention_mask", "position_ids", "use_cache", "logits_to_keep")


class Decoding:
    """What `generate` of one model has recorded. calls, steps: served here; replays: steps by a graph. plain: why calls
    were left to transformers' own loop -> how often. refused: why the model's steps cannot be recorded."""

    def __init__(self) -> None:
        self.calls, self.steps, self.replays = 0, 0, 0
        self.plain: Counter[str] = Counter()
        self.refused = ""
        self._forget()

    def _forget(self) -> None:
        self._kinds: OrderedDict[Any, RecordedSteps] = OrderedDict()
        self._recorder = RECORDER()
        self._one_call = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        # A recording is of the parameters that it was made with: a copy records its own.
        own = ("_kinds", "_recorder", "_one_call")
        return {name: value for name, value in self.__dict__.items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def told(self) -> list[str]:
        """Sentences for the report."""
        told = []
        if self.calls:
            graphs = sum(kind.graphs for kind in self._kinds.values())
            held = sum(kind.bytes() for kind in self._kinds.values())
            told.append(
                f"generate: {self.replays} of {counted(self.steps, 'step')} of {counted(self.calls, 'call')} by "
                f"replays of {counted(graphs, 'graph')}, {held / 2**20:.1f} MiB held"
            )
        if self.refused:
            told.append(f"generate cannot be recorded and runs as before: {self.refused}")
        return told + [f"generate ran as before {counted(count, 'time')}: {why}" for why, count in self.plain.items()]

    def sample(self, plain: Callable[..., Any], model: nn.Module, prompt: Tensor, **given: Any) -> Any:
        """What `_sample` of transformers is called for: `plain` is its own."""
        why = self.refused or self._obstacle(model, prompt, **given)
        processors = [] if why else [(p, stand_in(p)) for p in given["logits_processor"]]
        foreign = [type(p).__name__ for p, found in processors if found is None]
        why = why or (f"the logits processor {foreign[0]} needs the host" if foreign else "")
        if not why and not self._one_call.acquire(blocking=False):
            why = "another call of generate was under way"
        if why:
            self.plain[why] += 1
            return plain(model, prompt, **given)
        try:
            with torch.cuda.device_of(prompt):
                return self._generate(model, prompt, processors, **given)
        finally:
            self._one_call.release()

    def _obstacle(
        self, model: nn.Module, prompt: Tensor, logits_processor: Any, stopping_criteria: Any, generation_config: Any,
        synced_gpus: bool = False, streamer: Any = None, **told: Any,
    ) -> str:  # fmt: skip
        """Why recorded steps do not serve a call, "" if they do."""
        device = next(model.parameters()).device
        if torch.compiler.is_compiling():
            return "it is being compiled"
        found = all_observed() or observer() or _of_config(generation_config, synced_gpus)
        if found:
            return found
        missing = self._recorder.missing(device) or ("somebody records it" if self._recorder.busy() else "")
        if missing:
            return missing
        for check in (
            _of_stopping(stopping_criteria, generation_config),
            _of_inputs(prompt, device, told),
            _of_model(model),
        ):
            if check:
                return check
        return _of_cache(told.get(cache_name(told)), told.get("attention_mask"))

    def _generate(
        self,
        model: nn.Module,
        prompt: Tensor,
        processors: Sequence[tuple[Any, StaticProcessor]],
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **told: Any,
    ) -> Tensor:
        asked = [static for _, static in processors]
        steps = self._steps(model, prompt, told, generation_config, asked)
        told[cache_name(told)] = steps.cache
        with steps.layers.prompt(whole=generation_config.prefill_chunk_size is None):
            outputs = model._prefill(prompt, generation_config, told, is_first_iteration=True)
        told = model._update_model_kwargs_for_generation(outputs, told, is_encoder_decoder=False)
        logits = outputs.logits[:, -1]
        ends = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        eos, pad = (generation_config._eos_token_tensor, generation_config._pad_token_tensor) if ends else (None, None)
        position, mask = told.get("position_ids"), _padding(told.get("attention_mask"))
        position = None if position is None else position[:, -1:]
        steps.state.begin(prompt, position, None if mask is None else mask[:, : prompt.shape[1]], eos, pad)
        for (processor, _), static in zip(processors, steps.processors, strict=True):
            static.begin(processor, prompt, logits.shape[-1])
        del outputs
        with model._optimize_model_for_decode():
            tokens = _run(steps, logits, generation_config.max_length - prompt.shape[1], streamer)
        self._count(steps)
        return steps.state.sequence[:, : prompt.shape[1] + tokens].clone()

    def _count(self, steps: RecordedSteps) -> None:
        self.calls += 1
        self.steps, steps.steps = self.steps + steps.steps, 0
        self.replays, steps.replays = self.replays + steps.replays, 0
        self.refused = steps.problem
        if steps.problem:
            self._kinds.clear()

    def _steps(
        self, model: nn.Module, prompt: Tensor, told: dict[str, Any], config: Any, processors: list[StaticProcessor]
    ) -> RecordedSteps:
        """The recording that serves a call, or a new one."""
        cache, kind = told[cache_name(told)], prompt.device.type
        positions, padded = told.get("position_ids") is not None, _padding(told.get("attention_mask")) is not None
        eos, pad = config._eos_token_tensor, config._pad_token_tensor
        slots = max(config.max_length - 1, *(layer.max_cache_len for layer in cache.layers))
        slots = max(slots, getattr(model, "_previous_max_cache_length", 0))
        key = (
            prompt.shape[0], slots, tuple(layer.max_cache_len for layer in cache.layers), positions, padded,
            None if eos is None else tuple(eos.shape), tuple(p.key for p in processors), bool(config.do_sample),
            model.dtype, prompt.device, torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
            torch.is_inference_mode_enabled(), torch.get_float32_matmul_precision(), torch.get_default_dtype(),
            torch_private.deterministic(), tuple(sorted(pins().items())),
            getattr(model.config, "_attn_implementation", None),
        )  # fmt: skip
        known = self._kinds.pop(key, None)
        if known is None or known.stale():
            windows = max((layer.max_cache_len for layer in cache.layers if layer.is_sliding), default=0)
            state = TokenState.empty(prompt, slots, positions, windows if padded else None, eos, pad)
            known = RecordedSteps(model, RECORDER(), cache, state, processors, bool(config.do_sample))
        self._kinds[key] = known
        while len(self._kinds) > MOST_KINDS:
            self._kinds.popitem(last=False)
        return known


def _run(steps: RecordedSteps, logits: Tensor, most: int, streamer: Any) -> int:
    """Make up to `most` tokens, the first by `logits`; returns how many there are until all rows have ended."""
    state, recorder, device = steps.state, steps.recorder, logits.device
    looked: deque[Callable[[], list[int]]] = deque()
    drawn: dict[int, Tensor] = {}  # states of the generator by how many tokens were drawn before
    made, looks = 0, state.eos is not None or steps.sample
    while made < most:
        if steps.sample and state.eos is not None:
            drawn[made] = recorder.random_state(device)
            drawn.pop(made - 4 * LOOK_EVERY, None)
        if made == 0:
            steps.choose(logits)
        else:
            steps.advance()
        made += 1
        if streamer is not None:
            streamer.put(state.token[:, 0].cpu())
            looked.append(recorder.fetch(state.status))
        elif looks and made % LOOK_EVERY == 0:
            looked.append(recorder.fetch(state.status))
        if looked and (streamer is not None or len(looked) > 1) and _ended(looked.popleft()()):
            break
    tokens, *_ = status = recorder.fetch(state.status)()
    _ended(status)
    if tokens in drawn and tokens < made:
        recorder.restore(device, drawn[tokens])  # as if no token had been drawn behind the end
    if streamer is not None:
        streamer.end()
    return tokens


def _ended(status: list[int]) -> bool:
    """Whether all rows have ended. Raises RuntimeError where probabilities to draw from were none, as torch does."""
    if status[2]:
        raise RuntimeError("probability tensor contains either `inf`, `nan` or element < 0")
    return status[1] == 0


def _padding(mask: Tensor | None) -> Tensor | None:
    """A mask that hides something, else None."""
    return None if mask is None or bool((mask == 1).all()) else mask


def _of_config(config: Any, synced: bool) -> str:
    """Why steps do not serve what a call of `generate` asks for."""
    reasons = {
        "return_dict_in_generate": config.return_dict_in_generate,
        "is_assistant": getattr(config, "is_assistant", False),
        "synced_gpus": synced,
        "compile_config": config.compile_config is not None,
        "use_cache=False": not config.use_cache,
    }
    asked = [name for name, is_asked in reasons.items() if is_asked]
    if asked:
        return f"asked for {asked[0]}"
    return "" if config.cache_implementation == "static" else f"its cache is not static: {ASK}"


def _of_stopping(criteria: Any, config: Any) -> str:
    """Why steps do not end where these criteria do. Those of the configuration hold its own values."""
    from transformers import EosTokenCriteria, MaxLengthCriteria

    lengths = [c.max_length for c in criteria if type(c) is MaxLengthCriteria]
    ends = [c.eos_token_id for c in criteria if type(c) is EosTokenCriteria]
    if len(lengths) + len(ends) < len(criteria):
        names = [type(c).__name__ for c in criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)]
        return f"the stopping criterion {names[0]} needs the host"
    if any(length != config.max_length for length in lengths) or any(x is not config._eos_token_tensor for x in ends):
        return "a stopping criterion of the caller's own"
    return "" if lengths else "without a largest length"


def _of_inputs(prompt: Tensor, device: torch.device, told: dict[str, Any]) -> str:
    others = [name for name, value in told.items() if name not in _TOLD and value is not None]
    if others:
        return f"given {others[0]}"
    if prompt.ndim != 2 or 0 in prompt.shape:
        return f"given a prompt of shape {list(prompt.shape)}"
    if prompt.device != device:
        return f"given a prompt on {prompt.device}, the model is on {device}"
    position, mask = told.get("position_ids"), told.get("attention_mask")
    if position is not None and (position.ndim != 2 or position.shape[0] != prompt.shape[0]):
        return f"given positions of shape {list(position.shape)}"
    if mask is not None and mask.shape != prompt.shape:
        return f"given a mask of shape {list(mask.shape)}"
    return ""


def _of_model(model: nn.Module) -> str:
    if model.training:
        return "the model is in training mode"
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        return "the model is on several devices"
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    if "chunked_attention" in kinds:
        return "its attention is by chunks, which begin at places of their own"
    hooked = [name for name, module in model.named_modules() if has_own_hooks(module)]
    return f"{hooked[0] or 'the model'} has hooks" if hooked else ""


def _of_cache(cache: Any, mask: Tensor | None) -> str:
    from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer

    if cache is None:
        return "the model makes its cache itself"
    if type(cache) is not StaticCache:
        return f"its cache is a {type(cache).__name__}: {ASK}"
    if cache.offloading:
        return "its cache is offloaded"
    foreign = [type(x).__name__ for x in cache.layers if type(x) not in (StaticLayer, StaticSlidingWindowLayer)]
    if foreign:
        return f"its cache has a {foreign[0]}"
    if any(layer.is_initialized for layer in cache.layers):
        return "its cache is filled already"
    windows = {layer.max_cache_len for layer in cache.layers if layer.is_sliding}
    if len(windows) > 1 and _padding(mask) is not None:
        return "padding, and windows of several sizes"
    return ""
