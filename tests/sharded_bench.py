"""The benchmark of context parallelism, at tiny sizes over the ranks of a test."""

from tilesmith.bench import context_parallel
from tilesmith.bench.context_parallel_problems import BOTH, FORWARD


def check_the_benchmark_of_context_parallelism(mesh):
    """Values first, then both passes of every mode that is asked for; whatever is refused is a row that says why."""
    found = context_parallel.run(command="", rounds=1, cases=["causal", "packed"])
    size = mesh.size()
    assert found["subject"] == ("context-parallel" if size == 2 else f"context-parallel-{size}")
    errors = [error for row in found["rows"] for error in row.get("error_over_one_gpu", {}).values()]
    assert len(errors) == 3 * 3 * 4 and max(errors) < 1.3
    timed = [row for row in found["rows"] if "us" in row]
    assert {row["pass"] for row in timed} == {FORWARD, BOTH}
    ours = [row for row in timed if row["provider"].startswith(context_parallel.OURS)]
    assert len(ours) == 3 + 3 + 3 and all(row["of_one_gpu"] > 0 for row in ours)
    whole = [row for row in timed if row["provider"] == context_parallel.WHOLE]
    assert [row["case"] for row in whole] == ["packed, 64 on 2, 2/1 heads"]
