"""A few of transformers' models (text, images, sound), other ones for each release of transformers: optimised they
compute the same, undone the very same. `make families` runs all of them.

The release is the seed, so that a commit passes on each day or on none. TILESMITH_FAMILIES=2026-11-23 makes another
choice; names of tasks and families run these."""

import inspect
import random
import warnings

import pytest

pytest.importorskip("transformers", minversion="5")

import transformers

import all_families
from family_models import SLOW, families
from tilesmith.settings import settings

COUNT = {"causal_lm": 3, "masked_lm": 1, "seq2seq_lm": 1, "image_classification": 1, "ctc": 1, "speech_seq2seq": 1}


def _chosen():
    """(names in the order of trial, how many of each task are enough, what was asked for)."""
    asked = settings().families or transformers.__version__
    try:
        return all_families.chosen(asked.split(",")), {}, asked
    except ValueError:  # a seed
        quick = [name for name in sorted(families()) if name not in SLOW]
        return random.Random(asked).sample(quick, len(quick)), dict(COUNT), asked


def test_some_families():
    """Of those that cannot be built at a tiny size the next one is taken."""
    order, wanted, seed = _chosen()
    results = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in order:
            task = name.split("/")[0]
            if wanted.get(task) == 0:
                continue
            result = all_families.run(name)
            if result.outcome != "not built":
                results.append(result)
                if wanted:
                    wanted[task] -= 1
    told = "\n".join(f"{result.outcome} {result.family}: {result.told}" for result in results)
    assert results and all(result.outcome == "right" for result in results), f"TILESMITH_FAMILIES={seed}\n{told}"


METHOD = "_attn computes softmax(scale · Q · Kᵀ + mask) · V; where weights are asked for it still does"
INLINE = (
    "its scores are followed from queries and keys to the values; where it does more with them than scale, bias, mask, "
    "softmax and dropout, they are computed; weights that it returns unasked, when they are read"
)
INTERFACE = "called through transformers' attention interface"
CODEGEN = INTERFACE if "cache" in inspect.signature(transformers.CodeGenModel.forward).parameters else METHOD
"""transformers 5.24 has written it anew."""
# (row, number of calls of its op)
SERVED = {
    "causal_lm/gptj": (("rope", "GPTJAttention", "apply_rotary_pos_emb rotates neighbouring features"), "rope 4"),
    "causal_lm/nanochat": (
        ("rope", "NanoChatAttention", "apply_rotary_pos_emb rotates the halves of a head by the opposite angles"),
        "rope 2",
    ),
    "causal_lm/llama4_text": (
        ("rope", "Llama4TextAttention", "apply_rotary_emb rotates neighbouring features"),
        "rope 2",
    ),
    "causal_lm/olmo": (("norm", "OlmoLayerNorm", "LayerNorm"), "layer_norm 3"),
    "causal_lm/codegen": (("attention", "CodeGenAttention", CODEGEN), "attention 2"),
    "causal_lm/gpt_neo": (("attention", "GPTNeoSelfAttention", METHOD), "attention 2"),
    "causal_lm/openai-gpt": (("attention", "Attention", METHOD), "attention 2"),
    "image_classification/imagegpt": (("attention", "ImageGPTAttention", METHOD), "attention 2"),
    "causal_lm/apertus": (("activation", "XIELUActivation", "computes xIELU"), "xielu 2"),
    "causal_lm/mamba2": (
        ("norm", "MambaRMSNormGated", "RMSNorm of x * silu(gate), rounded before the weight"),
        "rms_norm_gated 2",
    ),
    "causal_lm/arcee": (("activation", "ReLUSquaredActivation", "computes relu_squared"), "relu_squared 2"),
    "causal_lm/falcon": (("attention", "FalconAttention", INLINE), "attention 2, gelu 2, layer_norm 3"),
    "masked_lm/deberta-v2": (("attention", "DisentangledSelfAttention", INLINE), "attention 2"),
    "image_classification/pvt": (("attention", "PvtEfficientSelfAttention", INLINE), "attention 4"),
    "speech_seq2seq/speecht5": (("attention", "SpeechT5Attention", INLINE), "attention 6"),
}


@pytest.mark.parametrize("name", SERVED)
def test_what_is_served_of_older_and_other_families(name):
    result = all_families.run(name)
    row, called = SERVED[name]
    assert result.outcome == "right", result.told
    assert row in result.rows
    assert called in result.told


def test_a_norm_over_channels_and_places_is_no_layer_norm():
    """On [rows, width] nn.GroupNorm of one group is one."""
    result = all_families.run("image_classification/poolformer")
    assert result.outcome == "right", result.told
    assert (
        "norm",
        "PoolFormerGroupNorm",
        "it normalises over groups of channels, for which there is no op",
    ) in result.left
