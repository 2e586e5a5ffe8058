"""Facts, limits and detection: the table is complete and plausible, and the device's own word comes first."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib import resources
from types import SimpleNamespace

import pytest
import torch

from tilesmith import hardware
from tilesmith.hardware import detect
from tilesmith.hardware.facts import Facts, facts_of, lists, nearest, table, tomllib
from tilesmith.hardware.limits import limits_of

KIB = 1024


@pytest.fixture(autouse=True)
def forget_devices():
    detect._probe.cache_clear()
    yield
    detect._probe.cache_clear()


def test_every_row_has_every_field_and_nothing_else():
    rows = tomllib.loads((resources.files("tilesmith.hardware") / "arch.toml").read_text())["gpu"]
    fields = set(Facts.__dataclass_fields__)
    assert [set(row) for row in rows] == [fields] * len(rows)


@pytest.mark.parametrize("row", table(), ids=lambda row: f"{row.arch}-{(row.models or ('any',))[0]}")
def test_rows_are_plausible(row):
    assert row.kind in ("cuda", "hip", "xpu", "mps", "cpu")
    assert all(isinstance(getattr(torch, dtype), torch.dtype) for dtype in row.dtypes)
    if row.kind == "cuda":
        assert row.arch == "sm" + "".join(map(str, row.capability))
    if row.kind in ("cuda", "hip", "xpu"):
        assert 32 * KIB <= row.shared_memory <= 256 * KIB
        assert 0.1e12 < row.bandwidth < 20e12
        assert row.warp in (32, 64)
        assert row.registers * 4 >= row.shared_memory


def test_no_model_is_listed_twice():
    models = [(row.arch, model) for row in table() for model in row.models]
    assert len(models) == len(set(models))


def test_facts_prefer_the_named_model():
    assert facts_of("sm90", "NVIDIA H200").bandwidth == 4.8e12
    assert facts_of("sm90", "NVIDIA H100 80GB HBM3").bandwidth == 3.35e12
    assert facts_of("sm90", "a card nobody lists").models == ("H100",)
    assert facts_of("sm89", "NVIDIA L40S").sms == 142
    assert facts_of("sm33") is None


@pytest.mark.parametrize(
    ("capability", "arch"),
    [((8, 7), "sm86"), ((9, 0), "sm90"), ((10, 3), "sm100"), ((12, 1), "sm120"), ((13, 0), None)],
)
def test_nearest_stays_within_the_generation(capability, arch):
    row = nearest("cuda", capability)
    assert (row.arch if row else None) == arch


def test_limits_refuse_in_words():
    assert limits_of("cuda").shared_memory == 48 * KIB
    assert limits_of("cuda", "sm90").shared_memory == 227 * KIB
    assert limits_of("cuda", "sm90").refuses(160 * KIB, (256, 1, 1)) == []
    (reason,) = limits_of("cuda", "sm89").refuses(160 * KIB, (256, 1, 1))
    assert reason == "needs 163,840 bytes of shared memory; cuda on sm89 has 101,376"
    reasons = limits_of("webgpu").refuses(0, (16, 16, 65))
    assert reasons == [
        "needs 16640 threads a workgroup; webgpu allows 256",
        "needs 65 threads along z; webgpu allows 64",
    ]


def test_limits_name_what_is_unknown():
    with pytest.raises(ValueError, match="backend must be one of cuda, metal, vulkan, webgpu, got 'dx12'"):
        limits_of("dx12")
    with pytest.raises(ValueError, match="arch must name an NVIDIA or AMD GPU"):
        limits_of("cuda", "apple")


def test_facts_and_limits_load_no_torch():
    code = "import sys, tilesmith.hardware.facts, tilesmith.hardware.limits; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_detection_always_has_the_four_keys():
    devices = hardware.detect_available_devices()
    assert list(devices) == ["cuda", "xpu", "mps", "cpu"]
    assert devices["cpu"] == [torch.device("cpu")]
    assert len(devices["cuda"]) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)


def test_the_cpu_is_described_once():
    arch = hardware.arch_of("cpu")
    assert (arch.name, arch.kind) == ("cpu", "cpu")
    assert arch.sms >= 1
    assert arch.device_name
    assert hardware.arch_of(torch.device("cpu")) is arch


def test_a_device_of_an_unknown_type_is_named_after_it():
    assert hardware.arch_of("meta").kind == "meta"


def test_arch_named_is_the_table_alone():
    arch = hardware.arch_named("gfx942")
    assert (arch.kind, arch.warp, arch.shared_memory) == ("hip", 64, 64 * KIB)
    with pytest.raises(ValueError, match="arch is 'sm1', which is unknown; it must be one of sm70, "):
        hardware.arch_named("sm1")


def test_the_device_of_an_arch_is_the_one_that_it_was_read_off(monkeypatch):
    read = [hardware.arch_named("sm90"), replace(hardware.arch_named("sm90"))]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(detect, "_probe", lambda kind, index: read[index])
    assert [detect.device_of(arch).index for arch in read] == [0, 1]
    assert detect.device_of(replace(read[0])) is detect.device_of(hardware.arch_named("gfx942")) is None
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert detect.device_of(read[0]) is None


def _properties(**changed) -> SimpleNamespace:
    read = {
        "name": "NVIDIA H200",
        "major": 9,
        "minor": 0,
        "multi_processor_count": 131,
        "L2_cache_size": 60 * 2**20,
        "warp_size": 32,
        "shared_memory_per_block_optin": 227 * KIB,
        "memory_clock_rate": 3_201_000,
        "memory_bus_width": 6144,
        "gcnArchName": "",
    }
    return SimpleNamespace(**{**read, **changed})


def _probe(monkeypatch, properties, hip=None):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.version, "hip", hip)
    return hardware.arch_of("cuda:0")


def test_the_device_s_word_comes_before_the_table(monkeypatch):
    arch = _probe(monkeypatch, _properties())
    assert (arch.name, arch.sms, arch.l2, arch.bandwidth) == ("sm90", 131, 60 * 2**20, 4.8e12)
    assert "float8_e4m3fn" in arch.dtypes


def test_a_model_nobody_lists_gets_its_bandwidth_from_the_driver(monkeypatch):
    arch = _probe(monkeypatch, _properties(name="NVIDIA H800"))
    assert arch.bandwidth == pytest.approx(4.917e12, rel=1e-3)


@pytest.mark.parametrize(
    ("device_name", "arch", "model"),
    [
        ("NVIDIA GH200 480GB", "sm90", "H200"),
        ("NVIDIA RTX A1000", "sm86", "A10"),
        ("NVIDIA T400 4GB", "sm75", "T4"),
        ("NVIDIA H200 NVL", "sm90", None),
        ("NVIDIA A10G", "sm86", None),
    ],
)
def test_a_model_is_listed_as_a_word(device_name, arch, model):
    """model: the one whose name stands within another word."""
    listed = [row for row in table() if row.arch == arch and lists(row, device_name)]
    assert bool(listed) == (model is None)


def test_a_gpu_of_intel_without_fp64_says_so(monkeypatch):
    read = SimpleNamespace(name="Intel(R) Arc(TM) B580 Graphics", total_memory=1, has_fp64=False)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda index: read)
    found = detect._probe_xpu(0)
    assert found.name == "xpu" and "float64" not in found.dtypes and "bfloat16" in found.dtypes


def test_a_capability_nobody_lists_keeps_its_own_name(monkeypatch):
    arch = _probe(monkeypatch, _properties(name="NVIDIA B300", major=10, minor=3, shared_memory_per_block_optin=0))
    assert (arch.name, arch.capability, arch.shared_memory) == ("sm103", (10, 3), 227 * KIB)
    assert _probe_unknown(monkeypatch).shared_memory == 48 * KIB


def _probe_unknown(monkeypatch):
    detect._probe.cache_clear()
    return _probe(monkeypatch, _properties(name="?", major=77, minor=0, shared_memory_per_block_optin=0))


def test_amd_gpus_are_named_by_their_gfx_number(monkeypatch):
    read = _properties(name="AMD Instinct MI300X", major=9, minor=4, gcnArchName="gfx942:sramecc+:xnack-", warp_size=64)
    arch = _probe(monkeypatch, read, hip="7.1")
    assert (arch.name, arch.kind, arch.warp, arch.bandwidth) == ("gfx942", "hip", 64, 5.3e12)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that torch calls cuda")
def test_a_real_gpu_matches_its_driver():
    read = torch.cuda.get_device_properties(0)
    arch = hardware.arch_of("cuda")
    assert (arch.device_name, arch.sms, arch.capability) == (
        read.name,
        read.multi_processor_count,
        (read.major, read.minor),
    )
    assert arch.shared_memory >= 48 * KIB
    assert arch.l2 > 0
    assert arch.bandwidth > 1e11
