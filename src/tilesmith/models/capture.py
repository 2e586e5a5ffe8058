"""Recording of CUDA graphs, apart from what is recorded: `graphs.py` and `pace.py` ask for nothing else of CUDA."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

Out = TypeVar("Out")


class Recorder(Protocol):
    """What records: `CudaRecorder`, or a test's."""

    def missing(self, device: torch.device) -> str: ...
    def busy(self) -> bool: ...
    def warm(self, fn: Callable[[], Any]) -> Any: ...
    def record(self, fn: Callable[[], Any]) -> tuple[Callable[[], None], Any]: ...
    def random_state(self, device: torch.device) -> Tensor: ...
    def restore(self, device: torch.device, state: Tensor) -> None: ...
    def memory(self) -> int: ...


class CudaRecorder:
    """Records work on one CUDA device. All graphs share a memory pool: what one of them frees while it is recorded,
    graphs recorded later may use."""

    def __init__(self) -> None:
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def missing(self, device: torch.device) -> str:
        """Why nothing can be recorded on a device, "" if it can."""
        return "" if device.type == "cuda" else f"on {device.type} there are no CUDA graphs"

    def busy(self) -> bool:
        """Whether this call is being recorded by somebody."""
        return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()

    def warm(self, fn: Callable[[], Out]) -> Out:
        """Run `fn` on the stream that will record it, so that libraries have set themselves up."""
        stream = self._side()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            out = fn()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        return out

    def record(self, fn: Callable[[], Out]) -> tuple[Callable[[], None], Out]:
        """Record what `fn` launches. Returns what repeats it, and what `fn` returned, whose tensors a repeat fills."""
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.stream(self._side()):
            # Threads that load data may allocate meanwhile, which a global capture would take for an error.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                out = fn()
            except BaseException:
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph.replay, out

    def fetch(self, tensor: Tensor) -> Callable[[], list[int]]:
        """Start to copy a tensor to the host. Returns what waits for the copy and gives its numbers."""
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
        done = torch.cuda.Event()
        done.record()

        def numbers() -> list[int]:
            done.synchronize()
            return copy.tolist()

        return numbers

    def mark(self, device: torch.device) -> Callable[[], bool]:
        """Mark where the host is on a device's current stream. Returns what tells, without waiting, whether the device
        has come there."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return event.query

    def random_state(self, device: torch.device) -> Tensor:
        """The state of the device's default generator, which is kept on the host."""
        return torch.cuda.get_rng_state(device)

    def restore(self, device: torch.device, state: Tensor) -> None:
        """Put the generator back."""
        torch.cuda.set_rng_state(state, device)

    def memory(self) -> int:
        """The bytes of the graphs' pool."""
        if self._pool is None:
            return 0
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if tuple(s.get("segment_pool_id", ())) == tuple(self._pool))

    def _side(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        return self._stream


@contextlib.contextmanager
def uncached_autocast(kind: str) -> Iterator[None]:
    """The autocast that is on, without its cache of casts: what one graph casts another must not look for."""
    if not torch.is_autocast_enabled(kind):
        yield
        return
    with torch.autocast(kind, torch.get_autocast_dtype(kind), cache_enabled=False):
        yield
