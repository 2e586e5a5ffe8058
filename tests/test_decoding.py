"""`generate` by recorded steps, with a recorder that repeats a step's operations on the CPU: the tokens are those of
transformers, and no step asks the host. benchmarks/decode_loop.py records CUDA graphs."""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import family_models
import tilesmith
from graph_runs import Recorder
from optimize_models import batch, build, ops_everywhere  # noqa: F401
from tilesmith.engine import use
from tilesmith.engine.backends import missing
from tilesmith.models.attention import interface
from tilesmith.models.generation import cache, decoding

pytest.importorskip("transformers")
PROMPT = 8
NO_TRITON = missing("triton", torch.device("cpu"), pinned=True)
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
        if op.overloadpacket.__name__ == "lift_fresh" and args[0].ndim:
            raise RuntimeError("a tensor is made of numbers on the host")
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


class TapeRecorder(Recorder):
    """Records by a tape. A recording runs what it records, so the first replay of it does nothing."""

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


@pytest.fixture(autouse=True)
def _recorder(monkeypatch):
    monkeypatch.setattr(decoding, "RECORDER", TapeRecorder)


@functools.cache
def _made(family):
    plain = build(family).eval()
    return plain, tilesmith.optimize(copy.deepcopy(plain), graphs=True)


def _pair(family):
    """A model as it was and an optimised one that has recorded nothing yet."""
    plain, model = _made(family)
    for m in (plain, model):
        m.__dict__.pop("_previous_max_cache_length", None)  # transformers keeps the size of the largest static cache
    _record(model).__init__()
    return plain, model


def _prompt(rows=3, length=PROMPT, padded=True):
    ids = torch.randint(3, 120, (rows, length), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded and rows > 1:
        mask[1, :3] = 0
        ids[1, :3] = 0
    return {"input_ids": ids, "attention_mask": mask}


def _generated(model, given, seed=0, **more):
    torch.manual_seed(seed)
    options = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, **more}
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
    _same(plain, model, given)
    _same(plain, model, given, do_sample=True, top_k=20, temperature=0.8)
    record = _record(model)
    assert record.calls == 2 and record.replays >= 2 * (10 - 1 - 4) and not record.plain, record.told()


@pytest.mark.skipif(NO_TRITON is not None, reason=str(NO_TRITON))
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_a_token_is_written_by_one_op(family, monkeypatch):
    plain, model = _pair(family)
    dims = []

    def append(k_cache, v_cache, k, v, lengths):
        dims.append((k.shape[3], v.shape[3]))
        return plain_append(k_cache, v_cache, k, v, lengths)

    plain_append = cache.ops.kv_cache_append
    monkeypatch.setattr(cache.ops, "kv_cache_append", append)
    with use(kv_cache_append="triton"):
        _same(plain, model, _prompt(3))
    # latents and the rotated part of keys
    assert set(dims) == {(16, 16) if family == "llama" else (32, 8)}
    assert not _record(model).plain


@pytest.mark.parametrize("padding", [0, 1, 2])
def test_a_window_that_fills_while_tokens_are_made(padding):
    plain, model = _pair("gemma3")
    given = _prompt(2, length=3, padded=False)  # the window is 4
    given["attention_mask"][1, :padding] = 0
    _same(plain, model, given)
    _same(plain, model, given)
    record = _record(model)
    assert next(iter(record._kinds.values())).graphs == 2 or record.replays > 10, record.told()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_attention_reads_the_filled_slots_alone(family, monkeypatch):
    plain, model = _pair(family)
    asked = []

    def attention(q, *args, kv_lengths=None, **kwargs):
        asked.append((q.shape[2], None if kv_lengths is None else kv_lengths.tolist(), args[2].dense is None))
        return plain_attention(q, *args, kv_lengths=kv_lengths, **kwargs)

    plain_attention = interface.ops.attention
    monkeypatch.setattr(interface.ops, "attention", attention)
    monkeypatch.setattr(TapeRecorder, "failing", "each step runs as it is, to be seen")
    with pytest.warns(UserWarning, match="to be seen"):
        _generated(model, _prompt(2, length=2, padded=False), max_new_tokens=6)
    assert all(sparse for *_, sparse in asked)
    lengths = [lengths for tokens, lengths, _ in asked if tokens == 1]
    full = [[n, n] for n in (3, 4, 5, 6, 7)]
    windows = [[3, 3], [4, 4], None, None, None]  # the window is 4: then all of it is seen
    kinds = model.config.layer_types if family == "gemma3" else ["full_attention"] * 2
    assert lengths == [x for n in range(5) for x in ((windows if "sliding" in kind else full)[n] for kind in kinds)]


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


@pytest.mark.parametrize("append", [False, True])
def test_a_later_call_replays_what_an_earlier_one_recorded(append, monkeypatch):
    plain, model = _pair("llama")
    monkeypatch.setattr(cache, "reaches", lambda op, keys: append)
    _same(plain, model, _prompt(2, padded=False))
    _same(plain, model, _prompt(2, length=5, padded=False), max_new_tokens=9)
    record = _record(model)
    assert record.steps == 9 + 8 and record.replays == 9 + 8 - 2 and len(record._kinds) == 1, record.told()
    changed = copy.deepcopy(plain), copy.deepcopy(model)
    for m in changed:
        m.lm_head.weight = torch.nn.Parameter(m.lm_head.weight.detach() * -1)
    _same(*changed, _prompt(2, padded=False))
    _same(plain, model, _prompt(2, padded=False))


def test_weights_that_move_are_recorded_anew():
    plain, model = (copy.deepcopy(m) for m in _pair("llama"))
    for _ in range(2):
        _same(plain, model, _prompt(1))
        for m in (plain, model):
            m.lm_head.weight = torch.nn.Parameter(m.lm_head.weight.detach() * -1)


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


class Streamer:
    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.reshape(-1).tolist()

    def end(self):
        self.ended = True


def test_a_streamer_gets_each_token():
    plain, model = _pair("llama")
    given, streamer = _prompt(1), Streamer()
    eos = _generated(plain, given)[0][0, PROMPT + 5].item()
    tokens, _ = _generated(model, given, eos_token_id=eos, streamer=streamer)
    assert streamer.tokens == tokens[0].tolist() and streamer.ended
    assert torch.equal(tokens, _generated(plain, given, eos_token_id=eos)[0]) and _record(model).calls == 1


class Nothing:
    def __call__(self, input_ids, scores):
        return scores


def _more(name):
    transformers = pytest.importorskip("transformers")
    time, ends = transformers.MaxTimeCriteria(1e3), transformers.EosTokenCriteria(5)
    return {
        "its cache is not static": {"cache_implementation": None},
        "asked for return_dict_in_generate": {"return_dict_in_generate": True},
        "the logits processor NoRepeatNGramLogitsProcessor": {"no_repeat_ngram_size": 2},
        "the logits processor Nothing": {"logits_processor": [Nothing()]},
        "the stopping criterion MaxTimeCriteria": {"stopping_criteria": [time]},
        "a stopping criterion of the caller's own": {"stopping_criteria": [ends]},
        "given token_type_ids": {"token_type_ids": torch.zeros(1, PROMPT, dtype=torch.long)},
        "": {"num_beams": 2},
    }[name]


@pytest.mark.parametrize("why", [
    "its cache is not static", "asked for return_dict_in_generate", "the logits processor NoRepeatNGramLogitsProcessor",
    "the logits processor Nothing", "the stopping criterion MaxTimeCriteria",
    "a stopping criterion of the caller's own", "given token_type_ids", "",
])  # fmt: skip
def test_other_calls_run_as_before(why):
    plain, model = _pair("gpt2")
    given = _prompt(1)
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "disable_compile": True,
               "cache_implementation": "static", **_more(why)}  # fmt: skip
    wanted, found = (m.generate(**given, **options) for m in (plain, model))
    assert torch.equal(*(x if isinstance(x, torch.Tensor) else x.sequences for x in (wanted, found)))
    record = _record(model)
    assert not record.calls and [w.startswith(why) for w in record.plain] == ([True] if why else [])
    assert not why or f"generate ran as before 1 time: {why}" in " ".join(str(model.tilesmith_report).split())


def test_a_call_within_a_call():
    plain, model = _pair("llama")
    wanted = _same(plain, model, _prompt(1), max_new_tokens=5)
    inner = []

    class Asking(Streamer):
        def put(self, value):
            inner.append(_generated(model, _prompt(1), max_new_tokens=5)[0])

    assert torch.equal(_generated(model, _prompt(1), max_new_tokens=5, streamer=Asking())[0], wanted)
    assert all(torch.equal(tokens, wanted) for tokens in inner)
    assert _record(model).plain == {
        "another call of generate was under way": 5
    }  # one while the prompt is put is served


def test_hooks_and_training_run_as_before():
    plain, model = _pair("llama")
    handle = model.model.layers[0].register_forward_hook(lambda *_: None)
    _same(plain, model, _prompt(1), max_new_tokens=2)
    handle.remove()
    for m in (plain, model):
        m.train()
    _same(plain, model, _prompt(1), max_new_tokens=2)
    for m in (plain, model):
        m.eval()
    assert set(_record(model).plain) == {"model.layers.0 has hooks", "the model is in training mode"}


def test_hooks_of_all_modules_are_called_for_each_token():
    plain, model = _pair("llama")
    _same(plain, model, _prompt(1), max_new_tokens=6)
    replays, seen = _record(model).replays, []
    assert replays > 0
    hook = torch.nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        _generated(model, _prompt(1), max_new_tokens=6)
    finally:
        hook.remove()
    assert sum(module is model.model.layers[0].mlp for module in seen) == 6
    assert _record(model).replays == replays
    assert any("hooks of all modules are on" in told for told in _record(model).plain)


def test_a_step_that_cannot_be_recorded(monkeypatch):
    plain, model = _pair("gemma3")
    monkeypatch.setattr(TapeRecorder, "failing", "no capture today")
    with pytest.warns(UserWarning, match="no capture today"):
        _same(plain, model, _prompt(2, padded=False))
    record = _record(model)
    assert record.calls == 1 and not record.replays and not record._kinds
    _same(plain, model, _prompt(2, padded=False), max_new_tokens=2)
    assert record.plain == {"no capture today": 1} and "cannot be recorded" in str(model.tilesmith_report)


def test_probabilities_that_are_none():
    _, model = _pair("llama")
    model = copy.deepcopy(model)
    with torch.no_grad():
        model.lm_head.weight[5, 0] = float("nan")
    with pytest.raises(RuntimeError, match="probability tensor contains"):
        _generated(model, _prompt(1), do_sample=True)


def test_copies_pickles_and_undo():
    plain, model = _pair("llama")
    _same(plain, model, _prompt(1))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        record = _record(other)
        assert not record._kinds and other.__dict__["_tilesmith_decoding"] is record
        _same(plain, other, _prompt(1), max_new_tokens=5)
        assert record.calls == 2
    undone = tilesmith.undo(other)
    assert type(undone) is type(plain) and "_tilesmith_decoding" not in undone.__dict__
    again = tilesmith.optimize(tilesmith.optimize(undone, graphs=True))  # graphs are kept by a later call
    _same(plain, again, _prompt(1), max_new_tokens=5)
    assert _record(again).calls == 1


def test_without_cuda_graphs_nothing_is_served(monkeypatch):
    monkeypatch.undo()
    plain = _made("llama")[0]
    model = tilesmith.optimize(copy.deepcopy(plain), graphs=True)
    _same(plain, model, _prompt(1), max_new_tokens=2)
    assert _record(model).plain == {"on cpu there are no CUDA graphs": 1}


def test_chunks_are_not_taken_for_windows():
    plain = family_models.build("causal_lm/llama4_text").eval()
    try:
        _generated(plain, _prompt(2, padded=False), max_new_tokens=2)
    except TypeError as problem:  # transformers 5.17 gives its own function an argument that it does not take
        pytest.skip(str(problem))
    model = tilesmith.optimize(copy.deepcopy(plain), graphs=True)
    _same(plain, model, _prompt(2, padded=False), max_new_tokens=6)
    assert list(_record(model).plain) == ["its attention is by chunks, which begin at places of their own"]


def test_models_that_prepare_their_inputs_are_left_alone():
    model = tilesmith.optimize(build("phi3"), graphs=True)
    rows = [row for row in model.tilesmith_report.skipped if row.rule == "generate"]
    assert len(rows) == 1 and rows[0].reason.endswith("it has a prepare_inputs_for_generation of its own")
