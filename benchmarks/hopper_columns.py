"""Attention with tiles of 192 columns on Hopper (`hopper_columns`), which was compiled and not yet run there.

`python benchmarks/hopper_columns.py OUT.json` first runs each form on a small case in a process of its own, which is
ended after 90 seconds, then the other cases, and then times head dims of 192 and 128 under a causal mask beside the
kernels that serve today, FlashAttention 4 and cuDNN. A form that did not come to its end is not timed. The file is
written anew after each step.
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

import tilesmith
from tilesmith.bench.missing import Missing
from tilesmith.bench.peers_attention import PEERS
from tilesmith.engine import cases, ops
from tilesmith.engine.timing import measure
from tilesmith.ops import Mask, attention
from tilesmith.validate.cases import check_each

DEVICE = "cuda"
ALONE = "hopper_columns:overlap=0"  # each block's products wait for one another
FORMS = {
    "both": {"attention": "hopper_columns", "attention_vjp": "hopper_columns"},
    "gradient": {"attention": "hopper", "attention_vjp": "hopper_columns"},
    "gradient, no overlap": {"attention": "hopper", "attention_vjp": ALONE},
}
CASES = (
    "d192_128_tiles", "d192_128_grouped", "d192_128_window", "d192_128_more_queries", "d192_128_packed",
    "d192_128_whole", "d184_120_tiles", "d192_256_tiles", "d192_tiles",
)  # fmt: skip
GRADIENT_CASES = ("d128_64_tiles", "d64_128_tiles", "d256_128_tiles")
# name -> backend, and the form whose cases must have come to their end
BACKWARD = {
    "overlap": ("hopper_columns", "both"), "overlap, 4 stages": ("hopper_columns:stages=4", "both"),
    "overlap, 2 stages": ("hopper_columns:stages=2", "both"), "no overlap": (ALONE, "gradient, no overlap"),
    "triton": ("triton", ""),
}  # fmt: skip
FORWARD = {"columns": ("hopper_columns", "both"), "padded": ("hopper", ""), "triton": ("triton", "")}
HANGS = "no end after 90 s"


def check(name: str, form: str, dtype: str) -> None:
    """Run one case and print what was found."""
    case = next(case for case in cases("attention") if case.name == name)
    kind, pins = getattr(torch, dtype), FORMS[form]
    found = next(check_each(ops()["attention"], ("hopper_columns",), case, DEVICE, kind, pinned=pins))
    refused = (found.message or "").startswith("rejects")
    told = {"passed": found.passed and not refused, "error": found.error, "allowed": found.budget}
    sys.stdout.write("\n" + json.dumps(told | {"message": found.message}) + "\n")


def checked(job: tuple[str, str, str]) -> dict:
    """`check` in a process of its own."""
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--check", *job], capture_output=True, text=True, timeout=90, check=False
        )
    except subprocess.TimeoutExpired:
        return {"passed": False, "message": HANGS}
    if done.returncode:
        return {"passed": False, "message": f"exit {done.returncode}: {done.stderr.strip()[-600:]}"}
    return json.loads(done.stdout.strip().splitlines()[-1])


def run_jobs(jobs: list[tuple[str, str, str]], found: dict, out: Path) -> bool:
    """Run jobs side by side, and add what was found to the file."""
    with ThreadPoolExecutor(6) as pool:
        for job, told in zip(jobs, pool.map(checked, jobs)):
            found["values"][", ".join(job)] = told
            sys.stdout.write(f"{', '.join(job)}: {told}\n")
            sys.stdout.flush()
            out.write_text(json.dumps(found, indent=1))
    return all(found["values"][", ".join(job)]["passed"] for job in jobs)


def time_all(tokens: int, hanging: list[str], heads: int = 16) -> dict:
    """µs and TFLOP/s of a causal call of so many tokens, forward and backward, by each of its kernels and peers. The
    forms that hang are left out."""
    q, k, v = (
        torch.randn(1, tokens, heads, d, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for d in (192, 192, 128)
    )
    dout = torch.randn(1, tokens, heads, 128, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2)
    calls, grads, missing = {}, {}, {}
    outs = []

    def pinned(pins):
        def call():
            with tilesmith.use(**pins):
                return attention(q, k, v, Mask(causal=True))[0]

        return call

    def backward(out, pins):
        def gradients():
            with tilesmith.use(**pins):  # a pin of the forward would hold for the gradient where it has none of its own
                return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

        return gradients

    def add(name, call, forward, gradient, **pins):
        try:
            if forward:
                call()
                calls[name] = call
            if gradient:
                outs.append(call())
                grads[name] = backward(outs[-1], pins)
                grads[name]()
        except (Missing, ImportError, NotImplementedError, RuntimeError, ValueError, AssertionError, TypeError) as why:
            missing[name] = f"{type(why).__name__}: {why}"[:300]

    for name, (backend, form) in FORWARD.items():
        if form not in hanging:
            add(name, pinned({"attention": backend}), True, False)
    for name, (backend, form) in BACKWARD.items():
        if form not in hanging:
            add(name, pinned({"attention": "hopper"}), False, True, attention_vjp=backend)
    for name in ("flash4", "cudnn"):
        add(name, lambda name=name: PEERS[name]({"q": q, "k": k, "v": v, "causal": True})(), True, True)
    products = heads * tokens * tokens  # half of 2 · T² operations a column and head: the others are hidden
    found = {"missing": missing}
    for way, variants, columns in (("forward", calls, 192 + 128), ("backward", grads, 3 * 192 + 2 * 128)):
        found[way] = {
            name: {"us": t.median_us, "spread": t.spread, "tflops": products * columns / t.median_us / 1e6}
            for name, t in measure(variants, DEVICE, rounds=5).items()
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", nargs="?", default=os.path.join(os.environ.get("OUT", "."), "hopper_columns.json"))
    parser.add_argument("--part", choices=("values", "times"), help="one of both; times reads what values found")
    parser.add_argument("--check", nargs=3, metavar=("CASE", "FORM", "DTYPE"), help="one case, in this process")
    parser.add_argument("--time", nargs=2, metavar=("TOKENS", "FORMS"), help="time in this process, without FORMS")
    asked = parser.parse_args()
    if asked.check:
        check(*asked.check)
        return
    if asked.time:
        sys.stdout.write("\n" + json.dumps(time_all(int(asked.time[0]), asked.time[1].split(";"))) + "\n")
        return
    out = Path(asked.out)
    found = json.loads(out.read_text()) if asked.part == "times" else {"values": {}, "times": {}}
    if asked.part != "times":
        run_values(found, out)
    if asked.part != "values":
        run_times(found, out)


def run_values(found: dict, out: Path) -> None:
    """Check every form: the small case first, then the others."""
    small = [("d192_128_small", form, "bfloat16") for form in FORMS]
    if not run_jobs(small, found, out):
        sys.stdout.write("a small case failed: the others are run, and wrong forms are timed all the same\n")
    jobs = [(name, "both", "bfloat16") for name in CASES]
    jobs += [(name, "gradient, no overlap", "bfloat16") for name in CASES[:5]]
    jobs += [(name, "gradient", "bfloat16") for name in GRADIENT_CASES]
    jobs += [("d192_128_tiles", "both", "float16"), ("d192_128_packed", "both", "float16")]
    run_jobs(jobs, found, out)
    compiled = subprocess.run(
        [sys.executable, "-m", "tilesmith.validate.offline", "attn", "cuda", "90", "32", "d192_128_tiles"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    found["registers"] = compiled.stdout.splitlines() + compiled.stderr.splitlines()
    out.write_text(json.dumps(found, indent=1))


def run_times(found: dict, out: Path) -> None:
    """Time the forms that came to their end."""
    hanging = {job.split(", ", 1)[1].rsplit(", ", 1)[0] for job, x in found["values"].items() if x["message"] == HANGS}
    for tokens in (8192, 2048, 4096, 16384):
        command = [sys.executable, __file__, "--time", str(tokens), ";".join(hanging) or "none"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
            told = done.stderr[-2000:] if done.returncode else json.loads(done.stdout.strip().splitlines()[-1])
        except subprocess.TimeoutExpired:
            told = "no end after 150 s"
        found["times"][tokens] = told
        sys.stdout.write(f"{tokens}: {json.dumps(told, indent=1)}\n")
        sys.stdout.flush()
        out.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
