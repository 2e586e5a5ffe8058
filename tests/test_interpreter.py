"""The quick way through Triton's interpreter against the interpreter's own: the same bits, types and errors."""

import json
import os
import subprocess
import sys

import pytest
import torch

import tilesmith
from interpreter_fast import ARITHMETIC
from tilesmith.engine.backends import interpreting

SCRIPT = """
import json, os, sys, warnings
warnings.simplefilter("ignore")
os.environ["TRITON_INTERPRET"] = "1"
import numpy as np
import triton.language as tl
from triton.runtime import interpreter
if sys.argv[1] == "quick":
    import interpreter as ours
    ours.mend()
from triton.language.semantic import TritonSemantic

semantic = interpreter.interpreter_semantic
interpreter._patch_lang(lambda: tl)  # as inside a launch
SCALARS = [tl.int1, tl.uint8, tl.int32, tl.uint32, tl.int64, tl.uint64, tl.float16, tl.float32, tl.float64]
SHAPES = [(), (4,), (1,), (4, 1), (1, 2), (4, 2)]
PLAIN = [0, 3, -2, 300, 2**31, 2**40, -0.0, 0.1, 1e300, float("nan"), True]

def tensor(kind, shape, seed):
    draw = np.random.default_rng(seed).uniform(-9, 9, shape or (1,))
    dtype = interpreter._get_np_dtype(kind)
    draw = draw > 0 if kind is tl.int1 else np.abs(draw) + 1 if kind.is_int_unsigned() else draw
    data = draw.astype(dtype)
    return tl.tensor(interpreter.TensorHandle(data, kind), tl.block_type(kind, list(shape)) if shape else kind)

def told(run):
    try:
        found = run()
    except Exception as error:
        return type(error).__name__
    data = found.handle.data
    shape = [s.value for s in found.shape]
    data = np.broadcast_to(data, shape or (1,)).astype(interpreter._get_np_dtype(found.dtype))
    return [found.type.name, shape, found.numel.value, found.dtype.name, data.tobytes().hex()]

NONE = (tl.PropagateNan.NONE,)
MORE = {"add": (False,), "sub": (False,), "mul": (False,), "minimum": NONE, "maximum": NONE}
rows = {}
for name in sys.argv[2].split():
    method, more = getattr(semantic, name), MORE.get(name, ())
    for a in SCALARS:
        for b in SCALARS:
            x, y = tensor(a, (4, 1), 1), tensor(b, (1, 2), 2)
            rows[f"{name} {a} {b}"] = told(lambda: method(x, y, *more))
        for n in PLAIN:
            x = tensor(a, (4,), 3)
            rows[f"{name} {a} {n}"] = told(lambda: method(x, n, *more))
            rows[f"{name} {n} {a}"] = told(lambda: method(n, x, *more))
    for p in SHAPES:
        for q in SHAPES:
            x, y = tensor(tl.int32, p, 4), tensor(tl.int32, q, 5)
            rows[f"{name} {p} {q}"] = told(lambda: method(x, y, *more))
for p in SHAPES:
    for q in SHAPES:
        for side in (0, 1):
            x, y = tensor(tl.float32, p, 8), tensor(tl.int1, q, 9)
            rows[f"broadcast {p} {q} {side}"] = told(lambda: semantic.broadcast_impl_value(x, y)[side])
            rows[f"where {p} {q} {side}"] = told(lambda: semantic.where(y, *((x, 0.5) if side else (-1, x))))
for a in SCALARS:
    for b in SCALARS:
        rows[f"cast {a} {b}"] = told(lambda: semantic.cast(tensor(a, (4, 2), 6), b))
for kind in (tl.int1, tl.int32, tl.float16, tl.float64):
    pointer = tl.pointer_type(kind)
    for shape in SHAPES:
        address = tl.tensor(interpreter.TensorHandle(np.array([4096], np.uint64), pointer), pointer)
        for b in (tl.int32, tl.int64, tl.uint32):
            rows[f"offset {kind} {b} {shape}"] = told(lambda: semantic.add(address, tensor(b, shape, 7), True))
    rows[f"offset {kind} -3"] = told(lambda: semantic.sub(address, 3, True))
    rows[f"offset {kind} 3"] = told(lambda: semantic.add(address, 3, True))
print(json.dumps(rows))
"""


@pytest.mark.usefixtures("needs_triton")
def test_the_quick_way_computes_the_same():
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, way, " ".join(ARITHMETIC)], env=environment, stdout=-1, stderr=-1, text=True
        )
        for way in ("quick", "own")
    ]
    told = [run.communicate(timeout=600) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], [errors[-2000:] for _, errors in told]
    quick, own = (json.loads(out) for out, _ in told)
    assert len(own) > 5000 and quick.keys() == own.keys()
    wrong = {name: (row, quick[name]) for name, row in own.items() if quick[name] != row}
    assert not wrong, list(wrong.items())[:5]


@pytest.mark.usefixtures("needs_triton")
@pytest.mark.skipif(not interpreting(), reason="kernels are compiled here")
def test_a_launch_leaves_the_language_as_it_was():
    import triton.language as tl

    def held():
        owners = (tl, tl.core, tl.math, tl.tensor, tl.dtype)
        return [{n: x for n, x in vars(owner).items() if n != "__annotations__"} for owner in owners]

    before = held()
    with tilesmith.use(rms_norm="triton"):
        tilesmith.ops.rms_norm(torch.randn(3, 8), torch.ones(8))
    assert held() == before
