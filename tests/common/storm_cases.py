"""What ranks do in ``test_storm``: storms whose tensors that come again are small, so that they are cheap."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
from collections.abc import Callable
from typing import Any
from unittest import mock

import learn_cases
import torch
import torch.distributed as dist
from made_up_gpus import made_up_gpus

from sidelane.collectives import backend_cuda
from sidelane.collectives.learning import knowledge
from sidelane.memory.shared_tensors import SharedTensors
from sidelane.session.pools import SymmetricPool
from soak import drawing, leftovers, supply
from soak import storm as storms
from soak.caller import Caller
from soak.episode import Storm
from soak.judge import Tally
from soak.seat import Seat
from soak.supply import Supply

SLOT_BYTES = (3000, 9000)


class QuietSeat(Seat):
    """Nobody listens."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        line = multiprocessing.Pipe()[0]
        super().__init__(dist.get_rank(group), dist.get_world_size(group), torch.device("cpu"), line, 60.0)

    def beat(self, calls: int) -> None:
        pass


def storm(group: dist.ProcessGroup, mode: str, steps: int, seed: int, planted: str = "") -> tuple[dict[str, Any], str]:
    """What this rank counted, and what it has said of it."""
    gc.collect()
    kept: list[Any] = []
    real_stand_by, real_map = Supply.stand_by, SharedTensors.map

    def stand_by(self: Supply) -> None:
        real_stand_by(self)
        if planted == "a write elsewhere" and len(self._standing) == 2:
            self._standing[-1][0][-1] += 1

    def keeping_map(self: SharedTensors, handle: str, name: str) -> Any:
        found = real_map(self, handle, name)
        if planted == "a mapping that stays":
            kept.append(found)
        return found

    tally = Tally()
    with (
        learn_cases.counted(),
        mock.patch.object(drawing, "SLOT_BYTES", SLOT_BYTES),
        mock.patch.object(drawing, "CPU_MOST_BYTES", 20_000),
        mock.patch.object(drawing, "SHAPES", 8),
        mock.patch.object(storms, "COMES_AGAIN", 0.8),
        mock.patch.object(storms, "REPLACES", 0.005),
        mock.patch.object(Supply, "stand_by", stand_by),
        mock.patch.object(SharedTensors, "map", keeping_map),
    ):
        storms.play(Storm(steps, mode), seed, 30.0, QuietSeat(group), tally, group)
    kept.clear()
    return _counted(tally)


def with_graphs(
    group: dist.ProcessGroup, mode: str, steps: int, seed: int, planted: str = ""
) -> tuple[dict[str, Any], str]:
    """The same on the path of GPUs, with graphs, by copy engines. ``planted``: a replay that does nothing."""
    gc.collect()
    tally = Tally()
    with made_up_gpus() as driver:

        def record(act: Callable[[], None], pool: SymmetricPool | None = None) -> Callable[[], None]:
            driver.begin_capture()
            try:
                with pool or contextlib.nullcontext():
                    act()
            finally:
                graph = driver.end_capture()

            def replay() -> None:
                driver.replay(graph)
                driver.synchronize()

            return replay if not planted else lambda: None

        def check(self: Caller, *arguments: Any) -> None:  # nothing of torch's is in order with made-up streams
            self.communicator.synchronize()
            driver.synchronize()
            real_check(self, *arguments)

        real_check = Caller.check
        with (
            learn_cases.counted(),
            mock.patch.object(backend_cuda, "find_spec", return_value=None),  # no kernels
            mock.patch.object(drawing, "SLOT_BYTES", SLOT_BYTES),
            mock.patch.object(drawing, "CPU_MOST_BYTES", 20_000),
            mock.patch.object(drawing, "SHAPES", 8),
            mock.patch.object(Caller, "check", check),
            mock.patch.multiple(drawing, REDUCED_IN_STORMS=("int32",), OPS=("sum",)),  # what the made-up driver adds up
            mock.patch.multiple(
                storms,
                CAPTURES=0.2,
                WARM_UP_CAPTURES=0.2,
                REPLAYS=0.6,
                LETS_GO=0.03,
                SEASON=60,
                IS_ASYNCHRONOUS=0,
                POOL_BYTES=4 << 20,
            ),
        ):
            storms.play(Storm(steps, mode), seed, 30.0, QuietSeat(group), tally, group, record)
    return _counted(tally)


def gives_up(group: dist.ProcessGroup, steps: int, seed: int) -> tuple[dict[str, Any], str]:
    """The same in one season: ranks go ahead in some calls, and give up others, whose inputs nobody can map."""
    real_play = storms.play

    def in_one_season(*given: Any) -> None:
        with (
            mock.patch.multiple(storms, SEASON=steps, WARM_UP=0.02, REPLACES=0.01, COMES_AGAIN=0.93),
            mock.patch.multiple(storms, WARM_UP_CAPTURES=0.02, CAPTURES=0.004, REPLAYS=0.02),
        ):
            real_play(*given)

    with (
        mock.patch.object(knowledge, "PATIENCE", 10 * knowledge.VAIN),
        mock.patch.object(supply, "PRIVATE", 0.15),
        mock.patch.object(storms, "play", in_one_season),
    ):
        return with_graphs(group, "learn", steps, seed)


def _counted(tally: Tally) -> tuple[dict[str, Any], str]:
    gc.collect()
    assert leftovers.opened() == 0
    counts = {"calls": tally.calls.total(), "wrong": tally.wrong, "errors": tally.errors, **tally.noted}
    return counts, "\n".join(tally.texts)
