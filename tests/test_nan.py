"""NaN in attention: it reaches every query that sees it, by its score or its lse, and no other."""

import pytest
import torch

from devices import DEVICE, ON_GPU
from op_runs import runnable
from tilesmith import ops, use
from tilesmith.engine import ops as declared
from tilesmith.ops import Mask, attention, merge_attention
from tilesmith.validate.budget import compare

NAN = float("nan")
DTYPE, DIM = (torch.bfloat16, 64) if ON_GPU else (torch.float32, 16)


def inputs(tokens: int = 5, keys: int = 5, dtype: torch.dtype = DTYPE):
    heads = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(1, 2, n, DIM, generator=heads).to(DEVICE, dtype) for n in (tokens, keys, keys))
    return q, k, v


def assert_as(backend: str, got: tuple, clean: tuple, exact: tuple, rows: object = ...):
    """Chosen rows of out and lse are within the budget of the backend's kernel, by what there is without NaN."""
    errors = declared()["attention"].kernel(backend).errors
    for name, ours, reference, oracle in zip(("out", "lse"), got, clean, exact):
        found = compare(ours[rows], reference[rows], oracle[rows], more=errors.get(name, 0.0))
        assert found.passed, f"{name}: {found.message or f'off by {found.error:.3g}, allowed {found.allowed:.3g}'}"


def without_nan(q, k, v, *args, **named):
    """The reference in the dtype of the inputs, and in fp64."""
    wide = [x.double() for x in (q, k, v)]
    with use(attention="reference"):
        return attention(q, k, v, *args, **named), attention(*wide, *args, **named)


def served(op: str, backend: str, call):
    """What `backend` gives; skips where it does not serve the call."""
    try:
        with use(**{op: backend}):
            return call()
    except NotImplementedError as reason:
        pytest.skip(str(reason))


ATTENTIONS = runnable(declared()["attention"].backends())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("backend", ATTENTIONS)
def test_a_key_of_nan_reaches_what_sees_it(backend, causal):
    q, k, v = inputs()
    clean, exact = without_nan(q, k, v, Mask(causal=causal))
    k[:, :, 3, 1] = NAN
    out, lse = served("attention", backend, lambda: attention(q, k, v, Mask(causal=causal)))
    first = 3 if causal else 0
    assert out[:, :, first:].isnan().all() and lse[:, :, first:].isnan().all()
    assert_as(backend, (out, lse), clean, exact, (slice(None), slice(None), slice(first)))


@pytest.mark.parametrize("backend", ATTENTIONS)
def test_a_query_of_nan_is_a_row_of_nan(backend):
    q, k, v = inputs()
    clean, exact = without_nan(q, k, v)
    q[:, 1, 2, 0] = NAN
    out, lse = served("attention", backend, lambda: attention(q, k, v))
    row = torch.zeros(lse.shape, dtype=torch.bool, device=DEVICE)
    row[:, 1, 2] = True
    assert out[row].isnan().all() and lse[row].isnan().all()
    assert_as(backend, (out, lse), clean, exact, ~row)


@pytest.mark.parametrize("backend", ATTENTIONS)
def test_a_key_of_nan_that_nobody_sees_reaches_nothing(backend):
    q, k, v = inputs()
    lengths = torch.tensor([3], dtype=torch.int32, device=DEVICE)
    clean, exact = without_nan(q, k, v, kv_lengths=lengths)
    k[:, :, 3:], v[:, :, 3:] = NAN, NAN
    out, lse = served("attention", backend, lambda: attention(q, k, v, kv_lengths=lengths))
    assert_as(backend, (out, lse), clean, exact)


@pytest.mark.parametrize("backend", [b for b in ATTENTIONS if b != "portable"])  # whose loop over keys is the same
@pytest.mark.parametrize("tokens", [1, 4])
def test_decode(backend, tokens):
    """Few queries on many keys, which some backends split."""
    q, k, v = inputs(tokens, 300)
    k[:, 0, 77, 3] = NAN
    out, lse = served("attention", backend, lambda: attention(q, k, v))
    assert out[:, 0].isnan().all() and lse[:, 0].isnan().all()
    assert out[:, 1].isfinite().all() and lse[:, 1].isfinite().all()


@pytest.mark.parametrize("causal", [False, True])
def test_gradients(causal):
    """Of queries that see no NaN they are numbers, as PyTorch's are; of those that do, none."""
    q, k, v = (x.requires_grad_() for x in inputs())
    with torch.no_grad():
        k[:, :, 3, 1] = NAN
    attention(q, k, v, Mask(causal=causal))[0].float().sum().backward()
    first = 3 if causal else 0
    others = torch.arange(DIM, device=DEVICE) != 1  # where the key is NaN, 0 times it is too
    assert q.grad[:, :, :first, others].isfinite().all() and q.grad[:, :, first:].isnan().all()
    assert k.grad.isnan().all() and v.grad.isnan().all()


def test_sinks_do_not_hide_it():
    q, k, v = inputs()
    sinks = torch.zeros(2, device=DEVICE, dtype=DTYPE, requires_grad=True)
    q[:, 1, 2, 0] = NAN
    out, lse = attention(q, k, v, sinks=sinks)
    assert lse[0, 1, 2].isnan() and lse.isnan().sum() == 1
    lse.sum().backward()
    assert sinks.grad.isnan().tolist() == [False, True]


@pytest.mark.parametrize("is_causal", [False, True])
def test_packed_heads(is_causal):
    x = torch.randn(1, 5, 2 * DIM, device=DEVICE, dtype=DTYPE)
    key = x.clone()
    key[0, 3, 1] = NAN
    out = ops.memory_efficient_attention(x, key, x, 2, is_causal=is_causal)
    first = 3 if is_causal else 0
    assert out[:, first:, :DIM].isnan().all()
    assert out[:, :first].isfinite().all() and out[:, :, DIM:].isfinite().all()


@pytest.mark.parametrize("backend", runnable(declared()["attention_weights"].backends()))
def test_weights(backend):
    q, k, _ = inputs()
    lse = attention(q, k, k)[1]
    k[:, 0, 3], lse[0, 1, 2] = NAN, NAN
    weights = served("attention_weights", backend, lambda: ops.attention_weights(q, k, lse))
    assert torch.equal(weights.isnan()[0, 0].all(0).cpu(), torch.arange(5) == 3)
    assert torch.equal(weights.isnan()[0, 1].all(1).cpu(), torch.arange(5) == 2)
    assert weights.isnan().sum() == 10


@pytest.mark.parametrize("backend", runnable(declared()["merge_attention"].backends()))
def test_merged(backend):
    """An lse of NaN is one; one of -inf counts for nothing, whatever its out holds."""
    out_a, out_b = torch.ones(2, 4, 3, device=DEVICE)
    lse_a = torch.tensor([NAN, 0.0, -float("inf"), -float("inf")], device=DEVICE)
    lse_b = torch.tensor([0.0, 0.0, 0.0, NAN], device=DEVICE)
    out_a[2] = NAN
    given = [x.requires_grad_() for x in (out_a, lse_a, out_b, lse_b)]
    out, lse = served("merge_attention", backend, lambda: merge_attention(*given))
    assert lse.isnan().tolist() == [True, False, False, True]
    assert out.isnan().all(-1).tolist() == out.isnan().any(-1).tolist() == [True, False, False, True]
    with use(merge_attention=backend):
        (out.sum() + lse.sum()).backward()
    for x in given:
        assert x.grad.reshape(4, -1).isnan().any(-1).tolist() == [True, False, False, True]
