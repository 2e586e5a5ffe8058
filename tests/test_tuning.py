"""The search finds what is faster, rows are kept and found again, and a wrong winner is not kept."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from clock import Clock
from tilesmith.bench.tune import Tuned, kept
from tilesmith.engine import Op, Space, optimize_kernel, register_kernel, timing
from tilesmith.engine.table import Row, Table, append
from tilesmith.engine.tuning import Found, row_of, search, tunable


class Config(NamedTuple):
    pause: int
    offset: int


def _double(x: Tensor) -> Tensor:
    return 2 * x


CLOCK = Clock()


@pytest.fixture(scope="module")
def doubled():
    op = Op(_double, name="tuning_double", fake=torch.empty_like)

    @register_kernel("tuning_double", backend="paused", rank=60)
    @optimize_kernel(
        space=Space(
            dims=lambda x: {"rows": x.shape[0]},
            default=lambda dims, arch, dtype: Config(4, 0),
            choices={"pause": (1, 2, 4, 8), "offset": (0, 1)},
        )
    )
    def paused(x: Tensor, *, config: Config) -> Tensor:
        CLOCK.sleep(config.pause / 1e3 + config.offset / 1e2)
        return 2 * x

    return op


def test_tuning_at_the_first_call_leaves_what_an_op_writes_alone(monkeypatch):
    """It runs the kernel many times; what lies where a written argument does is a copy with it."""

    def grown(x: Tensor, into: Tensor) -> None:
        into.copy_(x + 1)

    op = Op(grown, name="tuning_grown", fake=lambda *given: None, outputs=(), mutates=("into",))
    seen = []

    def dims(x: Tensor, into: Tensor) -> dict[str, int]:
        seen.append((x, into))
        return {}

    @register_kernel("tuning_grown", backend="listening", rank=60)
    @optimize_kernel(space=Space(dims=dims, default=lambda dims, arch, dtype: Config(0, 0)))
    def listening(x: Tensor, into: Tensor, *, config: Config) -> None:
        grown(x, into)

    monkeypatch.setattr("tilesmith.engine.op.settings", lambda: types.SimpleNamespace(tune=True))
    x = torch.ones(3)
    op(x, x.view(3))
    a, b = seen[-1]
    assert a is b and a.data_ptr() != x.data_ptr() and (x == 2).all()
    other = torch.zeros(4)
    op(torch.ones(4), other)
    assert seen[-1][0] is not seen[-1][1] and seen[-1][1].data_ptr() != other.data_ptr() and (other == 2).all()


def test_a_kernel_hears_where_only_public_outputs_are_seen():
    def doubled_and_kept(x: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * x, x.clone()

    op = Op(doubled_and_kept, name="tuning_hidden", outputs=("y", "kept"), public=1)
    heard = []

    @register_kernel("tuning_hidden", backend="listening", rank=60)
    @optimize_kernel(space=Space(dims=lambda x: {}, default=lambda dims, arch, dtype: Config(0, 0)))
    def listening(x: Tensor, *, config: Config, hidden: bool = True) -> tuple[Tensor, Tensor]:
        heard.append(hidden)
        return 2 * x, x.clone() if hidden else None

    x, leaf = torch.ones(3), torch.ones(3, requires_grad=True)
    for call in (lambda: op(x), lambda: op(leaf), lambda: op.handle(x)[0], lambda: op(x)):
        assert torch.equal(call(), 2 * x)
    with torch.no_grad():
        assert torch.equal(op(leaf), 2 * x)
    assert heard == [False, True, True, False, False]
    assert torch.equal(torch.func.vmap(op)(x), 2 * x)  # row by row
    assert torch.equal(torch.func.grad(lambda x: op(x).sum())(x), 2 * x)
    assert heard[5:] == [True] * 4


def test_the_fastest_configuration_is_found(doubled, monkeypatch):
    monkeypatch.setattr(timing, "time", CLOCK)
    x = torch.ones(3)
    configure = tunable(doubled, (x,))
    found = search(configure, (x,), rounds=2, budget_ms=1)
    assert found.config == Config(1, 0)
    assert found.default == Config(4, 0)
    assert found.gain == pytest.approx(0.75)
    row = row_of(configure, (x,), found)
    assert row.kernel == "test_tuning.paused"
    assert row.dims == {"rows": 3}
    assert row.config == {"pause": 1, "offset": 0}
    assert row.torch == torch.__version__


def test_a_kernel_that_is_faster_at_one_size_keeps_rows_of_all():
    class Named(NamedTuple):
        name: str

    def tuned(kernel: str, us: float) -> Tuned:
        found = Found(Config(1, 0), timing.Timing.of([us]), Config(4, 0), timing.Timing.of([100.0]), 2)
        return Tuned(None, Named(kernel), (), found)

    every = [tuned("slow", 60.0), tuned("slow", 99.0), tuned("fine", 98.0)]
    assert kept(every) == every[:2]


def test_a_kernel_without_choices_is_not_tunable(doubled):
    from tilesmith.engine import use

    with use(tuning_double="reference"):
        assert tunable(doubled, (torch.ones(3),)) is None


def test_rows_are_replaced_and_found_again(tmp_path, monkeypatch):
    from tilesmith.engine import table

    monkeypatch.setattr(table, "user_file", lambda package, arch: tmp_path / f"{package}.{arch}.json")
    row = Row("triton.f", "float32", {"rows": 8}, {"pause": 2}, 1.0, 0.1, "t", "t", "d", "2026-01-01")
    better = Row("triton.f", "float32", {"rows": 8}, {"pause": 1}, 0.5, 0.1, "t", "t", "d", "2026-01-02")
    other = Row("hopper.f", "float32", {"rows": 8}, {"pause": 9}, 0.5, 0.1, "t", "t", "d", "2026-01-02")
    for r in (row, other, better):
        append("mine.triton", "sm90", [r])
    rows = Table.of("mine.triton", "sm90").rows
    assert {r.date for r in rows if r.kernel == "triton.f"} == {"2026-01-02"}
    found = Table.of("mine.triton", "sm90").nearest("triton.f", torch.float32, {"rows": 9})
    assert found.config == {"pause": 1}
    assert Table.of("mine.triton", "sm90").nearest("triton.f", torch.float32, {"rows": 900}) is None
    assert Table.of("mine.triton", "sm90").nearest("triton.f", torch.float16, {"rows": 8}) is None


def test_processes_that_keep_rows_at_the_same_time_lose_none(tmp_path):
    """What one keeps, the others neither overwrite nor tear."""
    code = (
        "import sys\n"
        "from tilesmith.engine.table import Row, append\n"
        "for i in range(20):\n"
        "    row = Row('triton.f', 'float32', {'rows': int(sys.argv[1]) + i}, {}, 1.0, 0.0, '', '', '', '')\n"
        "    append('mine.triton', 'sm90', [row])\n"
    )
    environment = {**os.environ, "TILESMITH_CACHE_DIR": str(tmp_path)}
    writers = [subprocess.Popen([sys.executable, "-c", code, str(1000 * i)], env=environment) for i in range(1, 4)]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    kept = json.loads(next((tmp_path / "tuning").glob("*.json")).read_text())
    assert sorted(row["dims"]["rows"] for row in kept) == [1000 * i + j for i in range(1, 4) for j in range(20)]
    assert sorted(p.suffix for p in (tmp_path / "tuning").iterdir()) == [".json", ".lock"]


GOOD = {"kernel": "triton.f", "dtype": "float32", "dims": {"rows": 8}, "config": {"pause": 1}, "median_us": 1.0}
GOOD |= {"spread": 0.0, "torch": "", "triton": "", "driver": "", "date": ""}

MALFORMED = ({"dims": None}, {"dims": {"rows": "8"}}, {"config": None}, {"config": {"pause": "1"}})


@pytest.mark.parametrize(
    "written",
    [
        *("", "5", "[[]]", "[" * 100_000),
        *(json.dumps([{**GOOD, **bad}]) for bad in MALFORMED),
    ],
)
def test_a_file_of_rows_that_is_damaged_fails_no_call(written, tmp_path, monkeypatch):
    from tilesmith.engine import table

    (tmp_path / "rows.json").write_text(written)
    monkeypatch.setattr(table, "user_file", lambda package, arch: tmp_path / "rows.json")
    Table.of.cache_clear()
    with pytest.warns(UserWarning, match="cannot be read"):
        found = Table.of("mine.triton", "sm90").nearest("triton.f", torch.float32, {"rows": 9})
    Table.of.cache_clear()
    assert found is None


def test_a_cache_folder_that_cannot_be_looked_into_fails_no_call(tmp_path, monkeypatch):
    from tilesmith.engine import table

    def stat(self, **how):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(table, "user_file", lambda package, arch: tmp_path / "rows.json")
    monkeypatch.setattr(Path, "stat", stat)
    monkeypatch.setattr(Path, "read_text", stat)
    with pytest.warns(UserWarning, match="Permission denied"):
        assert table._kept(table.user_file("mine", "sm90")) == []
