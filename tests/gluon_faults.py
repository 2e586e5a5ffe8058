"""A kernel with a ring of two tiles, as it should be and with one fault each: what `validate.gluon` is to find."""

from tilesmith.device.gluon.shim import (
    fence_async,
    gl,
    gluon,
    mbarrier_arrive,
    mbarrier_wait,
    mbarriers,
    named_barrier,
    smem_tiles,
    tma_load,
    tma_store,
    tma_store_wait,
    wgmma,
    wgmma_wait,
)

ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))


@gluon.jit
def _produce(x_desc, x, full, empty, tiles, FAULT: gl.constexpr):
    for i in range(tiles):
        if FAULT != "never waits for room":
            mbarrier_wait(empty.index(i % 2), ((i // 2) & 1) ^ 1)
        tma_load(x_desc, (i * 64, 0), full.index(i % 2), x.index(i % 2))


@gluon.jit
def _consume(out_desc, x, out, full, empty, tiles, FAULT: gl.constexpr):
    acc = gl.zeros([64, 64], gl.float32, ACC)
    for i in range(tiles):
        tile = x.index(i % 2)
        if FAULT == "waits for the other phase":
            mbarrier_wait(full.index(i % 2), ((i // 2) & 1) ^ 1)
        else:
            mbarrier_wait(full.index(i % 2), (i // 2) & 1)
        made = wgmma(tile, tile.permute((1, 0)), acc, use_acc=True, is_async=True)
        if FAULT == "gives room back too early":
            mbarrier_arrive(empty.index(i % 2))
        if FAULT == "uses a product at once" and i == tiles - 1:
            made = made * 2.0
        acc = wgmma_wait(0, deps=[made])
        if FAULT != "gives room back too early" and FAULT != "never gives room back":
            mbarrier_arrive(empty.index(i % 2))
        if FAULT == "arrives twice":
            mbarrier_arrive(empty.index(i % 2))
    out.index(0).store(acc.to(gl.bfloat16))
    if FAULT != "forgets a fence":
        fence_async()
    tma_store(out_desc, (0, 0), out.index(0))
    if FAULT == "overwrites what is stored":
        out.index(0).store(acc.to(gl.bfloat16) * 0.0)
    tma_store_wait(0)
    if FAULT == "waits at a barrier alone":
        named_barrier("sync", 9, 256)


@gluon.jit
def squares_kernel(x_desc, out_desc, tiles, FAULT: gl.constexpr):
    """out [64, 64] = the sum over tiles of x [64, 64] of x xᵀ."""
    x, out = smem_tiles(2, x_desc), smem_tiles(1, out_desc)
    full, empty = mbarriers((2, 1), (2, 1))
    fence_async()
    gl.warp_specialize(
        [(_produce, (x_desc, x, full, empty, tiles, FAULT)), (_consume, (out_desc, x, out, full, empty, tiles, FAULT))],
        [4], [240],
    )  # fmt: skip
