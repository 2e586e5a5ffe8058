"""RingAttentionLayer and ContextParallelAttention in one process; over ranks sharded_context.py checks them."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tilesmith import ops
from tilesmith.attention.context_parallel import ContextParallelAttention, create_context_parallel_attention
from tilesmith.attention.ring import RingAttentionLayer, create_ring_attention
from tilesmith.distributed import Layout, LocalRing, SharedSequence
from tilesmith.nn import AttentionLayer, Decoder, DecoderConfig

LOWEST = torch.finfo(torch.float64).min


def _masks():
    """Each form of a mask, and what it means as a bool [B, 1, T|1, T] or as something added."""
    keep = torch.ones(2, 13, dtype=torch.bool)
    keep[0, 10:] = keep[1, :2] = False
    plane = keep[:, None, None]
    hidden = torch.zeros(2, 1, 1, 13, dtype=torch.float64).masked_fill(~plane, LOWEST)
    added = torch.randn(2, 1, 13, 13, dtype=torch.float64)
    added[..., 5] = float("-inf")
    dense = torch.rand(1, 4, 13, 13) < 0.5
    return {
        "none": (None, None, None),
        "keys": (keep, plane, None),
        "integers": (keep.long(), plane, None),
        "keys as a plane": (plane, plane, None),
        "added to keys": (hidden, plane, None),
        "added": (added, None, added),
        "added to keys, any number": (added[:, :, :1], None, added[:, :, :1]),
        "dense": (dense, dense, None),
    }


@pytest.mark.parametrize("name", _masks())
@pytest.mark.parametrize("causal", [False, True])
def test_masks(name, causal):
    """Both layers against the plain one, with the gradient."""
    ring = RingAttentionLayer(32, 4, causal=causal, device="cpu").double()
    parallel = ContextParallelAttention(32, 4, 3, ["cpu"] * 3, causal=causal).double()
    parallel.load_state_dict(ring.state_dict())
    x = torch.randn(2, 13, 32, dtype=torch.float64)
    given, dense, bias = _masks()[name]
    q, k, v = (y.unflatten(2, (4, 8)).transpose(1, 2) for y in ring.qkv_proj(x).chunk(3, -1))
    out, _ = ops.attention(q, k, v, ops.Mask(causal=causal, dense=dense), ops.Score(bias=bias))
    expected = ring.out_proj(out.transpose(1, 2).flatten(2))
    exact = torch.autograd.grad(expected.square().sum(), ring.qkv_proj.weight)
    for layer in (ring, parallel):
        found = layer(x, given)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found.square().sum(), layer.qkv_proj.weight), exact)


def test_factories():
    layer = create_ring_attention(32, 4, max_sequence_length=16, device=torch.device("cpu"))
    assert isinstance(layer, RingAttentionLayer) and layer(torch.randn(1, 16, 32)).shape == (1, 16, 32)
    with pytest.raises(ValueError, match="the sequence has 17 tokens; max_sequence_length is 16"):
        layer(torch.randn(1, 17, 32))
    parallel = create_context_parallel_attention(32, 4, 2, device_mesh=[torch.device("cpu")] * 2)
    assert isinstance(parallel, ContextParallelAttention) and parallel(torch.randn(1, 5, 32)).shape == (1, 5, 32)
    assert layer.state_dict().keys() == AttentionLayer(32, 4).state_dict().keys()


def test_refusals():
    layer = create_ring_attention(32, 4, device=torch.device("cpu"))
    x = torch.randn(2, 6, 32)
    for call, match in (
        (lambda: create_ring_attention(30, 4), "num_heads is 4, which does not divide d_model, 30"),
        (lambda: create_ring_attention(32, 4, max_sequence_length=0), "max_sequence_length must be at least 1"),
        (lambda: layer(x[0]), r"hidden_states must be \[batch, tokens, 32\]"),
        (lambda: layer(x, torch.ones(2, 5, dtype=torch.bool)), r"attention_mask must be \[2, 6\]"),
        (lambda: layer(x, layout=Layout.zigzag(12, 2)), "the layer has no group; leave it out"),
        (lambda: SharedSequence(9, LocalRing(1), mode="rings"), "mode must be one of 'auto'"),
        (lambda: SharedSequence(9, LocalRing(1), layout=Layout.zigzag(8, 1)), "layout is of 8 tokens and 1 ranks"),
        (lambda: layer(x, torch.ones(2, 6)), "attention_mask is floating and holds 0 and 1"),
        (lambda: create_context_parallel_attention(32, 4, 3, ["cpu"] * 2), "is 3; device_mesh has 2 devices"),
    ):
        with pytest.raises(ValueError, match=match):
            call()
    with pytest.raises(TypeError, match="attention_mask has dtype torch.complex64; it must be bool, integer or real"):
        layer(x, torch.ones(2, 6, dtype=torch.complex64))
    with pytest.raises(TypeError, match="layout must be a Layout or None, got str 'zigzag'"):
        layer(x, layout="zigzag")
    with pytest.raises(TypeError, match="device_mesh must be a list of devices or a DeviceMesh"):
        create_context_parallel_attention(32, 4, 2, "cpu")


@pytest.mark.parametrize(("tokens", "starts"), [(9, None), (16, [0, 7, 16])], ids=["padded", "packed"])
def test_a_rank_may_hold_more_tokens_than_there_are_positions(tokens, starts):
    """A shard may end in padding, and documents have positions of their own."""
    torch.manual_seed(0)
    decoder = Decoder(DecoderConfig(64, 32, 48, 2, 4, max_positions=9))
    row = torch.randint(64, (1, tokens))
    packed = None if starts is None else torch.tensor(starts, dtype=torch.int32)
    sequence = SharedSequence(tokens, LocalRing(1), cu_seqlens=starts)
    shard = sequence.shard(row)
    assert shard.shape[1] > 9
    found = decoder(shard, sequence=sequence)
    torch.testing.assert_close(found[:, :tokens], decoder(row, cu_seqlens=packed))
    further = SharedSequence(10, LocalRing(1))
    with pytest.raises(ValueError, match="position 9; max_positions is 9"):
        decoder(further.shard(row[:, :10].repeat(1, 2)[:, :10]), sequence=further)


class _Maxima(TorchDispatchMode):
    """How often the largest element of a tensor was taken."""

    def __init__(self, x):
        super().__init__()
        self.of, self.count = x, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.max.default and args[0] is self.of
        return func(*args, **(kwargs or {}))


def test_a_decoder_asks_the_device_for_no_position_that_the_host_knows():
    """Each forward waited for the device; positions that a caller has changed are still looked at."""
    torch.manual_seed(0)
    decoder, tokens = Decoder(DecoderConfig(64, 32, 48, 2, 4, max_positions=9)), torch.randint(64, (1, 8))
    with torch.inference_mode():  # its tensors have no versions
        sequence = SharedSequence(8, LocalRing(1))
    with _Maxima(sequence.positions) as maxima:
        found = decoder(tokens, sequence=sequence)
    assert maxima.count == 0 and sequence.last_position == 7
    torch.testing.assert_close(found, decoder(tokens))
    sequence.positions += 1
    assert decoder(tokens, sequence=sequence).shape == found.shape
    for changed in (lambda: sequence.positions.add_(1), lambda: setattr(sequence, "positions", sequence.positions + 1)):
        changed()
        with pytest.raises(ValueError, match=r"position (9|10); max_positions is 9"):
            decoder(tokens, sequence=sequence)
