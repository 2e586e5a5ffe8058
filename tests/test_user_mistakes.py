"""The mistakes that users are likeliest to make: each error names the argument, what came, and what is allowed instead.

A row is (what is wrong, the call, words that the error must hold, in any order). `test_bad_input.py` has every public
name's refusals; this table asks more of fewer.
"""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import MISSING, fields, replace
from pathlib import Path

import pytest
import torch
from torch import nn as torch_nn

import tilesmith
from tilesmith import attention, codegen, nn, ops, precision, settings
from tilesmith.codegen.types import KernelError
from tilesmith.hardware import arch_named

X, W, VECTOR = torch.randn(2, 5, 8), torch.randn(11, 8), torch.randn(8)
Q, K = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8)
LABELS = torch.randint(11, (2, 5))
COS = torch.randn(16, 4)
PLAIN = torch_nn.Sequential(torch_nn.LayerNorm(8))


def _use(**pins):
    with tilesmith.use(**pins):
        pass


def _register(name, function, **more):
    tilesmith.register_kernel(name, **more)(function)


def _untyped(x):
    return x


def _returns_untyped(x: torch.Tensor):
    return x


def _other(x: torch.Tensor) -> torch.Tensor:
    return x


def _within(**bounds):
    with tilesmith.MemoryConfig(**bounds):
        ops.memory_efficient_linear(X, W)


ATTENTION = [
    (
        "window left",
        lambda: ops.attention(Q, K, K, window_left=8),
        "attention has no argument window_left (got int 8): write mask=Mask(window=(left, right))",
    ),
    (
        "causal",
        lambda: ops.attention(Q, K, K, causal=True),
        "attention has no argument causal (got bool True): write mask=Mask(causal=True)",
    ),
    ("is_causal", lambda: ops.attention(Q, K, K, is_causal=True), "is_causal (got bool True)|Mask(causal=True)"),
    (
        "window",
        lambda: ops.attention(Q, K, K, window_size=(2, 0)),
        "window_size (got tuple (2, 0))|Mask(window=(left, right))",
    ),
    ("scale", lambda: ops.attention(Q, K, K, scale=0.5), "no argument scale (got float 0.5)|Score(scale=...)"),
    (
        "softmax scale",
        lambda: ops.attention(Q, K, K, softmax_scale=0.5),
        "softmax_scale (got float 0.5)|Score(scale=",
    ),
    (
        "attn_mask",
        lambda: ops.attention(Q, K, K, attn_mask=X),
        "attn_mask (got a tensor of shape (2, 5, 8))|Mask(dense=...)",
    ),
    ("dropout", lambda: ops.attention(Q, K, K, dropout=0.1), "dropout (got float 0.1)|dropout_p=..."),
    ("alibi", lambda: ops.attention(Q, K, K, alibi_slopes=VECTOR), "alibi_slopes (got|Score(alibi=...)"),
    (
        "gqa",
        lambda: ops.attention(Q, K, K, enable_gqa=True),
        "enable_gqa (got bool True): leave it out: heads|need no expanding",
    ),
    ("score_mod", lambda: ops.attention(Q, K, K, score_mod=max), "score_mod|flex_attention"),
    ("typing error", lambda: ops.attention(Q, K, K, dropout_q=0.1), "dropout_q|Did you mean 'dropout_p'?"),
    ("tensor as mask", lambda: ops.attention(Q, K, K, X > 0), "mask|Tensor|Mask(dense=...)"),
    ("tensor as score", lambda: ops.attention(Q, K, K, ops.Mask(), X), "score|Tensor|Score(bias=...)"),
    ("field of a mask", lambda: ops.Mask(windw=3), "Mask has no argument windw (got int 3). Did you mean 'window'?"),
    (
        "field of a score",
        lambda: ops.Score(softcaps=9.0, x=1),
        "Did you mean 'softcap'?|; nor x (got int 1). Known: alibi",
    ),
    ("causal words", lambda: ops.Mask(causal="yes"), "Mask: causal|'yes'|True or False"),
    ("causal number", lambda: ops.Mask(causal=1), "Mask: causal|got 1|True or False"),
    ("window text", lambda: ops.Mask(window="4"), "Mask: window|'4'|an int or a pair of ints (left, right)"),
    ("window three", lambda: ops.Mask(window=(1, 2, 3)), "Mask: window|(1, 2, 3)|pair of ints"),
    ("softcap", lambda: ops.Score(softcap=-1.0), "Score: softcap|-1.0|at least 0"),
    ("score scale", lambda: ops.Score(scale="auto"), "Score: scale|'auto'|a number"),
    ("dropout_p", lambda: ops.attention(Q, K, K, dropout_p=1.0), "attention: dropout_p|1.0|[0, 1)"),
    ("heads", lambda: ops.attention(Q, Q[:, :3], Q[:, :3]), "attention: k|3|4"),
    ("rank", lambda: ops.attention(Q[0], K, K), "attention: q|[4, 6, 8]|batch"),
    ("dtypes", lambda: ops.attention(Q, K.half(), K), "attention: k|float16|float32"),
]
OPS = [
    ("keyword", lambda: ops.rms_norm(X, epsilon=1e-5), "rms_norm|'epsilon'|its parameters are x, weight, eps"),
    ("kind", lambda: ops.rms_norm("hello", 3), "rms_norm: x|str 'hello'|a tensor"),
    ("array", lambda: ops.rms_norm(X.numpy()), "rms_norm: x|ndarray|a tensor"),
    ("integers", lambda: ops.layer_norm(X.long()), "layer_norm: x|torch.int64|float16, bfloat16, float32 and float64"),
    ("weight", lambda: ops.rms_norm(X, VECTOR[:7]), "rms_norm: weight|(7,)|[8]"),
    ("device", lambda: ops.rms_norm(X, VECTOR.to("meta")), "rms_norm: weight|meta|cpu|move them to one device"),
    ("eps", lambda: ops.rms_norm(X, None, -1e-6), "rms_norm: eps|-1e-06|0 or more"),
    ("casting", lambda: ops.rms_norm(X, casting="bf16"), "rms_norm: casting|'bf16'|'fp32', 'llama' or 'none'"),
    ("approximate", lambda: ops.gelu(X, True), "gelu: approximate|bool True|a string"),
    ("tanh", lambda: ops.gelu(X, "fast"), "gelu: approximate|'fast'|'none' or 'tanh'"),
    ("residual", lambda: ops.add_rms_norm(X, X[:1]), "add_rms_norm: residual|(1, 5, 8)|(2, 5, 8)"),
    ("gate", lambda: ops.swiglu(X, X[..., :4]), "swiglu: up|(2, 5, 4)|(2, 5, 8)"),
    ("p", lambda: ops.bias_dropout(X, None, 1.5), "bias_dropout: p|1.5|[0, 1)"),
    ("percent", lambda: ops.bias_dropout(X, None, "10%"), "bias_dropout: p|'10%'|a number in [0, 1)"),
    ("features", lambda: ops.linear(X, W.t()), "linear: weight|(8, 11)|8"),
    ("activation", lambda: ops.linear_act(X, W, activation="swish"), "linear_act: activation|'swish'|silu"),
    ("reduction", lambda: ops.cross_entropy(X, LABELS, reduction="avg"), "cross_entropy: reduction|'avg'|mean"),
    ("labels", lambda: ops.cross_entropy(X, LABELS.float()), "cross_entropy: target|torch.float32|int64"),
    ("label range", lambda: ops.linear_cross_entropy(X, W[:4], LABELS + 4), "target|0|3"),
    ("smoothing", lambda: ops.cross_entropy(X, LABELS % 8, label_smoothing=2.0), "label_smoothing|2.0|1"),
    ("angles", lambda: ops.rope(Q, K, torch.randn(16, 8), torch.randn(16, 8)), "rope: cos|8 angles|[..., : "),
    ("table", lambda: ops.rope(Q, K, COS[:3], COS[:3]), "rope: cos|3 positions|6"),
]
NAMES = [
    ("explain", lambda: tilesmith.explain("atention"), "explain: there is no op 'atention'|Did you mean 'attention'?"),
    ("explain capitals", lambda: tilesmith.explain("RMS_Norm"), "there is no op 'RMS_Norm'|Did you mean 'rms_norm'?"),
    (
        "the reference of an op",
        lambda: tilesmith.register_kernel("rms_norm", backend="reference"),
        "register_kernel: backend|'reference'|the function that defines rms_norm|a name of its own",
    ),
    ("explain object", lambda: tilesmith.explain(X), "explain: op|a tensor|an op or its name"),
    ("use", lambda: _use(rms_nrm="triton"), "use(): there is no op 'rms_nrm'|Did you mean 'rms_norm'?"),
    ("use kernel", lambda: _use(rms_norm="cuda"), "use(): rms_norm|'cuda'|it has: triton"),
    ("use None", lambda: _use(rms_norm=None), "use(): rms_norm|None|the name of a backend"),
    ("optimize", lambda: tilesmith.optimize("llama"), "model|str|torch.nn.Module"),
    ("only", lambda: tilesmith.optimize(PLAIN, only="norms"), "only|norms|the rules are norm, add_norm"),
    ("exclude", lambda: tilesmith.optimize(PLAIN, exclude=["attn"]), "exclude|attn|neither a module"),
    (
        "only what is excluded",
        lambda: tilesmith.optimize(PLAIN, only=["norm", "mlp"], exclude=["mlp", "norm", "rope"]),
        "exclude names all that only does|norm, mlp|nothing would be replaced",
    ),
    (
        "switches of Liger",
        lambda: tilesmith.optimize(PLAIN, rms_norm=True, rope=False),
        "no argument rms_norm (got bool True)|rules are chosen by only=['norm']|rope (got bool False)|exclude=['rope']",
    ),
    ("a misspelled switch", lambda: tilesmith.optimize(PLAIN, graph=True), "no argument graph|Did you mean 'graphs'?"),
    ("report", lambda: tilesmith.report(PLAIN), "report: model|not optimised|tilesmith.optimize(model)"),
    (
        "kernel of no op",
        lambda: _register("foo", _untyped, backend="mine"),
        "no op 'foo'|backend|register_kernel('foo')",
    ),
    ("kernel of a near op", lambda: _register("rms_nrm", _other, backend="mine"), "'rms_nrm'|Did you mean 'rms_norm'?"),
    (
        "kernel of other types",
        lambda: _register("rms_norm", _other, backend="x"),
        "'x' of rms_norm|(Tensor x)|Tensor? weight",
    ),
    ("rank", lambda: _register("rms_norm", _other, rank="first"), "register_kernel: rank|str 'first'|an int"),
    ("num_warps", lambda: tilesmith.optimize_kernel(num_warps=0), "num_warps|0|a positive int"),
    ("memory", lambda: tilesmith.MemoryConfig("4"), "MemoryConfig: max_memory_gb|'4'|a number of GB"),
    ("too little memory", lambda: _within(max_memory_gb=1e-9), "memory_efficient_linear|528 bytes|(1 byte)|raise it"),
    (
        "too much memory",
        lambda: _within(min_memory_gb=1, target_memory_gb=2),
        "528 bytes here|min_memory_gb = 1 (1 GB)|lower it",
    ),
    ("heads of a layer", lambda: nn.Attention(8, 4, 3), "num_kv_heads|3|4"),
    ("width of a norm", lambda: nn.RMSNorm("8"), "dim|'8'|an int"),
    ("arch", lambda: arch_named("sm91"), "arch|'sm91'|sm90"),
]


@pytest.mark.parametrize(
    ("call", "words"), [pytest.param(*row[1:], id=row[0].replace(" ", "_")) for row in (*ATTENTION, *OPS, *NAMES)]
)
def test_errors_say_what_to_do(call, words):
    with pytest.raises((TypeError, ValueError)) as raised:
        call()
    text = str(raised.value)
    assert [part for part in words.split("|") if part not in text] == [], text
    assert len(text) < 1000


@pytest.mark.parametrize(
    ("name", "function", "words"),
    [
        ("unannotated", _untyped, "annotate x: torch.Tensor and the result"),
        ("half_annotated", _returns_untyped, "annotate the result"),
        ("several_unannotated", lambda x, y: x, "annotate x: torch.Tensor, y: torch.Tensor and the result"),
    ],
)
def test_a_function_without_annotations_is_said_to_be_no_op(name, function, words):
    told = f"{name} .*registered as a plain callable: torch.ops.tilesmith.{name} does not exist; {words}"
    with pytest.warns(UserWarning, match=told) as warned:
        _register(name, function)
    assert len(warned) == 1 and not hasattr(torch.ops.tilesmith, name)
    assert "a plain callable" in tilesmith.explain(name)


def test_a_function_that_takes_nothing_is_a_plain_callable_without_a_word(recwarn):
    _register("takes_nothing", lambda: None)
    assert not recwarn and "a plain callable" in tilesmith.explain("takes_nothing")


@pytest.mark.parametrize(("answer", "words"), [("too wide", "'too wide'"), (None, "None")])
def test_reasons_that_are_no_list_are_named(answer, words):
    """In place of a kernel that is refused for "t; o; o; ..."."""
    name = f"mistaken_{answer is None}"

    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    tilesmith.register_kernel(name)(twice)
    tilesmith.register_kernel(name, backend="mine", rejects=lambda call: answer)(twice)
    with pytest.raises(TypeError, match=f"rejects of {name}'s kernel 'mine' must return a list of sentences") as raised:
        tilesmith.explain(name, torch.ones(2))
    assert words in str(raised.value)


def test_names_of_rules_are_listed_once():
    with pytest.raises(ValueError) as raised:
        tilesmith.optimize(PLAIN, only="q")
    assert str(raised.value).count("add_norm") == 1


def test_a_kernel_without_its_text_is_told_where_to_go():
    scope: dict = {}
    exec("def scale(x: int):\n    pass", scope)
    with pytest.raises(KernelError, match="the Python text is needed .*; define the kernel in a file or a notebook"):
        codegen.build(scope["scale"], (64, 1, 1))


def test_there_are_sixty():
    assert len(ATTENTION) + len(OPS) + len(NAMES) >= 60


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("TILESMITH_DEBG", "1", "TILESMITH_DEBG='1'|did you mean TILESMITH_DEBUG?"),
        ("TILESMITH_A_B_C", "11", "TILESMITH_A_B_C='11'|known are TILESMITH_USE"),
        ("TILESMITH_DEBUG", "maybe", "TILESMITH_DEBUG|'maybe'|1, true, yes or on"),
        ("TILESMITH_TUNE", "2", "TILESMITH_TUNE|'2'|0, false, no, off or empty"),
        ("TILESMITH_USE", "rms_norm", "TILESMITH_USE|'rms_norm'|op=backend"),
        ("TILESMITH_USE", "silu=triton,silu=reference", "TILESMITH_USE|pins silu to 'triton' and to 'reference'"),
        ("TILESMITH_CACHE_DIR", "~nobody-of-that-name/x", "TILESMITH_CACHE_DIR|'~nobody-of-that-name/x'"),
        ("TILESMITH_PORTABLE", "metal", "TILESMITH_PORTABLE|'metal'|interpreter, vulkan or webgpu"),
    ],
)
def test_the_environment_is_read_in_full_or_not_at_all(monkeypatch, name, value, words):
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=name) as raised:
        settings.settings.__wrapped__()
    assert [part for part in words.split("|") if part not in str(raised.value)] == []


def test_the_cache_folder_of_any_environment(monkeypatch, tmp_path):
    """A "~" that no shell has expanded, a folder relative to where the process began, and a user without a home."""
    read = settings.settings.__wrapped__
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for written, folder in (("~/mine", tmp_path / "mine"), ("mine", tmp_path / "mine")):
        monkeypatch.setenv("TILESMITH_CACHE_DIR", written)
        assert read().cache_dir == folder
    monkeypatch.setenv("TILESMITH_CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert read().cache_dir == tmp_path / ".cache" / "tilesmith"

    def homeless(cls):
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", classmethod(homeless))
    assert read().cache_dir.is_absolute()


@pytest.mark.parametrize(("text", "value"), [("1", True), ("Yes", True), ("on", True), ("", False), ("OFF", False)])
def test_flags_of_the_environment(monkeypatch, text, value):
    monkeypatch.setenv("TILESMITH_DEBUG", text)
    assert settings.settings.__wrapped__().debug is value


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        ("rmsnorm=triton", "TILESMITH_USE: there is no op 'rmsnorm'|Did you mean 'rms_norm'?"),
        ("rms_norm=tritn", "TILESMITH_USE: rms_norm has no kernel 'tritn'|it has: triton"),
    ],
)
def test_pins_of_the_environment_name_what_there_is(monkeypatch, pins, words):
    monkeypatch.setenv("TILESMITH_USE", pins)
    made = settings.settings.__wrapped__()
    monkeypatch.setattr(ops, "settings", lambda: made)
    with pytest.raises(ValueError, match="TILESMITH_USE") as raised:
        ops._check_pins()
    assert [part for part in words.split("|") if part not in str(raised.value)] == []


SIZES = "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads"
CONFIGURATIONS = [
    (tilesmith.KernelConfig, {}, "hiden_size", "hidden_size"),
    (tilesmith.MemoryConfig, {}, "max_memory", "max_memory_gb"),
    (ops.Mask, {"causal": True}, "windw", "window"),
    (ops.Score, {}, "soft_cap", "softcap"),
    (nn.DecoderConfig, dict.fromkeys(SIZES, 8) | {"num_heads": 2}, "num_layer", "num_layers"),
    (nn.Llama3Scaling, {}, "factr", "factor"),
    (attention.AttentionConfig, {"d_model": 8, "num_heads": 2}, "windows", "window"),
    (attention.FP8AttentionConfig, {}, "granularty", "granularity"),
    (attention.FusionConfig, {}, "optimisation_level", "optimization_level"),
    (precision.FP8Config, {}, "recipes", "recipe"),
    (precision.PrecisionConfig, {}, "target_memory", "target_memory_reduction"),
]


@pytest.mark.parametrize(
    ("kind", "given", "name", "meant"), [pytest.param(*row, id=row[0].__name__) for row in CONFIGURATIONS]
)
def test_configurations_name_the_field_that_was_likely_meant(kind, given, name, meant):
    made = kind(**given)
    for make in (lambda: kind(**given, **{name: 3}), lambda: replace(made, **{name: 3})):
        with pytest.raises(
            TypeError, match=rf"{kind.__name__} has no argument {name} \(got int 3\). Did you mean '{meant}'"
        ):
            make()


@pytest.mark.parametrize(("kind", "given"), [pytest.param(*row[:2], id=row[0].__name__) for row in CONFIGURATIONS])
def test_configurations_stay_dataclasses(kind, given):
    """Signature, annotations, defaults, copies and pickles are those that `dataclass` makes."""
    made = kind(**given)
    parameters = inspect.signature(kind).parameters
    defaults = {f.name: f.default for f in fields(kind) if f.default is not MISSING}
    assert list(parameters) == [f.name for f in fields(kind)]
    assert defaults == {n: p.default for n, p in parameters.items() if p.default is not p.empty}
    assert kind.__init__.__qualname__ == f"{kind.__name__}.__init__"
    for other in (pickle.loads(pickle.dumps(made)), copy.deepcopy(made), replace(made)):
        assert type(other) is kind and vars(other) == vars(made)


def test_a_field_that_is_missing_is_still_named_by_python():
    with pytest.raises(TypeError, match=r"AttentionConfig.__init__\(\) missing 1 required positional .* 'num_heads'"):
        attention.AttentionConfig(8)
