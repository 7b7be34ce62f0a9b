"""Memory that was freed though a graph was captured with it, under ``Config.debug``: CPU ranks on the path of GPUs."""

from __future__ import annotations

import sys

import captured_cases
import pytest
from learn_cases import LEARNING
from ranks import RankPool
from reach_cases import MAPPING

from sidelane.execute.cuda.watch import CapturedMemory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say what is mapped where")

CALL = "all_gather in a graph, tensors [200] of torch.int32 at 0x"


def test_a_replay_on_memory_that_is_gone_is_said_and_ends_the_communicator(pool: RankPool) -> None:
    (warned, failed), (warned_there, failed_there) = pool.run(captured_cases.replays, 2, True, True, False)
    assert len(warned) == 1 and warned[0].startswith(CALL) and "do not replay its graph" in warned[0]
    assert "rank 0 replays its graph, though memory was freed" in failed and CALL in failed
    assert warned_there == [] and failed_there.startswith("PeerError: ")
    assert "rank 0 replays its graph" in failed_there


@pytest.mark.parametrize(("debug", "freed", "again"), [(False, True, False), (True, False, False), (True, True, True)])
def test_what_is_no_mistake_is_none(pool: RankPool, debug: bool, freed: bool, again: bool) -> None:
    """Without debug nobody looks. A second graph of the program may be the one that runs."""
    found = pool.run(captured_cases.replays, 2, debug, freed, again)
    assert [failed for _, failed in found] == [""] * 2
    assert [len(warned) for warned, _ in found] == [int(debug and freed), 0]


def test_captures_are_mapped_where_that_is_asked_for(pool: RankPool) -> None:
    for config in (MAPPING, LEARNING):
        assert pool.run(captured_cases.is_not_staged, 2, config) == [config is MAPPING] * 2


def test_memory_that_goes_while_its_graph_runs_was_there_when_it_began() -> None:
    memory, gone, running = CapturedMemory(), [False], [3]

    def ask() -> int:
        gone[0] = True  # behind the question
        return running[0]

    memory.add(3, "a call", lambda: gone[0])
    assert memory.look(ask) is None
    running[0] = 0
    assert memory.look(lambda: running[0]) is None
    running[0] = 4
    assert memory.look(lambda: running[0]) is None, "another one runs"
    running[0] = 3
    assert memory.look(lambda: running[0]) == "a call"


def test_a_kernel_says_nothing_while_it_runs_and_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    memory, gone = CapturedMemory(), [False]
    memory.add(0, "a kernel", lambda: gone[0])
    assert memory.look(lambda: 0) is None and not caplog.messages
    gone[0] = True
    assert [memory.look(lambda: 0) for _ in range(3)] == [None] * 3
    assert caplog.messages == ["a kernel: memory was freed with which it was captured: do not replay its graph"]


@pytest.mark.parametrize("when", ["before", "after", "under way"])
def test_flags_of_a_closed_program_are_let_alone(pool: RankPool, when: str) -> None:
    """Their memory may have another owner by the time at which a failure lets all waits go."""
    for rank, (errors, alone) in enumerate(pool.run(captured_cases.stores_behind_close, 2, when)):
        assert len(errors) == 1 and "a failure" in errors[0]
        if rank == 0 or when != "under way":  # then the other rank's flags get the signals of this one's last call
            assert alone == [True, True]
