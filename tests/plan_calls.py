"""Calls of attention for the tests of plans: random metadata, and the benched rows with a name each.

`python -m plan_calls` (with PYTHONPATH=src:tests) writes the golden plans anew.
"""

from pathlib import Path

from tilesmith.hardware.detect import arch_named
from tilesmith.ops.attn.plan import Plan, Shape, tables
from tilesmith.ops.attn.plan.configs import LatentConfig
from tilesmith.ops.attn.plan.decode import hopper_cluster, hopper_latent, hopper_split
from tilesmith.ops.attn.plan.hopper_backward import hopper_backward
from tilesmith.ops.attn.plan.hopper_backward_tiles import is_narrow_vjp
from tilesmith.ops.attn.plan.hopper_forward import hopper_forward
from tilesmith.ops.attn.plan.shape import window_of

GOLDEN = Path(__file__).parent / "golden" / "attention_plans.txt"
SM90 = arch_named("sm90")
LENGTHS = (
    1,
    2,
    3,
    7,
    16,
    20,
    31,
    64,
    65,
    100,
    127,
    128,
    129,
    300,
    512,
    1000,
    1024,
    2048,
    4096,
    5000,
    8192,
    16384,
    131072,
)


def random_shape(r) -> Shape:
    """A call that Hopper's kernels may serve."""
    dim, group, kv_heads = (
        r.choice((64, 72, 96, 128, 128, 192, 256)),
        r.choice((1, 1, 3, 5, 7, 8)),
        r.choice((1, 2, 4, 8)),
    )
    tokens = r.choice((r.randint(1, 5000), r.choice(LENGTHS)))
    keys = tokens if r.random() < 0.7 else r.choice(LENGTHS)
    causal = r.random() < 0.5
    documents = r.choice((0, 0, 0, 1, 3, 100))
    local = not documents and r.random() < 0.25
    left = r.choice((0, 64, 100, 128, 512, 4096)) if local else -1
    right = 0 if causal else r.choice((-1, 0, 28, 64)) if local else -1
    lists = not documents and not local and dim <= 128 and r.random() < 0.15
    heads = r.choice((1, kv_heads, kv_heads * group)) if lists else 0
    many = (heads, r.choice((1, 2)), heads, 1, 128, 128) if lists else (0, 1, 0, 1, 0, 0)
    return Shape(
        1 if documents else r.choice((1, 2, 4)), kv_heads * group, kv_heads, tokens, keys, dim, dim, 2, 2, causal, left,
        right, r.random() < 0.1, not lists and dim <= 128 and r.random() < 0.1, False, not lists and r.random() < 0.5,
        r.random() < 0.1, documents > 0 and r.random() < 0.3, documents, True, r.random() < 0.5, *many,
    )  # fmt: skip


def forward(s: Shape, arch=SM90) -> Plan:
    """Hopper's forward in its own configuration."""
    left, right = s.window_left, s.window_right
    dims = {
        "dim": s.dim, "value_dim": s.value_dim, "keys": s.keys, "drawn": 8 if s.dropout else 1,
        "causal": 8 if s.causal else 1, "packed": 8 if s.packed else 1,
        "seen": min(s.keys, left + right + 1) if left >= 0 and right >= 0 else s.keys,
    }  # fmt: skip
    return hopper_forward(s, arch, tables.hopper_forward(dims, arch, None))


def backward(s: Shape, arch=SM90, **fields) -> Plan:
    """Hopper's backward in its own configuration, but for some fields of it."""
    whole = s.window_left < 0 and (s.causal or s.window_right < 0)
    dims = {
        "dim": s.dim, "value_dim": s.value_dim, "plain": 8 if whole and not s.softcap and not s.dropout else 1,
        "narrow": 8 if is_narrow_vjp(s, window_of(s)) else 1,
    }  # fmt: skip
    return hopper_backward(s, arch, tables.hopper_backward(dims, arch, None)._replace(**fields))


def decode(s: Shape, arch=SM90) -> Plan:
    """Few tokens on a cache: by clusters up to 16 rows of a kv head, else split."""
    rows = s.tokens * s.group
    dims = {
        "dim": s.dim, "value_dim": s.value_dim, "rows": rows, "heads": s.batch * s.kv_heads, "bytes": s.kv_bytes,
        "paged": 8 if s.page else 1,
    }  # fmt: skip
    if rows <= 16:
        return hopper_cluster(s, arch, tables.cluster(dims, arch, None))
    return hopper_split(s, arch, tables.split_kv(dims, arch, None))


def latent(s: Shape, arch=SM90) -> Plan:
    """Few tokens on a cache whose values are the first columns of its keys."""
    return hopper_latent(s, arch, LatentConfig())


def benched() -> dict[str, Plan]:
    """The plans of the rows of `tilesmith bench attention` at hidden size 2048 and 16,384 tokens, and of decode."""
    found = {}
    for dim in (64, 128, 256):
        for tokens in (512, 1024, 4096, 16384):
            for causal in (False, True):
                heads, batch = 2048 // dim, max(1, 16384 // tokens)
                s = Shape(batch, heads, heads, tokens, tokens, dim, dim, 2, 2, causal, -1, 0 if causal else -1)
                name = f"D {dim}, {tokens} tokens, {'causal' if causal else 'full'}"
                found[f"forward, {name}"] = forward(s)
                found[f"backward, {name}"] = backward(s)
                found[f"backward, {name}, deterministic"] = backward(s._replace(deterministic=True))
    for batch, tokens, heads, dim, causal in (
        (2, 504, 16, 72, False),
        (1, 2048, 32, 80, True),
        (2, 2048, 16, 96, False),
    ):
        s = Shape(batch, heads, heads, tokens, tokens, dim, dim, 2, 2, causal, -1, 0 if causal else -1)
        found[f"backward, {batch} x {tokens} tokens, {heads} heads, D {dim}"] = backward(s)
    for tokens in (2048, 16384):
        s = Shape(1, 16, 16, tokens, tokens, 192, 128, 2, 2, True, -1, 0)
        found[f"forward, D 192 and 128, {tokens} tokens"] = forward(s)
        found[f"backward, D 192 and 128, {tokens} tokens"] = backward(s)
    for tokens, heads, kv_heads in ((4096, 8, 8), (16384, 16, 4)):
        s = Shape(1, heads, kv_heads, tokens, tokens, 512, 512, 2, 2, True, -1, 0)
        found[f"forward, D 512, {tokens} tokens, {heads}/{kv_heads} heads"] = forward(s)
        found[f"backward, D 512, {tokens} tokens, {heads}/{kv_heads} heads"] = backward(s)
    for batch, tokens, heads, kv_heads in ((3, 1112, 32, 2), (1, 2048, 64, 8)):
        s = Shape(batch, heads, kv_heads, tokens, tokens, 128, 128, 2, 2, True, -1, 0)
        found[f"backward, {batch} x {tokens} tokens, {heads}/{kv_heads} heads, parts of groups"] = backward(s)
    for window in (128, 1024):
        s = Shape(1, 16, 16, 32768, 32768, 128, 128, 2, 2, True, window, 0)
        found[f"forward, window {window}"], found[f"backward, window {window}"] = forward(s), backward(s)
    for batch, tokens, heads, kv_heads, window in ((2, 2592, 8, 1, 512), (2, 4096, 8, 4, 1024)):
        s = Shape(batch, heads, kv_heads, tokens, tokens, 256, 256, 2, 2, True, window - 1, 0)
        found[f"forward, D 256, {batch} x {tokens} tokens, {heads}/{kv_heads} heads, window {window}"] = forward(s)
    s = Shape(1, 32, 8, 32768, 32768, 128, 128, 2, 2, True, -1, 0, documents=16)
    found["forward, 16 documents"], found["backward, 16 documents"] = forward(s), backward(s)
    for batch, tokens, keys in ((1, 1, 8192), (1, 1, 131072), (1, 8, 8192), (1, 16, 8192), (32, 16, 8192)):
        s = Shape(batch, 64, 8, tokens, keys, 128, 128, 2, 2, True, -1, 0)
        found[f"decode, {batch} x {tokens} tokens on {keys} keys"] = decode(s)
    for batch, tokens, heads, keys in ((1, 1, 128, 4096), (64, 1, 128, 4096), (8, 2, 128, 32768), (8, 2, 16, 32768)):
        s = Shape(batch, heads, 1, tokens, keys, 576, 512, 2, 2, True, -1, 0, shared=True)
        found[f"decode, latent, {batch} x {tokens} tokens of {heads} heads on {keys} keys"] = latent(s)
    return found


def golden() -> str:
    return "\n".join(f"# {name}\n{plan}\n" for name, plan in benched().items())


if __name__ == "__main__":
    GOLDEN.write_text(golden())
