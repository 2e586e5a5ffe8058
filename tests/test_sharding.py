"""DTensor: row-sharded inputs go through norms and gates without a gather; gradients of shared weights are summed."""

import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _rank(rank, size, port):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=size)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    from tilesmith import ops

    mesh = init_device_mesh("cpu", (size,))
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(4, 6, 8, generator=generator), torch.randn(8, generator=generator)
    up = torch.randn(4, 6, 8, generator=generator)
    for dim in (0, 1):
        whole = [t.clone().requires_grad_() for t in (x, weight)]
        expected = ops.rms_norm(*whole)
        expected.square().sum().backward()
        sharded = distribute_tensor(x, mesh, [Shard(dim)]).requires_grad_()
        shared = distribute_tensor(weight, mesh, [Replicate()]).requires_grad_()
        with CommDebugMode() as talk:
            y = ops.rms_norm(sharded, shared)
            y.square().sum().backward()
        assert isinstance(y, DTensor) and y.placements == (Shard(dim),)
        names = [str(op) for op in talk.get_comm_counts()]
        assert not any("all_gather" in name for name in names), names
        torch.testing.assert_close(y.full_tensor(), expected)
        torch.testing.assert_close(sharded.grad.full_tensor(), whole[0].grad)
        torch.testing.assert_close(shared.grad.full_tensor(), whole[1].grad)
    for dim in (0, 2):
        gate, other = (distribute_tensor(t, mesh, [Shard(dim)]) for t in (x, up))
        y = ops.swiglu(gate, other)
        assert y.placements == (Shard(dim),)
        torch.testing.assert_close(y.full_tensor(), ops.swiglu(x, up))
    dist.destroy_process_group()


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
def test_row_sharded_tensors_stay_sharded():
    mp.spawn(_rank, args=(2, _free_port()), nprocs=2, join=True)
