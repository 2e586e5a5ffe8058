"""The peak that `fit_sequence` predicts, beside what the allocator of a GPU sees, by the kernels that serve there."""

import pytest
import torch

from devices import ON_GPU
from tilesmith import fit_sequence, optimize
from tilesmith.engine.timing import peak_memory


@pytest.mark.large
@pytest.mark.skipif(not ON_GPU, reason="peaks are measured on a GPU")
@pytest.mark.parametrize("keep", ["device", "host", "e4m3"])
def test_the_predicted_peak_is_what_the_allocator_sees(keep):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=1024, intermediate_size=3584, num_hidden_layers=6, num_attention_heads=8, num_key_value_heads=2,
        vocab_size=1024, use_cache=False,
    )  # fmt: skip
    with torch.device("cuda"):
        model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).train()
    optimize(model)
    plan = fit_sequence(model, 131_072, keep=keep)
    ids = torch.zeros(1, 131_072, dtype=torch.long, device="cuda")

    def step():
        model(input_ids=ids, labels=ids).loss.backward()
        model.zero_grad()

    step()
    peak = peak_memory(step, "cuda")
    assert abs(plan.peak - plan.parts["parameters"] - peak) <= 0.1 * peak
