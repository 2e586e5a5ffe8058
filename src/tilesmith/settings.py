"""Every environment variable that the library reads, under one prefix, read once."""

from __future__ import annotations

import difflib
import os
import tempfile
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path

PREFIX = "TILESMITH_"
TRANSPORTS = ("auto", "symmetric_memory", "nccl", "gloo")


@dataclass(frozen=True)
class Settings:
    """What the environment asks for.

    pins: ``TILESMITH_USE="rms_norm=triton,attention=reference"``: the backend that must serve an op.
    cache_dir: ``TILESMITH_CACHE_DIR``: where tuning rows found on this machine are kept as JSON.
    tune: ``TILESMITH_TUNE=1``: tune a kernel at its first call with a size that no row covers.
    debug: ``TILESMITH_DEBUG=1``: synchronise after each kernel and check its outputs for NaN.
    portable: ``TILESMITH_PORTABLE="vulkan"``: where portable kernels run on CPU tensors: "interpreter" (the default),
        "vulkan" or "webgpu".
    trust_triton: ``TILESMITH_TRUST_TRITON=1``: kernels in Gluon serve with any release of Triton, without a trial where
        it is not a tested one: for the tests of a new release.
    replay: ``TILESMITH_REPLAY="1"``: repeated calls on a CUDA device do again what their launcher did without asking
        it (the default); "0": each call runs its launcher; "check": both run, and RuntimeError says where they differ.
    compile_ahead: ``TILESMITH_COMPILE_AHEAD=0``: kernels are compiled one after another, each when it is launched; by
        default threads compile the others of a first call, and those of its gradient, meanwhile, and those of the whole
        first step of a transformers model.
    transport: ``TILESMITH_TRANSPORT="nccl"``: what moves tokens between the ranks of context-parallel attention:
        "symmetric_memory", "nccl" or "gloo"; "auto" (the default): the fastest that the ranks can have.
    require_all: ``TILESMITH_REQUIRE_ALL=1``: tests fail instead of skipping when a tool is missing.
    families: ``TILESMITH_FAMILIES="2026-11-23"``: the models of transformers that tests take, those of a day or of
        these tasks and families.
    """

    pins: tuple[tuple[str, str], ...]
    cache_dir: Path
    tune: bool
    debug: bool
    portable: str
    trust_triton: bool
    replay: str
    compile_ahead: bool
    transport: str
    require_all: bool
    families: str


_FLAGS = {**dict.fromkeys(("1", "true", "yes", "on"), True), **dict.fromkeys(("", "0", "false", "no", "off"), False)}


def _flag(name: str, default: str = "0") -> bool:
    text = os.environ.get(PREFIX + name, default)
    if text.lower() not in _FLAGS:
        raise ValueError(f"{PREFIX}{name} is {text!r}; it must be 1, true, yes or on, or 0, false, no, off or empty")
    return _FLAGS[text.lower()]


def _check_names() -> None:
    """Raise ValueError for a variable with the prefix that the library does not read: it would be ignored."""
    known = [PREFIX + ("USE" if field.name == "pins" else field.name.upper()) for field in fields(Settings)]
    for name in os.environ:
        if name.startswith(PREFIX) and name not in known:
            short = [full.removeprefix(PREFIX) for full in known]
            close = difflib.get_close_matches(name.removeprefix(PREFIX), short, n=1)
            told = f"did you mean {PREFIX}{close[0]}?" if close else f"known are {', '.join(known)}"
            raise ValueError(f"the environment has {name}={os.environ[name]!r}, which Tilesmith does not know; {told}")


def _pins(text: str) -> tuple[tuple[str, str], ...]:
    pins = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        name, equals, backend = part.partition("=")
        if not equals or not name.strip() or not backend.strip():
            raise ValueError(
                f"{PREFIX}USE has {part!r}; it must be a comma-separated list of op=backend, such as rms_norm=triton"
            )
        pins.append((name.strip(), backend.strip()))
    for name, backend in pins:
        if (other := dict(pins)[name]) != backend:
            raise ValueError(f"{PREFIX}USE pins {name} to {backend!r} and to {other!r}; give one of them")
    return tuple(pins)


def _portable(text: str) -> str:
    if text not in ("interpreter", "vulkan", "webgpu"):
        raise ValueError(f"{PREFIX}PORTABLE must be interpreter, vulkan or webgpu, got {text!r}")
    return text


def _replay(text: str) -> str:
    if text not in ("0", "1", "check"):
        raise ValueError(f"{PREFIX}REPLAY must be 0, 1 or check, got {text!r}")
    return text


def _transport(text: str) -> str:
    if text not in TRANSPORTS:
        raise ValueError(f"{PREFIX}TRANSPORT must be one of {', '.join(TRANSPORTS)}, got {text!r}")
    return text


def _default_cache() -> Path:
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if base.is_absolute():  # a relative one is invalid, says the XDG specification
        return base / "tilesmith"
    try:
        return Path.home() / ".cache" / "tilesmith"
    except RuntimeError:  # a user without a home, as in a container
        return Path(tempfile.gettempdir()) / f"tilesmith-{os.getuid() if hasattr(os, 'getuid') else 'cache'}"


def _cache(text: str) -> Path:
    """The folder named, "~" as shells read it, wherever the process goes later."""
    if not text:
        return _default_cache()
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as problem:
        raise ValueError(f"{PREFIX}CACHE_DIR is {text!r}: {problem}") from None


@lru_cache(maxsize=1)
def settings() -> Settings:
    """The settings of this process. Raises ValueError for a variable that is unknown or has no meaning."""
    return read()


def read() -> Settings:
    """What the environment says now. Raises ValueError as above."""
    _check_names()
    return Settings(
        pins=_pins(os.environ.get(PREFIX + "USE", "")),
        cache_dir=_cache(os.environ.get(PREFIX + "CACHE_DIR", "")),
        tune=_flag("TUNE"),
        debug=_flag("DEBUG"),
        portable=_portable(os.environ.get(PREFIX + "PORTABLE") or "interpreter"),
        trust_triton=_flag("TRUST_TRITON"),
        replay=_replay(os.environ.get(PREFIX + "REPLAY") or "1"),
        compile_ahead=_flag("COMPILE_AHEAD", default="1"),
        transport=_transport(os.environ.get(PREFIX + "TRANSPORT") or "auto"),
        require_all=_flag("REQUIRE_ALL"),
        families=os.environ.get(PREFIX + "FAMILIES", ""),
    )
