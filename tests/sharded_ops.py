"""What two ranks check of the ops: DTensors equal whole tensors, without a gather, or are refused in words. Run by
test_sharding.py."""

import pytest
import torch

from tilesmith import ops
from tilesmith.engine.families import ops as registered


def _compare(mesh, op, tensors, placements, gathers=False, **more):
    """Call `op` on whole tensors and on DTensors; all outputs and gradients must agree. Returns the DTensors' outputs.

    placements: of each tensor (None: it stays plain, and asks for no gradient).
    """
    from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    whole = [
        None if t is None else t.clone().requires_grad_(p is not None and t.is_floating_point())
        for t, p in zip(tensors, placements)
    ]
    placed = [
        t if t is None or p is None else distribute_tensor(t.detach(), mesh, [p]).requires_grad_(t.requires_grad)
        for t, p in zip(whole, placements)
    ]
    expected = _outputs(op(*whole, **more))
    with CommDebugMode() as talk:
        found = _outputs(op(*placed, **more))
    assert all(isinstance(y, DTensor) for y in found)
    slopes = [torch.randn(y.shape, generator=torch.Generator().manual_seed(i)).to(y) for i, y in enumerate(expected)]
    wanted = [i for i, t in enumerate(whole) if t is not None and t.requires_grad]
    exact = torch.autograd.grad(expected, [whole[i] for i in wanted], slopes)
    spots = [Replicate() if y.placements[0].is_partial() else y.placements[0] for y in found]
    slopes = [distribute_tensor(s, mesh, [p]) for s, p in zip(slopes, spots)]
    with talk:
        grads = torch.autograd.grad(found, [placed[i] for i in wanted], slopes)
    names = {str(kind) for kind, count in talk.get_comm_counts().items() if count}
    assert gathers or not any("gather" in name or "all_to_all" in name for name in names), names
    for y, e in zip(found, expected):
        torch.testing.assert_close(y.full_tensor(), e)
    for i, g, e in zip(wanted, grads, exact):
        assert g.shape == whole[i].shape and g.dtype == whole[i].dtype
        torch.testing.assert_close(g.full_tensor(), e, rtol=1e-4, atol=1e-5)
    return found


def _outputs(outs):
    outs = outs if isinstance(outs, tuple) else (outs,)
    return [out for out in outs if out.numel() or out.ndim > 1]


def _kinds():
    from torch.distributed.tensor import Partial, Replicate, Shard

    return Partial, Replicate, Shard


def check_norms(mesh):
    _, Replicate, Shard = _kinds()
    x, residual, weight, bias = torch.randn(3, 5, 8), torch.randn(3, 5, 8), torch.randn(8), torch.randn(8)
    same = Replicate()
    for place in (Shard(0), Shard(1), same):
        for y in (
            *_compare(mesh, ops.rms_norm, (x, weight), (place, same)),
            *_compare(mesh, ops.rms_norm, (x, None), (place, None)),
            *_compare(mesh, ops.layer_norm, (x, weight, bias), (place, same, same)),
            *_compare(mesh, ops.add_rms_norm, (x, residual, weight), (place, place, same)),
            *_compare(mesh, ops.add_layer_norm, (x, residual, weight, bias), (place, same, same, same)),
            *_compare(mesh, ops.dropout_add_norm, (x, residual, weight, bias), (place, place, same, same), p=0.0),
        ):
            assert y.placements == (place,) and y.stride() == (40, 8, 1)


def check_gates(mesh):
    _, Replicate, Shard = _kinds()
    x, y, bias = torch.randn(3, 5, 7), torch.randn(3, 5, 7), torch.randn(7)
    for place in (Shard(0), Shard(1), Shard(2), Replicate()):
        for op in (ops.silu, ops.gelu, ops.sigmoid, ops.relu_squared):
            assert _compare(mesh, op, (x,), (place,))[0].placements == (place,)
        for op in (ops.swiglu, ops.geglu, ops.add_relu):
            assert _compare(mesh, op, (x, y), (place, place))[0].placements == (place,)
        assert _compare(mesh, ops.swiglu, (x, y), (place, Replicate()))[0].placements == (place,)
        assert _compare(mesh, ops.bias_gelu, (x, bias), (place, Replicate()))[0].placements == (place,)
    assert _compare(mesh, ops.bias_gelu, (x, bias), (Shard(2), Shard(0)))[0].placements == (Shard(2),)


def check_products(mesh):
    """Rows, columns (weight by outputs) and the sum (weight by features), as tensor parallel layers have them."""
    Partial, Replicate, Shard = _kinds()
    x, weight, bias, norm = torch.randn(3, 5, 8), torch.randn(6, 8), torch.randn(6), torch.randn(8)
    same = Replicate()
    for op in (ops.linear, ops.memory_efficient_linear, ops.linear_act):
        for b in (bias, None) if op is ops.linear else (bias,):
            kind = None if b is None else same
            assert _compare(mesh, op, (x, weight, b), (Shard(1), same, kind))[0].placements == (Shard(1),)
            column = _compare(mesh, op, (x, weight, b), (same, Shard(0), b if b is None else Shard(0)))
            assert column[0].placements == (Shard(2),)
            if op is not ops.linear_act:
                assert _compare(mesh, op, (x, weight, b), (Shard(2), Shard(1), kind))[0].placements == (Partial(),)
                assert _compare(mesh, op, (x, weight, b), (same, Shard(1), kind))[0].placements == (Partial(),)
    for op in (ops.linear, ops.linear_act):
        with pytest.raises(ValueError, match=r"x is Shard\(0\) and weight is Shard\(0\)"):
            _compare(mesh, op, (x, weight, None), (Shard(0), Shard(0), None))
    for place, rest in ((Shard(0), same), (same, Shard(0))):
        spots = (place, rest, rest, same, same)
        y = _compare(mesh, ops.norm_linear, (x, weight, bias, norm, norm), spots, kind="layer")[0]
        assert y.placements == (Shard(0) if place == Shard(0) else Shard(2),)
    for place, sums in ((Shard(0), Partial()), (Shard(1), Partial()), (Shard(2), Shard(0)), (same, same)):
        assert _compare(mesh, ops.column_sums, (x,), (place,))[0].placements == (sums,)
    other = weight.t().contiguous()
    assert _compare(mesh, ops.matmul, (x, other), (Shard(0), same))[0].placements == (Shard(0),)
    assert _compare(mesh, ops.matmul, (x, other), (Shard(2), Shard(0)))[0].placements == (Partial(),)


def check_softmax(mesh):
    _, Replicate, Shard = _kinds()
    x = torch.randn(3, 5, 8)
    for place in (Shard(0), Shard(1), Replicate()):
        assert _compare(mesh, ops.softmax, (x,), (place,))[0].placements == (place,)
    assert _compare(mesh, ops.softmax, (x,), (Shard(0),), causal=True)[0].placements == (Shard(0),)
    with pytest.raises(ValueError, match=r"x is Shard\(1\) on mesh dim 'ranks', and .* may be sharded: 0"):
        _compare(mesh, ops.softmax, (x,), (Shard(1),), causal=True)
    with pytest.raises(ValueError, match=r"softmax: x is Shard\(2\) .* redistribute it to Replicate\(\)"):
        _compare(mesh, ops.softmax, (x,), (Shard(2),))


def check_rotations(mesh):
    """Rows, heads and tokens; positions count from where a rank's tokens begin."""
    _, Replicate, Shard = _kinds()
    q, k, weight = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(8)
    cos, sin = torch.randn(9, 4).cos(), torch.randn(9, 4).sin()
    each = torch.randn(2, 5, 4).cos()
    positions = torch.randint(9, (2, 5))
    normed = lambda q, k, cos, sin, q_weight, k_weight, **more: ops.rms_norm_rope(  # noqa: E731
        q, k, q_weight, k_weight, cos, sin, **more
    )
    tables = {
        "positions": ((cos, sin), {"positions": positions}),
        "offsets": ((cos, sin), {"offsets": torch.tensor([1, 3])}),
        "each": ((each, each), {}),
        "offset": ((cos, sin), {"offset": 2}),
    }
    for place in (Shard(0), Shard(1), Shard(2)):
        for angles, more in tables.values():
            found = _compare(mesh, ops.rope, (q, k, *angles), (place, place, None, None), **more)
            assert [y.placements for y in found] == [(place,), (place,)]
        angles, more = tables["offset"]
        spots = (place, place, None, None, Replicate(), Replicate())
        _compare(mesh, normed, (q, k, *angles, weight, weight), spots, **more)
        _compare(mesh, ops.rope, (q, None, *angles), (place, None, None, None))
    with pytest.raises(ValueError, match=r"q is Shard\(3\)"):
        _compare(mesh, ops.rope, (q, k, cos, sin), (Shard(3), Shard(3), None, None))
    with pytest.raises(ValueError, match=r"q is Shard\(2\)"):
        lengths = torch.tensor([0, 2, 5], dtype=torch.int32)
        _compare(mesh, ops.rope, (q[:1], k[:1], cos, sin), (Shard(2), Shard(2), None, None), cu_seqlens=lengths)


def check_attention(mesh):
    _, Replicate, Shard = _kinds()
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 8)
    for place in (Shard(0), Shard(1), Replicate()):
        out, lse = _compare(mesh, ops.attention, (q, k, v), (place, place, place), mask=ops.Mask(causal=True))
        assert out.placements == lse.placements == (place,)
    _compare(mesh, ops.attention, (q, k[:, :1], v[:, :1]), (Shard(1), Replicate(), Replicate()))
    biased = lambda q, k, v, bias, sinks: ops.attention(q, k, v, score=ops.Score(bias=bias), sinks=sinks)  # noqa: E731
    bias, sinks = torch.randn(1, 4, 5, 5), torch.randn(4)
    for place in (Shard(0), Shard(1)):
        _compare(mesh, biased, (q, k, v, bias, sinks), (place, place, place, Replicate(), Replicate()))
    with pytest.raises(ValueError, match=r"attention: q is Shard\(2\) .* may be sharded: 0, 1"):
        _compare(mesh, ops.attention, (q, k, v), (Shard(2), Shard(2), Shard(2)))
    with pytest.raises(ValueError, match=r"sizes \[3, 6\] are split over 2 ranks"):
        six, three = torch.randn(2, 6, 5, 8), torch.randn(2, 3, 5, 8)
        _compare(mesh, ops.attention, (six, three, three), (Shard(1), Shard(1), Shard(1)))
    lse = ops.attention(q, k, v)[1]
    for place in (Shard(0), Shard(1)):
        _compare(mesh, ops.attention_weights, (q, k, lse), (place, place, place))
        _compare(mesh, ops.merge_attention, (q, lse, q.flip(0), lse.flip(0)), (place,) * 4)
    with pytest.raises(ValueError, match=r"merge_attention: out_a is Shard\(3\) .* needs that dim whole"):
        _compare(mesh, ops.merge_attention, (q, lse, q, lse), (Shard(3), Replicate(), Shard(3), Replicate()))
    one = torch.randn(2, 1, 5, 8)  # the last rank would have no head, and it alone an error
    for op, tensors in ((ops.attention, (one, one, one)), (ops.attention_stats, (one, one))):
        with pytest.raises(ValueError, match=r"a dim of 1 is split over 2 ranks, which leaves a rank without any"):
            _compare(mesh, op, tensors, (Shard(1),) * len(tensors))
    m, total = ops.attention_stats(*(torch.distributed.tensor.distribute_tensor(t, mesh, [Shard(1)]) for t in (q, k)))
    torch.testing.assert_close((m.full_tensor(), total.full_tensor()), ops.attention_stats(q, k))


def check_dropout(mesh):
    """Each part drops by itself; replicas drop the same; the gradient drops what the forward dropped."""
    from torch.distributed.tensor import distribute_tensor

    _, Replicate, Shard = _kinds()
    x, bias = torch.ones(64, 32), torch.zeros(32)
    doors = {
        "bias_dropout": lambda x, bias, **seed: ops.bias_dropout(x, bias, 0.25, **seed),
        "bias_dropout_residual": lambda x, bias, **seed: ops.bias_dropout_residual(x, x * 0, bias, 0.25, **seed),
        "softmax_dropout": lambda x, bias, **seed: ops.softmax_dropout(x, 0.25, **seed) * 32,
        "dropout_add_norm": lambda x, bias, **seed: ops.dropout_add_norm(x, x * 0, p=0.25, **seed)[1],
    }
    for name, door in doors.items():
        for place in (Shard(0), Replicate()):
            torch.manual_seed(mesh.get_rank())  # the ranks' own generators do not agree
            d, b = distribute_tensor(x, mesh, [place]).requires_grad_(), distribute_tensor(bias, mesh, [Replicate()])
            y = door(d, b.requires_grad_())
            whole = y.full_tensor()
            dropped = whole == 0
            assert 0.2 < dropped.float().mean() < 0.3, name
            torch.testing.assert_close(whole[~dropped], torch.full_like(whole[~dropped], 4 / 3))
            if place == Shard(0):
                assert not torch.equal(dropped[:32], dropped[32:])
            theirs = distribute_tensor(whole.detach(), mesh, [Replicate()]).to_local()  # rank 0's
            torch.testing.assert_close(theirs, whole)
            if name.startswith("bias"):
                y.sum().backward()
                torch.testing.assert_close(d.grad.full_tensor(), whole)
                torch.testing.assert_close(b.grad.full_tensor(), whole.sum(0))
    seed = torch.tensor([3, 5])
    same = [ops.bias_dropout(distribute_tensor(x, mesh, [Replicate()]), None, 0.25, seed=s) for s in (seed, seed)]
    assert torch.equal(same[0].to_local(), ops.bias_dropout(x, None, 0.25, seed=seed))


def check_distances(mesh):
    """Sums of what each rank holds, divided by what all hold."""
    _, Replicate, Shard = _kinds()
    x, target = torch.randn(3, 5, 7).log_softmax(-1), torch.randn(3, 5, 7).log_softmax(-1)
    labels = torch.randint(-1, 2, (3, 5))
    for place in (Shard(0), Shard(2)):
        for reduction in ("mean", "batchmean", "sum", "none"):
            spots, more = (place, place), {"reduction": reduction}
            _compare(mesh, ops.kl_div, (x, target), spots, log_target=True, **more)
            _compare(mesh, ops.tvd, (x.exp(), target.exp()), spots, **more)
            _compare(mesh, ops.jsd, (x, target, labels), (*spots, None), ignore_index=-1, **more)
    tensors = torch.randn(3, 5, 8), torch.randn(11, 8), torch.randn(11), torch.randn(3, 5, 6), torch.randn(11, 6)
    call = lambda x, weight, bias, teacher, teacher_weight, target: ops.linear_distillation(  # noqa: E731
        x, weight, teacher.detach(), teacher_weight.detach(), target, bias, hard_weight=0.5, ignore_index=-1
    )[0]
    for place in (Shard(0), Shard(1)):
        _compare(mesh, call, (*tensors, labels), (place, Replicate(), Replicate(), None, None, place))


def check_preferences(mesh):
    """Sequences that a formula takes one by one may be sharded; chosen and rejected ones may not."""
    from tilesmith.ops.loss.formulas import KTOOptions, PairOptions

    _, Replicate, Shard = _kinds()
    x, weight, bias, target = torch.randn(4, 5, 8), torch.randn(11, 8), torch.randn(11), torch.randint(11, (4, 5))
    sequences = torch.rand(4, 4)

    def call(formula, options):
        return lambda x, weight, bias, target: ops.linear_preference(
            x, weight, target, sequences, formula, options, bias
        )

    spots = (Shard(0), Replicate(), Replicate(), Shard(0))
    loss, log_probs = _compare(mesh, call("kto", list(KTOOptions())), (x, weight, bias, target), spots)
    assert loss.placements == (Replicate(),) and log_probs.placements == (Shard(0),)
    with pytest.raises(ValueError, match=r"linear_preference: x is Shard\(0\) .* needs that dim whole"):
        _compare(mesh, call("sigmoid", list(PairOptions())), (x, weight, bias, target), spots)
    spots = (Shard(1), Replicate(), Replicate(), Shard(1))
    tensors = (x, weight, bias, target)
    _compare(mesh, lambda x, w, b, t: ops.linear_log_probs(x, w, t, b), tensors, spots)


def check_outputs_have_what_may_be_sharded(mesh):
    """Or sum it: what each rank has whole would get its gradient once from each."""
    for name, op in registered().items():
        if isinstance(op.sharding, str):
            inputs, _, outputs = op.sharding.partition("->")
            free = {letter for letter in inputs if letter.islower() or letter == "*"}
            for output in outputs.split():
                assert free <= set(output), (name, output)


def check_what_has_no_pattern(mesh):
    from torch.distributed.tensor import distribute_tensor

    _, Replicate, Shard = _kinds()
    x = distribute_tensor(torch.randn(4, 8), mesh, [Shard(0)])
    with pytest.raises(ValueError, match=r"silu_vjp: does not take DTensors; call it on each rank's local tensor"):
        ops.silu_vjp(x, x)
    with pytest.raises(ValueError, match="rms_norm: weight is a plain tensor that requires a gradient"):
        ops.rms_norm(x, torch.ones(8, requires_grad=True))
    with pytest.raises(ValueError, match=r"x has shape \(4, 8\); it must equal|weight has shape"):
        ops.rms_norm(x, torch.ones(4))
