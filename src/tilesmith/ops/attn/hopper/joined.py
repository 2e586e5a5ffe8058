"""Products with tiles of keys or values whose number of rows or columns is no power of two: one WGMMA a step of 16.

Gluon's tiles have sizes that are powers of two, those of WGMMA any multiple of 8. So a tile of values lies in shared
memory as parts of V_PART columns, one after another, whose rows are a swizzle's 32, 64 or 128 bytes: what one
descriptor of a tile with contiguous columns describes. The products are inline PTX, on sums in tensors of 16 columns.

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

SIXTEEN = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))  # of a tensor [64, 16]


def _high_word(atom):
    """The high word of the descriptor of a tile whose rows have `atom` columns: swizzle, and bytes of 8 rows."""
    return {64: 1, 32: 2, 16: 3}[atom] << 30 | (16 * atom >> 4)


def _joined_ptx(columns, keys, atom, rows, bf16):
    """PTX of the products of `keys` keys with a tile of `rows` keys, and its constraints."""
    sums, steps = 8 * -(-columns // 16), keys // 16
    kind = "bf16" if bf16 else "f16"
    high = _high_word(atom)
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
def add_sixteens(x, tile, total, ROWS: gl.constexpr, COLS: gl.constexpr, V_PART: gl.constexpr):
    """Ask for x [64, keys] . values [keys, COLS], added to total: one group of WGMMA. x, total: tensors of 16 columns.
    tile: the address of the values in shared memory, parts of ROWS rows and V_PART columns."""
    low = ((tile >> 4) & 0x3FFF) | ((ROWS * 2 * V_PART >> 4) << 16)
    return _joined_products(total, x, low, COLS, V_PART, ROWS)


@gluon.jit
def whole_sums(sixteens, REST: gl.constexpr):
    """Sums of 64 columns and of their rest, from tensors of 16."""
    rest = sixteens[4]
    if REST == 32:
        rest = _whole(sixteens[4], sixteens[5])
    return _whole(_whole(sixteens[0], sixteens[1]), _whole(sixteens[2], sixteens[3])), rest


@gluon.jit
def add_joined(x, tile, total, total_rest, ROWS: gl.constexpr, COLS: gl.constexpr, V_PART: gl.constexpr):
    """`add_sixteens` of a whole x, to the sums of 64 columns and of the rest."""
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, x.shape[1], 16])
    x = _sixteens(gl.convert_layout(x, LAYOUT, assert_trivial=True))
    made = add_sixteens(x, tile, _sixteens(total) + _sixteens(total_rest), ROWS, COLS, V_PART)
    return whole_sums(made, total_rest.shape[1])


def _scores_ptx(keys, rest, bf16):
    """PTX of the products of 64 queries and `keys` keys, of 64 columns and of their rest, and its constraints."""
    sums, kind = keys // 2, "bf16" if bf16 else "f16"
    steps = [(0, 64, k) for k in range(4)] + [(2, rest, k) for k in range(rest // 16)]
    total = ",".join(f"${i}" for i in range(sums))
    lines = [f"{{ .reg .pred p; .reg .b64 a<{len(steps)}>, b<{len(steps)}>; .reg .b32 lo; setp.ne.b32 p, 1, 0;"]
    products = ["wgmma.fence.sync.aligned;"]
    for step, (first, atom, k) in enumerate(steps):
        for name, place in (("a", first), ("b", first + 1)):
            low = f"add.s32 lo, ${sums + 8 * place}, {16 * 2 * k >> 4};"
            lines.append(f"{low} mov.b64 {name}{step}, {{lo, {_high_word(atom)}}};")
        products.append(
            f"wgmma.mma_async.sync.aligned.m64n{keys}k16.f32.{kind}.{kind} {{{total}}}, a{step}, b{step}, "
            f"{'p' if step else '0'}, 1, 1, 0, 0;"
        )
    lines += [*products, "wgmma.commit_group.sync.aligned; }"]
    return "\n".join(lines), ",".join(["=f"] * sums + ["r"] * 32)


@builtin
def _scores(q, k, q_rest, k_rest, keys, rest, dtype, _semantic=None):
    """q: the low word of its descriptor, as a tensor [64, 16]; the others': numbers."""
    keys, rest, dtype = (getattr(n, "value", n) for n in (keys, rest, dtype))
    asm, constraints = _scores_ptx(keys, rest, dtype == gl.bfloat16)
    made = gl.inline_asm_elementwise(
        asm, constraints, [q, k, q_rest, k_rest], dtype=[gl.float32] * (keys // 16), is_pure=False, pack=8,
        _semantic=_semantic,
    )  # fmt: skip
    return gl.tuple(made)


@gluon.jit
def _rows_word(tile):
    """The low word of the descriptor of a tile whose rows are contiguous."""
    return ((tile >> 4) & 0x3FFF) | (1 << 16)


@gluon.jit
def scores_of(q, q_rest, k, k_rest, KEYS: gl.constexpr, REST: gl.constexpr, dtype: gl.constexpr):
    """Ask for the scores of 64 queries and KEYS keys, tensors [64, 16]: one group of WGMMA. The arguments are addresses
    of tiles in shared memory, of 64 columns and of REST."""
    q = gl.full([64, 16], 0, gl.int32, SIXTEEN) + _rows_word(q)
    return _scores(q, _rows_word(k), _rows_word(q_rest), _rows_word(k_rest), KEYS, REST, dtype)


@gluon.jit
def address(room, BEGIN: gl.constexpr, which, BYTES: gl.constexpr):
    """Of one of the tiles of so many bytes that begin so far behind the start of shared memory, where `room` lies."""
    return smem_base() + BEGIN + which * BYTES


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
