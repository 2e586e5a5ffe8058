"""The one harness: every op, every kernel, every case. An op is tested by having cases, not by having a test file."""

import itertools
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tilesmith.ops
from devices import DEVICE, ON_GPU
from op_runs import (
    DIFFERENTIABLE,
    NAMES,
    arguments_of,
    backward_call_of,
    cotangents_of,
    deterministic,
    first_case,
    kernels_of,
    runnable,
)
from tilesmith.engine import cases, ops, tracing, use
from tilesmith.engine.backends import REFERENCE, interpreting
from tilesmith.engine.choice import pinned, pins
from tilesmith.validate import check
from tilesmith.validate.cases import OracleMemoryError, backends_of, each_output, outputs_and_gradients, pins_of
from tilesmith.validate.trial import _size


def _interpreted(backend):
    return not ON_GPU and (backend == "portable" or (interpreting() and backend.startswith("triton")))


def _runs(name):
    """(case, dtype, backend) triples of one op."""
    op = ops()[name]
    for case, backend in itertools.product(cases(name), runnable(backends_of(op))):
        wanted = {"interpret"} if _interpreted(backend) else {"test", "gpu"} if ON_GPU else {"test"}
        if not case.tags & wanted:
            continue
        large = "gpu" in case.tags
        for dtype in case.dtypes:
            if large and (backend == REFERENCE or dtype is not case.dtypes[-1]):
                continue  # large cases are for addresses and tiles: one dtype each, and the oracle fills the memory
            if not _interpreted(backend) or _interpretable(name, case, dtype):
                label = f"{name}-{backend}-{case.name}-{str(dtype)[6:]}"
                yield pytest.param(name, case, dtype, backend, id=label, marks=[pytest.mark.large] if large else [])


def _interpretable(name, case, dtype):
    """fp32, and one case in fp16: the interpreter is slow, and computes bf16 products from the raw bits."""
    first = next(c for c in cases(name) if "interpret" in c.tags)
    return dtype is torch.float32 or (dtype is torch.float16 and case is first)


RUNS = [run for name in NAMES for run in _runs(name)]


@pytest.mark.parametrize(("name", "case", "dtype", "backend"), RUNS)
def test_values_and_gradients(name, case, dtype, backend):
    try:
        result = check(ops()[name], backend, case, DEVICE, dtype)
    except OracleMemoryError as problem:  # of the largest of the benchmark
        pytest.skip(str(problem))
    assert result.passed, result.message


def test_no_declaration_needs_a_kernel():
    """A kernel's module asks for all declarations: one that imported it would find it half made, if it came first."""
    kernels = {module for op in ops().values() for module in op._modules.values()}
    folder = Path(tilesmith.ops.__file__).parent
    for path in folder.glob("*/*op.py"):
        module = sys.modules[".".join(("tilesmith.ops", *path.relative_to(folder).with_suffix("").parts))]
        used = {getattr(value, "__module__", None) for value in vars(module).values()}
        assert not used & kernels, f"{module.__name__} imports from {used & kernels}"


@pytest.mark.parametrize("name", sorted(ops()))
def test_every_op_has_cases(name):
    base = name.removesuffix("_vjp")
    assert cases(base), f"{base} has no cases"
    if not name.endswith("_vjp"):
        assert {"test"} & set().union(*(c.tags for c in cases(base)))


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name):
    op, args = arguments_of(name)
    torch.library.opcheck(op.handle, args, {"pin": ""})


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_opcheck_of_the_vjp(name):
    op, args = arguments_of(name)
    args = tuple(a.detach().clone() if isinstance(a, Tensor) else a for a in backward_call_of(op, args))
    torch.library.opcheck(op.vjp.handle, args, {"pin": ""})


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_a_vjp_returns_memory_of_its_own(name):
    """As torch's dispatcher and torch.func demand; but for what a last backward may write over."""
    op = ops()[name]
    for case in (c for c in cases(name) if "test" in c.tags):
        args = op.bind((), case.build(DEVICE, case.dtypes[0], case.generator()))
        call = [a.detach() if isinstance(a, Tensor) else a for a in backward_call_of(op, args) or ()]
        if not call:
            continue
        outs = op.vjp.run((*call[:-1], False) if op.vjp.overwrites else tuple(call))
        outs = outs if isinstance(outs, tuple) else (outs,)
        taken = {a.untyped_storage().data_ptr(): n for n, a in zip(op.vjp.parameters, call) if isinstance(a, Tensor)}
        for n, out in zip(op.vjp.outputs, outs):
            shared = taken.setdefault(out.untyped_storage().data_ptr(), n) if out.numel() else n
            assert shared == n, f"{case.name}: {n} is in the memory of {shared}"


@pytest.mark.parametrize("name", [name for name in NAMES if ops()[name].when is tracing.small])
def test_small_calls_are_traced_as_plain_functions(name, monkeypatch):
    op, args = arguments_of(name)
    traced, told = [], "traced as plain PyTorch"

    def backend(graph, _):
        traced.append({node.target for node in graph.graph.nodes})
        return graph.forward

    for limit, small in ((tracing.SMALL, True), (0, False)):
        monkeypatch.setattr(tracing, "SMALL", limit)
        torch._dynamo.reset()
        found = torch.compile(lambda *a: op(*a), fullgraph=True, backend=backend, dynamic=False)(*args)
        torch.testing.assert_close(found, op(*args), equal_nan=True)
        assert (op.handle not in traced.pop()) is small is (told in op.explain(*args, compiled=True).note)


@pytest.mark.parametrize("name", NAMES)
def test_compiles_whole_and_dynamic(name):
    op, args = arguments_of(name)
    expected = outputs_and_gradients(op, args)
    compiled = torch.compile(lambda *a: op(*a), fullgraph=True, backend="aot_eager", dynamic=True)
    leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    work = tuple(a.clone() if n in op.mutates else a for n, a in zip(op.parameters, args))
    outs = compiled(*work)
    outs = outs if isinstance(outs, tuple) else (outs,)
    for out, want in zip(outs, (expected[n] for n in op.outputs[: op.public])):
        torch.testing.assert_close(out, want, equal_nan=True)
    if leaves and op.gradient is not None:
        grads = torch.autograd.grad(
            [o for o in outs if o.requires_grad], leaves, cotangents_of(outs), allow_unused=True
        )
        named = [n for n, a in zip(op.parameters, args) if isinstance(a, Tensor) and a.requires_grad]
        for n, grad in zip(named, grads):
            torch.testing.assert_close(
                grad if grad is not None else torch.zeros_like(expected[f"d{n}"]), expected[f"d{n}"]
            )


@pytest.mark.parametrize("name", NAMES)
def test_autocast_casts_arguments_and_nothing_else(name):
    op, args = arguments_of(name)
    args = tuple(a.detach() if isinstance(a, Tensor) else a for a in args)
    to = torch.bfloat16
    lowered = [a.to(to) if i in op.autocast and isinstance(a, Tensor) else a for i, a in enumerate(args)]
    wanted = op(*(a.clone() if isinstance(a, Tensor) else a for a in lowered))
    with torch.autocast(DEVICE.type, to):
        got = op(*(a.clone() if isinstance(a, Tensor) else a for a in args))
    for x, y in zip(*(outs if isinstance(outs, tuple) else (outs,) for outs in (got, wanted))):
        torch.testing.assert_close(x, y, rtol=0.0, atol=0.0, equal_nan=True)


@pytest.mark.parametrize("name", NAMES)
def test_exports(name):
    op, args = arguments_of(name)

    class Module(torch.nn.Module):
        def forward(self, *tensors):
            given = iter(tensors)
            return op(*(next(given) if isinstance(a, Tensor) else a for a in args))

    tensors = tuple(a.detach() for a in args if isinstance(a, Tensor))
    if op.mutates:
        pytest.skip("export of an op that writes its arguments needs buffers")
    program = torch.export.export(Module(), tensors)
    if op.decompose is None:
        assert op.handle in [node.target for node in program.graph.nodes]


@pytest.mark.parametrize("name", NAMES)
def test_fake_tensors_tell_shape_dtype_and_strides(name):
    from torch._subclasses.fake_tensor import FakeTensorMode

    op, args = arguments_of(name)
    work = tuple(a.detach().clone() if n in op.mutates else a for n, a in zip(op.parameters, args))
    mode = FakeTensorMode()
    with torch.no_grad(), mode:
        faked = op.handle(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args))
    faked = faked if isinstance(faked, tuple) else (faked,)
    for backend in kernels_of(op):
        if op.kernel(backend).rejects(op._describe(*args)):
            continue
        with torch.no_grad():
            real = op.run(work, backend)
        real = real if isinstance(real, tuple) else (real,)
        for n, fake, out in zip(op.outputs, faked, real):
            assert (tuple(fake.shape), fake.dtype, fake.stride()) == (tuple(out.shape), out.dtype, out.stride()), (
                backend,
                n,
            )


def _turned(a):
    """The dims the other way round in memory."""
    back = tuple(reversed(range(a.ndim)))
    return a.detach().permute(back).clone(memory_format=torch.contiguous_format).permute(back)


@pytest.mark.parametrize("name", NAMES)
def test_fakes_hold_for_any_strides(name):
    """Code that Inductor generates reads an output by the strides of its fake."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    op = ops()[name]
    for case in (c for c in cases(name) if "test" in c.tags):
        built = op.bind((), case.build(DEVICE, case.dtypes[0], case.generator()))
        for lay_out in (Tensor.detach, _turned):
            args = [
                a.clone() if n in op.mutates else lay_out(a) if isinstance(a, Tensor) else a
                for n, a in zip(op.parameters, built)
            ]
            mode = FakeTensorMode()
            with torch.no_grad(), mode:
                faked = op.handle(*(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args))
            with torch.no_grad():
                real = op.run(tuple(args), REFERENCE)
            for n, fake, out in zip(op.outputs, each_output(faked), each_output(real)):
                told, is_so = (
                    (tuple(x.shape), x.dtype, [step for size, step in zip(x.shape, x.stride()) if size > 1])
                    for x in (fake, out)
                )
                assert not out.numel() or told == is_so, f"{case.name}, {lay_out.__name__}: {n}"


@pytest.mark.parametrize("name", NAMES)
def test_autocast_changes_nothing_but_the_inputs(name):
    op, args = arguments_of(name)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        lowered = tuple(
            a.detach().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in op._autocast(args)
        )
    for backend in kernels_of(op):
        with use(**pins_of(op, backend)), deterministic():
            try:
                want = outputs_and_gradients(op, lowered)
            except NotImplementedError:
                continue
            with torch.autocast(DEVICE.type, torch.bfloat16):
                found = outputs_and_gradients(op, lowered)
        for n, x in want.items():
            torch.testing.assert_close(found[n], x, rtol=0, atol=0, equal_nan=True, msg=lambda m, n=n: f"{n}: {m}")


@pytest.mark.parametrize("name", [n for n in DIFFERENTIABLE if ops()[n].public > 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_of_one_output_alone(name, dtype):
    op, args = arguments_of(name, dtype)
    floating = [isinstance(a, Tensor) and a.is_floating_point() for a in args]
    if dtype is torch.float64:
        args = tuple(a.detach().double().requires_grad_(a.requires_grad) if f else a for a, f in zip(args, floating))
    leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    for backend in kernels_of(op):
        with use(**pins_of(op, backend)):
            try:
                outs = [o for o in op(*args) if o.requires_grad]
            except NotImplementedError:
                continue
            for i in range(len(outs)):
                cotangents = [torch.ones_like(o) if i == j else torch.zeros_like(o) for j, o in enumerate(outs)]
                want = torch.autograd.grad(outs, leaves, cotangents, allow_unused=True, retain_graph=True)
                got = torch.autograd.grad(outs[i], leaves, cotangents[i], allow_unused=True, retain_graph=True)
                for g, w, leaf in zip(got, want, leaves):
                    zero = torch.zeros_like(leaf)
                    torch.testing.assert_close(zero if g is None else g, zero if w is None else w)


EMPTY = [
    pytest.param(name, case, id=f"{name}-{case.name}")
    for name in DIFFERENTIABLE
    if ops()[name].public > 1
    for case in cases(name)
    if "test" in case.tags and torch.float32 in case.dtypes and case.name.startswith("no_")
]


@pytest.mark.parametrize(("name", "case"), EMPTY)
def test_gradients_of_one_output_of_a_call_without_rows(name, case):
    """The other inputs get none, or an empty one of their shape, not what stands for none."""
    op = ops()[name]
    for i in range(op.public):
        args = op.bind((), case.build(DEVICE, torch.float32, case.generator()))
        outs = op(*args)
        if outs[i].requires_grad:
            outs[i].sum().backward()
            assert all(a.grad is None or a.grad.shape == a.shape for a in args if isinstance(a, Tensor))


def test_rope_of_no_rows_and_one_output():
    for shape in ((0, 2, 4, 8), (2, 2, 0, 8)):
        for used in range(2):
            q, k = (torch.randn(shape, device=DEVICE, requires_grad=True) for _ in range(2))
            angles = torch.randn(2, shape[2], 4, device=DEVICE)
            ops()["rope"](q, k, *angles)[used].sum().backward()
            assert (q, k)[used].grad.shape == shape and (q, k)[1 - used].grad is None


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_functional_gradient_equals_autograd(name):
    op, args = arguments_of(name)
    positions = tuple(i for i, a in enumerate(args) if isinstance(a, Tensor) and a.requires_grad)
    plain = tuple(a.detach() if isinstance(a, Tensor) else a for a in args)

    def total(*a):
        outs = op(*a)
        outs = outs if isinstance(outs, tuple) else (outs,)
        return sum(torch.where(o.isfinite(), o, 0).sum() for o in outs if o.is_floating_point())

    functional = torch.func.grad(total, argnums=positions)(*plain)
    leaves = [args[i] for i in positions]
    eager = torch.autograd.grad(total(*args), leaves, allow_unused=True)
    for f, e, leaf in zip(functional, eager, leaves):
        torch.testing.assert_close(f, e if e is not None else torch.zeros_like(leaf))


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_vmap_equals_a_loop(name):
    op, args = arguments_of(name)
    plain = tuple(a.detach() if isinstance(a, Tensor) else a for a in args)
    first = next(i for i, a in enumerate(plain) if isinstance(a, Tensor) and a.is_floating_point())
    batch = torch.stack([plain[first], plain[first].flip(0)])

    def one(x):
        return op(*plain[:first], x, *plain[first + 1 :])

    mapped = torch.func.vmap(one)(batch)
    looped = [one(b) for b in batch]
    tuples = isinstance(mapped, tuple)
    for m, *each in zip(mapped, *looped) if tuples else [(mapped, *looped)]:
        _assert_close_by_size(m, torch.stack(each))


def _assert_close_by_size(found, want):
    """Close for numbers of the size of the largest: another order of a sum rounds at the size of its terms."""
    finite = want[want.isfinite()].abs() if want.is_floating_point() else want[:0]
    size = finite.max().clamp(min=1.0) if finite.numel() else 1
    torch.testing.assert_close(found / size, want / size, equal_nan=True)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_double_backward_is_right_or_refused(name):
    op, args = arguments_of(name, torch.float64)
    if not all(a.dtype is torch.float64 for a in args if isinstance(a, Tensor) and a.requires_grad):
        args = tuple(
            a.double().detach().requires_grad_() if isinstance(a, Tensor) and a.requires_grad else a for a in args
        )
    leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]

    def second(fn):
        outs = fn(*args)
        outs = (outs if isinstance(outs, tuple) else (outs,))[: op.public]
        outs = [o for o in outs if o.requires_grad]
        cotangents = [torch.linspace(-1, 1, o.numel(), dtype=o.dtype, device=o.device).view(o.shape) for o in outs]
        cotangents = [torch.where(o.detach().isfinite(), c, 0).requires_grad_() for o, c in zip(outs, cotangents)]
        grads = torch.autograd.grad(outs, leaves, cotangents, create_graph=True, allow_unused=True)
        total = sum(g.square().sum() for g in grads if g is not None)
        return torch.autograd.grad(total, [*leaves, *cotangents], allow_unused=True)

    try:
        with use(**{name: REFERENCE}):
            got = second(op)
    except NotImplementedError as refusal:
        assert name in str(refusal)
        return
    for g, want in zip(got, second(op.reference)):
        if want is None:
            assert g is None or not g.any()
        else:
            torch.testing.assert_close(g, want)


@pytest.mark.parametrize("name", ["rms_norm", "attention_weights", "column_sums"])  # the last one has no vjp
def test_gradients_under_hooks_of_saved_tensors(name):
    """save_on_cpu around a whole step, or the hooks of a checkpoint around a gradient taken within."""
    op, args = arguments_of(name)
    leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]

    def twice():
        outs = op(*args)
        out = outs[0] if isinstance(outs, tuple) else outs
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True, allow_unused=True)
        total = sum(g.square().sum() for g in first if g is not None)
        return [*first, *torch.autograd.grad(total, leaves, allow_unused=True)]

    want = twice()
    with torch.autograd.graph.save_on_cpu():
        got = twice()
    for g, w in zip(got, want):
        torch.testing.assert_close(g, w)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_nested_functional_gradients_are_right_or_refused(name):
    op, args = arguments_of(name)
    args = tuple(a.detach().double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
    first = next(i for i, a in enumerate(args) if isinstance(a, Tensor) and a.is_floating_point())

    def second(fn):
        def total(x):
            outs = fn(*args[:first], x, *args[first + 1 :])
            out = (outs if isinstance(outs, tuple) else (outs,))[0]
            return torch.where(out.isfinite(), out, 0).sin().sum()

        return torch.func.grad(lambda x: torch.func.grad(total)(x).square().sum())(args[first])

    try:
        got = second(op)
    except NotImplementedError as refusal:
        assert name in str(refusal)
        return
    torch.testing.assert_close(got, second(op.reference))


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_a_pin_around_the_forward_holds_for_the_backward(name):
    op, args = arguments_of(name)
    leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    for backend in kernels_of(op):
        if backend not in op.vjp.backends():
            continue
        ran = []
        kernel = op.vjp.kernel(backend)

        def spied(*a, kernel=kernel, ran=ran):
            if not any(isinstance(x, Tensor) and x.is_meta for x in a):  # a rehearsal runs nothing
                ran.append(kernel.backend)
            return kernel.fn(*a)

        op.vjp.replace_kernel(backend, spied)
        try:
            with use(**{name: backend}):
                try:
                    outs = op(*args)
                except NotImplementedError:
                    continue
            outs = [o for o in (outs if isinstance(outs, tuple) else (outs,)) if o.requires_grad]
            torch.autograd.grad(outs, leaves, [torch.ones_like(o) for o in outs], allow_unused=True)
        finally:
            op.vjp.replace_kernel(backend, kernel.fn)
        assert ran == [backend]


def test_a_pin_of_the_vjp_goes_before_that_of_the_forward():
    op, args = arguments_of("rms_norm")
    ran = []

    def spied(*a):
        ran.append(REFERENCE)
        return op.vjp.reference(*a)

    for backend in kernels_of(op):
        try:
            with use(rms_norm=backend):
                out = op(*args)
        except NotImplementedError:
            continue
        op.vjp.replace_kernel(REFERENCE, spied)
        try:
            with use(rms_norm_vjp=REFERENCE):
                out.sum().backward()
        finally:
            op.vjp.replace_kernel(REFERENCE, op.vjp.reference)
        assert ran.pop() == REFERENCE and not ran


class _Deep(torch.autograd.Function):
    """Backwards inside one another; beyond some 60 torch runs them in threads of its own, as those of a GPU."""

    @staticmethod
    def forward(ctx, x, depth, found):
        ctx.depth, ctx.found = depth, found
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.depth:
            with torch.enable_grad():
                _Deep.apply(torch.zeros(1, requires_grad=True), ctx.depth - 1, ctx.found).sum().backward()
        else:
            with use(layer_norm=REFERENCE):  # which must leave those there that torch carried along
                pass
            ctx.found.append((threading.current_thread(), pinned("rms_norm")))
        return grad, None, None


def test_pins_reach_the_threads_that_run_a_backward():
    found = []
    with use(rms_norm=REFERENCE):
        _Deep.apply(torch.zeros(1, requires_grad=True), 70, found).sum().backward()
    _Deep.apply(torch.zeros(1, requires_grad=True), 70, found).sum().backward()
    threads, backends = zip(*found)
    assert threading.current_thread() not in threads and backends == (REFERENCE, "")


def test_pins_are_counted_as_python_counts():
    for _ in range(3):
        with use(rms_norm=REFERENCE):
            inside = pins()
            _Deep.apply(torch.zeros(1, requires_grad=True), 70, []).sum().backward()
        until = time.monotonic() + 60
        while sys.getrefcount(inside) > 2 and time.monotonic() < until:  # `inside`, and the argument
            time.sleep(0.01)  # torch's threads let go of them a little later
        assert sys.getrefcount(inside) == 2


DETERMINISTIC = [
    run
    for run in RUNS
    if run.values[1].args.get("deterministic")
    and run.values[3] in set(ops()[run.values[0]].vjp.backends()) - {REFERENCE}
]


@pytest.mark.skipif(not ON_GPU, reason="on a GPU programs end in another order each time")
@pytest.mark.parametrize(("name", "case", "dtype", "backend"), DETERMINISTIC)
def test_deterministic_gradients_are_the_same_a_thousand_times(name, case, dtype, backend):
    op = ops()[name]
    args = op.bind((), case.build(DEVICE, dtype, case.generator()))
    call = backward_call_of(op, args)
    if op.kernel(backend).rejects(op._describe(*args)) or op.vjp.kernel(backend).rejects(op.vjp._describe(*call)):
        pytest.skip(f"{backend} does not serve the call")
    run = op.vjp.kernel(backend).fn
    first, other = run(*call), torch.zeros((), dtype=torch.bool, device=DEVICE)
    for _ in range(1000):
        for a, b in zip(first, run(*call)):
            other |= (a != b).any()
    assert not other


@pytest.mark.parametrize("name", NAMES)
def test_two_runs_are_bitwise_equal(name):
    op, args = arguments_of(name)
    with deterministic():
        first, second = outputs_and_gradients(op, args), outputs_and_gradients(op, args)
    for n in first:
        assert torch.equal(*(x[n].double().nan_to_num(nan=3.0) for x in (first, second))), n


def _apart(name):
    """An op with each test case by its reference, and with the first one by each kernel that runs here."""
    tested = [c for c in cases(name) if "test" in c.tags]
    for backend in kernels_of(ops()[name]):
        for case in tested if backend == REFERENCE else tested[:1]:
            yield pytest.param(name, case, backend, id=f"{name}-{backend}-{case.name}")


@pytest.mark.parametrize(("name", "case", "backend"), [one for name in DIFFERENTIABLE for one in _apart(name)])
def test_an_output_may_be_written_to(name, case, backend):
    """Models add to what a layer returns, in place: autograd refuses that for views, and inputs must not change."""
    op = ops()[name]
    args = op.bind((), case.build(DEVICE, case.dtypes[0], case.generator()))
    leaves = [a.requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() and i == 0 else a
              for i, a in enumerate(args)]  # fmt: skip
    try:
        with use(**{name: backend}):
            outs = op(*leaves)
    except NotImplementedError:
        pytest.skip("the kernel does not serve this case")
    kept = [a.detach().clone() if isinstance(a, Tensor) else None for a in args]
    for out in outs if isinstance(outs, tuple) else (outs,):
        if isinstance(out, Tensor) and out.is_floating_point():
            out += 1
    for before, after in zip(kept, args):
        bytes_of = (t.detach().reshape(-1).contiguous().view(torch.uint8) for t in (before, after) if t is not None)
        assert before is None or torch.equal(*bytes_of)


@pytest.mark.parametrize("name", [n for n in NAMES if ops()[n].mutates])
def test_autograd_can_tell_what_was_written(name):
    op, args = arguments_of(name)
    before = [a._version for a in args if isinstance(a, Tensor)]
    op(*args)
    after = [a._version for a in args if isinstance(a, Tensor)]
    tensors = [n for n, a in zip(op.parameters, args) if isinstance(a, Tensor)]
    assert {n for n, x, y in zip(tensors, before, after) if x != y} == set(op.mutates)


@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_kernel_is_refused_by_name(name):
    with pytest.raises(ValueError, match="no kernel 'nowhere'"), use(**{name: "nowhere"}):
        pass


@pytest.mark.skipif(not ON_GPU, reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("name", NAMES)
def test_captures_in_a_cuda_graph(name):
    op, args = arguments_of(name, torch.bfloat16)
    small = (case for case in cases(name) if torch.bfloat16 in case.dtypes and _size(case) <= 2**22)
    built = itertools.chain([args], (arguments_of(name, torch.bfloat16, case)[1] for case in small))
    # what a kernel serves, if anything: references may read values
    args = next((each for each in built if op.explain(*each).kernel.backend != "reference"), args)
    plain = tuple(a.detach() if isinstance(a, Tensor) else a for a in args)
    with torch.no_grad():
        expected = op(*(a.clone() if n in op.mutates else a for n, a in zip(op.parameters, plain)))
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = op(*plain)
        graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(captured, expected, equal_nan=True)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("name", NAMES)
def test_runs_on_the_device_of_its_tensors(name):
    op, case = ops()[name], first_case(name)
    args = op.bind((), case.build(torch.device("cuda", 1), torch.float32, case.generator()))
    with torch.cuda.device(0):
        for n, t in outputs_and_gradients(op, args).items():
            assert t.device.index == 1, n


@pytest.mark.parametrize("name", [n for n in DIFFERENTIABLE if len(ops()[n].outputs) > ops()[n].public])
def test_outputs_are_the_same_where_no_gradient_is_asked_for(name):
    op, args = arguments_of(name)
    for backend in kernels_of(op):
        with use(**pins_of(op, backend)):
            try:
                wanted = op(*args)
            except NotImplementedError:
                continue
            with torch.no_grad():
                found = [op(*args) for _ in range(3)]  # the second call is recorded and the third replays it
        for each in found:
            for x, y in zip(*(outs if isinstance(outs, tuple) else (outs,) for outs in (each, wanted)), strict=True):
                torch.testing.assert_close(x, y, rtol=0.0, atol=0.0, equal_nan=True)
