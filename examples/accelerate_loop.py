"""A loop of one's own with accelerate: optimise, then prepare.

accelerate launch examples/accelerate_loop.py
"""

import torch
from accelerate import Accelerator
from transformers import LlamaConfig, LlamaForCausalLM

import tilesmith


def main():
    accelerator = Accelerator(gradient_accumulation_steps=2)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = tilesmith.optimize(LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=128)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(128, (8, 16), generator=torch.Generator().manual_seed(1))
    loader = torch.utils.data.DataLoader(tokens, batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(3):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=batch, labels=batch).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    accelerator.print("losses", *(f"{loss:.4f}" for loss in losses[:: len(loader)]))
    accelerator.print(accelerator.unwrap_model(model).tilesmith_report)
    assert losses[-1] < losses[0]


if __name__ == "__main__":
    main()
