"""What two ranks check of the losses: tokens or the vocabulary spread over ranks equal one process within its budget.
Run by test_sharding.py."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ranks import soon
from tilesmith import ops
from tilesmith.engine import use
from tilesmith.validate.budget import compare

WEIGHTS = torch.linspace(0.2, 2.0, 11)
OPTIONS = (
    {},
    {"ignore_index": 0},
    {"reduction": "sum", "scale": 0.7, "softcap": 4.0},
    {"reduction": "none", "z_loss": 0.01},
    {"label_smoothing": 0.1, "z_loss": 0.01},
    {"label_smoothing": 0.2, "softcap": 4.0, "reduction": "none"},
    {"weights": True},
    {"weights": True, "label_smoothing": 0.1, "z_loss": 0.01, "softcap": 4.0, "scale": 1.3},
)
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


def _target(*shape, classes=11):
    target = torch.randint(classes, shape)
    target[..., -1] = -100
    return target


def _call(op, tensors, target, dtype, options, names, distribute=None):
    """Loss and gradients of `op`, whole or of what `distribute` makes of each tensor; everything whole."""
    placed = [None if t is None else t.to(dtype) for t in tensors]
    options = dict(options)
    if "ignore_index" in options:
        target = torch.where(target == -100, options["ignore_index"], target)
    if distribute is not None:
        placed = [None if t is None else distribute(name, t) for name, t in zip(names, placed)]
        target = distribute("target", target)
    placed = [None if t is None else t.detach().requires_grad_() for t in placed]
    if options.pop("weights", False):
        options["weight" if names[0] == "logits" else "class_weight"] = WEIGHTS.to(dtype)
    given = dict(zip(names, placed))
    loss = op(target=target, **given, **options)
    slope = torch.linspace(0.5, 1.5, loss.numel(), dtype=torch.float64).view(loss.shape)
    whole = loss.full_tensor() if hasattr(loss, "full_tensor") else loss
    (whole * slope.to(whole.dtype)).sum().backward()
    grads = [t.grad for t in placed if t is not None]
    return [whole.detach(), *(g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads)]


def _judge(op, tensors, target, dtype, options, names, distribute, what):
    with use(cross_entropy="reference", linear_cross_entropy="reference"):
        seen = _call(op, tensors, target, dtype, options, names)
        exact = _call(
            op, [None if t is None else t.to(dtype).double() for t in tensors], target, torch.float64, options, names
        )
    found = _call(op, tensors, target, dtype, options, names, distribute)
    for name, got, reference, oracle in zip(("loss", *names), found, seen, exact):
        if dtype == torch.float64:  # the reference is the oracle, which leaves no room for another order of sums
            torch.testing.assert_close(got, oracle)
            continue
        budget = compare(got, reference, oracle)
        assert budget.passed, (what, op, options, dtype, name, budget)


def _spread(mesh, **placements):
    from torch.distributed.tensor import Replicate, distribute_tensor

    return lambda name, t: distribute_tensor(t, mesh, placements.get(name, [Replicate()] * mesh.ndim))


def _cases():
    return [(options, torch.float32) for options in OPTIONS] + [
        (options, dtype) for dtype in DTYPES[1:] for options in OPTIONS[-3:]
    ]


LINEAR = ("x", "weight", "bias")


def check_rows_of_logits(mesh):
    from torch.distributed.tensor import Shard

    logits, target = torch.randn(3, 5, 11), _target(3, 5)
    target[2] = -100  # all that the second rank holds
    for options, dtype in _cases():
        for dim in (0, 1):
            spread = _spread(mesh, logits=[Shard(dim)], target=[Shard(dim)])
            _judge(ops.cross_entropy, (logits,), target, dtype, options, ("logits",), spread, f"rows {dim}")


def check_rows_of_hidden_states(mesh):
    from torch.distributed.tensor import Shard

    tensors, target = (torch.randn(3, 5, 8), torch.randn(11, 8), torch.randn(11)), _target(3, 5)
    for options, dtype in _cases():
        spread = _spread(mesh, x=[Shard(0)], target=[Shard(0)])
        _judge(ops.linear_cross_entropy, tensors, target, dtype, options, LINEAR, spread, "rows")


def check_vocabulary_of_logits(mesh):
    from torch.distributed.tensor import Shard

    logits, target = torch.randn(3, 5, 11), _target(3, 5)
    for options, dtype in _cases():
        spread = _spread(mesh, logits=[Shard(2)])
        _judge(ops.cross_entropy, (logits,), target, dtype, options, ("logits",), spread, "vocabulary")


def check_vocabulary_of_weight(mesh):
    from torch.distributed.tensor import Shard

    tensors, target = (torch.randn(3, 5, 8), torch.randn(11, 8), torch.randn(11)), _target(3, 5)
    spread = _spread(mesh, weight=[Shard(0)], bias=[Shard(0)])
    for options, dtype in _cases():
        for chunk in (0, 4):
            given = {**options, "chunk_tokens": chunk}
            _judge(ops.linear_cross_entropy, tensors, target, dtype, given, LINEAR, spread, "vocabulary")


def check_modes(mesh):
    """Ranks with tokens of their own choose the mode by these; a sharded vocabulary serves one mode, and says so."""
    from torch.distributed.tensor import Shard, distribute_tensor

    op, target = ops.linear_cross_entropy, _target(4)
    x, weight = (torch.randn(n, 8, requires_grad=True) for n in (4, 11))
    at = op.parameters.index("mode")
    rows = _spread(mesh, x=[Shard(0)], target=[Shard(0)])
    spread = tuple(rows(name, t.detach()) for name, t in (("x", x), ("weight", weight), ("target", target)))
    assert op.bind(spread, {})[at] == "" and "each rank" in op.explain(*spread).note
    for mode in ("keep", "chunks", "recompute"):
        _judge(op, (x.detach(), weight.detach(), None), target, torch.float32, {"mode": mode}, LINEAR, rows, mode)
    classes = distribute_tensor(weight.detach(), mesh, [Shard(0)]).requires_grad_()
    replicated = _spread(mesh)("x", x.detach())
    assert op.bind((replicated, classes, target), {})[at] == "chunks"
    assert "as always where the vocabulary is sharded" in op.explain(replicated, classes, target).note
    for mode in ("keep", "recompute"):
        with pytest.raises(ValueError, match=f"mode is '{mode}' and the vocabulary is sharded"):
            op(replicated, classes, target, mode=mode)


def check_tokens_and_vocabulary(mesh):
    """Both at once, over the two dims of a mesh."""
    from torch.distributed.tensor import Replicate, Shard

    for sizes in ((2, 1), (1, 2)):
        both = torch.distributed.device_mesh.init_device_mesh("cpu", sizes, mesh_dim_names=("data", "model"))
        target = _target(4, 3)
        spread = _spread(both, logits=[Shard(0), Shard(2)], target=[Shard(0), Replicate()])
        for options in (OPTIONS[0], OPTIONS[-1]):
            _judge(
                ops.cross_entropy, (torch.randn(4, 3, 11),), target, torch.float32, options, ("logits",), spread, sizes
            )
        tensors = (torch.randn(4, 3, 8), torch.randn(11, 8), torch.randn(11))
        place = {"weight": [Replicate(), Shard(0)], "bias": [Replicate(), Shard(0)]}
        spread = _spread(both, x=[Shard(0), Replicate()], target=[Shard(0), Replicate()], **place)
        for options in (OPTIONS[0], OPTIONS[-1]):
            _judge(ops.linear_cross_entropy, tensors, target, torch.float32, options, LINEAR, spread, sizes)


def check_nothing_counts(mesh):
    """A mean over no tokens is NaN and its gradient 0, however they lie."""
    from torch.distributed.tensor import Shard

    target = torch.full((4,), -100)
    for spread in (_spread(mesh, logits=[Shard(0)], target=[Shard(0)]), _spread(mesh, logits=[Shard(1)])):
        loss, dlogits = _call(ops.cross_entropy, (torch.randn(4, 11),), target, torch.float32, {}, ("logits",), spread)
        assert loss.isnan() and not dlogits.any()
    tensors = (torch.randn(4, 8), torch.randn(11, 8), torch.randn(11))
    places = {"x": [Shard(0)], "target": [Shard(0)]}, {"weight": [Shard(0)], "bias": [Shard(0)]}
    for place in places:
        found = _call(ops.linear_cross_entropy, tensors, target, torch.float32, {}, LINEAR, _spread(mesh, **place))
        assert found[0].isnan() and not any(grad.any() for grad in found[1:])


def check_doors_for_plain_tensors(mesh):
    """The slice that a rank holds, and the gradient of just that; the group by any of its names."""
    rank, group = mesh.get_rank(), mesh.get_group()
    x, weight, bias, target = torch.randn(3, 5, 8), torch.randn(12, 8), torch.randn(12), _target(3, 5, classes=12)
    whole = [t.clone().requires_grad_() for t in (x, weight, bias)]
    exact = ops.linear_cross_entropy(*whole[:2], target, whole[2], label_smoothing=0.1)
    exact.backward()
    for name in (None, group, mesh):
        mine = [t.clone().requires_grad_() for t in (x, weight.chunk(2)[rank], bias.chunk(2)[rank])]
        loss = ops.vocab_parallel_linear_cross_entropy(*mine[:2], target, mine[2], label_smoothing=0.1, group=name)
        loss.backward()
        torch.testing.assert_close(loss, exact)
        for t, w, cut in zip(mine, whole, (False, True, True)):
            torch.testing.assert_close(t.grad, w.grad.chunk(2)[rank] if cut else w.grad)
    for classes in (12, 11):
        logits = torch.randn(3, 5, classes, requires_grad=True)
        labels = target.clamp(max=classes - 1)
        exact = ops.cross_entropy(logits, labels, z_loss=0.1)
        mine = logits.detach().chunk(2, -1)[rank].requires_grad_()
        loss = ops.vocab_parallel_cross_entropy(mine, labels, z_loss=0.1, group=group, classes=classes)
        torch.testing.assert_close(loss, exact)
        torch.testing.assert_close(
            torch.autograd.grad(loss, mine)[0], torch.autograd.grad(exact, logits)[0].chunk(2, -1)[rank]
        )


def check_ranks_without_a_class(mesh):
    """Ranks beyond the last class add nothing, and wait for nobody."""
    from torch.distributed.tensor import Shard

    rank, group = mesh.get_rank(), mesh.get_group()
    tensors, target = (torch.randn(3, 5, 8), torch.randn(1, 8), torch.randn(1)), _target(3, 5, classes=1)
    spread = _spread(mesh, weight=[Shard(0)], bias=[Shard(0)], logits=[Shard(2)])
    for options in ({"z_loss": 0.1}, {"z_loss": 0.1, "label_smoothing": 0.1, "softcap": 4.0}, {"reduction": "none"}):
        _judge(ops.linear_cross_entropy, tensors, target, torch.float64, options, LINEAR, spread, "one class")
        logits = tensors[0][..., :1].contiguous()
        _judge(ops.cross_entropy, (logits,), target, torch.float64, options, ("logits",), spread, "one class")
    logits = torch.randn(3, 5, 1, requires_grad=True)
    exact = ops.cross_entropy(logits, target, z_loss=0.1)
    mine = logits.detach()[..., rank:].requires_grad_()
    loss = ops.vocab_parallel_cross_entropy(mine, target, z_loss=0.1, group=group, classes=1)
    loss.backward()
    torch.testing.assert_close(loss, exact)
    torch.testing.assert_close(mine.grad, torch.autograd.grad(exact, logits)[0][..., rank:])


def check_distances_of_ranks_without_a_class(mesh):
    """As above: the op refuses distributions of no class, of which such a rank's are not a whole one."""
    from torch.distributed.tensor import Shard, distribute_tensor

    x, target = (torch.randn(3, 5, 1, dtype=torch.float64) for _ in range(2))
    for op in (ops.kl_div, ops.jsd, ops.tvd):
        for reduction in ("mean", "batchmean", "none"):
            whole, found = [x.clone(), target.clone()], []
            mine = [distribute_tensor(t, mesh, [Shard(2)]) for t in (x, target)]
            for tensors in (whole, mine):
                loss = op(*(t.requires_grad_() for t in tensors), reduction=reduction)
                loss = loss if tensors is whole else loss.full_tensor()
                found.append([loss, *torch.autograd.grad(loss.sum(), tensors)])
            gathered = [t.full_tensor() if hasattr(t, "full_tensor") else t for t in found[1]]
            torch.testing.assert_close(gathered, found[0])


def check_ranks_whose_classes_are_masked(mesh):
    """Logits of -inf, as those of classes that pad a vocabulary are, may fill a rank's whole slice."""
    rank = mesh.get_rank()
    x, weight, bias, target = torch.randn(3, 5, 8), torch.randn(12, 8), torch.randn(12), _target(3, 5, classes=6)
    bias[6:] = float("-inf")
    whole = [t.clone().requires_grad_() for t in (x, weight, bias)]
    exact = ops.linear_cross_entropy(*whole[:2], target, whole[2], z_loss=0.1, scale=0.7)
    exact.backward()
    for kernel in ("chunked", "reference"):
        mine = [t.clone().requires_grad_() for t in (x, weight.chunk(2)[rank], bias.chunk(2)[rank])]
        with use(cross_entropy=kernel, cross_entropy_vjp=kernel):
            loss = ops.vocab_parallel_linear_cross_entropy(*mine[:2], target, mine[2], z_loss=0.1, scale=0.7)
            loss.backward()
        torch.testing.assert_close(loss, exact)
        for t, w, cut in zip(mine, whole, (False, True, True)):
            torch.testing.assert_close(t.grad, w.grad.chunk(2)[rank] if cut else w.grad)


class Talk(TorchDispatchMode):
    """The collectives called inside: name and number of elements."""

    def __enter__(self):
        self.calls = []
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        if func.namespace == "_c10d_functional" and not name.startswith(("wait", "_wrap")):
            self.calls.append((name, args[0].numel()))
        return func(*args, **(kwargs or {}))


def check_what_is_exchanged(mesh):
    """A maximum and a sum of a few numbers a token; nothing as long as the vocabulary."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    logits = distribute_tensor(torch.randn(6, 40), mesh, [Shard(1)]).requires_grad_()
    with Talk() as talk:
        ops.cross_entropy(logits, torch.randint(40, (6,))).backward()
    # on a CPU first whether a rank has a label that is no class
    assert talk.calls == [("all_reduce", 1), ("all_reduce", 6), ("all_reduce", 2 * 6)]
    x = distribute_tensor(torch.randn(6, 5), mesh, [Shard(0)]).requires_grad_()
    target = distribute_tensor(torch.randint(40, (6,)), mesh, [Shard(0)])
    weight = distribute_tensor(torch.randn(40, 5), mesh, [Replicate()]).requires_grad_()
    with Talk() as talk:
        ops.linear_cross_entropy(x, weight, target).backward()
    # of losses, of class weights and of tokens
    assert talk.calls == [("all_reduce", 1), ("all_reduce", 3)]


def check_against_loss_parallel(mesh):
    """torch's own loss of sharded logits."""
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import loss_parallel

    logits, target = torch.randn(6, 12), _target(6, classes=12)
    theirs, ours = (distribute_tensor(logits, mesh, [Shard(1)]).requires_grad_() for _ in range(2))
    with loss_parallel():
        expected = torch.nn.functional.cross_entropy(theirs, target)
        expected.backward()
    found = ops.cross_entropy(ours, target)
    found.backward()
    torch.testing.assert_close(found.full_tensor(), expected.full_tensor())
    torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad.full_tensor())
    assert ours.grad.placements == (Shard(1),)


def check_refusals(mesh):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    x, weight, target = torch.randn(4, 8), torch.randn(12, 8), torch.randint(12, (4,))
    place = lambda t, *p: distribute_tensor(t, mesh, p).requires_grad_(t.is_floating_point())  # noqa: E731
    rows = place(x, Shard(0)), place(weight, Shard(0)), place(target, Shard(0))
    with pytest.raises(ValueError, match=r"x is Shard\(0\) and weight is Shard\(0\).*redistribute one of the two"):
        ops.linear_cross_entropy(*rows)
    with pytest.raises(ValueError, match=r"x is a plain tensor that requires a gradient, beside DTensors"):
        ops.linear_cross_entropy(x.clone().requires_grad_(), place(weight, Shard(0)), target)
    with pytest.raises(ValueError, match=r"weight is Shard\(1\) .* needs that dim whole"):
        ops.linear_cross_entropy(place(x, Replicate()), place(weight, Shard(1)), target)
    rank, held = mesh.get_rank(), 5 + mesh.get_rank()
    with pytest.raises(
        ValueError, match=rf"logits holds {held} classes; rank {rank} of 2 must hold {6 - rank} of the 11"
    ):
        ops.vocab_parallel_cross_entropy(torch.randn(4, held), target, classes=11)
    with pytest.raises(ValueError, match="target holds the label 12"):
        ops.cross_entropy(place(torch.randn(4, 12), Shard(1)), target.clamp(min=0) * 0 + 12)
    with pytest.raises(NotImplementedError, match="only its first derivative"):
        logits = torch.randn(4, 6, requires_grad=True)
        torch.autograd.grad(ops.vocab_parallel_cross_entropy(logits, target), logits, create_graph=True)
    with pytest.raises(ValueError, match="label_smoothing is 2"):
        ops.vocab_parallel_cross_entropy(torch.randn(4, 6), target, label_smoothing=2)


def _held(mesh, sizes):
    """Of slices of these sizes: all classes, and the part that is this rank's."""
    sizes, rank = sizes[: mesh.size()], mesh.get_rank()
    return sum(sizes), slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def check_slices_of_any_size(mesh):
    """Ranks say how many classes they hold, also none, where the caller does not say."""
    for sizes in ((2, 7, 4), (6, 0, 3), (0, 4, 5)):
        classes, mine = _held(mesh, sizes)
        target, weights = _target(3, 5, classes=classes), torch.linspace(0.2, 2.0, classes, dtype=torch.float64)
        x, weight, bias = (torch.randn(*n, dtype=torch.float64) for n in ((3, 5, 8), (classes, 8), (classes,)))
        for options in ({}, {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 4.0}, {"reduction": "none"}):
            logits, part = (t.clone().requires_grad_() for t in (x @ weight.t(), (x @ weight.t())[..., mine]))
            exact = ops.cross_entropy(logits, target, weights, **options)
            loss = ops.vocab_parallel_cross_entropy(part, target, weights, **options)
            torch.testing.assert_close(loss, exact)
            exact.sum().backward()
            loss.sum().backward()
            torch.testing.assert_close(part.grad, logits.grad[..., mine])
            whole, own = ([t.clone().requires_grad_() for t in (x, weight[s], bias[s])] for s in (slice(None), mine))
            exact = ops.linear_cross_entropy(*whole[:2], target, whole[2], weights, **options)
            loss = ops.vocab_parallel_linear_cross_entropy(*own[:2], target, own[2], weights, **options)
            torch.testing.assert_close(loss, exact)
            exact.sum().backward()
            loss.sum().backward()
            for t, w, cut in zip(own, whole, (slice(None), mine, mine)):
                torch.testing.assert_close(t.grad, w.grad[cut])


def check_all_ranks_cut_tokens_alike(mesh):
    """Where one holds so many classes less that its logits would fit in one chunk, and those of others would not."""
    from torch.distributed.tensor import Shard

    from tilesmith.ops.loss import vocabulary_linear

    classes = 8 * mesh.size() - 1
    chosen, vocabulary_linear.budget = vocabulary_linear.budget, lambda device: 600 * 7 * 8
    try:
        tensors, target = (torch.randn(600, 3), torch.randn(classes, 3), None), _target(600, classes=classes)
        spread = _spread(mesh, weight=[Shard(0)])
        _judge(ops.linear_cross_entropy, tensors, target, torch.float64, {}, LINEAR, spread, "chunks")
        exact = ops.linear_cross_entropy(*tensors[:2], target)
        mine = tensors[1].tensor_split(mesh.size())[mesh.get_rank()]
        torch.testing.assert_close(ops.vocab_parallel_linear_cross_entropy(tensors[0], mine, target), exact)
    finally:
        vocabulary_linear.budget = chosen


def _all_raise(mesh, call, words, told):
    """Every rank hears at once what the last one did wrong: `words`, at other ranks as `told`; it can then go on."""
    call(False)
    odd = mesh.get_rank() == mesh.size() - 1
    with soon(), pytest.raises((ValueError, TypeError), match=words if odd else f"{told}{words}"):
        call(odd)
    call(False)


def check_mistakes_of_one_rank(mesh):
    last = mesh.size() - 1
    x, weight, target = torch.randn(4, 8), torch.randn(6, 8), torch.randint(6, (4,))
    bad = torch.where(torch.arange(4) == 2, 6 * mesh.size(), target)

    def logits(odd, **of_odd):
        given = {"logits": x[:, :6], "target": target} | (of_odd if odd else {})
        return ops.vocab_parallel_cross_entropy(**given, group=mesh)

    def linear(odd, **of_odd):
        given = {"x": x, "weight": weight, "target": target} | (of_odd if odd else {})
        return ops.vocab_parallel_linear_cross_entropy(**given, group=mesh)

    for call in (logits, linear):
        refused = f"refused on rank {last}: .*"
        for words, of_odd in {
            f"target holds the label {6 * mesh.size()}": {"target": bad},
            "target has shape": {"target": target[:3]},
            "label_smoothing is 2": {"label_smoothing": 2.0},
            "holds 6 classes": {"classes": 99},
        }.items():
            _all_raise(mesh, lambda odd, c=call, o=of_odd: c(odd, **o), words, refused)
        for name, of_odd in {
            "reduction": {"reduction": "sum"},
            "z_loss": {"z_loss": 0.5},
            "target": {"target": (target + 1) % 6},
        }.items():
            words = f"{name} must be the same on all ranks, got .* on rank {last}"
            _all_raise(mesh, lambda odd, c=call, o=of_odd: c(odd, **o), words, "")
    deeper = {"x": x[:, None], "target": target[:, None]}
    for of_odd in ({"x": x.clone().requires_grad_()}, deeper, {"chunk_tokens": 3}):
        words = f"must be the same on all ranks, got .* on rank {last}"
        _all_raise(mesh, lambda odd, o=of_odd: linear(odd, **o), words, "")


def check_labels_that_one_rank_has_wrong(mesh):
    """Of DTensors, whose tokens lie on several ranks: nobody waits for the others' losses."""
    from torch.distributed.tensor import Shard

    rank, last, tokens = mesh.get_rank(), mesh.size() - 1, 2 * mesh.size()
    x, weight, logits = torch.randn(tokens, 8), torch.randn(11, 8), torch.randn(tokens, 11)
    target = torch.randint(11, (tokens,))
    target[-1] = 11
    spread = _spread(mesh, x=[Shard(0)], target=[Shard(0)], classes=[Shard(1)])
    x, logits, labels = spread("x", x), spread("x", logits), spread("target", target)
    # the last rank's own labels of what all must have alike
    other, of_classes = target.clamp(max=10 if rank < last else 11), spread("classes", logits.full_tensor())
    for call in (
        lambda: ops.cross_entropy(logits, labels),
        lambda: ops.cross_entropy(of_classes, other),
        lambda: ops.linear_cross_entropy(x, weight, labels),
        lambda: ops.linear_distillation(x, weight, x, weight, labels),
    ):
        told = "" if rank == last else f"refused on rank {last}: "
        with soon(), pytest.raises(ValueError, match=f"{told}target holds the label 11"):
            call()


def check_ranks_that_do_not_run_the_same_backward(mesh):
    """The gradient of x is a sum over ranks: one that goes on without it is an error on all of them."""
    x, weight, target = torch.randn(4, 8, requires_grad=True), torch.randn(6, 8), torch.randint(6, (4,))
    loss = ops.vocab_parallel_linear_cross_entropy(x, weight, target)
    with pytest.raises(ValueError, match="pass must be the same on all ranks, got 'vocab_parallel_linear_cross_"):
        if mesh.get_rank() == mesh.size() - 1:
            ops.vocab_parallel_linear_cross_entropy(x, weight, target)
        else:
            loss.backward()


def check_compiled_slices(mesh):
    """Traced calls do not compare: what they assume wrongly makes NaN."""
    compiled = torch.compile(
        lambda logits, target: ops.vocab_parallel_cross_entropy(logits, target), fullgraph=True, backend="aot_eager"
    )
    target = torch.randint(4, (5,))
    for equal in (True, False):
        logits = torch.randn(5, 4 if equal else 4 + mesh.get_rank(), requires_grad=True)
        loss = compiled(logits, target)
        loss.backward()
        assert bool(loss.isfinite()) == bool(logits.grad.isfinite().all()) == equal
