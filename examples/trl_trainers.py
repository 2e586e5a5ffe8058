"""TRL's SFTTrainer and DPOTrainer with their own fused head, on an optimised model.

    python examples/trl_trainers.py    # needs trl

TRL's trainers replace `model.forward` while they are made, so `optimize` comes before them. Their head computes the
loss from hidden states; the rest of the model runs the library's ops.
"""

import tempfile

import torch
import trl
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import tilesmith

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def tiny_model() -> LlamaForCausalLM:
    """A Llama of two layers."""
    torch.manual_seed(0)
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    return LlamaForCausalLM(LlamaConfig(**SIZES, **ids, num_key_value_heads=2, vocab_size=32))


def letters() -> PreTrainedTokenizerFast:
    """A tokenizer of letters."""
    words = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *"abcdefghijklmnopqrstuvwxyz"])}
    tokenizer = Tokenizer(models.WordLevel(words, "<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def logged(kind: str, model) -> list[float]:
    """Losses and norms of gradients of three steps."""
    if kind == "sft":
        trainer, config, more = trl.SFTTrainer, trl.SFTConfig, {}
        data = Dataset.from_dict({"text": ["a b c d e f", "f e d c b a", "a a b b", "z y x w v"] * 2})
    else:
        trainer, config, more = trl.DPOTrainer, trl.DPOConfig, {"ref_model": tiny_model()}
        columns = {"prompt": ["a b c", "d e f"], "chosen": [" d e", " g h"], "rejected": [" z z", " y y"]}
        data = Dataset.from_dict({name: texts * 4 for name, texts in columns.items()})
    with tempfile.TemporaryDirectory() as folder:
        arguments = config(
            output_dir=folder, max_steps=3, per_device_train_batch_size=2, report_to=[], logging_steps=1, bf16=False,
            use_cpu=not torch.cuda.is_available(), save_strategy="no", learning_rate=1e-2, disable_tqdm=True,
        )  # fmt: skip
        made = trainer(model=model, args=arguments, train_dataset=data, processing_class=letters(), **more)
        made.train()
    return [entry[name] for entry in made.state.log_history if "loss" in entry for name in ("loss", "grad_norm")]


def main():
    for kind in ("sft", "dpo"):
        plain, model = logged(kind, tiny_model()), tilesmith.optimize(tiny_model())
        found = logged(kind, model)
        print(kind, "losses", *(f"{loss:.4f}" for loss in found[::2]))
        print(model.tilesmith_report)
        torch.testing.assert_close(torch.tensor(found), torch.tensor(plain), rtol=1e-3, atol=1e-4)


if __name__ == "__main__":
    main()
