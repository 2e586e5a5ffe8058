"""The calls of a model's first step, found before they are made: which they are, and that nothing else changes."""

import contextlib
import copy
import os
import random
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import tilesmith
from tilesmith.engine import ahead, launcher, triton_private
from tilesmith.engine import threads as threads_of
from tilesmith.engine.model_state import random_numbers_kept
from tilesmith.models import first_step

transformers = pytest.importorskip("transformers")


@pytest.fixture
def seen(monkeypatch):
    """(op, whether with its gradient) of the calls that were found, on a CPU that is taken for a CUDA device; the
    first launch of each forward is made up, and compiles."""
    found = []

    def see(op, pin, args, device, gradient):
        assert {a.device.type for a in args if isinstance(a, torch.Tensor)} == {"meta"}
        found.append((op.name, gradient))

    monkeypatch.setattr(ahead, "compile_call", see)
    monkeypatch.setattr(first_step, "compilers", lambda: SimpleNamespace(most=1))
    monkeypatch.setattr(first_step, "_device", lambda model: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(launcher, "_key", lambda *given: (None, ()))  # where there is a GPU, too
    monkeypatch.setattr(triton_private, "run", lambda *given: None)
    monkeypatch.setattr(triton_private, "was_compiled_since", lambda *given: True)
    embedding = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding

    def forward(self, *args, _forward=embedding.forward, **kwargs):
        if not first_step.torch_private.dispatch_modes():
            launcher.launch(SimpleNamespace(__name__="made_up"), (1,))
        return _forward(self, *args, **kwargs)

    monkeypatch.setattr(embedding, "forward", forward)
    return found


def _llama(**more):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, use_cache=False, **more,
    )  # fmt: skip
    return tilesmith.optimize(transformers.LlamaForCausalLM(config).train())


IDS = torch.arange(32).view(2, 16) % 128


def _state(model):
    """The parameters and buffers of a model, as objects, and how often they were written."""
    held = {}
    for fqn, module in model.named_modules():
        for name, value in module.__dict__.items():
            tensors = value.items() if name in ("_parameters", "_buffers") else ()
            held |= {(fqn, name, n): (id(x), x._version, x.grad is None) for n, x in tensors if x is not None}
    return held


def _names(model):
    """The classes of all modules, and the names of what they hold."""
    return [(type(module).__qualname__, *module.__dict__) for module in model.modules()]


def test_the_calls_of_a_step_are_found_before_they_are_made(seen):
    model = _llama()
    loss = model(input_ids=IDS, labels=IDS).loss
    expected = {"linear_cross_entropy"}  # the one op that serves on a CPU
    assert set(seen) == {(name, True) for name in expected} and len(seen) == 1
    loss.backward()
    model(input_ids=IDS, labels=IDS)
    assert len(seen) == 1  # the first step alone


def test_without_gradients_none_are_compiled(seen):
    model = _llama()
    with torch.no_grad():
        model(input_ids=IDS, labels=IDS)
    assert not [name for name, gradient in seen if gradient]


def test_nothing_changes(seen, monkeypatch):
    """Values, gradients, state and random numbers are those of a step without."""
    plain, model = _llama(attention_dropout=0.1), _llama(attention_dropout=0.1)
    monkeypatch.setattr(first_step, "_looked", {plain: {(True, True)}})
    results = []
    for one in (plain, model):
        torch.manual_seed(3)
        before = _state(one)
        loss = one(input_ids=IDS, labels=IDS).loss
        after = _state(one)
        loss.backward()
        results.append((loss, [p.grad for p in one.parameters()], torch.rand(3), _names(one)))
        assert before == after
        fakes = [x for m in one.modules() for x in first_step._tensors(m.__dict__) if type(x).__name__ == "FakeTensor"]
        assert not fakes
    assert seen
    (loss, grads, numbers, names), (loss_2, grads_2, numbers_2, names_2) = results
    assert torch.equal(loss, loss_2) and all(map(torch.equal, grads, grads_2)) and torch.equal(numbers, numbers_2)
    assert names == names_2
    reports = [str(one.tilesmith_report) for one in (plain, model)]
    assert reports[0] == reports[1]  # with the calls that were counted


@pytest.mark.parametrize("draw", [random.random, np.random.random, lambda: torch.rand(()).item()])
def test_numbers_that_a_model_draws_on_the_host_are_given_back(draw):
    """SpecAugment and BigBird's random blocks draw from NumPy."""
    state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    wanted = draw()
    random.setstate(state[0]), np.random.set_state(state[1]), torch.set_rng_state(state[2])
    with random_numbers_kept([torch.device("cpu")]):
        draw()
    assert draw() == wanted


class Asks(nn.Module):
    """A norm that asks for values."""

    def forward(self, x):
        return x if x.sum().item() > 0 else -x


Asks.__module__ = "transformers.made_up"


def test_a_model_that_asks_for_values_runs_as_without(seen, recwarn):
    model = _llama()
    model.model.layers[1].mlp = Asks()
    loss = model(input_ids=IDS, labels=IDS).loss
    assert loss.isfinite() and not [name for name, _ in seen if name == "linear_cross_entropy"]
    assert threading.active_count() == len(threading.enumerate()) and not launcher._after_compiling
    assert not [w for w in recwarn if "fake" in str(w.message).lower()]


def _hooked(model):
    model.model.norm.register_forward_hook(lambda module, args, out: None)


def _of_others(model):
    model.model.norm.__class__ = type("Norm", (type(model.model.norm),), {"__module__": "theirs"})


def _with_parameters_of_their_own(model):
    weight = torch.randn(64).as_subclass(type("Theirs", (torch.Tensor,), {}))
    model.model.norm._parameters["weight"] = weight


def test_hooks_of_the_model_itself_run_once(seen):
    model, calls = _llama(), []
    model.register_forward_hook(lambda module, args, out: calls.append(out.loss))
    model(input_ids=IDS, labels=IDS)
    assert len(calls) == 1 and seen


@pytest.mark.parametrize("change", [_hooked, _of_others, _with_parameters_of_their_own])
def test_what_is_unusual_is_left_alone(seen, change):
    model = _llama()
    change(model)
    assert first_step._obstacle(model, (), {})
    model(input_ids=IDS, labels=IDS)
    assert not seen


def test_functions_on_instances_are_left_alone(seen):
    model = _llama()
    model.model.chosen = lambda: None
    assert first_step._obstacle(model, (), {}) and not first_step._obstacle(_llama(), (IDS,), {"labels": IDS})
    assert first_step._obstacle(_llama(), (), {"past_key_values": transformers.DynamicCache()})


def test_recorded_blocks_are_left_alone(seen):
    assert first_step._obstacle(tilesmith.optimize(copy.deepcopy(_llama()), graphs=True), (), {})


def test_the_switch_and_other_devices(monkeypatch):
    """Nothing is looked at where nothing is compiled ahead, nor on a CPU."""
    looks = []
    monkeypatch.setattr(launcher, "after_compiling", looks.append)
    monkeypatch.setattr(first_step, "compilers", lambda: threads_of.Threads(1))
    model = _llama()
    model(input_ids=IDS)
    monkeypatch.setattr(first_step, "_device", lambda model: torch.device("cuda", 0))
    monkeypatch.setattr(first_step, "compilers", lambda: None)
    _llama()(input_ids=IDS)
    assert not looks


def test_a_warm_cache_is_not_looked_behind(seen, monkeypatch):
    monkeypatch.setattr(triton_private, "was_compiled_since", lambda *given: False)
    _llama()(input_ids=IDS, labels=IDS)
    assert not seen and not launcher._after_compiling


def test_what_is_new_in_the_cache(tmp_path):
    file = tmp_path / "kernel.json"
    file.write_text("{}")
    moment = file.stat().st_mtime
    told = partial(triton_private.was_compiled_since, SimpleNamespace(metadata_group={"kernel.json": str(file)}))
    assert told(moment - 1) and not told(moment + 1)
    assert not triton_private.was_compiled_since(None, 0.0)
    file.unlink()
    assert not told(moment - 1)


STEP = """
import contextlib
from functools import partial
from types import SimpleNamespace

import torch
from torch._subclasses.fake_tensor import FakeTensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

import tilesmith
from test_first_step import IDS, _llama
from tilesmith.engine import ahead, backends, choice, launcher, replay, torch_private, triton_private
from tilesmith.engine.choice import choose
from tilesmith.engine.op import Op
from tilesmith.engine.replay import Ready, Replay
from tilesmith.engine.threads import Threads
from tilesmith.hardware.detect import arch_named, assuming
from tilesmith.models import first_step, reach

driver.set_active(SimpleNamespace(
    get_current_device=lambda: 0, get_current_stream=lambda device: 0, launcher_cls=None,
    get_current_target=lambda: GPUTarget("cuda", 90, 32), get_device_interface=None,
))
model = _llama(head_dim=64).to(torch.bfloat16).to("meta")

# meta stands for a Hopper GPU: launches are noted in place of compiled
SM90, META, autocast = arch_named("sm90"), torch.device("meta"), torch.is_autocast_enabled
torch_private.current_device = replay._current_device = lambda: 0
torch.cuda.is_initialized = lambda: True
torch.cuda.is_current_stream_capturing = lambda: False
torch.cuda.device = lambda device: contextlib.nullcontext()
torch.is_autocast_enabled = lambda kind=None: autocast("cuda" if kind == "meta" else kind)
reach._has_kernel = lambda op, kind: True
transformers_masks = __import__("transformers.masking_utils").masking_utils
packed_sequences = transformers_masks.find_packed_sequence_indices
transformers_masks.find_packed_sequence_indices = lambda positions: (
    packed_sequences(positions) if isinstance(positions, FakeTensor) else None  # values on meta cannot be read
)
choice.missing = lambda backend, device, pinned=False: (
    None if backend.startswith(("reference", "triton", "hopper")) else "it is not here"
)
first_step._device = lambda model: META
first_step.random_numbers_kept = lambda devices: contextlib.nullcontext()

def ready(self, args, pin):
    with assuming(SM90):
        kernel = choose(self, self._describe(*args)._replace(arch=SM90), pin, META, args).kernel
        configure = getattr(kernel.fn, "configure", None)
        if configure is not None:
            configure.arch = SM90
        fn = kernel.fn if configure is None else configure.bind(args, {})
    assert kernel.backend != "reference", self.name
    return Replay(fn, None, 0, self.name, partial(ahead.compile_rest, self, kernel, pin))

Op._ready = ready
threads = Threads(0)
first_step.compilers = ahead.compilers = lambda: threads
launched, found, look = [], [], first_step._look

def run(kernel, grid, args, named, first=True):
    launched.append(kernel.__name__)
    if found:
        key = launcher.uncompiled(kernel, args, named, 1)
        assert key in found[0], f"{kernel.__name__} was not compiled ahead"

def looked(call):
    look(call)
    found.append(dict(launcher.awaited))
    launcher.awaited.clear()

triton_private.run, triton_private.was_compiled_since, first_step._look = run, lambda *given: True, looked
launcher._remember = lambda key, compiled: None
ids = IDS.repeat(1, 8).to("meta")
with assuming(SM90):
    model(input_ids=ids, labels=ids).loss.backward()
names = set(launched)
assert len(found) == 1 and len(launched) > len(names) > 12, names
assert {"attention_fwd_kernel", "attention_dkv_kernel", "_gate_bwd_kernel", "norm_bwd_kernel"} <= names, names
assert len(found[0]) <= len(names) + 8, sorted(key[0].names for key in found[0])
"""


def test_what_is_compiled_ahead_is_what_the_step_launches(needs_triton, tmp_path):
    """All launches of a Llama's forward and backward behind the first, by their keys, for a GPU that is not here."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run([sys.executable, "-c", STEP], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
