"""Ways to run a chain, and its GEMMs."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from sidelane.program.collective import ELEMENT_BYTES
from sidelane.session import Communicator
from sidelane.session.prelaunch import Prelaunched
from sidelane_lab.baselines.candidate import (
    CALLS_AHEAD,
    HIDDEN_LAUNCH_US,
    ReadyCall,
    captured,
)
from sidelane_lab.baselines.reference import Case
from sidelane_lab.harness.measure import Job, Meter
from sidelane_lab.pairs.workload import Gemm

CALLS = 8
"""Chains in a sample."""

WIDTH = 4096
"""Columns of what the producer makes, and its inner dimension: a layer of an 8B model."""

CONSUMED = 512
"""Columns of what the consumer makes: it reads all that was gathered, for an eighth of the producer's work a rank."""


def chain_gemms(nbytes: int, ranks: int, dtype: str) -> tuple[Gemm, Gemm]:
    """Producer and consumer of a chain whose gathered size is ``nbytes``.

    >>> [gemm.name for gemm in chain_gemms(1 << 20, 4, "bfloat16")]
    ['32x4096x4096', '128x512x4096']
    """
    rows = nbytes // (WIDTH * ELEMENT_BYTES[dtype])
    return Gemm(rows // ranks, WIDTH, WIDTH, dtype), Gemm(rows, CONSUMED, WIDTH, dtype)


class Chain:
    """One way to run the chain. Its GEMMs share weights and the consumer's output with those of the others."""

    def __init__(self, gemms: Gemms, collective: ReadyCall) -> None:
        self.collective = collective
        self._gemms = gemms
        self._graph: torch.cuda.CUDAGraph | None = None

    def preparation(self) -> tuple[Callable[[], None], ...]:
        """Return what must come before the first run, in steps each of which can fail."""
        return ()

    def run(self) -> None:
        """Produce, gather, consume, once."""
        tensors = self.collective.tensors
        self._gemms.produce(tensors.input)
        self.collective.start()()
        assert tensors.output is not None, "implementations that allocate their output take no part"
        self._gemms.consume(tensors.output)

    def capture(self) -> None:
        """Go over to a graph that holds the chains of one sample."""
        self._graph = captured(self.run, CALLS)

    def sample(self) -> None:
        """All chains of a sample."""
        if self._graph is not None:
            self._graph.replay()
            return
        for _ in range(CALLS):
            self.run()

    def job(self) -> Job:
        """All chains of a sample, timed as a study of collectives times its calls."""
        if self._graph is not None:
            return Job(self._graph.replay, calls=CALLS, hide_launch_us=HIDDEN_LAUNCH_US)
        return Job(self.run, repeats=CALLS, calls=CALLS, ahead=CALLS_AHEAD)

    def release(self) -> None:
        """Drop the graph, and what :meth:`preparation` made. All ranks alike."""
        self._graph = None
        self.collective.release()


class PrelaunchedChain(Chain):
    """The chain with its all-gather armed ahead of the producer, and fired behind it."""

    def __init__(self, gemms: Gemms, collective: ReadyCall, communicator: Communicator) -> None:
        super().__init__(gemms, collective)
        self._communicator = communicator
        self._handle: Prelaunched | None = None

    def preparation(self) -> tuple[Callable[[], None], ...]:
        output, input = self.collective.tensors.output, self.collective.tensors.input
        assert output is not None, "Sidelane writes into tensors that it is given"

        def load() -> None:
            # CUDA loads a kernel at its first launch, which would wait for what is armed.
            self._gemms.produce(input)
            self._gemms.consume(output)

        def prepare() -> None:
            self._handle = self._communicator.prepare_all_gather(output, input, variant=self.collective.variant)

        return load, prepare

    def run(self) -> None:
        """Arm, produce, fire, consume, once. Nothing else may come between the first and the third."""
        handle, tensors = self._handle, self.collective.tensors
        assert handle is not None, "its preparation comes first"
        assert tensors.output is not None
        handle.arm()
        try:
            self._gemms.produce(tensors.input)
        finally:
            handle.trigger()  # without a product, too: the peers wait for this rank's copies
        self._gemms.consume(tensors.output)

    def release(self) -> None:
        if self._handle is not None:
            self._handle.close()
        self._handle = None
        super().release()


class Gemms:
    """Producer and consumer of one case."""

    def __init__(self, case: Case, meter: Meter) -> None:
        rows = case.nbytes // (WIDTH * case.dtype.itemsize)
        dtype, device = case.dtype, case.device
        self.x = torch.empty(rows // case.world_size, WIDTH, dtype=dtype, device=device)
        self.w = torch.randn(WIDTH, WIDTH, dtype=dtype, device=device) / WIDTH**0.5
        self.v = torch.randn(WIDTH, CONSUMED, dtype=dtype, device=device) / WIDTH**0.5
        self.y = torch.empty(rows, CONSUMED, dtype=dtype, device=device)
        self.shard = torch.empty_like(self.x)
        self.whole = torch.zeros(rows, WIDTH, dtype=dtype, device=device)
        self._world_size = case.world_size
        self._meter = meter

    def refill(self, seed: int) -> None:
        """A fresh input of the producer, and poison where the consumer writes."""
        self.x.copy_(torch.randn(self.x.shape, generator=torch.Generator().manual_seed(seed)))
        self.y.fill_(float("nan"))

    def produce(self, shard: torch.Tensor) -> None:
        torch.mm(self.x, self.w, out=shard.view(-1, WIDTH))

    def consume(self, whole: torch.Tensor) -> None:
        torch.mm(whole.view(-1, WIDTH), self.v, out=self.y)

    def alone(self) -> None:
        """Both, once, with nothing between them."""
        self.produce(self.shard)
        self.consume(self.whole)

    def expected(self) -> torch.Tensor:
        """Return what the consumer must have made, by way of the process group."""
        self.produce(self.shard)
        parts = [torch.empty_like(self.shard) for _ in range(self._world_size)]
        dist.all_gather(parts, self.shard)
        return torch.mm(torch.cat(parts), self.v)
