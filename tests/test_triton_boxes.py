"""Descriptors whose boxes are smaller than Triton's tiles: what their kernel's launcher is told."""

import inspect
from types import SimpleNamespace

import pytest
import torch

from tilesmith.engine import launcher, torch_private, triton_private
from tilesmith.engine.backends import triton_missing


class TensorDescriptor(SimpleNamespace):
    pass


class Kernel:
    def __init__(self):
        self.signature = SimpleNamespace(parameters={"q": None, "count": None, "out": None})
        forms = [{"block_size": [1, 1, 64, 64]}, {"block_size": [1, 1, 64, 128]}]
        self.compiled = SimpleNamespace(metadata=SimpleNamespace(tensordesc_meta=forms))
        self.told, self.warmed = None, 0

    def warmup(self, *args, grid, **named):
        self.warmed += 1
        return self.compiled

    def __getitem__(self, grid):
        def launched(*args, **named):
            self.told = [form["block_size"] for form in self.compiled.metadata.tensordesc_meta]
            return self.compiled

        return launched


def test_a_launcher_is_told_of_boxes_before_it_encodes_descriptors():
    kernel = Kernel()
    triton_private.run(kernel, (1,), (TensorDescriptor(box=(1, 7, 9)),), {"out": TensorDescriptor(), "count": 3})
    assert kernel.told == [[1, 7, 9, 64], [1, 1, 64, 128]] and kernel.warmed == 1


def test_a_launcher_is_told_of_boxes_once(monkeypatch):
    """A profiler that listens to Triton's hooks hears of each launch by Triton's own call."""
    kernel, names = Kernel(), ("q", "out")
    kernel.signature = inspect.Signature([inspect.Parameter(n, inspect.Parameter.POSITIONAL_ONLY) for n in names])
    kernel.params = [SimpleNamespace(is_constexpr=False)] * 2
    base = torch.zeros(4, dtype=torch.bfloat16)
    boxed, plain = (TensorDescriptor(base=base, block_shape=[64, 64], padding="zero") for _ in range(2))
    boxed.box = (1, 7, 9)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch_private, "current_device", lambda: 0)
    monkeypatch.setattr(launcher, "hooked", lambda: True)
    monkeypatch.setattr(launcher, "_compiled", {})
    monkeypatch.setattr(launcher, "_remember", lambda key, compiled: launcher._compiled.setdefault(key, compiled))
    for _ in range(3):
        kernel.told = None
        launcher.launch(kernel, (1,), boxed, plain)
        assert kernel.told == [[1, 7, 9, 64], [1, 1, 64, 128]]
    assert kernel.warmed == 1


def test_other_kernels_are_launched_as_they_are():
    kernel = Kernel()
    del kernel.signature  # kernels of the interpreter have none
    triton_private.run(kernel, (1,), (TensorDescriptor(),), {"out": TensorDescriptor(), "count": 3})
    assert kernel.told == [[1, 1, 64, 64], [1, 1, 64, 128]] and kernel.warmed == 0


@pytest.mark.skipif(triton_missing() is not None, reason=str(triton_missing()))
@pytest.mark.parametrize(
    ("rows", "heads", "box"), [(9, 7, (1, 7, 9)), (21, 3, (1, 3, 21)), (16, 4, None), (16, 1, None), (64, 1, None)]
)
def test_boxes_are_those_of_rows_that_are_no_power_of_two(rows, heads, box):
    from tilesmith.ops.attn.hopper.launch import descriptor

    made = descriptor(torch.zeros(2, 14, 40, 128, dtype=torch.bfloat16), rows, heads=heads)
    assert getattr(made, "box", None) == box
    assert list(made.block_shape) == ([1, heads, rows, 128] if box is None else [1, 1, 64, 128])
