"""Every sample kernel, by name."""

from codegen import samples_plain
from codegen.sample import SAMPLES, Sample
from codegen.samples_matrices import create_matmul, matmul_sample

__all__ = ["SAMPLES", "Sample", "create_matmul", "matmul_sample", "samples_plain"]
