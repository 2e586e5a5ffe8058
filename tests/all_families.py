"""Models of transformers at a tiny size (causal and masked language models, encoder-decoders, image classifiers, CTC
and other speech models): built, trained a step plain, optimised and undone.

python tests/all_families.py                  # all of them, one line each
python tests/all_families.py ctc masked_lm    # those of these tasks
python tests/all_families.py bloom ctc/sew    # these, and what the rules left of them
"""

from __future__ import annotations

import copy
import gc
import inspect
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from family_models import TASKS, build, families, inputs_of
from optimize_models import OPS, Calls, assert_within_budget, train
from tilesmith.engine import use
from tilesmith.models import optimize, undo


@dataclass
class Result:
    """What came of a family: "right", "wrong" or "not built", with numbers of calls or the reason; (rule, class,
    reason) of what was replaced and of what was left."""

    family: str
    outcome: str
    told: str = ""
    rows: frozenset[tuple[str, str, str]] = frozenset()
    left: frozenset[tuple[str, str, str]] = frozenset()


def run(name: str) -> Result:
    """Plain, optimised with the references pinned, undone."""
    try:
        model = build(name)
        inputs = inputs_of(name, model)
        more = {"use_cache": False} if _takes_cache(name, model) else {}

        def step(of: torch.nn.Module = model) -> tuple:
            loss, logits, gradients = train(of, inputs, **more)
            return loss, logits, {n: g for n, g in gradients.items() if g.numel()}

        torch.manual_seed(0)
        plain = step()
        again = [step() for _ in range(3)]
        if not all(torch.equal(plain[1], one[1]) for one in again) or not _finite(plain):
            return Result(name, "not built", "the plain model draws numbers, or gives NaN or infinities")
        oracle = step(copy.deepcopy(model).double())
        if not _finite(oracle):
            return Result(name, "not built", "in float64 the plain model gives NaN or infinities")
        plain_error = plain
        if any(p.ndim == 4 for p in model.parameters()):
            # Behind a normalised batch of two, another order of the sums in a convolution is more than the budget.
            other = step(copy.deepcopy(model).to(memory_format=torch.channels_last))
            plain_error = _further(plain, other, oracle)
    except Exception as problem:
        told = f"{type(problem).__name__}: {problem}".splitlines()[0]
        return Result(name, "not built", told[:160])
    return compared(name, model, step, plain, plain_error, oracle)


def _takes_cache(name: str, model: torch.nn.Module) -> bool:
    return name.startswith("causal_lm/") or "use_cache" in inspect.signature(model.forward).parameters


def compared(
    name: str, model: torch.nn.Module, step: Callable[[], tuple], plain: tuple, same_dtype: tuple, oracle: tuple
) -> Result:
    """The result of a model whose step gave `plain`, and in float64 `oracle`, optimised and undone. same_dtype: what
    says how far from `oracle` its dtype may be."""
    calls: dict[str, int] = {}
    rows = left = frozenset()
    try:
        with use(**dict.fromkeys((*OPS, "relu_squared"), "reference")):
            report = optimize(model).tilesmith_report
            rows, left = (
                frozenset((row.rule, row.cls, row.reason) for row in kind if row.rule)
                for kind in (report.replaced, report.skipped)
            )
            with Calls() as calls:
                found = step()
        _within_budget(found, same_dtype, oracle)
        undo(model)
        back = step()
        assert torch.equal(back[0], plain[0]) and torch.equal(back[1], plain[1]), "undo: other logits"
        assert list(back[2]) == list(plain[2]), "undo: gradients of other parameters"
        assert all(torch.equal(back[2][name], g) for name, g in plain[2].items()), "undo: other gradients"
    except Exception as problem:  # whatever an optimised model raises is wrong, since the plain one does not
        told = f"{type(problem).__name__}: {problem}".splitlines()[0]
        return Result(name, "wrong", told, rows, left)
    told = ", ".join(f"{op} {n}" for op, n in sorted(calls.items()) if not op.endswith("_vjp"))
    return Result(name, "right", told, rows, left)


def _finite(step: tuple) -> bool:
    return all(bool(t.isfinite().all()) for t in (*step[:2], *step[2].values()))


def _further(one: tuple, other: tuple, oracle: tuple) -> tuple:
    """Of two steps each tensor that is further from `oracle`."""

    def pick(a: torch.Tensor, b: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
        return max((a, b), key=lambda x: (x.double() - exact).abs().max().item())

    gradients = {name: pick(g, other[2][name], oracle[2][name]) for name, g in one[2].items()}
    return pick(one[0], other[0], oracle[0]), pick(one[1], other[1], oracle[1]), gradients


def _within_budget(found: tuple, plain: tuple, oracle: tuple) -> None:
    """`assert_within_budget`, where the loss may have the error of the plain model's logits, of which it is made: its
    own is 0 now and then."""
    loss = plain[0].double() - oracle[0]
    logits = (plain[1].double() - oracle[1]).abs().max()
    allowed = oracle[0] + torch.maximum(loss.abs(), logits)
    assert_within_budget(found, (allowed.to(plain[0].dtype), *plain[1:]), oracle)


def chosen(names: list[str]) -> list[str]:
    """The models that are asked for: by task, by family, or by both. Raises ValueError for a name of neither."""
    known = list(families())
    unknown = [n for n in names if not any(n in (one, *one.split("/")) for one in known)]
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: neither a task ({', '.join(TASKS)}) nor a family")
    return [one for one in known if not names or set(names) & {one, *one.split("/")}]


def main(names: list[str]) -> int:
    """Run models and print a line for each; the exit status says whether one was wrong."""
    warnings.simplefilter("ignore")
    outcomes: Counter[str] = Counter()
    for name in chosen(names):
        start = time.perf_counter()
        result = run(name)
        outcomes[result.outcome] += 1
        print(f"{result.outcome:<10}{name:<36}{time.perf_counter() - start:5.1f} s  {result.told}", flush=True)
        if not set(names) <= set(TASKS):
            for rule, cls, reason in sorted(result.left):
                print(f"    {rule}: {cls}: {reason}")
        gc.collect()
    print(", ".join(f"{n} {outcome}" for outcome, n in outcomes.items()))
    return outcomes["wrong"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
