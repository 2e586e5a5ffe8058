"""`tilesmith train` and `generate`: a resumed run is the uninterrupted one, and bad input changes nothing."""

from __future__ import annotations

import json
import math
import shutil
import signal
import threading
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
from torch import nn

typer_testing = pytest.importorskip("typer.testing")

from tilesmith import cli  # noqa: E402
from tilesmith import nn as layers  # noqa: E402
from tilesmith.cli import charts, checkpoint, text, trainer, writing  # noqa: E402
from tilesmith.cli.training import learning_rate  # noqa: E402
from tilesmith.cli.windows import Windows, held_out  # noqa: E402

SMALL = ("--hidden", 16, "--inter", 32, "--layers", 2, "--heads", 2, "--kv-heads", 1, "--vocab", 280)
PLAN = ("--device", "cpu", "--batch", 2, "--length", 16, "--steps", 6, "--eval-windows", 4, "--accumulate", 2)


def run(*arguments):
    """Exit code and all output of `tilesmith ...`, in this process."""
    result = typer_testing.CliRunner().invoke(cli.build(), [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, " ".join(result.output.split())


@pytest.fixture(autouse=True)
def _tools(missing):
    for needed in ("matplotlib", "safetensors"):
        if not find_spec(needed):
            missing(f"{needed} is not installed")


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    monkeypatch.setattr(charts, "training_curves", lambda *args: [])


@pytest.fixture
def book(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text("".join(f"{i} times {i} is {i * i}; the cat sat on the mat, it’s said.\n" for i in range(80)))
    return path


@pytest.fixture
def llama(tmp_path, missing):
    """A folder with the config.json of a very small Llama."""
    if not find_spec("transformers"):
        missing("transformers is not installed")
    from transformers import LlamaConfig

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaConfig(**sizes, num_key_value_heads=1, vocab_size=300, attention_dropout=0.1).save_pretrained(
        tmp_path / "llama"
    )
    return tmp_path / "llama"


def train(out, *more):
    code, output = run("train", "--out", out, *more)
    assert code == 0, output
    return output


def weights(folder):
    return checkpoint.load_tensors(folder / checkpoint.WEIGHTS)


def assert_same_run(first, second):
    """Weights, moments, random state, data position and history, all bit for bit."""
    (a,), (b,) = (trainer.checkpoints(folder)[-1:] for folder in (first, second))
    for name in (checkpoint.WEIGHTS, trainer.OPTIMIZER):
        left, right = checkpoint.load_tensors(a / name), checkpoint.load_tensors(b / name)
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left)
    states = [json.loads((folder / trainer.STATE).read_text()) for folder in (a, b)]
    assert states[0] == states[1]
    assert states[0]["step"] == 6


@pytest.mark.parametrize("kind", ["own", "transformers"])
def test_a_resumed_run_is_the_uninterrupted_one(kind, book, tmp_path, request):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    model = SMALL if kind == "own" else ("--model", request.getfixturevalue("llama") / "config.json")
    first = train(whole, book, *model, *PLAN, "--eval-every", 2)
    train(halves, book, *model, *PLAN, "--eval-every", 2, "--stop-at", 3)
    assert [p.name for p in trainer.checkpoints(halves)] == ["step-000003"]
    output = train(halves, "--resume", "--eval-every", 2, "--device", "cpu")
    assert "3 of them done" in output
    assert "step 6 of 6" in output
    assert_same_run(whole, halves)
    assert first.count("validation ") == 4  # steps 0, 2, 4, 6
    losses = json.loads((whole / "step-000006" / trainer.STATE).read_text())["history"]["validation"]
    assert losses["6"] < losses["0"]
    assert all(torch.equal(a, b) for a, b in zip(weights(whole).values(), weights(whole / "step-000006").values()))


def test_transformers_reads_what_train_wrote(book, tmp_path, missing):
    if not find_spec("transformers"):
        missing("transformers is not installed")
    from transformers import AutoModelForCausalLM

    train(tmp_path / "out", book, *SMALL, *PLAN, "--steps", 1)
    ours = checkpoint.read(tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.tensor([ours.prompt("the cat")])
    torch.testing.assert_close(ours.model.eval()(ids).logits, theirs(ids).logits, rtol=1e-5, atol=1e-6)


def test_the_checkpoints_asked_for_stay(book, tmp_path):
    train(tmp_path / "out", book, *SMALL, *PLAN, "--save-every", 1, "--keep", 2, "--no-optimize")
    assert [p.name for p in trainer.checkpoints(tmp_path / "out")] == ["step-000005", "step-000006"]
    (tmp_path / "out" / "step-000009.partial").mkdir()
    (tmp_path / "out" / "step-000008").mkdir()  # without a state: not one of ours
    assert trainer.checkpoints(tmp_path / "out")[-1].name == "step-000006"


class Killed(BaseException):
    """What stands for SIGKILL: nothing is tidied up after it."""


def killed(*args, **how):
    raise Killed


@pytest.mark.parametrize("at", ["_save_state", "rename"])
def test_a_run_killed_in_its_first_save_can_begin_again(at, book, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer if at == "_save_state" else trainer.Path, at, killed)
        patch.setattr(trainer, "shutil", SimpleNamespace(rmtree=lambda path, ignore_errors: None))
        with pytest.raises(Killed):
            run("train", "--out", out, book, *SMALL, *PLAN)
    assert [p.name for p in out.iterdir()] == ["step-000006.partial"]
    assert "step 2 of 6" in train(out, book, *SMALL, *PLAN, "--stop-at", 2)
    assert sorted(p.name for p in out.glob("step-*")) == ["step-000002"]


def test_the_model_of_a_run_killed_before_it_was_there_is_put_there(book, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "publish", killed)
        with pytest.raises(Killed):
            run("train", "--out", out, book, *SMALL, *PLAN)
    assert [p.name for p in out.iterdir()] == ["step-000006"]
    assert "is at step 6 already" in run("train", "--out", out, "--resume", "--device", "cpu")[1]
    assert torch.equal(weights(out)["lm_head.weight"], weights(out / "step-000006")["lm_head.weight"])


def test_what_is_being_removed_is_no_checkpoint(book, tmp_path, monkeypatch):
    out = tmp_path / "out"
    train(out, book, *SMALL, *PLAN, "--stop-at", 3)
    with monkeypatch.context() as patch:
        removing = lambda path, ignore_errors=False: ignore_errors or killed()  # noqa: E731
        patch.setattr(trainer, "shutil", SimpleNamespace(rmtree=removing))
        with pytest.raises(Killed):
            run("train", "--out", out, "--resume", "--device", "cpu", "--keep", 1)
    assert [p.name for p in trainer.checkpoints(out)] == ["step-000006"]
    train(out, "--resume", "--device", "cpu", "--steps", 7)
    assert sorted(p.name for p in out.glob("step-*")) == ["step-000006", "step-000007"]


def test_the_command_of_a_run_resumes_it_with_resume_added(book, llama, tmp_path):
    made = {"own": SMALL, "other": ("--model", llama / "config.json")}
    for name, model in made.items():
        command = (book, *model, *PLAN, "--steps", 3)
        train(tmp_path / name, *command, "--stop-at", 1)
        assert "step 3 of 3" in train(tmp_path / name, *command, "--resume")


def test_ctrl_c_saves_after_the_step_and_leaves(book, tmp_path, monkeypatch):
    advance = trainer.Trainer.advance

    def interrupted(self):
        if self.step == 2:
            signal.raise_signal(signal.SIGINT)
        advance(self)

    train(tmp_path / "whole", book, *SMALL, *PLAN)
    monkeypatch.setattr(trainer.Trainer, "advance", interrupted)
    code, output = run("train", "--out", tmp_path / "out", book, *SMALL, *PLAN)
    assert code == 130
    assert "interrupted; step 3 of 6" in output
    monkeypatch.undo()
    monkeypatch.setattr(charts, "training_curves", lambda *args: [])
    train(tmp_path / "out", "--resume", "--device", "cpu")
    assert torch.equal(weights(tmp_path / "whole")["lm_head.weight"], weights(tmp_path / "out")["lm_head.weight"])


def test_ctrl_c_before_the_first_step_leaves(book, tmp_path, monkeypatch):
    evaluate = trainer.Trainer.evaluate

    def interrupted(self):
        signal.raise_signal(signal.SIGINT)
        return evaluate(self)

    monkeypatch.setattr(trainer.Trainer, "evaluate", interrupted)
    code, output = run("train", "--out", tmp_path / "out", book, *SMALL, *PLAN)
    assert code == 130
    assert "interrupted; nothing new was trained" in output


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_trained(book, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer.Trainer, "advance", lambda self: pytest.fail("a step was taken"))
    for out in ("/proc/out", book / "out"):
        code, output = run("train", "--out", out, book, *SMALL, *PLAN)
        assert code == 2
        assert f"--out {out} cannot be written to: " in output.replace("\n", "")


def test_large_seeds(book, tmp_path):
    assert "step 1 of 1" in train(tmp_path / "out", book, *SMALL, *PLAN, "--steps", 1, "--seed", 2**63 - 1)
    code, output = run("train", "--out", tmp_path / "new", book, *SMALL, *PLAN, "--seed", 2**63)
    assert code == 2 and "Invalid value for '--seed'" in output


def test_a_run_can_be_made_longer(book, tmp_path):
    train(tmp_path / "out", book, *SMALL, *PLAN, "--steps", 2)
    assert run("train", "--out", tmp_path / "out", "--resume")[0] == 2
    assert "step 3 of 3" in train(tmp_path / "out", "--resume", "--steps", 3, "--device", "cpu")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name at least one text file"),
        (("no/such/text",), "error: no/such/text does not exist; give text files"),
        ((".",), "error: . is a folder; give text files"),
        (("EMPTY",), "holds no text"),
        (("BOOK", "--length", 9999), "the text is too short: of its 2,014 tokens"),
        (("BOOK", "--validation", 0.001), "the text is too short: of its"),
        (("BOOK", "--validation", 1.0), "--validation is 1.0; it must be between 0 and 1"),
        (("BOOK", "--rate", 0), "--rate is 0.0"),
        (("BOOK", "--warmup", 7), "--warmup is 7, of --steps 6"),
        (("BOOK", "--dtype", "float16"), "--dtype must be float32 or bfloat16, got 'float16'"),
        (("BOOK", "--device", "gpu7"), "'gpu7' is not a device here"),
        (("BOOK", "--chosen", 2), "--chosen is for a model of experts; say how many by --experts"),
        (("BOOK", "--chosen", 2, "--experts", 0), "--chosen is for a model of experts; say how many by --experts"),
        (
            ("BOOK", "--heads", 3, "--kv-heads", 2),
            "the sizes of the model do not fit together: DecoderConfig: num_kv_heads is 2",
        ),
        (("BOOK", "--heads", 3, "--kv-heads", 3), "num_heads is 3, which does not divide hidden_size"),
        (("BOOK", "--resume"), "holds no checkpoint"),
        (("BOOK", "--model", "no/such/model"), "no/such/model holds no config.json"),
        (("BOOK", "--model", "LLAMA"), "no file named model.safetensors"),
        (("BOOK", "--model", "CONFIG", "--hidden", 8), "--hidden is for a new model"),
        (("BOOK", "--model", "CONFIG", "--length", 4000), "the model has 2048 positions"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(arguments, message, book, llama, tmp_path):
    (tmp_path / "empty").touch()
    known = {"BOOK": book, "EMPTY": tmp_path / "empty", "LLAMA": llama, "CONFIG": llama / "config.json"}
    named = [known.get(a, a) for a in arguments]
    sizes = () if "--model" in arguments else SMALL
    code, output = run("train", "--out", tmp_path / "out", *sizes, *PLAN, *named)
    assert code == 2
    assert message in output
    assert not (tmp_path / "out").exists()


def test_a_folder_with_something_in_it_is_not_trained_into(book, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    for out in (tmp_path / "out", book):
        code, output = run("train", "--out", out, book, *SMALL, *PLAN)
        assert code == 2
        assert "is not an empty folder" in output
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine"]


def test_a_checkpoint_that_does_not_fit_is_refused(book, tmp_path):
    from safetensors.torch import save_file

    out = tmp_path / "out"
    train(out, book, *SMALL, *PLAN, "--steps", 1)
    more = ("--resume", "--steps", 2, "--device", "cpu")
    other = tmp_path / "other.txt"
    other.write_text("another text " * 400)
    step = out / "step-000001"
    before = {p: p.read_bytes() for p in step.iterdir()}

    def refusal(*extra):
        code, output = run("train", "--out", out, *more, *extra)
        assert code == 2
        assert sorted(p.name for p in out.glob("step-*")) == ["step-000001"]
        return output

    assert "is not the text that the run began with" in refusal(other)
    assert "--rate belongs to the run that is resumed" in refusal("--rate", 0.5)
    assert "--hidden belongs to the run that is resumed" in refusal("--hidden", 32)
    for name in (checkpoint.WEIGHTS, trainer.OPTIMIZER):
        tensors = checkpoint.load_tensors(step / name)
        key = next(key for key in tensors if key.endswith("q_proj.weight") and "step" not in key)
        (step / name).unlink()
        save_file({**tensors, key: torch.zeros(3, 3)}, step / name)
        assert "does not fit" in refusal()
        (step / name).write_bytes(before[step / name][:100])
        assert "is not a whole safetensors file" in refusal()
        (step / name).write_bytes(before[step / name])
    (step / trainer.STATE).write_text("{")
    assert "cannot be continued" in refusal()
    (step / trainer.STATE).write_bytes(before[step / trainer.STATE])
    train(out, *more)


class Fixed(nn.Module):
    """A model whose loss is the square of its only weight, or not finite."""

    def __init__(self, factor: float = 1.0):
        super().__init__()
        self.weight, self.factor = nn.Parameter(torch.ones(2, 2)), factor

    def forward(self, input_ids, labels, use_cache):
        return SimpleNamespace(loss=self.factor * self.weight.square().sum() * input_ids.float().mean())


def made(model, **changes):
    values = {
        "steps": 4,
        "batch": 2,
        "accumulate": 1,
        "length": 4,
        "rate": 0.1,
        "warmup": 1,
        "floor": 0.0,
        "decay": 0.0,
    }
    values |= {"clip": 0.0, "seed": 0, "validation": 0.1, "eval_windows": 1, "dtype": "float32", "autocast": "none"}
    plan = trainer.Plan(**{**values, "optimize": False, **changes})
    language = checkpoint.LanguageModel(model, text.BytePairs(), None)
    return trainer.Trainer(language, torch.ones(40, dtype=torch.long), torch.ones(1, 4, dtype=torch.long), plan)


def test_a_step_that_is_not_finite_changes_nothing():
    trained = made(Fixed(math.inf))
    with pytest.raises(trainer.Diverged, match="step 1: the loss is inf"):
        trained.advance()
    assert trained.step == 0
    assert torch.equal(trained.language.model.weight, torch.ones(2, 2))


def test_a_run_that_diverges_before_a_checkpoint_says_that_there_is_none(book, tmp_path, monkeypatch):
    monkeypatch.setattr(trainer.torch.nn.utils, "clip_grad_norm_", lambda *args: torch.tensor(math.nan))
    code, output = run("train", "--out", tmp_path / "out", book, *SMALL, *PLAN)
    assert code == 1
    assert "the norm of the gradient nan; there is no checkpoint yet" in output


def test_random_numbers_of_another_kind_of_device_are_left_out(book, tmp_path):
    """As of a run that began on a GPU and goes on elsewhere."""
    from safetensors.torch import save_file

    train(tmp_path / "out", book, *SMALL, *PLAN, "--stop-at", 1)
    path = tmp_path / "out" / "step-000001" / trainer.OPTIMIZER
    tensors = checkpoint.load_tensors(path)
    path.unlink()
    save_file({**tensors, "rng.cuda": torch.zeros(16, dtype=torch.uint8)}, path)
    assert "step 6 of 6" in train(tmp_path / "out", "--resume", "--device", "cpu")


def test_micro_batches_add_up_to_a_batch():
    runs = [made(Fixed(), batch=4), made(Fixed(), batch=2, accumulate=2), made(Fixed(), batch=1, accumulate=4)]
    for trained in runs:
        trained.advance()
        trained.advance()
    assert runs[0].history == runs[1].history == runs[2].history
    assert runs[0].history.norm[0] == 4.0  # of 2 w, four of them
    assert runs[0].history.rate == [0.1, 0.1]


def test_the_gradient_is_clipped_and_only_matrices_decay():
    trained = made(Fixed(), clip=1.0, decay=0.5)
    trained.advance()
    assert trained.history.norm == [4.0]
    (state,) = trained.optimizer.state.values()
    assert torch.allclose(state["exp_avg"], torch.full((2, 2), 0.1 * 0.5))  # a norm of 1, spread over four
    assert [group["weight_decay"] for group in trained.optimizer.param_groups] == [0.5]


def test_the_learning_rate_rises_and_falls():
    rates = [learning_rate(step, 20, warmup=5, floor=0.1) for step in range(20)]
    assert rates[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert learning_rate(20, 20, warmup=5, floor=0.1) == pytest.approx(0.1)


def test_an_epoch_has_every_window_once_and_another_order_than_the_next():
    epochs = [Windows(torch.arange(100), 8, seed=3, epoch=epoch)._starts.tolist() for epoch in range(2)]
    for starts in epochs:
        assert sorted(starts) == list(range(min(starts), 93, 8))
        assert min(starts) < 8
    assert epochs[0] != epochs[1]
    taken = Windows(torch.arange(100), 8, seed=3).take(len(epochs[0]) + 2)
    assert taken[:, 0].tolist() == epochs[0] + epochs[1][:2]


def test_windows_continue_where_they_were():
    tokens = torch.arange(50)
    straight, first = Windows(tokens, 7, seed=1), Windows(tokens, 7, seed=1)
    expected = [straight.take(4) for _ in range(5)]
    found = [first.take(4) for _ in range(2)]
    second = Windows(tokens, 7, seed=1, epoch=first.epoch, position=first.position)
    found += [second.take(4) for _ in range(3)]
    assert all(torch.equal(a, b) for a, b in zip(expected, found))
    assert Windows(tokens[:7], 7, seed=1).take(3).tolist() == [list(range(7))] * 3
    assert held_out(tokens, 7, 3).tolist() == torch.arange(21).view(3, 7).tolist()


def test_byte_pairs_are_saved(tmp_path):
    pairs = text.BytePairs.train("the cat and the hat, " * 9, 270)
    pairs.save(tmp_path / "pairs.json")
    again = text.BytePairs.load(tmp_path / "pairs.json")
    assert again.tokens == pairs.tokens
    assert again.encode("the cat’s hat") == pairs.encode("the cat’s hat")


@pytest.fixture
def trained(book, tmp_path):
    train(tmp_path / "out", book, *SMALL, *PLAN, "--steps", 2)
    return tmp_path / "out"


def test_the_likeliest_tokens_are_those_of_the_library_s_own_loop(trained):
    language = checkpoint.read(trained)
    ids = language.prompt("the cat")
    expected = layers.generate(language.model.decoder.eval(), torch.tensor([ids]), 12)[0].tolist()
    greedy = writing.continued(language.model, ids, 12, lambda logits: writing.sample(logits, None, temperature=0))
    assert list(greedy) == expected
    code, output = run("generate", trained, "-p", "the cat", "-n", 12, "--temperature", 0, "--device", "cpu")
    assert code == 0
    assert " ".join(language.tokenizer.decode(ids + expected).split()) in output
    assert "tokens/s" in output


def test_a_seed_makes_it_write_the_same(trained):
    def written(*more):
        return run("generate", trained, "-p", "the", "-n", 20, "--device", "cpu", *more)[1].partition("first token")[0]

    assert written("--seed", 4) == written("--seed", 4, "--no-optimize")
    assert written("--seed", 4) != written("--seed", 5)


def test_generate_reads_a_hugging_face_checkpoint(llama, book, missing):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    LlamaForCausalLM(LlamaConfig.from_pretrained(llama)).save_pretrained(llama)
    words = Tokenizer(models.WordLevel({"<s>": 0, "the": 1, "cat": 2, "sat": 3, "?": 4}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", unk_token="?").save_pretrained(llama)
    code, output = run("generate", llama, "-p", "the cat", "-n", 5, "--device", "cpu", "--seed", 1)
    assert code == 0, output
    assert output.startswith("the cat")
    train(llama.parent / "out", book, "--model", llama, *PLAN, "--steps", 1)
    assert run("generate", llama.parent / "out", "-p", "the cat", "-n", 5, "--device", "cpu")[0] == 0


def test_json_is_all_that_stands_on_standard_output(book, tmp_path):
    def told(*arguments):
        result = typer_testing.CliRunner().invoke(cli.build(), [str(a) for a in arguments])
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    out = tmp_path / "out"
    run_told = told("train", "--out", out, book, *SMALL, *PLAN, "--eval-every", 3, "--json")
    assert run_told["step"] == len(run_told["history"]["loss"]) == 6
    assert run_told["checkpoint"] == str(out / "step-000006")
    assert run_told["plan"]["accumulate"] == 2
    asked = ("generate", out, "--prompt", "the cat", "-n", 5, "--seed", 1, "--device", "cpu")
    written, plain = told(*asked, "--json"), run(*asked)[1]
    assert len(written["tokens"]) == 5
    assert written["tokens_per_second"] > 0
    assert " ".join((written["prompt"] + written["text"]).split()) in plain


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no/such/folder", "-p", "x"), "no/such/folder is not a folder"),
        (("OUT", "-p", ""), "--prompt is empty"),
        (("OUT", "-p", "x", "-n", 5000), "the model has 2048 positions"),
        (("OUT", "-p", "x", "--top-p", 0), "--top-p is 0.0"),
        (("OUT", "-p", "ab\udcff"), "--prompt is not UTF-8: byte 2 is 0xff"),
        (("OUT", "-p", "x", "--dtype", "float33"), "'float33' is not a dtype"),
    ],
)
def test_generate_says_what_is_wrong(arguments, message, trained):
    code, output = run("generate", "--device", "cpu", *(trained if a == "OUT" else a for a in arguments))
    assert code == 2
    assert message in output


class _KeepsStates(nn.Module):
    """A language model whose cache transformers before 5.24 called cache_params, as Mamba's: its sum of tokens."""

    def __init__(self):
        super().__init__()
        self.head = nn.Parameter(torch.eye(16))

    def forward(self, input_ids, cache_params=None, use_cache=False, **others):
        seen = input_ids.sum().item() + (cache_params or 0)
        return SimpleNamespace(logits=self.head[seen % 16].expand(1, 1, -1), cache_params=seen)


def test_a_cache_of_states_is_handed_on():
    found = writing.continued(_KeepsStates(), [1, 2], 3, lambda logits: int(logits.argmax()))
    assert list(found) == [3, 6, 12]


def test_draws_are_from_the_tokens_asked_for():
    draw = torch.Generator().manual_seed(0)
    logits = torch.log(torch.tensor([0.05, 0.5, 0.15, 0.3]))
    drawn = lambda **how: {writing.sample(logits, draw, **how) for _ in range(200)}  # noqa: E731
    assert drawn() == {0, 1, 2, 3}
    assert drawn(top_k=2) == {1, 3}
    assert drawn(top_p=0.79) == {1, 3}
    assert drawn(top_p=0.81) == {1, 2, 3}
    assert drawn(top_p=0.01) == drawn(temperature=0.0) == drawn(top_k=1) == {1}


@pytest.mark.parametrize("temperature", [1e-30, 1e-42, 1e-300, 5e-324])
def test_a_temperature_near_0_takes_the_likeliest(temperature):
    draw = torch.Generator().manual_seed(0)
    assert writing.sample(torch.tensor([-90.0, 30.0, 31.0, 30.5]), draw, temperature) == 2


def test_characters_are_told_whole():
    pairs = text.BytePairs()
    ids = pairs.encode("aé’b")
    spelling = writing.Spelling(pairs.decode, ids[:1])
    told = [spelling.add(i) for i in ids[1:]]
    assert "".join(told) == "é’b"
    assert told == ["", "é", "", "", "’", "b"]
    half = writing.Spelling(pairs.decode, [])
    assert half.add(ids[1]) == ""
    assert half.rest() == "\ufffd"


def test_a_decoder_of_experts_is_trained_and_read_again(book, tmp_path):
    code, text = run("train", book, "--out", tmp_path / "out", *SMALL, *PLAN, "--experts", 4, "--chosen", 3)
    assert code == 0, text
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "tilesmith" and config["architectures"] == []
    decoder = checkpoint.read(tmp_path / "out").model.decoder
    assert (decoder.config.num_experts, decoder.config.experts_per_token) == (4, 3)
    assert all(isinstance(layer.mlp, layers.MixtureOfExperts) for layer in decoder.layers)
    code, text = run("train", book, "--out", tmp_path / "other", *SMALL, *PLAN, "--experts", 2, "--chosen", 3)
    assert code != 0 and "experts_per_token is 3; there are 2 experts" in text


def test_a_copy_of_a_checkpoint_beside_it_is_not_ours(book, tmp_path):
    out = tmp_path / "out"
    train(out, book, *SMALL, *PLAN, "--steps", 1)
    for name in ("step-000001-copy", "step-000001 old", "step-best"):
        shutil.copytree(out / "step-000001", out / name)
    assert [p.name for p in trainer.checkpoints(out)] == ["step-000001"]
    assert "step 2 of 2" in train(out, "--resume", "--steps", 2, "--device", "cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state["data"].update(position=10**9), "has no window 1000000000"),
        (lambda state: state["data"].update(epoch=-1), "epoch -1"),
        (lambda state: state["history"]["loss"].pop(), "is of step 1, its history of 0"),
        (lambda state: state["plan"].update(dtype="float33"), "no attribute 'float33'"),
    ],
)
def test_a_state_that_is_damaged_is_refused(change, message, book, tmp_path):
    train(tmp_path / "out", book, *SMALL, *PLAN, "--steps", 1)
    path = tmp_path / "out" / "step-000001" / trainer.STATE
    state = json.loads(path.read_text())
    change(state)
    path.write_text(json.dumps(state))
    code, output = run("train", "--out", tmp_path / "out", "--resume", "--steps", 2, "--device", "cpu")
    assert code == 2
    assert message in output


def test_a_moment_that_is_missing_is_refused(book, tmp_path):
    from safetensors.torch import save_file

    train(tmp_path / "out", book, *SMALL, *PLAN, "--steps", 1)
    path = tmp_path / "out" / "step-000001" / trainer.OPTIMIZER
    tensors = checkpoint.load_tensors(path)
    lost = next(key for key in tensors if key.startswith("exp_avg."))
    del tensors[lost]
    save_file(tensors, path)
    code, output = run("train", "--out", tmp_path / "out", "--resume", "--steps", 2, "--device", "cpu")
    assert code == 2
    assert f"it has no {lost}" in output


@pytest.mark.parametrize("kind", ["system", "safetensors"])
def test_a_full_disk_ends_in_a_line_and_leaves_the_last_checkpoint(kind, book, tmp_path, monkeypatch):
    from safetensors import SafetensorError

    save = trainer.Trainer._save_state

    def full(self, folder, about):
        if self.step > 2:
            raise OSError(28, "No space left on device") if kind == "system" else SafetensorError("I/O error: full")
        save(self, folder, about)

    def no_picture(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trainer.Trainer, "_save_state", full)
    monkeypatch.setattr(charts, "training_curves", no_picture)
    code, output = run("train", "--out", tmp_path / "out", book, *SMALL, *PLAN, "--save-every", 2)
    assert code == 1
    assert "the checkpoint cannot be written: " in output and "the last checkpoint is of step 2" in output
    assert [p.name for p in (tmp_path / "out").glob("step-*")] == ["step-000002"]


def test_ctrl_c_at_any_moment_saves_the_last_step(book, tmp_path, monkeypatch):
    """Between the look at what was asked and the end of the loop, too."""
    advance = trainer.Trainer.advance

    class Late(threading.Event):
        asked = 0

        def is_set(self):  # asked after the step that looked and did not save
            self.asked += 1
            return self.asked > 2

    monkeypatch.setattr(threading, "Event", Late)
    monkeypatch.setattr(trainer.Trainer, "advance", advance)
    code, output = run("train", "--out", tmp_path / "out", book, *SMALL, *PLAN)
    assert code == 130
    assert "interrupted; step 1 of 6" in output
