"""Probe of graphs: some HIP runtimes run stream memory operations at once while a stream is captured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from sidelane.execute.cuda.driver import Driver, DriverError
from sidelane.execute.cuda.probe import DriverFeatures, becomes_idle
from sidelane.memory.exchange import Exchange

_MARK = 7


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
                if not becomes_idle(driver, stream) or words.array[0] == _MARK:
                    return "graphs: this HIP runtime runs a stream's memory operations while it is captured"
                for _ in range(2):
                    words.array[0] = 0
                    driver.submit([driver.bind_graph(graph, stream)])
                    if not becomes_idle(driver, stream) or words.array[0] != _MARK:
                        return "graphs: this HIP runtime does not run a captured memory operation"
            finally:
                driver.destroy_graph(graph)
        return ""
    except DriverError as error:
        return f"graphs: {error}"
    finally:
        driver.destroy_stream(stream)
