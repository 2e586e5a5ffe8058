"""Training in 8-bit floating point: recipes, the conversion of a model, and an engine for its steps."""

from __future__ import annotations

import importlib

from tilesmith._lazy import absent

_HOMES = {
    "FP8AttentionConfig": "tilesmith.precision.attention",
    "FP8Config": "tilesmith.precision.config",
    "FP8Format": "tilesmith.precision.config",
    "FP8LinearLayer": "tilesmith.precision.linear",
    "FP8TrainingEngine": "tilesmith.precision.engine",
    "convert_model_to_fp8": "tilesmith.precision.convert",
    "create_fp8_trainer": "tilesmith.precision.engine",
    "refresh_fp8": "tilesmith.precision.scaling",
    "revert_model_from_fp8": "tilesmith.precision.convert",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str):
    home = _HOMES.get(name)
    if home is None:
        raise absent(__name__, name, __all__)
    value = getattr(importlib.import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
