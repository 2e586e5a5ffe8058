"""Products of powers with a tile of values whose number of columns is no power of two: one WGMMA a step of 16 keys.

Gluon's tiles have sizes that are powers of two, those of WGMMA any multiple of 8. So the tile lies in shared memory as
parts of V_PART columns, one after another, whose rows are a swizzle's 32, 64 or 128 bytes: what one descriptor of a
tile with contiguous columns describes. The products are inline PTX, on sums in tensors of 16 columns.

Gluon does not say where shared memory lies, so these kernels assume that values lie at its start: Triton 3.6 places
the largest allocation first, and `plan.joined` joins products only where values are that one, on a release whose
kernels are tested. `validate.offline` reads it from compiled kernels, and each CTA checks it once (`check_place`).
"""

from tilesmith.device.gluon.shim import (
    builtin,
    gl,
    gluon,
    mbarrier_expect,
    reinterpret,
    syncthreads,
    tma_copy,
)
from tilesmith.ops.attn.hopper.columns import add_products, load_tile, rest_tile


def _joined_ptx(columns, keys, atom, rows, bf16):
    """PTX of the products of `keys` keys with a tile of `rows` keys, and its constraints."""
    sums, steps = 8 * -(-columns // 16), keys // 16
    kind = "bf16" if bf16 else "f16"
    swizzle = {128: 1, 64: 2, 32: 3}[2 * atom]
    high = swizzle << 30 | (16 * atom >> 4)
    total = ",".join(f"${i}" for i in range(columns // 2))
    first = 2 * sums + 4 * steps
    lines = ["{ .reg .pred p; .reg .b64 d; .reg .b32 lo; setp.ne.b32 p, 1, 0; wgmma.fence.sync.aligned;"]
    for k in range(steps):
        x = ",".join(f"${2 * sums + 4 * k + i}" for i in range(4))
        lines += [
            f"add.s32 lo, ${first}, {k * 16 * 2 * atom >> 4}; mov.b64 d, {{lo, {high}}};",
            f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} {{{total}}}, {{{x}}}, d, p, 1, 1, 1;",
        ]
    lines.append("wgmma.commit_group.sync.aligned; }")
    constraints = ["=f"] * sums + [str(i) for i in range(sums)] + ["r"] * (4 * steps + 8)
    return "\n".join(lines), ",".join(constraints)


@builtin
def _joined_products(total, x, low, columns, atom, rows, _semantic=None):
    """total: sums in tensors [64, 16] of fp32; x: powers in tensors [64, 16]; low: the low word of the descriptor."""
    columns, atom, rows = (getattr(n, "value", n) for n in (columns, atom, rows))
    dtype = x[0].dtype
    asm, constraints = _joined_ptx(columns, 16 * len(x), atom, rows, dtype == gl.bfloat16)
    args = [*total, *x, low]
    made = gl.inline_asm_elementwise(
        asm, constraints, args, dtype=[gl.float32] * len(total), is_pure=False, pack=8, _semantic=_semantic
    )
    return gl.tuple(made)


@builtin
def smem_base(_semantic=None):
    """The address of the shared memory that Gluon allocates."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, global_smem; // $1", "=r,r", [_semantic.to_tensor(0)], dtype=gl.int32, is_pure=True, pack=1,
        _semantic=_semantic,
    )  # fmt: skip


@gluon.jit
def check_place(v):
    """Stop the kernel with an error where values do not lie at the start of shared memory. All threads of a CTA call
    it, before anything is loaded."""
    words = reinterpret(v, gl.int32, [128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    written = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0])) + 0x5A17E000
    words.store(written)
    syncthreads()
    gl.inline_asm_elementwise(
        """{
        .reg .pred p;
        .reg .b32 place, found;
        mov.u32 place, %tid.x;
        and.b32 place, place, 127;
        shl.b32 place, place, 2;
        mov.u32 found, global_smem;
        add.u32 place, place, found;
        ld.shared.b32 found, [place];
        setp.ne.b32 p, found, $1;
        @p trap;
        mov.b32 $0, found;
        }""",
        "=r,r", [written], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    syncthreads()


@gluon.jit
def _halves(x):
    COLS: gl.constexpr = x.shape[1] // 2
    PART: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLS, 16])
    low, high = gl.split(gl.permute(gl.reshape(x, [64, 2, COLS]), (0, 2, 1)))
    return gl.convert_layout(low, PART, assert_trivial=True), gl.convert_layout(high, PART, assert_trivial=True)


@gluon.jit
def _whole(low, high):
    COLS: gl.constexpr = low.shape[1]
    WHOLE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * COLS, 16])
    x = gl.reshape(gl.permute(gl.join(low, high), (0, 2, 1)), [64, 2 * COLS])
    return gl.convert_layout(x, WHOLE, assert_trivial=True)


@gluon.jit
def _sixteens(x):
    """Parts of 16 columns."""
    if x.shape[1] == 16:
        found = (x,)
    elif x.shape[1] == 32:
        found = _halves(x)
    else:
        low, high = _halves(x)
        found = _sixteens_of(low) + _sixteens_of(high)
    return found


@gluon.jit
def _sixteens_of(x):
    if x.shape[1] == 32:
        found = _halves(x)
    else:
        low, high = _halves(x)
        found = _halves(low) + _halves(high)
    return found


@gluon.jit
def add_joined(x, tile, total, total_rest, ROWS: gl.constexpr, COLS: gl.constexpr, V_PART: gl.constexpr):
    """Ask for x [64, keys] . values [keys, COLS], added to the sums of 64 columns and of the rest: one group of WGMMA.
    tile: the address of the values in shared memory, parts of ROWS keys and V_PART columns."""
    low = ((tile >> 4) & 0x3FFF) | ((ROWS * 2 * V_PART >> 4) << 16)
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, x.shape[1], 16])
    x = _sixteens(gl.convert_layout(x, LAYOUT, assert_trivial=True))
    made = _joined_products(_sixteens(total) + _sixteens(total_rest), x, low, COLS, V_PART, ROWS)
    rest = made[4]
    if total_rest.shape[1] == 32:
        rest = _whole(made[4], made[5])
    return _whole(_whole(made[0], made[1]), _whole(made[2], made[3])), rest


@gluon.constexpr_function
def parts_of(columns, atom):
    """How many parts a tile has."""
    return -(-columns // atom)


@gluon.jit
def value_tiles(v, v_rest, t, walk, KEYS: gl.constexpr):
    """The first KEYS keys of a tile of values, and of its rest; with parts that lie together their address."""
    if walk.V_PART > 0:
        PARTS: gl.constexpr = parts_of(walk.DV + walk.V_REST, walk.V_PART)
        tile = smem_base() + t * (PARTS * walk.BN * walk.V_PART * 2)
        rest = tile
    else:
        tile = v.index(t).reshape([walk.BN, walk.DV])
        rest = rest_tile(v_rest, t, tile, walk.V_REST)
        if KEYS < walk.BN:
            tile, rest = tile.slice(0, KEYS), rest.slice(0, KEYS)
    return tile, rest


@gluon.jit
def add_values(p, tile, rest, total, total_rest, walk):
    """Ask for p . values, added to the sums: one group of WGMMA, or two of values that lie apart."""
    if walk.V_PART > 0:
        made, rest_made = add_joined(p, tile, total, total_rest, walk.BN, walk.V_COLS, walk.V_PART)
    else:
        made, rest_made = add_products(p, tile, rest, total, total_rest, walk.V_REST)
    return made, rest_made


@gluon.jit
def load_values(desc, rest_desc, there, barrier, v, v_rest, t, walk):
    """Start the TMA loads of a tile of values."""
    if walk.V_PART > 0:
        load_joined(desc, there, barrier, v, t, parts_of(walk.DV + walk.V_REST, walk.V_PART), walk.PACKED)
    else:
        load_tile(desc, rest_desc, there, barrier, v.index(t), v_rest.index(t), walk.V_REST, walk.PACKED)


@gluon.jit
def load_joined(desc, there, barrier, tiles, t, PARTS: gl.constexpr, PACKED: gl.constexpr):
    """Start the TMA loads of a tile's parts; `barrier` receives one arrival."""
    V_PART: gl.constexpr = desc.block_type.shape[len(desc.block_type.shape) - 1]
    mbarrier_expect(barrier, PARTS * desc.block_type.nbytes)
    for i in gl.static_range(PARTS):
        if PACKED:
            place = (there[0], there[1], there[2], there[3], i * V_PART)
        else:
            place = (there[0], there[1], there[2], i * V_PART)
        tma_copy(desc, place, barrier, tiles.index(t * PARTS + i))
