"""One training step (forward and backward) of a whole model: PyTorch, torch.compile, Liger, and optimised by us."""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

import torch

from tilesmith.bench.document import document
from tilesmith.bench.run import reason
from tilesmith.engine.arguments import dtype_name
from tilesmith.engine.timing import Timing, interleave, launches, peak_memory, wall_time

LLAMA = "transformers.models.llama.modeling_llama"
FEWEST = 3  # rounds: of two, one that something else slowed moves the median


@dataclass(frozen=True)
class Shape:
    """The sizes of a Llama model and of a batch."""

    name: str
    hidden: int
    inter: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    batch: int
    tokens: int


SHAPES = {
    "1.5b": Shape("Llama, 1.5 B parameters", 2048, 8192, 16, 32, 8, 128256, 4, 4096),
    "1.5b-long": Shape("Llama, 1.5 B parameters", 2048, 8192, 16, 32, 8, 128256, 1, 16384),
    "tiny": Shape("Llama, tiny", 64, 128, 2, 4, 2, 512, 2, 64),
}
PROVIDERS = ("pytorch", "compile", "liger", "liger+compile", "tilesmith", "tilesmith+compile")


def run(
    shape: Shape,
    device: torch.device,
    dtype: torch.dtype,
    *,
    optimize: Callable[[torch.nn.Module], object],
    command: str,
    only: tuple[str, ...] = PROVIDERS,
    rounds: int = 5,
    limit: float = 600.0,
    progress: Callable[[str], None] = lambda what: None,
    so_far: Callable[[dict[str, Any]], None] = lambda document: None,
) -> dict[str, Any]:
    """The document: for each provider time, tokens/s, peak memory (weights included) and kernels of one step.

    optimize: makes ours out of the plain model, in place. limit: seconds that a provider may take to be built and for
    its first step, which compiles; a peer that takes longer is a row that says so. so_far: is given the document after
    each round from the third on, with the number of rounds it has, for a run that is stopped before its end.
    """
    head = {"model": shape.name, "batch": shape.batch, "tokens": shape.tokens, "sizes": asdict(shape)}
    ids = torch.randint(shape.vocab, (shape.batch, shape.tokens), device=device)
    steps: dict[str, Callable[[], None]] = {}
    weights: dict[str, int] = {}
    failed = []
    for provider in only:
        progress(f"building {provider}")
        try:
            with _within(limit):
                model = _build(provider, shape, device, dtype, optimize)
                step = _step(model, ids)
                step()
            weights[provider] = sum(p.nbytes for p in model.parameters())
            steps[provider] = step
        except Exception as problem:  # whatever a peer throws is its row; ours must not throw
            if provider == "tilesmith":
                raise
            failed.append({**head, "provider": provider, "error": reason(problem)})
        _free(device)
    memory = {name: weights[name] + peak_memory(step, device) for name, step in steps.items()}
    kernels = {name: launches(step, device) for name, step in steps.items()}

    def described(timings: Mapping[str, Timing]) -> dict[str, Any]:
        rows = [_row(head, name, timings, memory[name], kernels[name]) for name in timings]
        done = next((len(timing.rounds) for timing in timings.values()), rounds)
        named = {"dtype": dtype_name(dtype), "rounds": done}
        return document("model", device, command, failed + rows, **named)

    def after(timings: Mapping[str, Timing]) -> None:
        found = described(timings)
        progress(f"timing, {found['rounds']} of {rounds} rounds done")
        if found["rounds"] >= FEWEST:
            so_far(found)

    progress("timing")
    timed = {name: (lambda step=step: _timed(step, device)) for name, step in steps.items()}
    return described(interleave(rounds, timed, after))


def _row(
    head: Mapping[str, Any], provider: str, timings: Mapping[str, Timing], memory: int, kernels: int
) -> dict[str, Any]:
    timing = timings[provider]
    row = {**head, "provider": provider, "us": round(timing.median_us), "spread": round(timing.spread, 4)}
    row |= {"tokens_per_s": head["batch"] * head["tokens"] / timing.median_us * 1e6, "peak_bytes": memory}
    row |= {"kernels": kernels}
    if "pytorch" in timings:
        row["times_pytorch"] = round(timings["pytorch"].median_us / timing.median_us, 3)
    return row


@contextlib.contextmanager
def _within(seconds: float) -> Iterator[None]:
    """Raise TimeoutError when the block has run for `seconds`, and again each second until it ends, since a compiler
    may catch it. Without interval timers, or outside of the main thread, the block takes as long as it takes."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    late = TimeoutError(f"not built and run once within {seconds:g} s")

    def stop(*_):
        raise late

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # in here: a short one may be over before the next statement
        yield
        if late.__traceback__ is not None:  # it was raised where nothing is passed on, as in a __del__
            raise late
    except Exception as problem:
        if late.__traceback__ is not None and problem is not late:  # it was caught, and something else came of it
            raise late from problem
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _build(provider: str, shape: Shape, device: torch.device, dtype: torch.dtype, optimize) -> torch.nn.Module:
    """A model with the same weights for every provider."""
    kind, _, compiled = provider.partition("+")
    with _private_copy(LLAMA) as modeling:
        config = modeling.LlamaConfig(
            hidden_size=shape.hidden,
            intermediate_size=shape.inter,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            vocab_size=shape.vocab,
            max_position_embeddings=32768,
            attn_implementation="sdpa",
            use_cache=False,
        )
        torch.manual_seed(0)
        with device:
            model = modeling.LlamaForCausalLM(config).to(dtype)
        if kind == "liger":
            from liger_kernel.transformers import apply_liger_kernel_to_llama

            apply_liger_kernel_to_llama(model=model)
    if kind == "tilesmith":
        optimize(model)
    if compiled or kind == "compile":
        model.compile(dynamic=False)
    return model


@contextlib.contextmanager
def _private_copy(name: str) -> Iterator[ModuleType]:
    """The module loaded once more, in its own place while the block runs, so that patches to it touch nobody else."""
    original = importlib.import_module(name)
    package, _, leaf = name.rpartition(".")
    spec = importlib.util.find_spec(name)
    copy = importlib.util.module_from_spec(spec)
    sys.modules[name] = copy
    setattr(sys.modules[package], leaf, copy)
    try:
        spec.loader.exec_module(copy)
        yield copy
    finally:
        sys.modules[name] = original
        setattr(sys.modules[package], leaf, original)


def _step(model: torch.nn.Module, ids: torch.Tensor) -> Callable[[], None]:
    def step():
        model(input_ids=ids, labels=ids).loss.backward()
        for parameter in model.parameters():
            parameter.grad = None

    return step


def _timed(step: Callable[[], None], device: torch.device, times: int = 3) -> float:
    """µs of one step. A step before the clock starts fills the allocator's pools, which are emptied afterwards."""
    step()
    spent = wall_time(step, device, times)
    _free(device)
    return spent


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
