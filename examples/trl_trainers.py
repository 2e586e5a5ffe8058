"""TRL's SFTTrainer, DPOTrainer and GRPOTrainer on an optimised model.

    python examples/trl_trainers.py    # needs trl

TRL's trainers replace `model.forward` while they are made, so `optimize` comes before them. They compute the loss; the
rest of the model runs the library's ops. GRPO's loss is 0 up to rounding, since the advantages of a group sum to 0; the
norm of its gradient is not.
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


def vowels(completions: list[str], **columns) -> list[float]:
    """A reward: the share of vowels."""
    return [sum(letter in "aeiou" for letter in text) / max(len(text), 1) for text in completions]


def parts(kind: str) -> tuple[type, type, dict]:
    """A trainer, its configuration, and what else it takes."""
    if kind == "sft":
        texts = ["a b c d e f", "f e d c b a", "a a b b", "z y x w v"] * 2
        return trl.SFTTrainer, trl.SFTConfig, {"train_dataset": Dataset.from_dict({"text": texts})}
    if kind == "grpo":
        prompts = Dataset.from_dict({"prompt": ["a b c", "d e f"] * 4})
        return trl.GRPOTrainer, trl.GRPOConfig, {"train_dataset": prompts, "reward_funcs": vowels}
    columns = {"prompt": ["a b c", "d e f"], "chosen": [" d e", " g h"], "rejected": [" z z", " y y"]}
    pairs = Dataset.from_dict({name: texts * 4 for name, texts in columns.items()})
    return trl.DPOTrainer, trl.DPOConfig, {"train_dataset": pairs, "ref_model": tiny_model()}


def logged(kind: str, model, **how) -> list[float]:
    """Losses and norms of gradients of three steps. how: more arguments of the trainer."""
    trainer, config, more = parts(kind)
    sizes = {"max_completion_length": 6, "num_generations": 2} if kind == "grpo" else {}
    with tempfile.TemporaryDirectory() as folder:
        arguments = config(
            output_dir=folder, max_steps=3, per_device_train_batch_size=2, report_to=[], logging_steps=1, bf16=False,
            use_cpu=not torch.cuda.is_available(), save_strategy="no", learning_rate=1e-2, disable_tqdm=True, **sizes,
        )  # fmt: skip
        made = trainer(model=model, args=arguments, processing_class=letters(), **more, **how)
        made.train()
    return [entry[name] for entry in made.state.log_history if "loss" in entry for name in ("loss", "grad_norm")]


def main():
    for kind in ("sft", "dpo", "grpo"):
        plain, model = logged(kind, tiny_model()), tilesmith.optimize(tiny_model())
        found = logged(kind, model)
        told = [f"{value:.4f}" for value in found]
        print(kind, "losses", *told[::2], "norms", *told[1::2])
        print(model.tilesmith_report)
        torch.testing.assert_close(torch.tensor(found), torch.tensor(plain), rtol=1e-3, atol=1e-4)


if __name__ == "__main__":
    main()
