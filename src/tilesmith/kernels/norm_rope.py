"""RMS norm before rotary embedding, of whole tokens or head by head."""

from dataclasses import dataclass

from tilesmith.codegen import (
    In,
    KernelIR,
    Out,
    Scalar,
    Type,
    build,
    f32,
    inline,
    local,
    rsqrt,
    shared,
    type_named,
    u32,
    unroll,
    vector,
)
from tilesmith.kernels import checks
from tilesmith.kernels.rows import Rows, across, row_of_thread, row_sum, stored_scalar

_PAIRS = 16
"""A thread's, where it has several heads. H200, f16, share of Triton's speed with 1, 2, 4 and 8 heads a thread: heads
of 128 89, 96, 98 and 96 %, of 64 91, 96, 98 and 95 %, through Vulkan 87, 92, 91 and 92 %, 88, 93, 92 and 90 %."""


@dataclass(frozen=True)
class RMSNormRoPEConfig:
    """RMS norm and rotary embedding of tokens of `hidden_dim` elements, which are heads of `head_dim`.

    max_seq_len: positions that the tables hold. norm_dim: "row" normalises the whole token, as the seed of this
    library does; "head" each head by itself (QK-norm). interleaved: neighbours form a pair (GPT-J), else the two halves
    of a head (GPT-NeoX, Llama). use_half: x, weight and y have 16 bits an element, else f32; tables and arithmetic are
    f32. half: which 16 bits, "f16", or "bf16" where the target has it.
    """

    hidden_dim: int
    head_dim: int
    max_seq_len: int
    use_half: bool = False
    norm_dim: str = "row"
    interleaved: bool = False
    workgroup_size: int = 256
    half: str = "f16"

    def __post_init__(self) -> None:
        checks.positive(self, "hidden_dim", "head_dim", "max_seq_len")
        checks.flags(self, "use_half", "interleaved")
        checks.one_of(self, "norm_dim", "row", "head")
        checks.workgroup(self)
        checks.half(self)
        if self.head_dim % 2:
            checks.fail(self, f"head_dim must be even, since features turn in pairs; got {self.head_dim}")
        if self.hidden_dim % self.head_dim:
            checks.fail(self, f"hidden_dim {self.hidden_dim} is not a multiple of head_dim {self.head_dim}")

    @property
    def normed(self) -> int:
        """Elements that are normalised together."""
        return self.hidden_dim if self.norm_dim == "row" else self.head_dim

    @property
    def plan(self) -> Rows:
        """How the pairs of features are shared out: a vector of first ones goes with one of second ones."""
        return _plan(self, stored_scalar(self))

    def grid(self, rows: int) -> tuple[int, int, int]:
        """The workgroups for `rows` tokens."""
        checks.counts(self, rows=rows)
        return self.plan.grid(rows * (self.hidden_dim // self.normed))


@dataclass(frozen=True)
class HeadsNormRoPEConfig:
    """RMS norm and rotary embedding of [batch, tokens, heads, head_dim] in any memory order, for a backward to follow.

    x, weight: the type of these tensors' elements, "f32", "f16", or "bf16" where the target has it; weight None: none.
    norm_dim, interleaved, workgroup_size: see `RMSNormRoPEConfig`. casting, subgroup: see `NormConfig`.
    """

    heads: int
    head_dim: int
    x: str = "f32"
    weight: str | None = "f32"
    norm_dim: str = "head"
    interleaved: bool = False
    casting: str = "fp32"
    workgroup_size: int = 256
    subgroup: int | None = None

    def __post_init__(self) -> None:
        checks.positive(self, "heads", "head_dim")
        checks.flags(self, "interleaved")
        checks.one_of(self, "x", "f32", "f16", "bf16")
        checks.one_of(self, "weight", None, "f32", "f16", "bf16")
        checks.one_of(self, "norm_dim", "row", "head")
        checks.one_of(self, "casting", "fp32", "llama")
        checks.workgroup(self)
        checks.subgroup(self)
        if self.head_dim % 2:
            checks.fail(self, f"head_dim must be even, since features turn in pairs; got {self.head_dim}")

    @property
    def normed(self) -> int:
        """Elements that are normalised together."""
        return self.heads * self.head_dim if self.norm_dim == "row" else self.head_dim

    @property
    def parts(self) -> int:
        """How often a token is normalised."""
        return 1 if self.norm_dim == "row" else self.heads

    @property
    def together(self) -> int:
        """Heads of which a thread has the pairs of the same angles."""
        a_head = self.plan.count * self.plan.lanes
        return next((n for n in (4, 2) if self.parts % n == 0 and n * a_head <= _PAIRS), 1)

    @property
    def plan(self) -> Rows:
        """How the pairs of features are shared out, as in `RMSNormRoPEConfig`."""
        return _plan(self, type_named(self.x), self.subgroup)

    @property
    def lanes(self) -> int:
        """Elements of a vector, in which steps are counted."""
        return 2 if self.interleaved else self.plan.lanes

    def grid(self, rows: int) -> tuple[int, int, int]:
        """The workgroups for `rows` tokens."""
        checks.counts(self, rows=rows)
        return self.plan.grid(rows * (self.parts // self.together))


def _plan(config: RMSNormRoPEConfig | HeadsNormRoPEConfig, scalar: Type, subgroup: int | None = None) -> Rows:
    half = config.head_dim // 2
    lanes = 1 if config.interleaved else 4 if half % 4 == 0 else 2 if half % 2 == 0 else 1
    # heads are short
    return Rows.of(config.normed // 2, config.workgroup_size, scalar, lanes, beside=16, subgroup=subgroup)


@checks.builds_from(RMSNormRoPEConfig)
def create_rms_norm_rope_kernel(config: RMSNormRoPEConfig) -> KernelIR:
    """y = rope(rms_norm(x) · weight): a pair (a, b) becomes (a cos - b sin, b cos + a sin). Rounded once.

    Tensors x, y: [rows, hidden_dim], contiguous, a row being a token; weight: [hidden_dim], for norm_dim "head"
    [head_dim]; cos, sin: f32 [max_seq_len, head_dim / 2]; positions: u32 [rows]. A position past the tables reads their
    last row. Scalars: rows, eps. Grid: `config.grid(rows)`.

    Source: Zhang and Sennrich, arXiv:1910.07467; Su et al., arXiv:2104.09864.
    """
    plan, parts = config.plan, config.hidden_dim // config.normed
    stored = vector(plan.scalar, 2 if config.interleaved else plan.lanes)
    half = config.head_dim // 2 // plan.lanes  # pairs a head, in vectors
    head = half if config.interleaved else 2 * half
    body = _body(plan, config.normed, half, config.interleaved, stored, stored, "fp32")

    def rms_norm_rope(
        x: In[stored],
        weight: In[stored],
        cos: In[plan.wide],
        sin: In[plan.wide],
        positions: In[u32],
        y: Out[stored],
        rows: Scalar[u32],
        eps: Scalar[f32],
    ):
        part, at, t = row_of_thread(plan, rows * parts)
        start = at * (config.normed // config.head_dim * head)
        angles = min(positions[at // parts], config.max_seq_len - 1) * half
        live = part < rows * parts
        body(x, weight, cos, sin, y, t, live, start, start, head, head, angles, eps, None)

    return build(rms_norm_rope, (plan.workgroup, 1, 1))


@checks.builds_from(HeadsNormRoPEConfig)
def create_heads_norm_rope_kernel(config: HeadsNormRoPEConfig) -> KernelIR:
    """y = rope(rms_norm(x) · (weight + offset)), with 1 / the root mean square of what was normalised together.

    Tensors x, y: heads at batch · x_batch + token · x_token + head · x_head, likewise y, counted in vectors of
    `config.lanes` elements; weight: [normed]; cos, sin: f32 [angles, head_dim / 2], the row of a token being its number
    modulo `angles`. Scalars: rows (batch · tokens), tokens, angles, the six steps, eps, and
    with a weight offset. Grid: `config.grid(rows)`.
    """
    plan, together = config.plan, config.together
    parts = config.parts // together
    stored = vector(plan.scalar, config.lanes)
    scaled = None if config.weight is None else vector(type_named(config.weight), config.lanes)
    half = config.head_dim // 2 // plan.lanes
    body = _body(plan, config.normed, half, config.interleaved, stored, scaled, config.casting, together)

    def heads_norm_rope(
        x: In[stored],
        weight: In[scaled] if scaled else None,
        cos: In[plan.wide],
        sin: In[plan.wide],
        y: Out[stored],
        rows: Scalar[u32],
        tokens: Scalar[u32],
        angles: Scalar[u32],
        x_batch: Scalar[u32],
        x_token: Scalar[u32],
        x_head: Scalar[u32],
        y_batch: Scalar[u32],
        y_token: Scalar[u32],
        y_head: Scalar[u32],
        eps: Scalar[f32],
        offset: Scalar[f32] if scaled else None,
    ):
        part, at, t = row_of_thread(plan, rows * parts)
        row, head = at // parts, at % parts * together
        batch, token = row // tokens, row % tokens
        start = batch * x_batch + token * x_token + head * x_head
        place = batch * y_batch + token * y_token + head * y_head
        live, angle = part < rows * parts, row % angles * half
        body(x, weight, cos, sin, y, t, live, start, place, x_head, y_head, angle, eps, offset)

    return build(heads_norm_rope, (plan.workgroup, 1, 1), subgroup_size=config.subgroup)


def _body(
    plan: Rows,
    normed: int,
    half: int,
    interleaved: bool,
    stored: Type,
    scaled: Type | None,
    casting: str,
    together: int = 1,
):
    """The body of both kernels. half: pairs a head, in vectors. together: heads that a thread has vectors of, whose
    loads are all in flight at once. `weight` and `offset` may be None."""
    wide, two, sweep, llama = plan.wide, vector(f32, 2), plan.sweep, casting == "llama"
    rounded = vector(plan.scalar, plan.lanes)
    factor = rounded if scaled is stored else wide  # what weight + offset is rounded to, for "llama"
    a_head = half if interleaved else 2 * half
    early = plan.exact and plan.count == 1  # what x is multiplied by is on its way while the sums are made

    @inline
    def pair_at(buffer, start, head_step, p):
        place = start + p // half * head_step + p % half
        if interleaved:
            both = two(buffer[place])
            first, second = both.x, both.y
        else:
            first, second = wide(buffer[place]), wide(buffer[place + half])
        return first, second

    @inline
    def scaled_by(n, w, offset):
        if llama:
            n = wide(rounded(n))
        if w is not None:
            if offset is not None:
                w = w + offset
            n = n * (wide(factor(w)) if llama else w)
        if llama:
            n = wide(rounded(n))
        return n

    @inline
    def body(x, weight, cos, sin, y, t, live, start, place, x_head, y_head, angles, eps, offset):
        stage = shared(f32, plan.workgroup) if plan.stages else None
        firsts = local(wide, plan.count * together) if plan.keep else None
        seconds = local(wide, plan.count * together) if plan.keep else None
        scales = local(f32, together)  # at first sums of squares
        for h in unroll(together):
            scales[h] = 0.0
        if plan.keep:
            for k in unroll(plan.count):
                p = t + k * plan.threads
                if plan.exact or p < plan.vectors:
                    for h in unroll(together):
                        firsts[k * together + h], seconds[k * together + h] = pair_at(x, start + h * x_head, x_head, p)
        if early:
            c, s = cos[angles + t % half], sin[angles + t % half]
            wa, wb = pair_at(weight, u32(0), a_head, t) if weight is not None else (None, None)
        for k in sweep(plan.count):
            p = t + k * plan.threads
            if plan.exact or p < plan.vectors:
                for h in unroll(together):
                    if plan.keep:
                        a, b = firsts[k * together + h], seconds[k * together + h]
                    else:
                        a, b = pair_at(x, start, x_head, p)
                    scales[h] += across(a * a + b * b, plan.lanes)
        for h in unroll(together):
            scales[h] = rsqrt(row_sum(scales[h], stage, plan.threads, plan.subgroup) / f32(normed) + eps)
        for k in sweep(plan.count):
            p = t + k * plan.threads
            if live and (plan.exact or p < plan.vectors):
                if not early:
                    c, s = cos[angles + p % half], sin[angles + p % half]
                    wa, wb = pair_at(weight, u32(0), a_head, p) if weight is not None else (None, None)
                for h in unroll(together):
                    if plan.keep:
                        a, b = firsts[k * together + h], seconds[k * together + h]
                    else:
                        a, b = pair_at(x, start, x_head, p)
                    a, b = scaled_by(a * scales[h], wa, offset), scaled_by(b * scales[h], wb, offset)
                    first, second = a * c - b * s, b * c + a * s
                    to = place + h * y_head + p // half * y_head + p % half
                    if interleaved:
                        y[to] = stored(two(first, second))
                    else:
                        y[to] = stored(first)
                        y[to + half] = stored(second)

    return body
