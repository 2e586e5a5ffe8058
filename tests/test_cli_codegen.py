"""`tilesmith codegen`: what it writes, and what it refuses in words."""

from __future__ import annotations

import json

import pytest

typer = pytest.importorskip("typer")

from typer.testing import CliRunner  # noqa: E402

from tilesmith.cli import codegen  # noqa: E402


def run(*arguments: str):
    """Exit code and all output of `tilesmith codegen ...`, in this process."""
    app = typer.Typer()
    app.command()(codegen.command)
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("target", "holds"),
    [
        ("cuda", "__global__"),
        ("metal", "half4"),
        ("wgsl", "@compute"),
        ("spvasm", "OpEntryPoint"),
        ("json", '"swiglu"'),
    ],
)
def test_text(target, holds):
    code, output = run("swiglu", "--target", target, "--set", "hidden_dim=64", "--set", "use_half=true")
    assert code == 0
    assert holds in output
    assert "swiglu(gate: read f16x4, up: read f16x4, out: write f16x4; rows: u32): 256 threads" in output


def test_spirv_and_presets(tmp_path):
    code, _ = run("flash_attention", "-t", "spirv", "--preset", "rdna3", "--set", "causal=true", "-o", tmp_path / "a")
    assert code == 0
    assert (tmp_path / "a").read_bytes()[:4] == b"\x03\x02\x23\x07"


def test_json_is_a_kernel(tmp_path):
    code, _ = run("geglu", "-t", "json", "--set", "hidden_dim=8", "--set", "approximate=none", "-o", tmp_path / "a")
    assert code == 0
    assert "geglu" in json.dumps(json.loads((tmp_path / "a").read_text()))


def test_one_json_object_has_the_text_and_what_a_launcher_needs(tmp_path):
    code, output = run("swiglu", "-t", "wgsl", "--set", "hidden_dim=64", "--json")
    told = json.loads(output)
    assert code == 0 and "@compute" in told["text"] and told["file"] is None
    assert told["tensors"][0] == {"name": "gate", "access": "read", "type": "f32x4"}
    assert (told["kernel"], told["target"], told["threads"]) == ("swiglu", "wgsl", 256)
    code, output = run("swiglu", "-t", "spirv", "--set", "hidden_dim=64", "--json", "-o", tmp_path / "a")
    told = json.loads(output)
    assert code == 0 and told["text"] is None and told["file"] == str(tmp_path / "a")
    assert (tmp_path / "a").read_bytes()[:4] == b"\x03\x02\x23\x07"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("swiglu", "-t", "hlsl"), "--target must be one of cuda, ptx"),
        (("swiglu", "-t", "spirv"), "SPIR-V is binary; name a file with -o, or ask for spvasm"),
        (("nothing", "-t", "cuda"), "there is no kernel 'nothing'; known: flash_attention"),
        (("swiglu", "-t", "cuda"), "swiglu needs --set hidden_dim=..."),
        (("swiglu", "-t", "cuda", "--set", "hidden_dim"), "--set must be NAME=VALUE"),
        (("swiglu", "-t", "cuda", "--set", "width=4"), "--set width: swiglu has the fields hidden_dim, use_half"),
        (("swiglu", "-t", "cuda", "--set", "hidden_dim=0"), "hidden_dim must be a whole number of at least 1"),
        (("swiglu", "-t", "cuda", "--preset", "ampere"), "--preset is for flash_attention"),
        (("swiglu", "-t", "cuda", "--set", "hidden_dim=4", "-o", "no/such/folder"), "-o no/such/folder: No such file"),
        (("swiglu", "-t", "cuda", "--set", "hidden_dim=4", "-o", "."), "-o .: Is a directory"),
        (("flash_attention", "-t", "wgsl", "--preset", "ampere"), "36,864 bytes of shared memory; at most 32,768"),
    ],
)
def test_refusals(arguments, words):
    code, output = run(*arguments)
    assert code == 2
    assert words in " ".join(output.split())
