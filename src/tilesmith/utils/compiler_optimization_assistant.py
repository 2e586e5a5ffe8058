"""Latency of attention under the module path of `kernel_pytorch.utils`. Its home is `tilesmith.bench`."""

from tilesmith.bench.attention_latency import benchmark_attention_performance

__all__ = ["benchmark_attention_performance"]
