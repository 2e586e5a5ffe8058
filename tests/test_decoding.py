"""`generate` by recorded steps, with a recorder that repeats a step's operations on the CPU: the tokens are those of
transformers, and no step asks the host. benchmarks/decode_loop.py records CUDA graphs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import tilesmith
from optimize_models import batch, build, ops_everywhere  # noqa: F401
from tilesmith.models.generation import decoding

pytest.importorskip("transformers")
PROMPT = 8
ASKING = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "is_nonzero")


class Tape(TorchDispatchMode):
    """Keeps the operations that run within it, with their arguments. One that asks the host is refused, as by CUDA."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if op.overloadpacket.__name__ in ASKING:
            raise RuntimeError(f"{op} asks the host")
        out = op(*args, **kwargs)
        self.operations.append((op, args, kwargs, out))
        return out

    def replay(self):
        with torch.no_grad():
            for op, args, kwargs, out in self.operations:
                again = op(*args, **kwargs)
                for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


class TapeRecorder:
    """Records by a tape. A recording runs what it records, so the first replay of it does nothing."""

    failing = ""

    def missing(self, device):
        return ""

    def busy(self):
        return False

    def warm(self, fn):
        return fn()

    def record(self, fn):
        if self.failing:
            raise RuntimeError(self.failing)
        tape, ran = Tape(), []
        with tape:
            out = fn()

        def replay():
            if ran:
                tape.replay()
            ran.append(True)

        return replay, out

    def fetch(self, tensor):
        numbers = tensor.tolist()
        return lambda: numbers

    def random_state(self, device):
        return torch.get_rng_state()

    def restore(self, device, state):
        torch.set_rng_state(state)

    def memory(self):
        return 0


@pytest.fixture(autouse=True)
def _recorder(monkeypatch):
    monkeypatch.setattr(decoding, "RECORDER", TapeRecorder)


def _pair(family, **more):
    plain = build(family, **more).eval()
    model = copy.deepcopy(plain)
    return plain, tilesmith.optimize(model, graphs=True)


def _prompt(rows=3, length=PROMPT, padded=True):
    ids = torch.randint(3, 120, (rows, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded and rows > 1:
        mask[1, :3] = 0
        ids[1, :3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _generated(model, given, seed=0, **more):
    torch.manual_seed(seed)
    options = {"max_new_tokens": 14, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **more}
    tokens = model.generate(**given, cache_implementation="static", disable_compile=True, **options)
    return tokens, torch.rand(1).item()


def _same(plain, model, given, **more):
    (wanted, after), (found, after_ours) = _generated(plain, given, **more), _generated(model, given, **more)
    assert torch.equal(found, wanted)
    assert after == after_ours  # the generator is left as transformers leaves it
    return wanted


def _record(model):
    return next(note for note in model.tilesmith_report.notes if isinstance(note, decoding.Decoding))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "gemma3"])
@pytest.mark.parametrize("padded", [False, True])
def test_tokens_are_those_of_transformers(family, padded):
    plain, model = _pair(family)
    given = _prompt(3, padded=padded)
    if family == "gemma3" and padded:
        _same(plain, model, given)
        assert "padding, and windows that fill" in _record(model).plain
        return
    _same(plain, model, given)
    _same(plain, model, given, do_sample=True, top_k=20, temperature=0.8)
    record = _record(model)
    assert record.calls == 2 and record.replays >= 2 * 14 - 2 * 4 and not record.plain, record.told()


def test_a_window_that_fills_while_tokens_are_made():
    plain, model = _pair("gemma3")
    given = _prompt(2, length=2, padded=False)  # the window is 4
    _same(plain, model, given)
    _same(plain, model, given)
    record = _record(model)
    assert next(iter(record._kinds.values())).graphs == 2 or record.replays > 14, record.told()


def test_rows_that_end():
    plain, model = _pair("llama")
    given = _prompt(3)
    tokens, _ = _generated(plain, given)
    for eos in (tokens[0, PROMPT + 3].item(), tokens[:, PROMPT + 6].tolist(), tokens[:, PROMPT].tolist()):
        _same(plain, model, given, eos_token_id=eos, max_new_tokens=30)
        _same(plain, model, given, eos_token_id=eos, max_new_tokens=30, do_sample=True)
    assert not _record(model).plain


@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_few_tokens(tokens):
    plain, model = _pair("llama")
    _same(plain, model, _prompt(1), max_new_tokens=tokens)


def test_a_later_call_replays_what_an_earlier_one_recorded():
    plain, model = _pair("llama")
    _same(plain, model, _prompt(2, padded=False))
    _same(plain, model, _prompt(2, length=5, padded=False), max_new_tokens=9)
    record = _record(model)
    assert record.steps == 13 + 8 and record.replays == 13 + 8 - 2 and len(record._kinds) == 1, record.told()
    with torch.no_grad():
        for m in (plain, model):
            m.lm_head.weight = torch.nn.Parameter(m.lm_head.weight * -1)
    _same(plain, model, _prompt(2, padded=False))


PROCESSORS = {
    "repetition": {"repetition_penalty": 1.7},
    "least": {"min_new_tokens": 4},
    "least length": {"min_length": 11},
    "suppressed": {"suppress_tokens": [5, 6, 7], "begin_suppress_tokens": [9, 10]},
    "last": {"forced_eos_token_id": 2},
    "sampling": {"do_sample": True, "top_p": 0.7, "min_p": 0.01, "typical_p": 0.9, "epsilon_cutoff": 0.001},
    "all": {"do_sample": True, "repetition_penalty": 1.3, "renormalize_logits": True, "remove_invalid_values": True},
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_processors(name):
    plain, model = _pair("llama")
    given = _prompt(3)
    eos = _generated(plain, given)[0][0, PROMPT + 1].item()
    for _ in range(2):
        _same(plain, model, given, eos_token_id=eos, **PROCESSORS[name])
    record = _record(model)
    assert not record.plain and record.replays, record.told()
