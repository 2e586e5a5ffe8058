"""PTX that the products with packed weights on Hopper share: a thread's own loads and stores, in registers by name."""

from tilesmith.device.gluon.shim import gl, gluon


@gluon.jit
def warp_number():
    """The number of a thread's warp, one for each warp; found anew each time, and not kept."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, %tid.x; shr.u32 $0, $0, 5; // $1", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def copy_async(to, source, inside):
    """cp.async of 16 bytes a thread where `inside`."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        setp.ne.s32 p, $3, 0;
        @p cp.async.ca.shared.global [$1], [$2], 16;
        mov.b32 $0, $1;
        }""",
        "=r,r,l,r", [to, source, inside.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def warp_sync(at):
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.b32 $0, $1;", "=r,r", [at], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def of_lane(x, lane):
    """What another lane of the warp has."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", "=r,r,r", [x, lane], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def load_4(at):
    return gl.inline_asm_elementwise(
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r", [at],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def store_2(at, a, b, where):
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $4, 0; @p st.shared.v2.b32 [$1], {$2, $3}; mov.b32 $0, $1; }",
        "=r,r,f,f,r", [at, a, b, where.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def two_halves(word):
    """The two fp16 numbers of a word in fp32."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 low, high; mov.b32 {low, high}, $2; cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }",
        "=f,=f,r", [word], dtype=(gl.float32, gl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.constexpr_function
def kind_of(dtype):
    """PTX's name of a 16-bit dtype."""
    return "bf16" if dtype == gl.bfloat16 else "f16"


@gluon.constexpr_function
def _product_of(kind):
    return (
        f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
    )


@gluon.jit
def mma_of_warp(a, b0, b1, c, dtype: gl.constexpr):
    """c + a b of 16 x 8 x 16; a, c: four registers."""
    ASM: gl.constexpr = _product_of(kind_of(dtype))
    return gl.inline_asm_elementwise(
        ASM, "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2], c[3]],
        dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def room_of_cta(BYTES: gl.constexpr):
    """The address of BYTES of shared memory, Gluon's only allocation, of which static declarations could hold 48 KB."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    THREADS: gl.constexpr = 32 * gl.num_warps()
    lines = gl.allocate_shared_memory(
        gl.int32, [(BYTES + 4 * THREADS - 1) // (4 * THREADS), THREADS], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    lines.index(0).store(gl.zeros([THREADS], gl.int32, LINE))
    return gl.inline_asm_elementwise(
        "mov.u32 $0, global_smem; // $1", "=r,r", [gl.to_tensor(0)], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def load_int(at):
    return gl.inline_asm_elementwise("ld.shared.b32 $0, [$1];", "=r,r", [at], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def store_float(at, x):
    gl.inline_asm_elementwise(
        "st.shared.b32 [$1], $2; mov.b32 $0, $1;", "=r,r,f", [at, x], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def _barrier_of(threads):
    return f"cp.async.wait_all; barrier.sync 1, {threads}; mov.b32 $0, $1;"


@gluon.jit
def wait_for_copies(at):
    """Wait until what all threads of the CTA have copied is there."""
    ASM: gl.constexpr = _barrier_of(32 * gl.num_warps())
    gl.inline_asm_elementwise(ASM, "=r,r", [at], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_pair(at):
    return gl.inline_asm_elementwise(
        "ld.shared.v2.b32 {$0, $1}, [$2];", "=r,=r,r", [at], dtype=(gl.int32, gl.int32), is_pure=False, pack=1
    )


@gluon.jit
def store_pair(at, a, b, where):
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $4, 0; @p st.shared.v2.b32 [$1], {$2, $3}; mov.b32 $0, $1; }",
        "=r,r,r,r,r", [at, a, b, where.to(gl.int32)], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
