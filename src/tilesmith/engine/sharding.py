"""DTensors: an op's pattern says which dims may be sharded, and each rank calls the op on what it holds.

A pattern names the dims of the op's tensor arguments, in order, and of its public outputs::

    "*k nk +n -> *n(k)"          linear: x [..., k], weight [n, k], bias [n] -> y [..., n], a sum over k

One letter is one dim; equal letters are split alike. A capital letter is a dim that the op needs whole. `*` stands for
all leading dims. `(k)` names the dims that are summed: where one of them is sharded, the output is `Partial`. `+` marks
an argument that is added to the result, so that one rank alone may add it to a partial sum. `@` is a dropout's seed.

Only one letter may be sharded over a mesh dim. An argument that has it and is replicated is sliced where it lies; one
that has it not must be replicated, and its gradient is `Partial`. Partial arguments are summed. Nothing is gathered:
what would need that raises ValueError. A plain tensor beside DTensors is the same on all ranks, and has no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilesmith.engine.torch_private import all_reduce

Label = str | int
_LAYOUTS: dict[tuple, Layout] = {}
_MOST = 800  # bytes of what other ranks are told of an error


def distributed(args: Sequence[Any]) -> bool:
    """Whether any argument is a DTensor."""
    return any(isinstance(a, Tensor) and hasattr(a, "device_mesh") for a in args)


def call(op: Any, args: tuple) -> Any:
    """The op's public outputs, as DTensors, from arguments of which some are."""
    op.check(*args)
    if op.draw is not None:
        args = op.draw(args)
    if op.sharding is None:
        raise ValueError(f"{op.name}: does not take DTensors; call it on each rank's local tensor, x.to_local()")
    return spread(op, args, op.sharding) if isinstance(op.sharding, str) else op.sharding(op, args)


def spread(op: Any, args: tuple, pattern: str, starts: Mapping[str, str] | None = None, held: str = "") -> Any:
    """Call the op on each rank's part. starts: int argument -> the letter of the dim it is a position in. held: letters
    of dims of which each rank must have some."""
    layout = lay_out(op, args, pattern)
    for label in held:
        layout.check_held(label)
    local = layout.local(args)
    for name, label in (starts or {}).items():
        local[op.parameters.index(name)] += layout.start(label)
    outs = op(*local)
    if not isinstance(outs, tuple):
        return layout.wrap(outs, layout.outputs[0])
    return tuple(layout.wrap(out, token) for out, token in zip(outs, layout.outputs))


def lay_out(op: Any, args: tuple, pattern: str) -> Layout:
    """The layout of these arguments by a pattern; the same call asks for it once."""
    given = {i: args[i] for i in op.gradient.tensors if args[i] is not None}
    if torch.compiler.is_compiling():
        return Layout(op, given, pattern)
    key = (op.name, pattern, *((i, *_where(a)) for i, a in given.items()))
    if key not in _LAYOUTS:
        if len(_LAYOUTS) >= 1024:  # ever new lengths: start over rather than grow
            _LAYOUTS.clear()
        _LAYOUTS[key] = Layout(op, given, pattern)
    return _LAYOUTS[key]


def _where(a: Tensor) -> tuple:
    if hasattr(a, "device_mesh"):
        return a.shape, id(a.device_mesh), a.placements  # its layout holds the mesh; an equal one has other groups
    return a.shape, a.requires_grad


class Token(NamedTuple):
    """One tensor of a pattern. dims: its labels, `*` still folded; sums: labels it is a sum over; mark: "", + or @."""

    dims: str
    sums: str = ""
    mark: str = ""

    def labels(self, ndim: int) -> tuple[Label, ...]:
        """A label for each of `ndim` dims; leading ones are numbered."""
        if not self.dims.startswith("*"):
            return tuple(self.dims)
        return (*range(ndim - len(self.dims) + 1), *self.dims[1:])


def _tokens(side: str) -> tuple[Token, ...]:
    tokens = []
    for word in side.split():
        mark = word[0] if word[0] in "+@" else ""
        dims, _, sums = word[len(mark) :].partition("(")
        tokens.append(Token(dims, sums.rstrip(")"), mark))
    return tuple(tokens)


class Step(NamedTuple):
    """How an argument becomes this rank's part of it. move: placements that have no partial sums, if it has some;
    grads: placements of the gradient (None: a plain tensor); cuts: (dim, start, length); silent: not added here."""

    move: list[Any] | None
    grads: list[Any] | None
    cuts: tuple[tuple[int, int, int], ...]
    silent: bool


class Layout:
    """Which label is sharded over each mesh dim, and which part of every tensor belongs to this rank.

    mesh: the arguments' DeviceMesh. labels: for each of its dims the label that is sharded over it, or None. sizes: of
    each label, over all ranks. outputs: the pattern's tokens.
    """

    def __init__(self, op: Any, given: Mapping[int, Tensor], pattern: str):
        inputs, _, outputs = pattern.partition("->")
        self.name, self.names, self.outputs = op.name, op.parameters, _tokens(outputs)
        self.tokens = dict(zip(op.gradient.tensors, _tokens(inputs)))
        self.mesh = self._mesh(given)
        self.sizes: dict[Label, set[int]] = {}
        for i, a in given.items():
            for label, size in zip(self.tokens[i].labels(a.ndim), a.shape):
                self.sizes.setdefault(label, set()).add(size)
        self.labels = tuple(self._label(given, m) for m in range(self.mesh.ndim))
        self._check_splits()
        self.steps = {i: self._step(i, a) for i, a in given.items() if self.tokens[i].mark != "@"}
        self.seeds = [i for i in given if self.tokens[i].mark == "@"]

    def dims_of(self, label: Label) -> tuple[int, ...]:
        """The mesh dims over which a label is sharded."""
        return tuple(m for m, found in enumerate(self.labels) if found == label)

    def size(self, label: Label) -> int:
        """How many there are of a label over all ranks."""
        return max(self.sizes[label])

    def check_held(self, label: Label) -> None:
        """Raise ValueError, on all ranks, where some rank has no part of a dim: the op would refuse it there alone, and
        the other ranks would wait."""
        last = self.size(label)
        for m in self.dims_of(label):  # the last rank has the least
            last -= min((self.mesh.size(m) - 1) * -(-last // self.mesh.size(m)), last)
        if last == 0 < self.size(label):
            raise ValueError(
                f"{self.name}: a dim of {self.size(label)} is split over {self._parts(label)} ranks, which leaves a "
                "rank without any; split it over fewer ranks, or redistribute it to Replicate()"
            )

    def start(self, label: Label) -> int:
        """Where this rank's part of a label begins."""
        return self._range(label, self.size(label))[0]

    def local(self, args: Sequence[Any]) -> list[Any]:
        """The op's arguments with this rank's part of each tensor, connected to autograd."""
        local = list(args)
        for i, step in self.steps.items():
            a = local[i]
            if step.move is not None:
                a = a.redistribute(placements=step.move)
            if step.grads is not None:
                a = a.to_local(grad_placements=step.grads)
            for cut in step.cuts:
                a = a.narrow(*cut)
            local[i] = a * 0 if step.silent else a  # a product, so that every rank has a share of the gradient
        for i in self.seeds:
            local[i] = self._seed(local[i])
        return local

    def wrap(self, out: Tensor, token: Token) -> Tensor:
        """A local output as a DTensor."""
        from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

        labels = token.labels(out.ndim)
        if len(labels) != out.ndim:  # a placeholder for an output that is not there
            return DTensor.from_local(out, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        placements = []
        for label in self.labels:
            if label is not None and label in labels:
                placements.append(Shard(labels.index(label)))
            else:
                summed = ("*" if isinstance(label, int) else label or " ") in token.sums
                placements.append(Partial() if summed else Replicate())
        sharded = [label for label in labels if label in self.labels]
        if all(size % self._parts(label) == 0 for label in sharded for size in self.sizes[label]):
            return DTensor.from_local(out, self.mesh, placements, run_check=False)
        shape = torch.Size([self.size(label) if label in sharded else n for label, n in zip(labels, out.shape)])
        return DTensor.from_local(out, self.mesh, placements, run_check=False, shape=shape, stride=_strides(shape, out))

    def total(self, out: Tensor, rows: bool = False) -> Tensor:
        """The sum of a local tensor over the ranks that hold other parts, or other rows; local too, with a gradient."""
        from torch.distributed.tensor import DTensor, Partial, Replicate

        parted = [isinstance(label, int) or (label is not None and not rows) for label in self.labels]
        placements = [Partial() if part else Replicate() for part in parted]
        parts = DTensor.from_local(out, self.mesh, placements, run_check=False)
        return parts.redistribute(placements=[Replicate()] * self.mesh.ndim).to_local()

    def refused_together(self, check: Callable[[], None]) -> None:
        """What `check` raises ValueError for on one rank, as for values in its own part of a tensor, is raised on all
        ranks of the mesh, which would wait for that one. On a CPU only, where such checks look at values."""
        problem = None
        try:
            check()
        except ValueError as found:
            problem = found
        mine = 0 if problem is None else torch.distributed.get_rank() + 1
        rank = int(self._most(torch.tensor([mine])))
        if rank == 0:
            return
        said = list(str(problem).encode()[:_MOST]) if rank == mine else []
        text = self._most(torch.tensor(said + [0] * (_MOST - len(said))))
        if problem is not None:
            raise problem
        words = bytes(text.tolist()).rstrip(b"\0").decode(errors="replace")
        raise ValueError(f"{self.name}: refused on rank {rank - 1}: {words}")

    def _most(self, values: Tensor) -> Tensor:
        """The largest over all ranks of the mesh."""
        for m in range(self.mesh.ndim):
            if self.mesh.size(m) > 1:
                values = all_reduce(values, "max", (self.mesh, m))
        return values

    # how it is found ------------------------------------------------------------------------------------------------

    def _mesh(self, given: Mapping[int, Tensor]) -> Any:
        mesh, holder = None, ""
        for i, a in given.items():
            if not hasattr(a, "device_mesh"):
                if a.requires_grad:
                    raise ValueError(
                        f"{self.name}: {self.names[i]} is a plain tensor that requires a gradient, beside DTensors; "
                        "say where it lies: DTensor.from_local(tensor, mesh, [Replicate()]) if every rank holds the "
                        "same, or distribute_module for a module's parameters"
                    )
            elif mesh is None:
                mesh, holder = a.device_mesh, self.names[i]
            elif a.device_mesh != mesh:
                raise ValueError(f"{self.name}: {self.names[i]} lies on {a.device_mesh}, {holder} on {mesh}")
        return mesh

    def _label(self, given: Mapping[int, Tensor], m: int) -> Label | None:
        """The label that is sharded over a mesh dim."""
        from torch.distributed.tensor.placement_types import Shard, _StridedShard

        found, holder = None, -1
        for i, a in given.items():
            placement = a.placements[m] if hasattr(a, "device_mesh") else None
            if placement is None or placement.is_replicate() or placement.is_partial():
                continue
            if not isinstance(placement, Shard) or isinstance(placement, _StridedShard) or self.tokens[i].mark == "@":
                raise ValueError(f"{self.name}: {self.names[i]} is placed by {placement}, which is not supported")
            dim = placement.dim
            label = self.tokens[i].labels(a.ndim)[dim]
            if _whole(label) or (a.shape[dim] == 1 and self.sizes[label] != {1}):
                raise ValueError(
                    f"{self.name}: {self._place(given, i, m)} on mesh dim {self._dim_name(m)}, {self._instead(i, a)}"
                )
            if found is None:
                found, holder = label, i
            elif found != label:
                raise ValueError(
                    f"{self.name}: on mesh dim {self._dim_name(m)} {self._place(given, holder, m)} and "
                    f"{self._place(given, i, m)}, and these dims cannot be split over the same ranks; redistribute one "
                    "of the two to Replicate()"
                )
        return found

    def _place(self, given: Mapping[int, Tensor], i: int, m: int) -> str:
        return f"{self.names[i]} is Shard({given[i].placements[m].dim})"

    def _instead(self, i: int, a: Tensor) -> str:
        free = [str(d) for d, label in enumerate(self.tokens[i].labels(a.ndim)) if not _whole(label)]
        shard = f"; dims that may be sharded: {', '.join(free)}" if free else ""
        return f"and the op needs that dim whole on every rank; redistribute it to Replicate(){shard}"

    def _check_splits(self) -> None:
        """Dims of one letter but different sizes, as query and key heads, must be split evenly to belong together."""
        for label in self.labels:
            sizes = self.sizes.get(label, set()) - {1}
            if len(sizes) > 1 and any(size % self._parts(label) for size in sizes):
                raise ValueError(
                    f"{self.name}: dims of sizes {sorted(sizes)} are split over {self._parts(label)} ranks, which must "
                    "divide them all"
                )

    def _step(self, i: int, a: Tensor) -> Step:
        token, labels = self.tokens[i], self.tokens[i].labels(a.ndim)
        split = [l for l, size in zip(labels, a.shape) if l in self.labels and (size > 1 or self.sizes[l] == {1})]
        silent = token.mark == "+" and any(
            isinstance(label, str) and label not in labels and self.mesh.get_local_rank(m) != 0
            for m, label in enumerate(self.labels)
        )
        move = grads = None
        held: set[Label] = set()
        if hasattr(a, "device_mesh"):
            move, grads, held = self._moves(a, labels, split)
        cuts = ((d, *self._range(l, a.shape[d])) for d, l in enumerate(labels) if l in split and l not in held)
        return Step(move, grads, tuple(cuts), silent)

    def _moves(self, a: Tensor, labels: tuple[Label, ...], split: Sequence[Label]) -> tuple[Any, Any, set[Label]]:
        """`Step.move` and `Step.grads` of a DTensor, and the labels that it is sharded by."""
        from torch.distributed.tensor import Partial, Replicate, Shard

        have = list(a.placements)
        for m, (label, placement) in enumerate(zip(self.labels, a.placements)):
            if placement.is_partial():
                have[m] = Shard(labels.index(label)) if label in split else Replicate()
        held = {label for label, placement in zip(self.labels, have) if placement.is_shard()}
        for label in held:
            if any(have[m].is_replicate() for m in self.dims_of(label)):
                raise ValueError(
                    f"{self.name}: a dim is split over mesh dims {self.dims_of(label)} in one argument and only over "
                    "some of them in another"
                )
        # what each rank contributes to the gradient of a replicated tensor is its part of a sum
        grads = [Partial() if l is not None and p.is_replicate() else p for l, p in zip(self.labels, have)]
        return have if any(p.is_partial() for p in a.placements) else None, grads, held

    def _parts(self, label: Label) -> int:
        parts = 1
        for m in self.dims_of(label):
            parts *= self.mesh.size(m)
        return parts

    def _range(self, label: Label, size: int) -> tuple[int, int]:
        """(start, length) of this rank's part of a dim, as `Shard` splits it."""
        start, length = 0, size
        for m in self.dims_of(label):
            step = -(-length // self.mesh.size(m))
            first = min(self.mesh.get_local_rank(m) * step, length)
            start, length = start + first, min(step, length - first)
        return start, length

    def _dim_name(self, m: int) -> str:
        names = self.mesh.mesh_dim_names
        return repr(names[m]) if names else str(m)

    def _seed(self, seed: Tensor) -> Tensor:
        """The same for ranks that hold the same elements, another for each part, which counts its elements from 0."""
        if hasattr(seed, "device_mesh"):
            seed = seed.to_local()
        part = 0
        for m, label in enumerate(self.labels):
            if label is None and self.mesh.size(m) > 1:
                seed = all_reduce(seed, "max", (self.mesh, m))
            elif label is not None:
                part = part * self.mesh.size(m) + self.mesh.get_local_rank(m)
        return seed + torch.tensor([0, part], device=seed.device) if part else seed


def _whole(label: Label) -> bool:
    return isinstance(label, str) and label.isupper()


def _strides(shape: Sequence[int], like: Tensor) -> tuple[int, ...]:
    """Dense strides of `shape` in the memory order of `like`."""
    order = sorted(range(like.ndim), key=like.stride, reverse=True) if not like.is_contiguous() else range(like.ndim)
    strides, step = [1] * like.ndim, 1
    for d in reversed(list(order)):
        strides[d], step = step, step * max(1, shape[d])
    return tuple(strides)
