"""Autoregressive generation with a key/value cache."""

from __future__ import annotations

import torch
from torch import Tensor

from tilesmith.engine.argument_checks import number, one_device, readable, size, tensor
from tilesmith.nn.decoder import Decoder


@torch.no_grad()
def generate(
    decoder: Decoder,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    prompt_lengths: Tensor | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    stop_token: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """New tokens [B, max_new_tokens] that continue prompt [B, T].

    prompt_lengths: [B] int32 or int64, from 1 to T, for prompts of different lengths; what follows in their rows may be
    any token and is ignored. temperature: 0 takes the likeliest token, else the logits are divided by it and a token is
    drawn, from the `top_k` likeliest if given. stop_token: a row that has produced it repeats it, and the loop ends
    once all rows have; to find that out costs one wait for the device a token. generator: where random numbers come
    from.

    Call `decoder.eval()` first: in training mode hidden_dropout applies. If FSDP2 shards the decoder, register the
    methods that are called, `hidden_states` and `logits`, by `torch.distributed.fsdp.register_fsdp_forward_method`.

    Raises ValueError for an empty prompt, where prompt and new tokens exceed the decoder's max_positions, for a
    stop_token outside the vocabulary and, on a CPU, for prompt_lengths outside 1 to T.
    """
    if not isinstance(decoder, Decoder):
        raise TypeError(
            f"generate: decoder must be a Decoder, got {type(decoder).__name__}; call the method "
            "generate of a transformers model"
        )
    tensor("generate", "prompt", prompt, ("batch", "tokens"))
    size("generate", "max_new_tokens", max_new_tokens, 0)
    number("generate", "temperature", temperature, 0.0)
    batch, length = prompt.shape
    if prompt.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"generate: prompt has dtype {prompt.dtype}; it must hold tokens, int64 or int32")
    if top_k is not None:
        size("generate", "top_k", top_k)
    if stop_token is not None:
        _check_stop(stop_token, decoder.config.vocab_size)
    if prompt_lengths is not None:
        _check_lengths(prompt_lengths, prompt)
    if length == 0:
        raise ValueError("generate: prompt has no tokens; give at least one, such as the one that begins a text")
    if length + max_new_tokens > decoder.config.max_positions:
        raise ValueError(
            f"generate: {length} prompt tokens and max_new_tokens = {max_new_tokens} make {length + max_new_tokens}; "
            f"the decoder has {decoder.config.max_positions} positions: pass fewer"
        )
    cache = decoder.new_cache(batch, length + max_new_tokens)
    new = prompt.new_empty(batch, max_new_tokens)
    last = decoder.hidden_states(prompt, cache=cache)
    if prompt_lengths is None:
        last = last[:, -1]
    else:
        last = last[torch.arange(batch, device=prompt.device), prompt_lengths - 1]
        cache.lengths.copy_(prompt_lengths)
    for i in range(max_new_tokens):
        token = _choose(decoder.logits(last), temperature, top_k, generator)
        if stop_token is not None and i > 0:
            token = torch.where(new[:, i - 1] == stop_token, stop_token, token)
        new[:, i] = token
        if stop_token is not None and bool((token == stop_token).all()):
            new[:, i + 1 :] = stop_token
            break
        if i + 1 < max_new_tokens:
            last = decoder.hidden_states(token[:, None], cache=cache)[:, -1]
    return new


def _check_lengths(lengths: Tensor, prompt: Tensor) -> None:
    tensor("generate", "prompt_lengths", lengths)
    if lengths.shape != prompt.shape[:1] or lengths.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"generate: prompt_lengths must be [{prompt.shape[0]}] int32, got {list(lengths.shape)} {lengths.dtype}"
        )
    one_device("generate", "prompt_lengths", lengths, "prompt", prompt)
    if readable(lengths) and ((lengths < 1) | (lengths > prompt.shape[1])).any():
        raise ValueError(
            f"generate: prompt_lengths holds {lengths.tolist()[:8]}; the rows of prompt have {prompt.shape[1]} tokens: "
            f"give numbers from 1 to {prompt.shape[1]}"
        )


def _check_stop(token: int, classes: int) -> None:
    if size("generate", "stop_token", token, 0) >= classes:
        raise ValueError(f"generate: stop_token is {token}; it must be 0 … {classes - 1}, or None to go on to the end")


def _choose(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """One token a row of logits [B, vocab_size]."""
    if temperature == 0.0:
        return logits.argmax(dim=-1)
    logits = logits.float()
    below = logits - logits.amax(dim=-1, keepdim=True)  # the largest stays 0, however small the temperature
    logits = below / max(temperature, torch.finfo(torch.float32).tiny)
    if top_k is not None:
        logits = logits.where(logits >= logits.topk(min(top_k, logits.shape[-1])).values[:, -1:], float("-inf"))
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)[:, 0]
