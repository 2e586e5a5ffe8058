"""A few of transformers' causal language models, other ones each day: optimised they compute the same, undone the very
same. `make families` runs all of them.

The day is the seed: TILESMITH_FAMILIES=2026-11-23 repeats that day's choice, a list of families runs these."""

import datetime
import os
import random
import warnings

import pytest

pytest.importorskip("transformers", minversion="5")

import all_families

COUNT = 6


def _chosen():
    asked = os.environ.get("TILESMITH_FAMILIES", "") or datetime.date.today().isoformat()
    known = sorted(all_families.families())
    if asked.split(",")[0] in known:
        return asked.split(","), asked
    quick = [family for family in known if family not in all_families.SLOW]
    return random.Random(asked).sample(quick, len(quick)), asked


def test_families_of_the_day():
    """Of those that cannot be built at a tiny size the next one is taken."""
    order, seed = _chosen()
    results = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for family in order:
            result = all_families.run(family)
            if result.outcome != "not built":
                results.append(result)
            if len(results) == COUNT:
                break
    told = "\n".join(f"{result.outcome} {result.family}: {result.told}" for result in results)
    assert results and all(result.outcome == "right" for result in results), f"TILESMITH_FAMILIES={seed}\n{told}"


METHOD = "_attn computes softmax(scale · Q · Kᵀ + mask) · V; where weights are asked for it still does"
SERVED = {
    "gptj": ("rope", "GPTJAttention", "apply_rotary_pos_emb rotates neighbouring features"),
    "nanochat": (
        "rope",
        "NanoChatAttention",
        "apply_rotary_pos_emb rotates the halves of a head by the opposite angles",
    ),
    "llama4_text": ("rope", "Llama4TextAttention", "apply_rotary_emb rotates neighbouring features"),
    "olmo": ("norm", "OlmoLayerNorm", "LayerNorm"),
    "codegen": ("attention", "CodeGenAttention", METHOD),
    "gpt_neo": ("attention", "GPTNeoSelfAttention", METHOD),
    "arcee": ("activation", "ReLUSquaredActivation", "computes relu_squared"),
}


@pytest.mark.parametrize("family", SERVED)
def test_what_is_served_of_older_and_other_families(family):
    result = all_families.run(family)
    assert result.outcome == "right", result.told
    assert SERVED[family] in result.rows
