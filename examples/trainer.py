"""Train with transformers' Trainer and one callback; the losses are those of the plain model.

python examples/trainer.py
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from tilesmith.integrations.trainer import TilesmithCallback


def tiny_model() -> LlamaForCausalLM:
    """A Llama of two layers."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=128))


def losses(model, callbacks=(), steps=4, **options):
    """Losses of `steps` steps on the same data."""
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(128, (16,), generator=generator) for _ in range(2 * steps)]
    data = [{"input_ids": row, "labels": row} for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=2, logging_steps=1, learning_rate=1e-2, report_to=[],
            save_strategy="no", disable_tqdm=True, use_cpu=not torch.cuda.is_available(), **options,
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=list(callbacks))
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main():
    plain, model = losses(tiny_model()), tiny_model()
    found = losses(model, [TilesmithCallback()])
    print("losses", *(f"{loss:.4f}" for loss in found))
    print(model.tilesmith_report)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(plain), rtol=1e-3, atol=1e-4)


if __name__ == "__main__":
    main()
