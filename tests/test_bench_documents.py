"""Results carry what made their rows, and README tables come from result files alone."""

from __future__ import annotations

import json

import pytest
import torch

from tilesmith.bench import document, tables

CPU = torch.device("cpu")


def _document(**more):
    head = {"provider": "tilesmith", "case": "a", "pass": "forward", "shapes": {"x": [16, 32], "causal": True}}
    ours = {**head, "us": 10.0, "TB/s": 4.0, "bound": "copy", "of_ceiling": 0.951, "times_best_peer": 1.5}
    rows = [ours, {**head, "provider": "liger", "us": 15.0}, {**head, "provider": "quack", "error": "is not installed"}]
    return {**document.document("an_op", CPU, "tilesmith bench an_op", rows, dtype="bfloat16", rounds=5), **more}


def test_documents_survive_a_round_trip(tmp_path):
    written = _document()
    path = document.save(written, tmp_path)
    assert path == tmp_path / "cpu" / "an_op.json"
    assert document.load(path) == written
    assert len(path.read_text().splitlines()) < 40


def test_cases_that_a_run_leaves_out_stay_with_the_run_that_made_them(tmp_path):
    """Of a case that is measured again no row of before stays: providers are compared within one process."""
    row = _document()["rows"][0]
    everything = [{**row, "case": case, "pass": name, "us": 1.0} for case in "abc" for name in ("forward", "backward")]
    everything.append({**row, "case": "b", "provider": "liger", "us": 2.0})
    document.save(_document(rows=everything, date="2026-01-01"), tmp_path)
    for date, case in (("2026-01-02", "b"), ("2026-01-03", "d"), ("2026-01-04", "d")):
        again = [{**row, "case": case, "us": float(date[-1])}]
        path = document.save(_document(rows=again, date=date, command=f"bench {case}"), tmp_path, keep=True)
    found = document.load(path)
    assert [(r["case"], r["pass"], r["us"]) for r in found["rows"]] == [
        *(("a", name, 1.0) for name in ("forward", "backward")),
        *(("b", "forward", 2.0), ("b", "backward", 1.0)),
        *(("c", name, 1.0) for name in ("forward", "backward")),
        ("d", "forward", 4.0),
    ]
    made = [found["earlier"][r["earlier"]]["date"] if "earlier" in r else found["date"] for r in found["rows"]]
    assert made == ["2026-01-01"] * 2 + ["2026-01-02"] + ["2026-01-01"] * 3 + ["2026-01-04"]
    assert "2026-01-01 to 2026-01-04; `bench d ; tilesmith bench an_op ; bench b`" in tables.provenance(found)
    assert document.load(document.save(_document(), tmp_path)) == _document()


def test_figures_of_providers_that_a_run_left_out_are_counted():
    head = _document()["rows"][0]
    old = [{**head, "case": case, "provider": name} for case in "ab" for name in ("tilesmith", "pytorch", "flex")]
    old.append({**head, "case": "a", "provider": "flash2", "error": "is not installed"})
    new = [{**head, "case": "a"}, {**head, "case": "a", "provider": "flex", "error": "fails"}, {**head, "case": "c"}]
    assert document.dropped({"rows": old}, {"rows": new}) == {"pytorch": 1}
    assert document.dropped({"rows": old}, {"rows": old}) == document.dropped({"rows": []}, {"rows": new}) == {}


def test_a_run_that_is_not_done_drops_no_rows_of_other_cases(tmp_path):
    """While a model is timed, it is saved with the number of rounds so far."""
    other = [{**_document()["rows"][0], "case": "b"}]
    document.save(_document(command="bench 5"), tmp_path)
    for rounds in (3, 4, 7):
        path = document.save(_document(rows=other, rounds=rounds, command="bench 7"), tmp_path, keep=True)
    found = document.load(path)
    assert {row["case"] for row in found["rows"]} == {"a", "b"}
    assert [run["rounds"] for run in document.runs(found)] == [7, 5]
    assert "median of 5 or 7 interleaved rounds" in tables.provenance(found)


def test_rows_of_another_dtype_or_device_do_not_stay(tmp_path):
    document.save(_document(), tmp_path)
    other = _document(dtype="float16", rows=[{**_document()["rows"][0], "case": "b"}])
    assert document.load(document.save(other, tmp_path, keep=True)) == other
    faster = {**other, "hardware": {**other["hardware"], "name": "another card"}}
    assert document.load(document.save(faster, tmp_path, keep=True)) == faster


def test_a_table_names_each_version_that_its_runs_had(tmp_path):
    first, second = (_document(versions={"torch": version, "triton": "3.6.0"}) for version in ("2.10", "2.11"))
    second["rows"] = [{**second["rows"][0], "case": "b"}]
    document.save(first, tmp_path)
    path = document.save(second, tmp_path, keep=True)
    assert "torch 2.11 / 2.10, triton 3.6.0;" in tables.provenance(document.load(path))


def test_a_readme_is_filled_from_results(tmp_path):
    document.save(_document(), tmp_path)
    text = "before\n<!-- bench:cpu/an_op -->\nold\n<!-- /bench -->\nafter\n"
    filled = tables.fill(text, tmp_path)
    assert filled.splitlines()[2:5] == [
        "| `an_op` | pass | tilesmith, µs | liger, µs | rate | of ceiling | × best peer |",
        "| :-- | :-- | --: | --: | --: | --: | --: |",
        "| 16×32 causal, a | forward | **10** | 15 | 4 TB/s | 95% | 1.50 |",
    ]
    assert "`tilesmith bench an_op`" in filled
    assert "old" not in filled
    assert tables.fill(filled, tmp_path) == filled


def test_a_case_is_named_unless_its_name_only_repeats_its_sizes_and_those_without_a_time_are_left_out():
    ours, liger, failed = _document()["rows"]
    names = ("pages", "16x32", "causal_16x32", "layer_16x32")
    rows = [{**row, "case": name} for name in names for row in (ours, liger)]
    text = tables.markdown(_document(rows=[*rows, {**failed, "case": "alone", "shapes": {"x": [7]}}]))
    assert [line.split(" |")[0] for line in text.splitlines()[2:6]] == [
        "| 16×32 causal, pages",
        "| 16×32 causal",
        "| 16×32 causal",
        "| 16×32 causal, layer_16x32",
    ]
    assert "| 7" not in text


def test_a_marker_can_ask_for_some_cases(tmp_path):
    row = _document()["rows"][0]
    document.save(_document(rows=[{**row, "case": name} for name in ("a", "b-1", "c.d")]), tmp_path)
    shown = tables.fill("<!-- bench:cpu/an_op c.d b-1 -->\n<!-- /bench -->", tmp_path)
    assert [line.split(" |")[0] for line in shown.splitlines()[3:5]] == ["| 16×32 causal, c.d", "| 16×32 causal, b-1"]
    assert "causal, a" not in shown
    assert tables.fill(shown, tmp_path) == shown
    with pytest.raises(ValueError, match="an_op has no rows of e, f"):
        tables.fill("<!-- bench:cpu/an_op a f e -->\n<!-- /bench -->", tmp_path)


def test_the_table_of_training_steps(tmp_path):
    """Ours is compared with the fastest of the others in any run; not where plain PyTorch alone was measured."""

    def row(ms, gb):
        return {"ms": ms, "peak_gb": gb}

    both = {"eager": row(90, 9), "compile": {"error": "no"}, "liger": row(80, 8), "optimize": row(70, 7)}
    graphs = {"graphs": row(40, 5), "eager (beside graphs)": row(60, 6), "optimize (beside graphs)": row(65, 6)}
    rows = {"a": both | graphs, "b": {"eager": row(90, 9), "optimize": row(70, 7)}}
    made = {
        "subject": "model-steps",
        "gpu": "a GPU",
        "torch": "1",
        "transformers": "2",
        "date": "today",
        "command": "run",
    }
    (tmp_path / "steps.json").write_text(json.dumps({**made, "rows": rows}), encoding="utf-8")
    filled = tables.fill("<!-- bench:steps b a -->\n<!-- /bench -->", tmp_path).splitlines()
    assert filled[3:5] == [
        "| b | 90.0 | – | – | 70.0 | – |  |  |",
        "| a | 90.0 | – | 80.0 | 70.0 | 40.0 | 1.50 | 6.0, 5.0 |",
    ]
    assert filled[6] == "<sub>a GPU, bf16, torch 1, transformers 2; today; `run`</sub>"
    rows["a"]["graphs"] |= {"command": "run graphs", "date": "later"}
    (tmp_path / "steps.json").write_text(json.dumps({**made, "rows": rows}), encoding="utf-8")
    filled = tables.fill("<!-- bench:steps b a -->\n<!-- /bench -->", tmp_path).splitlines()
    assert filled[6].endswith("; later to today; `run ; run graphs`</sub>")
    with pytest.raises(ValueError, match="model-steps has no rows of c"):
        tables.fill("<!-- bench:steps c -->\n<!-- /bench -->", tmp_path)


def test_a_version_is_told_where_its_package_has_a_figure():
    versions = dict.fromkeys(("python", "torch", "transformers", "liger-kernel", "quack-kernels"), "1")
    told = tables.provenance(_document(versions=versions))
    assert "torch 1, liger-kernel 1;" in told  # quack has no figure


def test_a_table_without_a_result_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"marker bench:sm90/nothing needs .*nothing\.json"):
        tables.fill("<!-- bench:sm90/nothing -->\n<!-- /bench -->", tmp_path)


def test_rates_use_the_unit_that_shows_them():
    assert tables.rate({"TB/s": 4.256, "bound": "copy"}) == "4.26 TB/s"
    assert tables.rate({"TB/s": 0.0042, "bound": "copy"}) == "4.2 GB/s"
    assert tables.rate({"TFLOP/s": 612.3, "TB/s": 1.0, "bound": "matmul"}) == "612 TFLOP/s"
    assert tables.rate({"TFLOP/s": 1143.6, "bound": "matmul"}) == "1,144 TFLOP/s"
    assert tables.rate({}) == "–"
