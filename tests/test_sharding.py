"""DTensors and process groups: gloo ranks run the checks of the modules named here, in one spawn."""

import pytest

from ranks import gloo, run_checks

MODULES = ("sharded_ops", "sharded_losses", "sharded_models", "sharded_experts", "sharded_bench")
THREE = ("slices_of_any", "cut_tokens", "mistakes_of_one", "one_rank_has_wrong", "distances_of")  # among losses


@gloo
@pytest.mark.parametrize("size, only, modules", [(2, (), MODULES), (3, THREE, ("sharded_losses",))])
def test_ranks(tmp_path, size, only, modules):
    told = run_checks(tmp_path, modules, size, only)
    assert not any("FAILED" in one for one in told), "\n".join(told)


if __name__ == "__main__":  # python tests/test_sharding.py [part of a name]
    import pathlib
    import sys
    import tempfile

    sys.stdout.write("\n".join(run_checks(pathlib.Path(tempfile.mkdtemp()), MODULES, only=sys.argv[1:])))
