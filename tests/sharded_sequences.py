"""What ranks check of whole models: `shard_sequence` on transformers models, and torch's own context parallel with our
attention inside. Run by test_context_parallel.py."""

import copy
import io
import pickle

import pytest
import torch
import torch.distributed as dist

from ranks import soon
from tilesmith import ops
from tilesmith.distributed import Layout

VOCABULARY = 128


def _loss_and_gradients(model, **inputs):
    model.zero_grad()
    loss = model(**inputs, use_cache=False).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def check_models_of_transformers(mesh):
    """Loss and gradients of whole batches, plain, padded and packed, are those of one process; also checkpointed."""
    pytest.importorskip("transformers")
    from optimize_models import build, checkpoint_layers
    from tilesmith.models import model_sharding, shard_sequence

    ids = torch.randint(VOCABULARY, (2, 13))
    labels = ids.clone()
    labels[0, :3] = -100
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[0, 10:], mask[1, :2] = 0, 0
    labels[1, 2] = -100  # padding would predict it, and what padding attends is nobody's promise
    positions = torch.cat([torch.arange(5), torch.arange(8)])[None]
    batches = {
        "plain": {"input_ids": ids, "labels": labels},
        "padded": {"input_ids": ids, "labels": torch.where(mask.bool(), labels, -100), "attention_mask": mask},
        "packed": {"input_ids": ids[:1], "labels": labels[:1], "position_ids": positions},
    }
    for family in ("llama", "gemma2", "gpt_oss"):
        model = build(family)
        sharded = shard_sequence(copy.deepcopy(model), mesh)
        model.set_attn_implementation("eager")
        for name, batch in batches.items():
            if (family, name) == ("gpt_oss", "packed"):
                continue  # transformers gives its mask no positions: eager attention sees across documents
            for checkpointed in (False, True) if (family, name) == ("llama", "packed") else (False,):
                if checkpointed:
                    sharded.train()
                    checkpoint_layers(sharded, use_reentrant=False)
                loss, exact = _loss_and_gradients(model, **batch)
                found, grads = _loss_and_gradients(sharded, **batch)
                torch.testing.assert_close(found, loss, msg=lambda text, n=name, f=family: f"{f} {n}: {text}")
                assert grads.keys() == exact.keys()
                for key, grad in grads.items():
                    dist.all_reduce(grad, group=mesh.get_group())
                    torch.testing.assert_close(
                        grad / mesh.size(), exact[key], rtol=1e-3, atol=2e-5, msg=f"{name} {key}"
                    )
        model_sharding(sharded).remove()
        sharded.set_attn_implementation("eager")
        torch.testing.assert_close(sharded.eval()(**batches["plain"]).loss, model.eval()(**batches["plain"]).loss)


def check_losses_that_a_model_adds(mesh):
    """Those of routers count as in one process: their mean, by value and by gradient."""
    pytest.importorskip("transformers")
    from optimize_models import build
    from tilesmith.models import shard_sequence

    ids = torch.randint(VOCABULARY, (2, 16))
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    for gradients, share in (("mean", mesh.size()), ("sum", 1)):
        model = shard_sequence(build("mixtral").double(), mesh, gradients=gradients)
        model.router_aux_loss_coef = 1.0
        found = []
        for what in ("loss", "loss", "aux_loss"):
            model.zero_grad()
            out = model(**batch, output_router_logits=len(found) > 0)
            getattr(out, what).backward()
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
            values = [getattr(out, what).detach().clone(), *grads]
            for value in values:
                dist.all_reduce(value)
            found.append([values[0] / mesh.size(), *(grad / share for grad in values[1:])])
        for plain, whole, added in zip(*found):
            others = mesh.size() // share if added.ndim else 1  # gradients of aux_loss itself are of their sum
            torch.testing.assert_close(whole, plain + added / others)


def check_labels_of_another_mark(mesh):
    """`ignore_index`, which transformers' loss takes, is that of what lies behind the last label, too."""
    pytest.importorskip("transformers")
    from optimize_models import build
    from tilesmith.models import shard_sequence

    ids = torch.randint(1, VOCABULARY, (2, 13))
    labels = ids.clone()
    labels[0, :5] = 0
    model = build("llama")
    batch = {"input_ids": ids, "labels": labels, "ignore_index": 0}
    expected = _loss_and_gradients(copy.deepcopy(model), **batch)[0]
    torch.testing.assert_close(_loss_and_gradients(shard_sequence(model, mesh), **batch)[0], expected)


def check_batches_that_one_rank_has_otherwise(mesh):
    """All ranks hear of it before they compute, and can go on."""
    pytest.importorskip("transformers")
    from optimize_models import build
    from tilesmith.models import shard_sequence

    last = mesh.size() - 1
    odd, ids = mesh.get_rank() == last, torch.randint(VOCABULARY, (2, 12))
    model = shard_sequence(build("llama"), mesh)
    told = "" if odd else f"refused on rank {last}: "
    for words, call in {
        f"^{told}shard_sequence: logits_to_keep would": lambda: model(ids, logits_to_keep=int(odd)),
        f"arguments must be the same on all ranks, got .* on rank {last}": lambda: model(
            ids, labels=None if odd else ids
        ),
        f"input_ids must be the same on all ranks, got .* on rank {last}": lambda: model(ids[:1] if odd else ids),
        f"the values of input_ids must be the same on all ranks, got .* on rank {last}": lambda: model(
            ids.flip(1) if odd else ids
        ),
        f"the values of labels must be the same on all ranks, got .* on rank {last}": lambda: model(
            ids, labels=ids.roll(1, 0) if odd else ids
        ),
        f"num_items_in_batch must be the same on all ranks, got .* on rank {last}": lambda: model(
            ids, labels=ids, num_items_in_batch=20 + odd
        ),
    }.items():
        with soon(), pytest.raises(ValueError, match=words if odd else words.replace("^", "shard_sequence: ")):
            call()
        model(ids)


def check_looks_at_a_sharded_model(mesh):
    """Runs without values, as `optimize` makes of decoder layers after a first call, tell other ranks nothing."""
    pytest.importorskip("transformers")
    from torch._subclasses import FakeTensorMode

    from optimize_models import OPS, build
    from tilesmith.engine import use
    from tilesmith.models import optimize, shard_sequence

    ids = torch.randint(VOCABULARY, (2, 12))
    model = build("llama")
    expected = model(ids, labels=ids).loss
    shard_sequence(model, mesh)
    model(ids)
    with use(**dict.fromkeys(OPS, "reference")), soon():
        if mesh.get_rank() == 0:
            twin = copy.deepcopy(model).to("meta")
            assert twin(ids.to("meta"), labels=ids.to("meta")).logits.shape == (2, 12, VOCABULARY)
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                model(mode.from_tensor(ids))
            optimize(model)
        torch.testing.assert_close(model(ids, labels=ids).loss, expected)


def check_copies_of_a_sharded_model(mesh):
    """A copy is sharded, too, and is given its attention back without its original."""
    pytest.importorskip("transformers")
    from optimize_models import build
    from tilesmith.models import model_sharding, shard_sequence

    ids = torch.randint(VOCABULARY, (1, 12))
    model = build("llama")
    before = model.config._attn_implementation
    shard_sequence(model, mesh)
    twin = copy.deepcopy(model)
    assert twin(ids).logits.shape[1] == model(ids).logits.shape[1] < 12
    model_sharding(twin).remove()
    assert model_sharding(twin) is None and twin.config._attn_implementation == before
    assert twin(ids).logits.shape[1] == 12 > model(ids).logits.shape[1]
    model_sharding(model).remove()
    assert model(ids).logits.shape[1] == 12


def check_what_a_sharded_model_may_not_be(mesh):
    """It is saved by its state dict: a pickle says so, as a process group is of one process."""
    pytest.importorskip("transformers")
    from optimize_models import build
    from tilesmith.models import model_sharding, shard_sequence

    ids = torch.randint(VOCABULARY, (1, 12))
    model = build("llama")
    expected = model(ids).logits
    shard_sequence(model, mesh)
    for save in (pickle.dumps, lambda model: torch.save(model, io.BytesIO())):
        with pytest.raises(TypeError, match=r"cannot be pickled, .*state_dict\(\), or call .*remove\(\) first"):
            save(model)
    sharding = model_sharding(model)
    sharding.remove()
    torch.testing.assert_close(pickle.loads(pickle.dumps(model))(ids).logits, expected)
    del model
    sharding.remove()  # of a model that is gone


def check_undo_of_a_sharded_model(mesh):
    """In both orders the model asks for the attention from before `optimize`, and so do copies."""
    pytest.importorskip("transformers")
    from optimize_models import build
    from tilesmith.models import model_sharding, optimize, shard_sequence, undo

    before = build("llama").config._attn_implementation
    for optimized in (lambda model: model, lambda model: model.model):  # the whole model, or the one within
        for copied in (False, True):
            for first, second in ((undo, _removed), (_removed, undo)):
                model = build("llama")
                optimize(optimized(model))
                shard_sequence(model, mesh)
                model = copy.deepcopy(model) if copied else model
                second(first(model))
                assert model_sharding(model) is None and model.config._attn_implementation == before


def _removed(model):
    from tilesmith.models import model_sharding

    model_sharding(model).remove()
    return model


def check_models_in_mode_hybrid(mesh):
    """A mesh of two dims says how many ranks exchange heads; another one is refused before the model is changed."""
    pytest.importorskip("transformers")
    from optimize_models import build
    from tilesmith.models import model_sharding, shard_sequence

    model, ids = build("llama"), torch.randint(VOCABULARY, (2, 13))
    with pytest.raises(ValueError, match="shard_sequence: mode 'hybrid' needs a DeviceMesh of two dims"):
        shard_sequence(model, mesh, mode="hybrid")
    assert model_sharding(model) is None
    expected = model(ids, labels=ids).loss
    if mesh.size() == 4:
        two = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "sp"))
        torch.testing.assert_close(shard_sequence(model, two, mode="hybrid")(ids, labels=ids).loss, expected)


def check_positions(mesh):
    """A model that numbers positions in its own way is served with its own, and refused without."""
    transformers = pytest.importorskip("transformers")
    from optimize_models import SIZES
    from tilesmith.models import shard_sequence

    ids = torch.randint(3, VOCABULARY, (2, 12))
    left, right = torch.ones(2, 2, 12, dtype=torch.long)
    left[0, :4], right[1, 9:] = 0, 0
    ids[0, :4] = 1  # RoBERTa's padding
    sizes = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
    roberta = transformers.RobertaForCausalLM(transformers.RobertaConfig(**sizes, is_decoder=True))
    more = {"ffn_dim": 64, "word_embed_proj_dim": sizes["hidden_size"], "dropout": 0.0}
    del sizes["intermediate_size"]
    opt = transformers.OPTForCausalLM(transformers.OPTConfig(**sizes, **more))
    own = {"roberta": left.cumsum(1) * left + 1, "opt": left.cumsum(1) * left - 1}
    for name, model, mask, words in (
        ("roberta", roberta, left, "numbers positions in its own way"),
        ("opt", opt, left, "numbers positions by attention_mask"),
        ("opt", opt, right, None),
    ):
        sharded = shard_sequence(copy.deepcopy(model.eval()), mesh)
        batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask.bool(), ids, -100)}
        batch["labels"][0, 4] = -100  # padding would predict it
        expected = model(**batch).loss
        if words is not None:
            with pytest.raises(ValueError, match=words):
                sharded(**batch)
            batch["position_ids"] = own[name]
        torch.testing.assert_close(sharded(**batch).loss, expected, msg=lambda text, n=name: f"{n}: {text}")


def check_what_is_not_of_tokens(mesh):
    """Outputs and arguments that a rank cannot have, and losses of a model's own."""
    transformers = pytest.importorskip("transformers")
    from optimize_models import SIZES, build
    from tilesmith.models import model_sharding, shard_sequence

    ids = torch.randint(3, VOCABULARY, (2, 12))
    sizes = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
    llama = shard_sequence(build("llama"), mesh)
    for words, named in {
        r"position_ids must be \[1 or 2, 12\], got \[3, 2, 12\]": {"position_ids": torch.zeros(3, 2, 12).long()},
        "logits_to_keep would be of each rank's own": {"logits_to_keep": 1},
        "return_dict, of the call": {"return_dict": False},
        "pixel_values is given; of tensors only": {"pixel_values": torch.zeros(1)},
    }.items():
        with pytest.raises(ValueError, match=words):
            llama(input_ids=ids, **named)
    ends, hides = torch.tensor([0, 5, 12], dtype=torch.int32), torch.ones(1, 12).long()
    hides[0, 11:] = 0
    with pytest.raises(ValueError, match="cu_seq_lens_q is given beside an attention_mask that hides tokens"):
        llama(input_ids=ids[:1], cu_seq_lens_q=ends, attention_mask=hides)
    llama.config.return_dict = False
    with pytest.raises(ValueError, match="return_dict, of the call or the model's config, must not be False"):
        llama(input_ids=ids)
    alone = transformers.BertModel(transformers.BertConfig(**sizes)).eval()
    bert = shard_sequence(copy.deepcopy(alone), mesh)
    out, layout = bert(ids), model_sharding(bert).batch.layout
    assert out.pooler_output is None
    torch.testing.assert_close(out.last_hidden_state, layout.shard(alone(ids).last_hidden_state, mesh.get_rank()))
    with pytest.raises(ValueError, match="token_type_ids is given"):
        bert(ids, token_type_ids=torch.zeros_like(ids))
    config = transformers.LlamaConfig(**SIZES, pad_token_id=0, num_labels=-(-12 // mesh.size()))
    classifier = shard_sequence(transformers.LlamaForSequenceClassification(config), mesh)
    with pytest.raises(ValueError, match="logits of LlamaForSequenceClassification is"):
        classifier(ids)
    bart = transformers.BartConfig(vocab_size=VOCABULARY, d_model=32, decoder_layers=1, decoder_attention_heads=4)
    with pytest.raises(ValueError, match=r"BartForCausalLM.forward takes no position_ids"):
        shard_sequence(transformers.BartForCausalLM(bart), mesh)
    with torch.device("meta"), pytest.raises(ValueError, match="are on the meta device"):
        shard_sequence(build("llama"), mesh)

    class Deaf(transformers.LlamaForCausalLM):
        """Positions and labels come in, and nothing comes of them."""

        def forward(self, input_ids=None, attention_mask=None, position_ids=None, labels=None, **more):
            given = position_ids if self.listens else None
            out = super().forward(input_ids, attention_mask, given)
            if labels is not None:
                out.loss = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            return out

    config = transformers.LlamaConfig(**SIZES)
    Deaf.listens = False
    model = Deaf(config)
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match="position_ids make no difference to Deaf"):
        shard_sequence(model, mesh)
    assert model_sharding(model) is None and model.config._attn_implementation == before
    Deaf.listens = True
    with pytest.raises(ValueError, match="the loss of Deaf takes no shift_labels"):
        shard_sequence(model, mesh)(input_ids=ids, labels=ids)


def check_models_that_are_refused(mesh):
    pytest.importorskip("transformers")
    import transformers

    from optimize_models import SIZES, build
    from tilesmith.models import shard_sequence

    model = shard_sequence(build("llama"), mesh)
    ids = torch.randint(VOCABULARY, (1, 8))
    with pytest.raises(ValueError, match="is sharded already"):
        shard_sequence(model, mesh)
    with pytest.raises(ValueError, match=r"attention_mask must be \[batch, tokens\]"):
        model(input_ids=ids, attention_mask=torch.ones(1, 1, 8, 8))
    with pytest.raises(ValueError, match="past_key_values is given"):
        model(input_ids=ids, past_key_values=transformers.DynamicCache())
    with pytest.raises(ValueError, match="gradients must be 'mean' or 'sum'"):
        shard_sequence(build("llama"), mesh, gradients="max")
    with pytest.raises(TypeError, match="must be a transformers model, got Linear; of a wrapper, such as PEFT's"):
        shard_sequence(torch.nn.Linear(2, 2), mesh)
    bert = shard_sequence(build("bert"), mesh)
    with pytest.raises(ValueError, match="takes no shift_labels"):
        bert(input_ids=ids, labels=ids)
    config = transformers.LlamaConfig(
        **SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    )
    with pytest.raises(ValueError, match="rope_type 'dynamic' depends on the longest position"):
        shard_sequence(transformers.LlamaForCausalLM(config), mesh)


def check_torchs_context_parallel_with_our_kernels(mesh):
    """torch's ring calls the operators that `register_for_sdpa` replaces, here for CPU tensors: lse, max_q, philox."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as torchs

    from tilesmith.models.attention.sdpa import _Activation

    activated = _Activation("CPU")
    try:
        layout, rank = Layout.zigzag(16, mesh.size()), mesh.get_rank()
        q, k, v = (torch.randn(2, 4, 16, 8).requires_grad_() for _ in range(3))
        out, lse = ops.attention(q, k, v, ops.Mask(causal=True))
        dout = torch.randn_like(out)
        exact = torch.autograd.grad(out, (q, k, v), dout)
        shard = lambda x: layout.shard(x.detach(), rank, 2)  # noqa: E731
        mine = [shard(x) for x in (q, k, v)]
        for method in ("allgather", "alltoall"):
            torchs.set_rotate_method(method)
            got, got_lse, cum_q, cum_k, max_q, max_k, seed, offset, *_ = (
                torchs._scaled_dot_product_ring_flash_attention(mesh, *mine, is_causal=True)
            )
            torch.testing.assert_close(got, shard(out))
            torch.testing.assert_close(got_lse.view_as(shard(lse)), shard(lse))
            grads = torchs._scaled_dot_product_ring_flash_attention_backward(
                mesh, shard(dout), *mine, got, got_lse, cum_q, cum_k, max_q, max_k, 0.0, True, seed, offset
            )
            for g, e in zip(grads, exact):
                torch.testing.assert_close(g, shard(e))
    finally:
        torchs.set_rotate_method("allgather")
        activated.remove()
