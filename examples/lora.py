"""LoRA by PEFT on an optimised model, plain or with 4-bit weights, before `optimize` or after it, and on experts.

python examples/lora.py
python examples/lora.py --four-bit    # needs bitsandbytes
"""

import argparse

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import tilesmith


def adapted(four_bit: bool, first: bool):
    """A small Llama with adapters on all its products, optimised before they are added or after it."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=128))
    if four_bit:
        model = quantized(model)
    if first:
        tilesmith.optimize(model)
    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=names, init_lora_weights=False))
    return model if first else tilesmith.optimize(model)


def quantized(model):
    """The model with its layers' products in NF4, as `BitsAndBytesConfig(load_in_4bit=True)` loads one."""
    import bitsandbytes

    for layer in model.model.layers:
        for owner in (layer.self_attn, layer.mlp):
            for name, linear in list(owner.named_children()):
                if isinstance(linear, torch.nn.Linear):
                    narrow = bitsandbytes.nn.Linear4bit(
                        linear.in_features, linear.out_features, bias=False, quant_type="nf4",
                        compute_dtype=torch.float32,
                    )  # fmt: skip
                    narrow.weight = bitsandbytes.nn.Params4bit(
                        linear.weight.data, requires_grad=False, quant_type="nf4"
                    )
                    setattr(owner, name, narrow)
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def adapted_experts():
    """A small Qwen3-MoE with adapters on the stacked weights of its experts, which are parameters, not layers."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "moe_intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen3MoeConfig(**sizes, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, vocab_size=128)
    names = ["experts.gate_up_proj", "experts.down_proj"]
    how = LoraConfig(r=4, target_modules=[], target_parameters=names, init_lora_weights=False)
    model = get_peft_model(Qwen3MoeForCausalLM(config), how)
    return tilesmith.optimize(model.to("cuda" if torch.cuda.is_available() else "cpu"))


def gradients(model):
    """Loss, and gradients of the adapters."""
    device = next(model.parameters()).device
    tokens = torch.randint(128, (2, 16), generator=torch.Generator().manual_seed(2)).to(device)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]


def compared(model):
    """The loss of a step, which is that of the model without `optimize`, as its gradients are."""
    loss, found = gradients(model)
    model.zero_grad()
    plain_loss, plain = gradients(tilesmith.undo(model))
    torch.testing.assert_close(loss, plain_loss, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found, plain, rtol=1e-3, atol=1e-5)
    return loss


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--four-bit", action="store_true", help="keep the frozen weights in NF4")
    four_bit = parser.parse_args().four_bit
    for first in (True, False):
        model = adapted(four_bit, first)
        report = tilesmith.report(model.get_base_model() if first else model)
        print("optimised", "before" if first else "after", "the adapters: loss", f"{compared(model):.4f}")
    print(report)
    experts = adapted_experts()
    report = tilesmith.report(experts)
    print("adapters on experts: loss", f"{compared(experts):.4f}")
    print(report)


if __name__ == "__main__":
    main()
