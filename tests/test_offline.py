"""Every Triton kernel compiles for GPUs that are not here: each launcher, on one small case, says what it launches."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tilesmith
from tilesmith.engine import ops
from tilesmith.validate.ptx import spilling_lanes
from tilesmith.validate.sass import unwritten

TARGETS = {
    "sm80": ("cuda", 80, 32),
    "sm90": ("cuda", 90, 32),
    "sm100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
    "gfx1100": ("hip", "gfx1100", 32),
}
FAMILIES = sorted({op.reference.__module__.split(".")[2] for op in ops().values()})
# a process compiles several families for several targets, since its start takes as long as a dozen kernels; those of
# Hopper are in three parts
HOPPER = (("attn",), ("gemm", "loss"), tuple(f for f in FAMILIES if f not in ("attn", "gemm", "loss")))
LOADS = [(("sm90",), part) for part in HOPPER] + [
    (t, tuple(FAMILIES)) for t in (("sm80", "sm100"), ("gfx942", "gfx1100"))
]
SCRIPT = """
import sys
from tilesmith.validate.offline import main
for target in sys.argv[2:]:
    print("target", target, flush=True)
    if main(sys.argv[1], *target.split(), "--brief"):
        sys.exit(f"nothing or faulty code for {target}")
"""


@pytest.mark.parametrize(
    ("targets", "families"), LOADS, ids=[f"{'-'.join(t)}-{f[0] if 'sm90' in t else 'all'}" for t, f in LOADS]
)
@pytest.mark.usefixtures("needs_triton")
def test_compiles_offline(targets, families):
    named = {" ".join(map(str, TARGETS[target])): target for target in targets}
    command = [sys.executable, "-c", SCRIPT, ",".join(families), *named]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    parts = re.split(r"^target (.+)\n", done.stdout, flags=re.MULTILINE)[1:]
    assert [named[name] for name in parts[::2]] == list(targets)
    for text in parts[1::2]:
        compiled = re.findall(r"^compiled (\S+) .* for (.+)$", text, re.MULTILINE)
        served = {ops()[op].reference.__module__.split(".")[2] for _, names in compiled for op in names.split()}
        assert served == set(families)
    if "sm90" in targets:
        kernels = set().union(*(hopper_kernels(family) for family in families))
        assert not kernels - {name for name, _ in compiled}
    if "sm90" in targets and "norm" in families:  # by each op: they share kernels, in forms of their own
        wide = {op for name, names in compiled if name == "norm_bwd_parts_kernel" for op in names.split()}
        assert {"layer_norm", "rms_norm", "dropout_add_norm"} <= wide
    if "sm90" in targets and "quant" in families:  # whose cases are run in fp32 alone
        ops_compiled = {op for _, names in compiled for op in names.split()}
        assert {"fp8_transpose", "add_rms_norm_fp8", "rms_norm_fp8", "swiglu_fp8", "swiglu_vjp_fp8"} <= ops_compiled


def hopper_kernels(family: str) -> set[str]:
    """Device kernels in the family's files for Hopper."""
    texts = [path.read_text() for path in (Path(tilesmith.__file__).parent / "ops" / family / "hopper").glob("*.py")]
    return set(re.findall(r"^def (\w+_kernel)\(", "\n".join(texts), re.MULTILINE))


@pytest.mark.usefixtures("needs_triton")
def test_no_path_of_attention_reads_what_it_has_not_written():
    """Causal forwards, whose consumers see parts of blocks, in the forms of large calls."""
    command = [sys.executable, "-m", "tilesmith.validate.offline", "attn", "cuda", "90", "32"]
    cases = ["dropout_whole", "d64_whole_turns"]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run([*command, *cases, "--brief"], env=environment, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-4000:]
    kernels = re.findall(r"^compiled (\S+)", done.stdout, re.MULTILINE)
    assert kernels.count("attention_fwd_kernel") == 2


@pytest.mark.usefixtures("needs_triton")
def test_norms_that_cast_leave_room_for_each_other():
    """Rows of 4,096 columns: more than half of a multiprocessor's 64 warps are resident, so that rows load while others
    are summed."""
    command = [sys.executable, "-m", "tilesmith.validate.offline", "quant", "cuda", "90", "32", "4096_columns"]
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    found = re.findall(r"^compiled _norm_kernel .*warps=(\d+) registers=(\d+) spills=(\d+)", done.stdout, re.MULTILINE)
    assert len(found) == 2, done.stdout
    for warps, registers, spills in (map(int, row) for row in found):
        resident = 65_536 // (-(-registers // 8) * 8 * 32 * warps) * warps
        assert resident > 32 and not spills, (registers, spills)


BRANCH = """
        /*0000*/                   ULDC.64 UR4, c[0x0][0x210] ;
        /*0010*/                   {jump} ;
        /*0020*/                   {first}
        /*0030*/                   HGMMA.64x64x16.F32.BF16 R24, R8, gdesc[UR4], R24 ;
        /*0040*/                   BRA `(.L_x_2) ;
.L_x_1:
        /*0050*/                   {second}
        /*0060*/                   HGMMA.64x64x16.F32.BF16 R24, R12, gdesc[UR4], R24 ;
.L_x_2:
        /*0070*/                   EXIT ;
"""


@pytest.mark.parametrize("jump", ["@P0 BRA `(.L_x_1)", "BRX R2 -0x20"])
def test_a_register_written_in_one_way_of_a_branch_is_found(jump):
    write = "UIADD3.64 UR6, UR4, 0x80, URZ ;"
    assert unwritten(BRANCH.format(jump=jump, first=write, second=write)) == []
    found = unwritten(BRANCH.format(jump=jump, first=write, second="NOP ;"))
    assert found == ["0060: HGMMA.64x64x16.F32.BF16 reads UR6", "0060: HGMMA.64x64x16.F32.BF16 reads UR7"]


LANES = """
	mul.wide.u32 	%rd27, %r4, {factor};
	cvt.u64.u32 	%rd28, %r58;
	shl.b64 	%rd29, %rd28, 35;
	{joined}
	mov.b64 	{{_, %r62}}, %rd30;
"""


def test_a_lane_that_spills_into_its_neighbour_is_found():
    joined = "or.b64 	%rd30, %rd27, %rd29;"
    (found,) = spilling_lanes(LANES.format(factor=2**31, joined=joined))
    assert found.endswith("%r4, 2147483648;")
    assert spilling_lanes(LANES.format(factor=2**15, joined=joined)) == []  # of a thread's index: within its lane
    assert spilling_lanes(LANES.format(factor=2**31, joined="mov.b64 	%rd30, %rd29;")) == []


@pytest.mark.parametrize(
    "program", ["api_pages", "fuzz", "matrix", "offline", "release", "sanitized", "stubs", "trial"]
)
def test_each_program_says_how_it_is_called(program, tmp_path):
    command = (sys.executable, "-m", f"tilesmith.validate.{program}", "--help")
    paths = os.pathsep.join([str(Path(tilesmith.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"usage: python -m tilesmith.validate.{program}")
    assert not list(tmp_path.iterdir())


def test_a_family_that_is_not_there_is_refused():
    command = (sys.executable, "-m", "tilesmith.validate.offline", "norms", "cuda", "90", "32")
    paths = os.pathsep.join([str(Path(tilesmith.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths})
    assert done.returncode == 2 and "there is no family norms; there are attn, elementwise, " in done.stderr
