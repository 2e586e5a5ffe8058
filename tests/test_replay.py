"""What a replay makes anew for each call. That replays compute what launchers do, test_ops checks on a GPU."""

import pytest
import torch

from tilesmith.engine.replay import _descriptor


def test_a_descriptor_of_other_memory_is_the_recorded_one_but_for_its_base():
    tensor_descriptor = pytest.importorskip("triton.tools.tensor_descriptor").TensorDescriptor
    template = tensor_descriptor(torch.zeros(64, 32), [64, 32], [32, 1], [16, 16])
    other = torch.ones(64, 32)
    made = _descriptor(template, other)
    assert made.base is other and template.base is not other
    assert {**vars(made), "base": None} == {**vars(template), "base": None}
