"""Layers that read one tensor, computed as one product in 8 bits."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tilesmith.precision import FP8Config, FP8LinearLayer, convert_model_to_fp8, revert_model_from_fp8
from tilesmith.precision.siblings import TOGETHER, FP8Siblings

X = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(1))


class Heads(nn.Module):
    """q, k and v of one tensor, of unlike widths."""

    def __init__(self, bias: bool = False, widths=(64, 32, 16)):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(64, n, bias) for n in widths)

    def forward(self, x, which="qkv"):
        found = {"q": self.q(x), "k": self.k(x), "v": self.v(x)}
        return tuple(found[name] for name in which)


def _converted(recipe="delayed", least=48, **more):
    return convert_model_to_fp8(Heads(**more), FP8Config(recipe=recipe, min_features=least, min_tokens=1)).train()


def _apart(model):
    """A copy whose layers compute one by one, the small ones too."""
    made = copy.deepcopy(model)
    for layer in made.modules():
        if isinstance(layer, FP8LinearLayer):
            layer.siblings = None
    return made


def _grads(model, x, which="qkv"):
    x = x.clone().requires_grad_()
    out = model(x, which)
    sum((y * y).sum() for y in out).backward()
    return out, [x.grad, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_outputs_and_gradients_are_those_of_the_layers(recipe, bias, monkeypatch):
    """By one factor for all weights and one for all gradients, so within what casts to 8 bits differ by."""
    model, called = _converted(recipe, bias=bias), []
    plain = copy.deepcopy(revert_model_from_fp8(copy.deepcopy(model)))
    genuine = FP8Siblings.product
    monkeypatch.setattr(FP8Siblings, "product", lambda self, x: (called.append(1), genuine(self, x))[1])
    (found, grads), (other, theirs), (exact, true) = (_grads(m, X) for m in (model, _apart(model), plain))
    assert len(called) == 1
    for one, apart, right in zip([*found, *grads], [*other, *theirs], [*exact, *true], strict=True):
        assert one.shape == right.shape and one.dtype == right.dtype
        assert (one - right).norm() < 1.3 * (apart - right).norm() + 1e-6 < 0.2 * right.norm()


def test_an_output_that_is_not_used_gives_its_parameters_no_gradient():
    model = _converted(bias=True)
    _, grads = _grads(model, X, "qv")
    assert model.k.weight.grad is None and model.k.bias.grad is None
    _, alone = _grads(_apart(_converted(bias=True)), X, "qv")
    assert [g is None for g in grads] == [g is None for g in alone]


def test_outputs_may_be_written_into():
    model = _converted()
    q, k, v = model(X)
    before = k.clone(), v.clone()
    q.mul_(2).sum().backward()
    assert torch.equal(k, before[0]) and torch.equal(v, before[1]) and model.q.weight.grad is not None


class Rotary(Heads):
    """As attention of transformers: q and k become other tensors."""

    def forward(self, x, position_embeddings=None):
        return self.q(x) * 2, self.k(x) * 2, self.v(x)


class NormedRotary(Rotary):
    def __init__(self):
        super().__init__()
        self.q_norm = nn.LayerNorm(64)


@pytest.mark.parametrize(("kind", "alone"), [(Heads, False), (Rotary, True), (NormedRotary, False)])
def test_v_does_not_keep_the_memory_of_q_and_k_that_were_rotated(kind, alone):
    model = convert_model_to_fp8(kind(), FP8Config(recipe="delayed", min_features=48, min_tokens=1)).train()
    v = model(X)[2]
    assert v.is_contiguous() == alone
    assert v.untyped_storage().nbytes() == (v.nbytes if alone else v.nbytes * (64 + 32 + 16) // 16)
    shared = copy.deepcopy(model)
    shared.get_submodule(TOGETHER).alone = False
    assert all(torch.equal(a, b) for a, b in zip(_flat_grads(model), _flat_grads(shared), strict=True))
    model(X)[2].add_(1).sum().backward()  # its own memory or not, it may be written into


def _flat_grads(model):
    x = X.clone().requires_grad_()
    out = model(x)
    return *out, *torch.autograd.grad(
        sum((y * y).sum() for y in out), [x, model.q.weight, model.k.weight, model.v.weight]
    )


def test_narrow_layers_are_converted_as_a_part_and_not_alone():
    model = _converted(least=64)
    assert [type(layer) for layer in (model.q, model.k, model.v)] == [FP8LinearLayer] * 3
    assert "q, k, v as one product" in model.fp8_report.full()
    q, k, v = model.eval()(X)
    plain = revert_model_from_fp8(copy.deepcopy(model))
    assert torch.equal(k, plain.k(X)) and torch.equal(v, plain.v(X)) and not torch.equal(q, plain.q(X))


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_recipes_with_finer_scales_compute_layers_one_by_one(recipe):
    wide = 128 if recipe == "blockwise" else 64
    model = Heads(widths=(wide, wide, wide))
    convert_model_to_fp8(model, FP8Config(recipe=recipe, min_features=16, min_tokens=1))
    assert not any(isinstance(m, FP8Siblings) for m in model.modules())


def test_other_tensors_are_computed_by_the_layers():
    """A layer that is given another tensor than the first makes all of them compute alone from then on."""
    model = _converted(widths=(64, 64, 64))
    q, k = model.q(X), model.k(X + 1)
    apart = _apart(model)
    assert (k - apart.k(X + 1)).norm() < 0.05 * k.norm() and q.shape == k.shape
    changed = X.clone()
    model = _converted(widths=(64, 64, 64))
    model.q(changed)
    changed.add_(1)
    assert (model.k(changed) - apart.k(X + 1)).norm() < 0.05 * k.norm()


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpointing(reentrant):
    model = _converted()
    x = X.clone().requires_grad_()
    sum((y * y).sum() for y in checkpoint(model, x, use_reentrant=reentrant)).backward()
    _, wanted = _grads(_converted(), X)
    for found, right in zip([x.grad, *(p.grad for p in model.parameters())], wanted, strict=True):
        torch.testing.assert_close(found, right)


def test_compiled_code_calls_the_layers_one_by_one(monkeypatch):
    model = _converted(widths=(64, 64, 64))
    monkeypatch.setattr(FP8Siblings, "product", lambda self, x: pytest.fail("called"))
    out = torch.compile(model, backend="aot_eager", fullgraph=True)(X)
    for found, right in zip(out, _apart(model)(X), strict=True):
        torch.testing.assert_close(found, right, rtol=0.1, atol=0.1)


def test_casts_of_weights_are_kept_by_those_who_use_them():
    model = _converted(widths=(64, 64, 64))
    together = next(m for m in model.modules() if isinstance(m, FP8Siblings))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    assert model.q.cached is not None and together.cached is None  # not known yet who computes
    for _ in range(2):
        _grads(model, X)
        optimizer.step()
        assert model.q.cached is None and together.cached is not None
    assert torch.equal(together.cached.x8[:64].float() * together.cached.factor, _of(model.q.weight, together))
    with torch.no_grad():
        model.q.weight.add_(1)
    _grads(model, X)
    assert together.cached.x8.shape == (192, 64)
    optimizer.step()
    optimizer.step()  # as two optimizers do, without a forward in between
    assert model.q.cached is None and together.cached is not None
    model.q(X), model.k(X + 1)  # for what others compute, they keep casts again
    optimizer.step()
    assert model.q.cached is not None and together.cached is None


def _of(weight, together):
    x8, factor, _, _ = together.cast(*(layer.weight.detach() for layer in together.layers))
    return x8[: weight.shape[0]].float() * factor


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_have_layers_of_their_own(how):
    model = _converted()
    _grads(model, X)
    other = how(model)
    together = next(m for m in other.modules() if isinstance(m, FP8Siblings))
    assert together.layers == (other.q, other.k, other.v) and other.q.siblings[0] is together
    with torch.no_grad():
        other.q.weight.zero_()
    assert not other(X)[0].any() and model(X)[0].any()


def test_revert_takes_the_product_back():
    model = _converted()
    plain = revert_model_from_fp8(model)
    assert all(type(layer) is nn.Linear and not hasattr(layer, "siblings") for layer in (plain.q, plain.k, plain.v))
    assert list(plain._modules) == ["q", "k", "v"] and plain.state_dict().keys() == Heads().state_dict().keys()


def test_threads_compute_their_own_products():
    model, found = _converted(), {}
    inputs = [X + i for i in range(4)]

    def run(i):
        for _ in range(20):
            found[i] = [y.detach() for y in model(inputs[i])]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, x in enumerate(inputs):
        for y, layer in zip(found[i], (model.q, model.k, model.v)):
            assert (y - nn.functional.linear(x, layer.weight)).norm() < 0.1 * y.norm()


def test_partly_frozen_layers_compute_alone():
    model = _converted(widths=(64, 64, 64))
    model.k.weight.requires_grad_(False)
    _, grads = _grads(model, X)
    assert model.k.weight.grad is None and model.q.weight.grad is not None and grads[0].isfinite().all()


def test_layers_that_are_elsewhere_do_not_take_part():
    """As where hooks bring the weights of one layer at a time."""
    model = _converted(widths=(64, 64, 64))
    held = model.k.weight
    model.k.weight = nn.Parameter(torch.empty_like(held, device="meta"))
    q = model.q(X)
    model.k.weight = held
    assert (q - nn.functional.linear(X, model.q.weight)).norm() < 0.1 * q.norm()
    assert model.k(X).shape == q.shape
