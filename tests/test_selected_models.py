"""Models of transformers whose trained indexer selects blocks of keys: their attention makes no dense mask."""

import pytest
import torch

import tilesmith
from tilesmith.engine import use
from tilesmith.models.attention import selected_blocks

transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def attention_everywhere():
    """Let the op serve attention by its reference, where no kernel of it is."""
    with use(attention="reference"):
        yield


def _minimax_m3():
    if not hasattr(transformers, "MiniMaxM3VLForCausalLM"):
        pytest.skip("this transformers has no MiniMax-M3")
    torch.manual_seed(0)
    config = transformers.MiniMaxM3VLTextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=16, dense_intermediate_size=32, shared_intermediate_size=16,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16, rotary_dim=8,
        num_experts_per_tok=1, num_local_experts=2, index_n_heads=2, index_head_dim=8, index_block_size=4,
        index_topk_blocks=2, layer_types=["full_attention", "minimax_m3_sparse"], mlp_layer_types=["dense", "dense"],
        pad_token_id=0, bos_token_id=1, eos_token_id=2, max_position_embeddings=64,
    )  # fmt: skip
    return transformers.MiniMaxM3VLForCausalLM._from_config(config, attn_implementation="eager")


def _gradients(model, tokens, **given):
    model.zero_grad()
    logits = model(tokens, **given).logits
    logits.float().log_softmax(-1).square().mean().backward()
    return logits.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _without_dense_masks(model, monkeypatch):
    """Have a dense mask of the selection raise."""

    def refused(*args, **kwargs):
        raise AssertionError("a dense mask was built")

    for module in model.modules():
        if hasattr(module, "build_block_mask"):
            monkeypatch.setattr(module, "build_block_mask", refused)


def test_minimax_m3_attends_to_its_blocks(monkeypatch):
    model = _minimax_m3()
    tokens = torch.randint(3, 64, (2, 22))
    logits, gradients = _gradients(model, tokens)
    tilesmith.optimize(model)
    assert model.config._attn_implementation == "tilesmith"
    with monkeypatch.context() as patched:
        _without_dense_masks(model, patched)
        ours, found = _gradients(model, tokens)
    torch.testing.assert_close(ours, logits, rtol=1e-4, atol=1e-5)
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-6)
    tilesmith.undo(model)
    torch.testing.assert_close(model(tokens).logits, logits)


def test_minimax_m3_selects_for_some_queries_at_a_time(monkeypatch):
    model = _minimax_m3().eval()
    (indexer,) = (m for m in model.modules() if hasattr(m, "build_block_mask"))
    tokens = torch.randint(3, 64, (2, 22))
    selections, largest = [], []
    monkeypatch.setattr(
        indexer,
        "build_block_mask",
        lambda found, *a, f=indexer.build_block_mask: selections.append(found) or f(found, *a),
    )
    with torch.no_grad():
        wanted = model(tokens).logits
        monkeypatch.undo()
        hook = indexer.register_forward_hook(lambda module, args, out: selections.append(out))
        tilesmith.optimize(model)
        monkeypatch.setattr(selected_blocks, "LARGEST", 1)
        monkeypatch.setattr(torch, "matmul", lambda a, b, f=torch.matmul: largest.append(a.shape[2]) or f(a, b))
        ours = model(tokens).logits
        hook.remove()
        model.generate(tokens, max_new_tokens=2, do_sample=False)
    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)
    whole, parts = selections[0].sort(-1).values, selections[1].sort(-1).values
    assert torch.equal(whole, parts) and 4 in largest and 22 not in largest


def test_minimax_m3_with_padding_and_a_cache():
    model = _minimax_m3().eval()
    tokens = torch.randint(3, 64, (2, 22))
    shown = torch.ones_like(tokens)
    shown[1, 15:] = 0
    with torch.no_grad():
        padded = model(tokens, attention_mask=shown).logits
        written = model.generate(tokens[:1], max_new_tokens=6, do_sample=False)
        tilesmith.optimize(model)
        ours = model(tokens, attention_mask=shown).logits
        torch.testing.assert_close(ours[shown.bool()], padded[shown.bool()], rtol=1e-4, atol=1e-5)
        assert torch.equal(model.generate(tokens[:1], max_new_tokens=6, do_sample=False), written)
