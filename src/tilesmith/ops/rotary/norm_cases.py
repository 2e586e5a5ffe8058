"""Example inputs of rms_norm_rope: those of rope, with weights."""

import torch
from torch import Tensor

from tilesmith.engine import Case, T
from tilesmith.engine.inits import around_one
from tilesmith.engine.memory import held


def normed(name: str, rope_args: dict, tags: frozenset[str], *, weights: str = "both", **options: object) -> Case:
    """A case of rms_norm_rope from the arguments of one of rope. weights: "both", "q", or "" for none; options may set
    `weight_dtype` and `frozen` (weights ask for no gradient)."""
    q, k = rope_args["q"], rope_args["k"]
    how = {"dtype": options.pop("weight_dtype", None), "grad": not options.pop("frozen", False), "init": around_one}
    row = options.get("norm_dim") == "row"

    def weight(x: T | None, wanted: bool) -> T | None:
        return T(x.shape[3] * (x.shape[1] if row else 1), **how) if x is not None and wanted else None

    both = {"q_weight": weight(q, weights != ""), "k_weight": weight(k, weights == "both")}
    rest = {n: v for n, v in rope_args.items() if n not in ("q", "k")}
    dtypes = {} if how["dtype"] is None else {"dtypes": (torch.float16, torch.bfloat16)}
    return Case(name, {"q": q, "k": k, **both, **rest, **options}, tags, **dtypes)


def angle_bytes(cos: Tensor, tokens: int) -> int:
    """cos and sin read once, as many of their rows as a row of the batch has tokens."""
    return 2 * cos.shape[-1] * cos.element_size() * min(tokens, cos.shape[-2]) * (cos.shape[0] if cos.ndim == 3 else 1)


bytes_moved = {
    "rms_norm_rope": lambda q, k, cos: 2 * held(q, k) + angle_bytes(cos, q.shape[2]),
    "rms_norm_rope_vjp": lambda q, k, cos: 3 * held(q, k) + angle_bytes(cos, q.shape[2]),
}
