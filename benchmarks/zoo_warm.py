"""Compile what `tilesmith bench OP --zoo SEED --count N` will run, by several processes at once, on one GPU.

    python benchmarks/zoo_warm.py attention SEED COUNT [--decode] [--against flash4,cudnn] [--processes 15]

Kernels of Triton are kept in its cache. FlashAttention 4 keeps its own where FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1
and FLASH_ATTENTION_CUTE_DSL_CACHE_DIR are set, here and for the bench. Its packages lie in
`nvidia_cutlass_dsl/dsl_packages`, which only a .pth file of site-packages names: a folder on PYTHONPATH needs it there,
too. What a call cannot do is printed and left to the bench.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

import torch
from common import say

from tilesmith.bench import zoo
from tilesmith.bench.run import case_rows
from tilesmith.engine import ops


def compile_share(given: argparse.Namespace) -> None:
    """Every `processes`-th call, once forward and backward."""
    for case in zoo.sample(given.op, given.seed, given.count, given.decode)[given.share :: given.processes]:
        try:
            peers = given.against.split(",")
            case_rows(ops()[given.op], case, torch.device("cuda"), torch.bfloat16, peers, 1, given.decode)
        except Exception as problem:  # the bench says what went wrong
            say(f"{case.name}: {type(problem).__name__}: {str(problem)[:200]}")
        torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("op")
    parser.add_argument("seed", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("--decode", action="store_true")
    parser.add_argument("--against", default="flash4,cudnn")
    parser.add_argument("--processes", type=int, default=15)
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.share is not None:
        compile_share(given)
        return 0
    command = [sys.executable, __file__, *sys.argv[1:]]
    shares = [subprocess.Popen([*command, "--share", str(share)]) for share in range(given.processes)]
    return max(process.wait() for process in shares)


if __name__ == "__main__":
    sys.exit(main())
