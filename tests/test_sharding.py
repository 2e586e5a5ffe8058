"""DTensors and process groups: two gloo ranks run the checks of the modules named here, in one spawn."""

import datetime
import importlib
import os
import time
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ranks import leave

MODULES = ("sharded_ops", "sharded_losses", "sharded_models", "sharded_experts", "sharded_bench")


def checks(modules=MODULES) -> dict:
    """The functions check_*(mesh) by module and name."""
    found = {}
    for module in modules:
        for name, check in vars(importlib.import_module(module)).items():
            if name.startswith("check_"):
                found[f"{module}.{name}"] = check
    return found


def run_checks(folder, size: int = 2, only=(), modules=MODULES) -> list[str]:
    """Run the checks whose name holds one of `only` on `size` ranks, all if empty; what failed where, and the processor
    time of each."""
    mp.spawn(_rank, args=(size, str(folder), only, modules), nprocs=size, join=True)
    return [(folder / f"rank{rank}").read_text() for rank in range(size)]


def _rank(rank: int, size: int, folder: str, only, modules) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=datetime.timedelta(minutes=10))
    mesh = dist.device_mesh.init_device_mesh("cpu", (size,), mesh_dim_names=("ranks",))
    told = []
    for name, check in checks(modules).items():
        if not only or any(part in name for part in only):
            torch.manual_seed(0)
            began = time.process_time()
            try:
                check(mesh)
            except Exception:
                told.append(f"FAILED on rank {rank}: {name}\n{traceback.format_exc()}")
                break  # from here on the ranks would talk at cross purposes
            told.append(f"{name}: {time.process_time() - began:.1f} s")
    with open(f"{folder}/rank{rank}", "w") as file:
        file.write("\n".join(told))
    if told and told[-1].startswith("FAILED"):
        os._exit(0)  # a peer may still wait in a collective
    leave()


THREE = ("slices_of_any", "cut_tokens", "mistakes_of_one", "one_rank_has_wrong", "distances_of")  # among losses


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
@pytest.mark.parametrize("size, only, modules", [(2, (), MODULES), (3, THREE, ("sharded_losses",))])
def test_ranks(tmp_path, size, only, modules):
    told = run_checks(tmp_path, size, only, modules)
    assert not any("FAILED" in one for one in told), "\n".join(told)


if __name__ == "__main__":  # python tests/test_sharding.py [part of a name]
    import pathlib
    import sys
    import tempfile

    sys.stdout.write("\n".join(run_checks(pathlib.Path(tempfile.mkdtemp()), only=sys.argv[1:])))
