"""Every private name of Triton that the engine uses, and what happens where a release does not have it.

Nothing here imports Triton before a kernel is launched or compiled. Gluon's own names are in the shim of the device
code, which only Gluon kernels import; those of PyTorch in `engine.torch_private`.

| name | without it |
|---|---|
| `CudaLauncher.launch`, below its `__call__` | each launch goes through `__call__`, 1-2 us slower |
| the launcher below `wrap_handle_tensordesc`, `fill_tma_descriptor` | Triton encodes each descriptor at each launch |
| `packed_metadata` of (warps, CTAs, shared memory) | clusters cannot be launched: RuntimeError |
| `cuOccupancyMaxActiveClusters` | as many clusters are resident as the smallest GPCs hold; none of more than 8 CTAs |
| `knobs.runtime` hooks | a profiler that listens to Triton's hooks hears only of first launches |
| `knobs.cache.dir` | errors name the folder that the environment gives, or the default one |
| `launcher_cls` of the active driver | the launch of a kernel that was compiled ahead runs a C compiler (Triton 3.6) |
| `CompiledKernel.metadata_group` | no kernel is compiled before the call that launches it is made |
| `JITFunction.src`, `.fn` | kernels are compiled ahead in the order of launches, not the largest first |
| `JITFunction.device_caches` | a kernel that is compiled ahead may be read from Triton's cache on disk again |
| `create_function_from_signature`, `_pack_args` | nothing can be compiled for a GPU that is not here |
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import inspect
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

# Contraction of products and sums is a part of what a kernel computes: Triton 3.10 will change the default.
OPTIONS = {"enable_fp_fusion": True}

# releases whose launchers are known to take (encoded descriptor, *shape, *strides) for a descriptor
_ENCODE = ("3.6.", "3.7.", "3.8.", "3.9.")


def run(kernel: Any, grid: tuple[int, ...], args: tuple, named: Mapping[str, Any], first: bool = True) -> Any:
    """Triton's own launch of a kernel, all of whose options are given; returns what it compiled. first: whether what
    these arguments compile to was not launched before.

    Raises RuntimeError, naming the folder, where Triton's cache is damaged or cannot be written.
    """
    try:
        if first:
            _have_boxes(kernel, args, named)
        return kernel[grid](*args, **{**OPTIONS, **named})
    except (json.JSONDecodeError, OSError) as problem:
        folder = _cache_dir()
        if isinstance(problem, OSError) and not str(problem.filename or "").startswith(folder):
            raise
        raise RuntimeError(
            f"Triton cannot use its cache of compiled kernels in {folder} ({problem}): delete that folder, or set "
            "TRITON_CACHE_DIR to one that can be written"
        ) from problem


def _have_boxes(kernel: Any, args: tuple, named: Mapping[str, Any]) -> None:
    """Tell a kernel's launcher of the descriptors whose boxes are smaller than tiles: those with a `box`, the sizes of
    all dims but the last. Triton takes the sizes of tiles, powers of two, when it encodes a descriptor."""
    if not any(hasattr(x, "box") for x in (*args, *named.values())):
        return
    compiled = kernel.warmup(*args, grid=(1,), **{**OPTIONS, **named})
    values = [*args, *(named[n] for n in kernel.signature.parameters if n in named)]
    descriptors = [x for x in values if type(x).__name__ == "TensorDescriptor"]
    for x, form in zip(descriptors, compiled.metadata.tensordesc_meta, strict=True):
        if hasattr(x, "box"):
            form["block_size"] = [*x.box, form["block_size"][-1]]


def warm(kernel: Any, args: tuple, named: Mapping[str, Any]) -> None:
    """Have Triton compile what `run` would for the current device, and keep it; nothing is loaded there or launched.

    That includes the C function which launches the kernel. Up to Triton 3.6 each signature has one of its own, and a C
    compiler takes as long for it as Triton takes for a small kernel.
    """
    compiled = kernel.warmup(*args, grid=(1,), **{**OPTIONS, **named})
    build = getattr(_driver(), "launcher_cls", None)
    if build is not None and was_compiled(compiled):
        build(compiled.src, compiled.metadata)


def code_size(kernel: Any) -> int:
    """Characters of a kernel's source and of the functions that are inlined into it, by which the times go that it and
    others take to compile; 0 where Triton does not tell."""
    found: dict[int, int] = {}

    def add(function: Any) -> None:
        fn, source = getattr(function, "fn", None), getattr(function, "src", None)
        if id(function) in found or not isinstance(source, str) or not inspect.isfunction(fn):
            return
        found[id(function)] = len(source)
        for name in fn.__code__.co_names:
            add(fn.__globals__.get(name))

    add(kernel)
    return sum(found.values())


def have_cache(kernel: Any, device: int) -> None:
    """Make what Triton keeps a kernel's compiled forms in, for the current device, which has this index. Of two threads
    that make it at once as they compile, one would lose what it compiled."""
    caches = getattr(kernel, "device_caches", None)
    if caches is not None:
        caches[device]


def _cache_dir() -> str:
    """Where Triton keeps what it compiled."""
    found = getattr(getattr(importlib.import_module("triton.knobs"), "cache", None), "dir", None)
    return str(found or os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")


class Compiled:
    """A compiled kernel with everything of a launch that does not change between calls of one specialisation.

    function: the driver's. `run` takes the grid, the stream, the function, `head`, and then the kernel's arguments: one
    by one, or, with `together`, as one sequence. encoded: how descriptors are encoded beforehand, or None.
    """

    def __init__(self, compiled: Any, cluster: int = 1):
        launcher = compiled.run
        self.function = compiled.function
        packed = compiled.packed_metadata
        if cluster > 1:
            packed = _packed_for(packed, cluster)
            if cluster > 8:  # not portable: the driver wants to be told, which this question for its occupancy does
                _utils().cuOccupancyMaxActiveClusters(self.function, packed[2], cluster)
        count = len(getattr(getattr(compiled.src, "fn", None), "params", ()))
        direct = _direct(launcher, packed, count)
        if direct is None:
            self.run, self.together, self.encoded = launcher, False, None
            self.head: tuple = (packed, None, None, None)  # launch metadata and hooks: only while profiling
        else:
            self.run = launcher.launch
            self.head, self.together = direct
            self.encoded = Encoded.of(self.run, compiled)


def _packed_for(packed: Any, cluster: int) -> tuple:
    """The metadata of a launch by clusters."""
    if not isinstance(packed, tuple) or len(packed) != 3:
        raise RuntimeError(f"Triton {version()} packs a launch's metadata as {packed!r}, not (warps, CTAs, shared)")
    warps, _, shared = packed
    return warps, cluster, shared


def _direct(launcher: Any, packed: Any, count: int) -> tuple[tuple, bool] | None:
    """What `launcher.launch` takes between the function and the kernel's `count` arguments, and whether it takes these
    together: seen from what the launcher's own call hands to it, so that a release that changes that is noticed.

    None where `launch` cannot be called in its place: it is told of memory that each launch needs, or is unknown.
    """
    scratch = [getattr(launcher, f"{kind}_scratch_size", None) for kind in ("global", "profile")]
    if scratch != [0, 0] or not hasattr(launcher, "launch"):
        return None
    told: list[tuple] = []
    probe = copy.copy(launcher)
    probe.launch = lambda *args: told.append(args)
    place, values = (2, 3, 5, 7, 11), tuple(object() for _ in range(count))  # grid, stream, function
    probe(*place, packed, None, None, None, *values)
    if len(told) != 1 or told[0][:5] != place:
        return None
    rest = told[0][5:]
    if rest[-1:] == (values,):
        return rest[:-1], True
    split = len(rest) - count
    return (rest[:split], False) if rest[split:] == values else None


class Encoded(NamedTuple):
    """A launch whose tensor descriptors are encoded beforehand: Triton's wrapper does that for each by a few Python
    functions that look up what never changes, 2.5 us a descriptor.

    run: the launcher below that wrapper; it takes the encoded descriptor, then its shape and strides. encode: the
    driver's function. formats: what Triton says of each descriptor, in the order of the kernel's parameters.
    """

    run: Callable[..., None]
    encode: Callable[..., Any]
    formats: tuple[Mapping[str, Any], ...]

    @classmethod
    def of(cls, wrapper: Callable[..., None], compiled: Any) -> Encoded | None:
        """None where there is no descriptor, or a Triton that is not known to do it so."""
        formats = tuple(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        plain = all(f and not f["fp4_padded"] and not f.get("is_im2col", False) for f in formats)
        if not formats or not plain or not version().startswith(_ENCODE) or not inspect.isfunction(wrapper):
            return None
        below = inspect.getclosurevars(wrapper).nonlocals.get("launcher")
        encode = getattr(_utils(), "fill_tma_descriptor_tiled", None) or getattr(_utils(), "fill_tma_descriptor", None)
        return None if below is None or encode is None else cls(below, encode, formats)

    def arguments(self, position: int, descriptor: Any) -> tuple:
        """All of `encode`'s arguments but the address, for the descriptor at a position among the descriptors."""
        from triton.backends.nvidia import driver

        form = self.formats[position]
        kind = driver.TMA_DTYPE_DEVICE_TO_HOST[form["elem_type"]]
        if getattr(descriptor, "round_f32_to_tf32", False):
            kind = driver.TMA_TF32
        sizes = form["block_size"], descriptor.shape, descriptor.strides
        return form["swizzle"], form["elem_size"], kind, *sizes, int(descriptor.padding == "nan")


@functools.cache
def version() -> str:
    """Triton's version."""
    import triton

    return triton.__version__


def _driver() -> Any:
    from triton.runtime import driver

    return driver.active


def _utils() -> Any:
    return _driver().utils


def most_clusters(kernel: Any, shared: int, parts: int) -> int | None:
    """How many clusters of `parts` CTAs with `shared` bytes of shared memory each the current device has room for, by
    the driver; None where Triton does not let it be asked. kernel: any without arguments."""
    ask = getattr(_utils(), "cuOccupancyMaxActiveClusters", None)
    return None if ask is None else ask(run(kernel, (0,), (), {"num_warps": 4}).function, shared, parts)


def runtime() -> Any:
    """What `listened` is asked of: Triton's hooks into launches, None where it keeps them otherwise."""
    from triton import knobs

    found = getattr(knobs, "runtime", None)
    chains = [getattr(found, f"launch_{when}_hook", None) for when in ("enter", "exit")]
    return found if all(hasattr(chain, "calls") for chain in chains) else None


def listened(runtime: Any) -> bool:
    """Whether somebody listens to launches by Triton's hooks."""
    return bool(runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls)


def was_compiled(result: Any) -> bool:
    """Whether what a launch returned is a compiled kernel, which an interpreted one is not."""
    from triton.compiler import CompiledKernel

    return isinstance(result, CompiledKernel)


def was_compiled_since(result: Any, moment: float) -> bool:
    """Whether what a launch returned was compiled, not read from Triton's cache, since `moment` (of `time.time`)."""
    files = getattr(result, "metadata_group", None)
    try:
        return bool(files) and min(os.stat(path).st_mtime for path in files.values()) >= moment
    except (OSError, AttributeError):  # a cache of another kind
        return False


def refusals() -> tuple[type[Exception], ...]:
    """What a launch raises where a configuration does not compile or does not fit the device."""
    found = []
    for home, name in (
        ("triton", "CompilationError"),
        ("triton.runtime.errors", "OutOfResources"),
        ("triton.runtime.errors", "PTXASError"),
    ):
        with contextlib.suppress(ImportError, AttributeError):
            found.append(getattr(importlib.import_module(home), name))
    return tuple(found)


def compile_for(kernel: Any, args: tuple, named: Mapping[str, Any], target: Any) -> Any:
    """What Triton's own launch would compile for these arguments, if `target` were the device."""
    import triton
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.jit import create_function_from_signature

    named = {**OPTIONS, **named}
    backend = make_backend(target)
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, options = bind(*args, **named)
    options, signature, constexprs, attributes = kernel._pack_args(backend, named, bound, specialization, options)
    if kernel.is_gluon():
        from triton.experimental.gluon._runtime import GluonASTSource as ASTSource
    source = ASTSource(kernel, signature, constexprs, attributes)
    return triton.compile(source, target=target, options=options.__dict__)
