"""The executor for AMD GPUs: that for CUDA with another driver, and flags that do not wrap around.

Some HIP runtimes run stream memory operations at once while a stream is captured: a probe finds out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from sidelane.errors import UnavailableError
from sidelane.execute.base import Addresses, Capabilities, Runnable
from sidelane.execute.cuda.driver import Driver, DriverError
from sidelane.execute.cuda.executor import CudaExecutor
from sidelane.execute.cuda.probe import DriverFeatures, stream_becomes_idle
from sidelane.memory.control import ControlBlock
from sidelane.memory.exchange import Exchange
from sidelane.program.ir import Copy, Program

_MARK = 7  # that a graph writes in the probe

LAST_EPOCH = 1 << 31
"""Number of the first call that is refused. A released wait gets a value beyond the epoch, which must fit, too."""


class HipExecutor(CudaExecutor):
    """Runs one rank's queues of programs on SDMA engines through the HIP runtime. Never run on AMD hardware.

    See :class:`sidelane.execute.cuda.executor.CudaExecutor` for arguments and methods.
    """

    def __init__(
        self,
        rank: int,
        device: torch.device,
        monitor: ControlBlock,
        timeout_s: float,
        features: DriverFeatures,
        **options: Any,
    ) -> None:
        features = dataclasses.replace(features, rows_by_engines=False)
        super().__init__(rank, device, monitor, timeout_s, features, **options)

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(frozenset({Copy}), "hip")

    def load(self, program: Program, addresses: Addresses, *, captured: bool = False) -> Runnable:
        """See ``CudaExecutor.load``.

        Raises:
            UnavailableError: ``captured``, and this HIP runtime cannot capture memory operations.
        """
        if captured and not self.features.graphs:
            raise UnavailableError(f"a collective cannot be captured into a graph here: {self.features.note}")
        return super().load(program, addresses, captured=captured)

    def renew(self, epoch: int) -> None:
        """See ``CudaSite.renew``.

        Raises:
            UnavailableError: the communicator has made 2,147,483,648 calls. A HIP stream waits for "at least" among
                unsigned numbers, so that flags may not wrap around: a new communicator begins at 1 again.
        """
        if epoch >= LAST_EPOCH:
            raise UnavailableError(
                f"Communicator: calls on AMD GPUs (value={epoch}, allowed=..{LAST_EPOCH - 1}). Make a new communicator"
            )
        super().renew(epoch)


def probe_graphs(
    device: torch.device, features: DriverFeatures, exchange: Exchange, make_driver: Callable[[torch.device], Driver]
) -> DriverFeatures:
    """Return the features with ``graphs`` as found on all ranks. Collective.

    Raises:
        PeerError, PeerTimeoutError: a rank did not take part, or could not.
    """

    def problem() -> str:
        return graph_problem(make_driver(device)) if features.stream_memory_ops else features.note

    problems = exchange("probe of graphs", problem)
    first = next((text for text in problems if text), "")
    return dataclasses.replace(features, graphs=not first, note=features.note or first)


def graph_problem(driver: Driver) -> str:
    """Return the reason why a write cannot be captured into a graph and run twice; empty if it can."""
    words, stream = driver.host_words(1), driver.create_stream()
    try:
        with driver.current():
            ops = driver.memory_ops()
            ops.write(words.address, _MARK)
            graph = driver.make_graph([driver.bind_memory_ops(ops, stream)], stream)
            try:
                if not stream_becomes_idle(driver, stream) or words.array[0] == _MARK:
                    return "graphs: this HIP runtime runs a stream's memory operations while it is captured"
                for _ in range(2):
                    words.array[0] = 0
                    driver.submit([driver.bind_graph(graph, stream)])
                    if not stream_becomes_idle(driver, stream) or words.array[0] != _MARK:
                        return "graphs: this HIP runtime does not run a captured memory operation"
            finally:
                driver.destroy_graph(graph)
        return ""
    except DriverError as error:
        return f"graphs: {error}"
    finally:
        driver.destroy_stream(stream)
