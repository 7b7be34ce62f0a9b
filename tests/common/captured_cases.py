"""What CPU ranks do, on the path of GPUs, with graphs whose memory is freed."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from made_up_gpus import AskedTensors, made_up_gpus
from reach_cases import MAPPING, shared

from sidelane import Communicator, Config
from sidelane.errors import SidelaneError
from sidelane.execute.cuda.watch import BUSY
from sidelane.program import collective as define
from sidelane.program.builders import build

PATIENCE_S = 20


class Said(logging.Handler):
    """What was warned of."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.anything = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        self.anything.set()


def replays(group: dist.ProcessGroup, debug: bool, freed: bool, again: bool) -> tuple[list[str], str]:
    """Capture a call, have rank 0 lose its memory, and replay it there first; what is warned of, and what goes wrong.

    ``again``: it is captured a second time before it is replayed, with memory at the same place.
    """
    said, gone = Said(), set[str]()
    logger = logging.getLogger("sidelane.execute.cuda.watch")
    logger.addHandler(said)
    real = AskedTensors.is_gone

    def is_gone(self: Any, allocation: Any) -> bool:
        return allocation.name in gone or real(self, allocation)

    config = dataclasses.replace(MAPPING, debug=debug)
    try:
        with (
            mock.patch.object(AskedTensors, "is_gone", is_gone),
            made_up_gpus() as driver,
            Communicator(group, config=config) as comm,
        ):
            first, n = comm.rank == 0, comm.world_size
            watch = comm.lane.backend.executor.watch  # type: ignore[attr-defined]
            output, input = shared(n * 100, torch.int32), shared(100, torch.int32)
            comm.all_gather(output, input, variant="b2b")

            def capture() -> Any:
                driver.begin_capture()
                comm.all_gather(output, input, variant="b2b")
                return driver.end_capture()

            graph = capture()
            dist.barrier(group)
            driver.replay(graph)
            driver.synchronize()
            if freed and first:
                found = comm.lane.backend.ordinary.allocation_of(output)  # type: ignore[union-attr]
                gone.add(found.name)  # type: ignore[union-attr]
                if debug:
                    assert said.anything.wait(PATIENCE_S), "nobody looks"
                watch._look_at_captured()
            if again:
                gone.clear()
                graph = capture()
            dist.barrier(group)
            try:
                if first:
                    driver.replay(graph)
                    until = time.monotonic() + PATIENCE_S
                    while not watch._words.array[BUSY] and watch.failure is None:
                        assert time.monotonic() < until, "it does not begin"
                        time.sleep(1e-3)
                    watch._look_at_captured()
                dist.barrier(group)
                if not first:
                    driver.replay(graph)
                driver.synchronize()
                comm.all_gather(output, input, variant="b2b")
                return said.texts, ""
            except SidelaneError as error:
                return said.texts, f"{type(error).__name__}: {error}"
    finally:
        logger.removeHandler(said)


def is_not_staged(group: dist.ProcessGroup, config: Config) -> bool:
    """Capture a call on ordinary tensors, and one on memory that peers cannot map; whether replays are right while
    other memory comes and goes, and the staging of the first one is not touched."""
    with made_up_gpus() as driver, Communicator(group, config=config) as comm:
        n, rank = comm.world_size, comm.rank
        output, input = shared(n * 100, torch.int32), shared(100, torch.int32)
        for given, kept in ((input, 0), (torch.empty(100, dtype=torch.int32), 1)):
            target = output if not kept else torch.empty(n * 100, dtype=torch.int32)
            comm.all_gather(target, given.fill_(rank), variant="b2b")
            driver.begin_capture()
            comm.all_gather(target, given, variant="b2b")
            graph = driver.end_capture()
            staging = comm.lane.preparer._staging
            for replay in range(5):
                dist.barrier(group)
                given.fill_(10 * replay + rank)
                target.fill_(-1)
                if kept == 0 and staging._block is not None:
                    staging._block.tensor.fill_(77)
                driver.replay(graph)
                driver.synchronize()
                if target.view(n, 100).unique(dim=1).flatten().tolist() != [10 * replay + peer for peer in range(n)]:
                    return False
                if kept == 0 and staging._block is not None and not (staging._block.tensor == 77).all():
                    return False
        return True


def stores_behind_close(group: dist.ProcessGroup, when: str) -> tuple[list[str], list[bool]]:
    """Close a program of one's own before or after a call fails: the errors, and whether its flags were let alone."""
    with made_up_gpus(finish=False) as driver:
        comm = Communicator(group, config=Config(timeout_s=20, profile="builtin"))
        n, errors = comm.world_size, []
        program = build(define.all_gather([64] * n, in_place=True), "b2b")
        for again in range(3 if when == "before" else 1):
            bound = comm.load(program, {"output": comm.empty(64 * n, dtype=torch.uint8)})
            bound()
            comm.synchronize()
            assert bound._block is not None
            words = bound._block.tensor.view(torch.int32)  # kept here, where others would find their own bytes
            if again:
                bound.close()
        if when == "before":
            bound.close()
            words.fill_(-7)
        if when == "under way" and comm.rank == 0:
            bound()  # its stream waits for flags that nobody signals
        dist.barrier(group)
        if comm.rank == 1:
            comm.lane.control.abort("a failure", (1,))
        deadline = time.monotonic() + 10
        while comm.lane.backend.executor.watch.failure is None and time.monotonic() < deadline:
            time.sleep(1e-3)
        try:
            comm.synchronize()
        except SidelaneError as error:
            errors.append(str(error))
        if when != "before":
            bound.close()
            words.fill_(-7)
        time.sleep(0.3)  # some five releases
        alone = [bool((words == -7).all())]
        driver.synchronize()
        comm.close()
        alone.append(bool((words == -7).all()))
        return errors, alone
