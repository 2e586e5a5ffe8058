"""The products of experts on Hopper, in Gluon: rows in the order of experts, times the weights of their expert.

A CTA makes one tile of 64 · CONSUMERS rows after another: one warpgroup issues TMA loads, two or three run WGMMA, each
for 64 of the rows, with an epilogue of its own. The last tile of an expert may be shorter; a consumer that has none of
its rows only gives its stages back. Legend as in `ops.moe.kernels`.
"""

from tilesmith.device.gluon.matmul import split_columns
from tilesmith.device.gluon.shim import (
    cp_async,
    cp_async_arrive,
    fence_async,
    gl,
    gluon,
    mbarrier_arrive,
    mbarrier_expect,
    mbarrier_wait,
    mbarriers,
    reinterpret,
    smem_tiles,
    tma_copy,
    tma_store_wait,
    wgmma,
    wgmma_wait,
)
from tilesmith.ops.moe.hopper.tiles import FLAT, HALF_ROWS, PIECE, STEP, corner, part_corner, store_piece
from tilesmith.ops.moe.plan import HOPPER_COLS

LOG2E = gl.constexpr(1.4426950408889634)
COLS = HOPPER_COLS  # of a tile
_INTERLEAVED, _BIAS, _LIMIT, _KEEPS_PRE = (gl.constexpr(n) for n in (1, 2, 4, 8))  # bits of an epilogue's FLAGS
_STEP, _HALF, _PIECE, _COLS = (gl.constexpr(n) for n in (STEP, HALF_ROWS, PIECE, COLS))


@gluon.jit
def _tile_and_column(number, tiles, tiles_n, GROUP: gl.constexpr):
    """Tile of rows and of columns: GROUP tiles down, then the next columns, so that both operands stay in L2."""
    group = number // (GROUP * tiles_n)
    height = gl.minimum(tiles - group * GROUP, GROUP)
    within = number - group * (GROUP * tiles_n)
    column = within // height
    return group * GROUP + within - column * height, column


@gluon.jit
def tile_of_expert(number, table, GROUP: gl.constexpr):
    """A tile's expert, how many rows the expert has from the tile's first on (0 where the tile is not used), where they
    end, and the tile's number among those of columns."""
    starts_ptr, tile_expert_ptr, tile_row_ptr, experts, tiles, tiles_n = table
    tile, column = _tile_and_column(gl.minimum(number, tiles * tiles_n - 1), tiles, tiles_n, GROUP)
    expert = gl.load(tile_expert_ptr + tile)
    first = gl.load(tile_row_ptr + tile)
    used = expert < experts
    expert = gl.minimum(expert, experts - 1)
    end = gl.load(starts_ptr + expert + 1)
    return expert, gl.where(used, end - first, 0), end, column


@gluon.jit
def _token_rows(source, end, length, row):
    """Pointers to the first STEP features of 64 rows of tokens, from `row` of a tile on. Behind the expert's last row
    that one is read again: nobody stores what comes of it."""
    x_ptr, order_ptr, top_k, row_units, _ = source
    LANES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    at = gl.minimum(row + gl.arange(0, _HALF, gl.SliceLayout(1, LANES)), length - 1)
    units = (gl.load(order_ptr + (end - length) + at) // top_k).to(gl.int64) * row_units
    return x_ptr + (units * 8)[:, None] + gl.arange(0, _STEP, gl.SliceLayout(0, LANES))[None, :]


@gluon.jit
def _token_units(source, end, length, row):
    """Where `_token_rows` begin, in units of 8 elements. Beside three consumers a thread that loads has 32 registers:
    pointers would not fit."""
    _, order_ptr, top_k, row_units, _ = source
    LANES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    at = gl.minimum(row + gl.arange(0, _HALF, gl.SliceLayout(1, LANES)), length - 1)
    return gl.load(order_ptr + (end - length) + at) // top_k * row_units


@gluon.jit
def _pointers(source, units, k):
    """Pointers to STEP features of the rows that begin at `units`, from feature k on, a multiple of STEP."""
    LANES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    first = (units + k // 8).to(gl.int64) * 8
    return source[0] + first[:, None] + gl.arange(0, _STEP, gl.SliceLayout(0, LANES))[None, :]


@gluon.jit
def _load(a_desc, b_desc, a, b, full, empty, table, steps, each, second, source, GATHERS: gl.constexpr,
          BY_ROWS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):  # fmt: skip
    """BY_ROWS: the weights lie as [E, features, outputs]. A tile of columns begins at `each` times its number; the
    second half of its weights lies `second` behind the first. GATHERS: rows are those of tokens, by cp.async."""
    BYTES: gl.constexpr = (0 if GATHERS else CONSUMERS * a_desc.block_type.nbytes) + 2 * b_desc.block_type.nbytes
    _, _, _, _, tiles, tiles_n = table
    count = gl.to_tensor(0)
    number = gl.program_id(0)
    expert, length, end, column = tile_of_expert(number, table, GROUP)
    while number < tiles * tiles_n:
        following = number + gl.num_programs(0)
        next_expert, next_length, next_end, next_column = tile_of_expert(following, table, GROUP)
        if length > 0:
            col = column * each
            if GATHERS and CONSUMERS == 3:
                upper_units = _token_units(source, end, length, 0)
                lower_units = _token_units(source, end, length, _HALF)
                third_units = _token_units(source, end, length, 2 * _HALF)
            elif GATHERS:
                upper = _token_rows(source, end, length, 0)
                lower = _token_rows(source, end, length, _HALF)
            for i in range(steps):
                s = count % STAGES
                k = i * _STEP
                mbarrier_wait(empty.index(s), ((count // STAGES) & 1) ^ 1)
                mbarrier_expect(full.index(s), BYTES)
                if BY_ROWS:
                    tma_copy(b_desc, (expert, k, col), full.index(s), b.index(2 * s))
                    tma_copy(b_desc, (expert, k, col + second), full.index(s), b.index(2 * s + 1))
                else:
                    tma_copy(b_desc, (expert, col, k), full.index(s), b.index(2 * s))
                    tma_copy(b_desc, (expert, col + second, k), full.index(s), b.index(2 * s + 1))
                if GATHERS:
                    LANES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
                    feature = gl.arange(0, _STEP, gl.SliceLayout(0, LANES))
                    there = (feature < source[4] * 8 - k)[None, :]
                    if CONSUMERS == 3:
                        cp_async(a.index(3 * s), _pointers(source, upper_units, k), there)
                        cp_async(a.index(3 * s + 1), _pointers(source, lower_units, k), there)
                        cp_async(a.index(3 * s + 2), _pointers(source, third_units, k), there)
                    else:
                        cp_async(a.index(2 * s), upper + k, there)
                        cp_async(a.index(2 * s + 1), lower + k, there)
                    cp_async_arrive(full.index(s))
                else:
                    for j in gl.static_range(CONSUMERS):
                        tma_copy(a_desc, corner(end, length, j * _HALF, k), full.index(s), a.index(CONSUMERS * s + j))
                count += 1
        number = following
        expert, length, end, column = next_expert, next_length, next_end, next_column


@gluon.jit
def _operands(a, b, s, HALF: gl.constexpr, BY_ROWS: gl.constexpr):
    """A stage's rows [64, STEP] of a consumer, and its weights [STEP, columns]."""
    rows = a.index(2 * s + HALF).reshape([_HALF, _STEP])
    weights = b.index(s)
    if not BY_ROWS:
        weights = weights.permute((1, 0))
    return rows, weights


@gluon.jit
def _multiply(HALF: gl.constexpr, a, b, out, full, empty, table, steps, extra, write: gl.constexpr,
              FLAGS: gl.constexpr, GATHERS: gl.constexpr, BY_ROWS: gl.constexpr, GROUP: gl.constexpr,
              STAGES: gl.constexpr):  # fmt: skip
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, _COLS, 16])
    _, _, _, _, tiles, tiles_n = table
    count = gl.to_tensor(0)
    number = gl.program_id(0)
    expert, length, end, column = tile_of_expert(number, table, GROUP)
    acc = gl.zeros([_HALF, _COLS], gl.float32, ACC)
    while number < tiles * tiles_n:
        following = number + gl.num_programs(0)
        next_expert, next_length, next_end, next_column = tile_of_expert(following, table, GROUP)
        if length > HALF * _HALF:
            s = count % STAGES
            mbarrier_wait(full.index(s), (count // STAGES) & 1)
            if GATHERS:
                fence_async()  # cp.async does not write through the proxy by which WGMMA reads
            rows, weights = _operands(a, b, s, HALF, BY_ROWS)
            made = wgmma(rows, weights, acc, use_acc=False, is_async=True)
            acc = wgmma_wait(1, deps=[made])
            count += 1
            for _ in range(1, steps):
                before = s
                s = count % STAGES
                mbarrier_wait(full.index(s), (count // STAGES) & 1)
                if GATHERS:
                    fence_async()
                rows, weights = _operands(a, b, s, HALF, BY_ROWS)
                made = wgmma(rows, weights, acc, is_async=True)
                acc = wgmma_wait(1, deps=[made])
                mbarrier_arrive(empty.index(before))
                count += 1
            acc = wgmma_wait(0, deps=[acc])
            mbarrier_arrive(empty.index(s))
            left, right = split_columns(acc)
            write(left, right, expert, length, end, column, HALF * _HALF, out, extra, FLAGS)
        elif length > 0:
            for _ in range(steps):
                s = count % STAGES
                mbarrier_wait(full.index(s), (count // STAGES) & 1)
                mbarrier_arrive(empty.index(s))
                count += 1
        number = following
        expert, length, end, column = next_expert, next_length, next_end, next_column
    tma_store_wait(0)


@gluon.jit
def _thirds_step(PART: gl.constexpr, a, halves, s, left, right, full, count, FIRST: gl.constexpr,
                 GATHERS: gl.constexpr, BY_ROWS: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Start a step of both halves of the columns of one of three consumers; what was started before is done."""
    mbarrier_wait(full.index(s), (count // STAGES) & 1)
    if GATHERS:
        fence_async()
    rows = a.index(3 * s + PART).reshape([_HALF, _STEP])
    if BY_ROWS:
        first = halves.index(2 * s).reshape([_STEP, _COLS // 2])
        second = halves.index(2 * s + 1).reshape([_STEP, _COLS // 2])
    else:
        first = halves.index(2 * s).reshape([_COLS // 2, _STEP]).permute((1, 0))
        second = halves.index(2 * s + 1).reshape([_COLS // 2, _STEP]).permute((1, 0))
    left = wgmma(rows, first, left, use_acc=not FIRST, is_async=True)
    right = wgmma(rows, second, right, use_acc=not FIRST, is_async=True)
    return wgmma_wait(2, deps=[left, right])


@gluon.jit
def _multiply_thirds(PART: gl.constexpr, a, halves, out, full, empty, table, steps, extra, write: gl.constexpr,
                     FLAGS: gl.constexpr, GATHERS: gl.constexpr, BY_ROWS: gl.constexpr, GROUP: gl.constexpr,
                     STAGES: gl.constexpr):  # fmt: skip
    """`_multiply` for one of three consumers, in products of 128 columns: ptxas has 128 registers for each of 512
    threads when it judges an instruction, and one of 256 columns wants 154."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1],
                                                  instr_shape=[16, _COLS // 2, 16])  # fmt: skip
    _, _, _, _, tiles, tiles_n = table
    count = gl.to_tensor(0)
    number = gl.program_id(0)
    expert, length, end, column = tile_of_expert(number, table, GROUP)
    left = gl.zeros([_HALF, _COLS // 2], gl.float32, ACC)
    right = gl.zeros([_HALF, _COLS // 2], gl.float32, ACC)
    while number < tiles * tiles_n:
        following = number + gl.num_programs(0)
        next_expert, next_length, next_end, next_column = tile_of_expert(following, table, GROUP)
        if length > PART * _HALF:
            s = count % STAGES
            left, right = _thirds_step(PART, a, halves, s, left, right, full, count, True, GATHERS, BY_ROWS, STAGES)
            count += 1
            for _ in range(1, steps):
                before = s
                s = count % STAGES
                left, right = _thirds_step(PART, a, halves, s, left, right, full, count, False, GATHERS, BY_ROWS,
                                           STAGES)  # fmt: skip
                mbarrier_arrive(empty.index(before))
                count += 1
            left, right = wgmma_wait(0, deps=[left, right])
            mbarrier_arrive(empty.index(s))
            write(left, right, expert, length, end, column, PART * _HALF, out, extra, FLAGS)
        elif length > 0:
            for _ in range(steps):
                s = count % STAGES
                mbarrier_wait(full.index(s), (count // STAGES) & 1)
                mbarrier_arrive(empty.index(s))
                count += 1
        number = following
        expert, length, end, column = next_expert, next_length, next_end, next_column
    tma_store_wait(0)


@gluon.jit
def _grouped_product(a_desc, b_desc, table, steps, each, second, source, extra, write: gl.constexpr,
                     FLAGS: gl.constexpr, GATHERS: gl.constexpr, BY_ROWS: gl.constexpr, GROUP: gl.constexpr,
                     STAGES: gl.constexpr, CONSUMERS: gl.constexpr):  # fmt: skip
    """The body of a persistent kernel. write(left, right, expert, length, end, column, row, out, extra, FLAGS) is the
    epilogue for the halves of an accumulator of 64 rows, from `row` of the tile on; `out` are two places in shared
    memory for `store_piece`. FLAGS: bits, since a constexpr inside `extra` would reach the consumers as a value."""
    if GATHERS:
        a = gl.allocate_shared_memory(b_desc.dtype, [CONSUMERS * STAGES, _HALF, _STEP], FLAT)
    else:
        a = smem_tiles(CONSUMERS * STAGES, a_desc)
    halves = smem_tiles(2 * STAGES, b_desc)
    if BY_ROWS:
        b = reinterpret(halves, b_desc.dtype, [STAGES, _STEP, _COLS], FLAT)
    else:
        b = reinterpret(halves, b_desc.dtype, [STAGES, _COLS, _STEP], FLAT)
    first = gl.allocate_shared_memory(b_desc.dtype, [2, _HALF, _PIECE], FLAT)
    last = gl.allocate_shared_memory(b_desc.dtype, [2, _HALF, _PIECE], FLAT)
    # full: expected bytes; with cp.async also 128 threads
    full, empty = mbarriers((STAGES, 129 if GATHERS else 1), (STAGES, CONSUMERS))
    fence_async()
    if CONSUMERS == 3:
        third = gl.allocate_shared_memory(b_desc.dtype, [2, _HALF, _PIECE], FLAT)
        gl.warp_specialize(
            [
                (_load, (a_desc, b_desc, a, halves, full, empty, table, steps, each, second, source, GATHERS, BY_ROWS,
                         GROUP, STAGES, CONSUMERS)),
                (_multiply_thirds, (0, a, halves, first, full, empty, table, steps, extra, write, FLAGS, GATHERS,
                                    BY_ROWS, GROUP, STAGES)),
                (_multiply_thirds, (1, a, halves, last, full, empty, table, steps, extra, write, FLAGS, GATHERS,
                                    BY_ROWS, GROUP, STAGES)),
                (_multiply_thirds, (2, a, halves, third, full, empty, table, steps, extra, write, FLAGS, GATHERS,
                                    BY_ROWS, GROUP, STAGES)),
            ],
            [4, 4, 4],
            [160, 160, 160],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_load, (a_desc, b_desc, a, halves, full, empty, table, steps, each, second, source, GATHERS, BY_ROWS,
                         GROUP, STAGES, CONSUMERS)),
                (_multiply, (0, a, b, first, full, empty, table, steps, extra, write, FLAGS, GATHERS, BY_ROWS, GROUP,
                             STAGES)),
                (_multiply, (1, a, b, last, full, empty, table, steps, extra, write, FLAGS, GATHERS, BY_ROWS, GROUP,
                             STAGES)),
            ],
            [4, 4],
            [216, 216] if GATHERS else [224, 224],
        )  # fmt: skip


@gluon.jit
def _add_bias(x, bias_ptr, col, cols, FLAGS: gl.constexpr):
    """x [64, N] plus the bias of its columns, of which there are `cols`."""
    if FLAGS & _BIAS:
        at = col + gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout))
        x += gl.load(bias_ptr + at, mask=at < cols, other=0.0).to(gl.float32)[None, :]
    return x


@gluon.jit
def _write_rows(left, right, expert, length, end, column, row, out, extra, FLAGS: gl.constexpr):
    out_desc, bias_ptr, cols = extra
    col = column * _COLS
    bias_ptr += expert.to(gl.int64) * cols
    first, second = split_columns(left)
    third, fourth = split_columns(right)
    first = _add_bias(first, bias_ptr, col, cols, FLAGS)
    store_piece(first, out_desc, corner(end, length, row, col), out, 0)
    second = _add_bias(second, bias_ptr, col + _PIECE, cols, FLAGS)
    store_piece(second, out_desc, corner(end, length, row, col + _PIECE), out, 1)
    third = _add_bias(third, bias_ptr, col + 2 * _PIECE, cols, FLAGS)
    store_piece(third, out_desc, corner(end, length, row, col + 2 * _PIECE), out, 2)
    fourth = _add_bias(fourth, bias_ptr, col + 3 * _PIECE, cols, FLAGS)
    store_piece(fourth, out_desc, corner(end, length, row, col + 3 * _PIECE), out, 3)


@gluon.jit(do_not_specialize=["experts", "tiles", "tiles_n", "steps", "cols"])
def experts_rows_kernel(
    a_desc, b_desc, out_desc, bias_ptr, starts_ptr, tile_expert_ptr, tile_row_ptr, experts, tiles, tiles_n, steps, cols,
    HAS_BIAS: gl.constexpr, BY_ROWS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    """out[r] = a[r] · weight[e]ᵀ + bias[e] for the rows of all experts; a and out in the order of experts."""
    table = (starts_ptr, tile_expert_ptr, tile_row_ptr, experts, tiles, tiles_n)
    extra = (out_desc, bias_ptr, cols)
    FLAGS: gl.constexpr = HAS_BIAS * _BIAS
    _grouped_product(a_desc, b_desc, table, steps, _COLS, _COLS // 2, (), extra, _write_rows, FLAGS, False, BY_ROWS,
                     GROUP, STAGES, CONSUMERS)  # fmt: skip


@gluon.jit
def _swiglu(gate, up, numbers, FLAGS: gl.constexpr):
    """gate · sigmoid(alpha gate) (up + up_offset), clamped before; a NaN stays one."""
    limit, alpha, up_offset = numbers
    gate, up = gate.to(gl.float32), up.to(gl.float32)
    if FLAGS & _LIMIT:
        gate = gl.where(gate > limit, limit, gate)
        up = gl.where(up > limit, limit, gl.where(up < -limit, -limit, up))
    return gate / (1.0 + gl.exp2(gate * (-LOG2E * alpha))) * (up + up_offset)


@gluon.jit
def _write_halves(gate, up, length, end, col, row, out, extra, bias_ptr, FLAGS: gl.constexpr, BEFORE: gl.constexpr):
    """A piece of gate and one of up, from column `col` of the activation on, and the activation that they give.
    BEFORE: how many pieces of the tile were stored."""
    out_desc, pre_desc, _, inner, numbers = extra
    gate = _add_bias(gate, bias_ptr, col, inner, FLAGS).to(out.dtype)
    up = _add_bias(up, bias_ptr + inner, col, inner, FLAGS).to(out.dtype)
    if FLAGS & _KEEPS_PRE:
        store_piece(gate, pre_desc, part_corner(end, length, 0, row, col), out, BEFORE)
        store_piece(up, pre_desc, part_corner(end, length, 1, row, col), out, BEFORE + 1)
    store_piece(_swiglu(gate, up, numbers, FLAGS), out_desc, corner(end, length, row, col), out, BEFORE)


@gluon.jit
def _write_interleaved(z, length, end, col, row, out, extra, bias_ptr, FLAGS: gl.constexpr, BEFORE: gl.constexpr):
    """The same of two neighbouring pieces in which columns of gate and up take turns."""
    out_desc, pre_desc, _, inner, numbers = extra
    z = _add_bias(z, bias_ptr, 2 * col, 2 * inner, FLAGS).to(out.dtype)
    if FLAGS & _KEEPS_PRE:
        left, right = split_columns(z)
        store_piece(left, pre_desc, corner(end, length, row, 2 * col), out, BEFORE)
        store_piece(right, pre_desc, corner(end, length, row, 2 * col + _PIECE), out, BEFORE + 1)
    gate, up = gl.split(gl.reshape(z, [_HALF, _PIECE, 2]))
    store_piece(_swiglu(gate, up, numbers, FLAGS), out_desc, corner(end, length, row, col), out, BEFORE)


@gluon.jit
def _write_gated(left, right, expert, length, end, column, row, out, extra, FLAGS: gl.constexpr):
    _, _, bias_ptr, inner, _ = extra
    col = column * (_COLS // 2)
    bias_ptr += expert.to(gl.int64) * (2 * inner)
    if FLAGS & _INTERLEAVED:
        _write_interleaved(left, length, end, col, row, out, extra, bias_ptr, FLAGS, 0)
        _write_interleaved(right, length, end, col + _PIECE, row, out, extra, bias_ptr, FLAGS, 1)
    else:
        gate, next_gate = split_columns(left)
        up, next_up = split_columns(right)
        _write_halves(gate, up, length, end, col, row, out, extra, bias_ptr, FLAGS, 0)
        _write_halves(next_gate, next_up, length, end, col + _PIECE, row, out, extra, bias_ptr, FLAGS, 1)


@gluon.jit(do_not_specialize=["experts", "tiles", "tiles_n", "steps", "inner", "top_k", "row_units", "units"])
def experts_gate_up_kernel(
    x_ptr, order_ptr, b_desc, out_desc, pre_desc, bias_ptr, starts_ptr, tile_expert_ptr, tile_row_ptr,
    experts, tiles, tiles_n, steps, inner, top_k, row_units, units, limit, alpha, up_offset,
    INTERLEAVED: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_LIMIT: gl.constexpr, KEEPS_PRE: gl.constexpr,
    BY_ROWS: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, CONSUMERS: gl.constexpr,
):  # fmt: skip
    """out [S, I] = swiglu(x[order // top_k] · weight[e]ᵀ + bias[e]) and pre [S, 2 I] what was activated, for all pairs
    that have an expert. A tile has 256 columns of the pre-activation: those of 128 of the activation. x's rows have
    8 · units features and begin at multiples of 8 · row_units."""
    table = (starts_ptr, tile_expert_ptr, tile_row_ptr, experts, tiles, tiles_n)
    extra = (out_desc, pre_desc, bias_ptr, inner, (limit, alpha, up_offset))
    FLAGS: gl.constexpr = INTERLEAVED * _INTERLEAVED + HAS_BIAS * _BIAS + HAS_LIMIT * _LIMIT + KEEPS_PRE * _KEEPS_PRE
    if INTERLEAVED:
        each, second = gl.to_tensor(_COLS), gl.to_tensor(_COLS // 2)
    else:
        each, second = gl.to_tensor(_COLS // 2), inner
    source = (x_ptr, order_ptr, top_k, row_units, units)
    _grouped_product(None, b_desc, table, steps, each, second, source, extra, _write_gated, FLAGS, True, BY_ROWS, GROUP,
                     STAGES, CONSUMERS)  # fmt: skip
