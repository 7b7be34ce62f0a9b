"""``verify``, happens-before: deadlocks, lost signals, pairing, while some ranks run ahead of others."""

from __future__ import annotations

import pytest
from listings import replace, without
from refusals import CYCLE, EPOCH_BARRIER, GATHER, RESET_BARRIER, gather, nothing, refused

from sidelane.program.builders import build
from sidelane.program.collective import all_gather
from sidelane.program.transform import freeze, hold
from sidelane.program.verify import verify, verify_sequence
from sidelane_lab.sim.prelaunch import prelaunch


def test_missing_signal() -> None:
    lines = refused(
        gather(without(GATHER, "signal rank 1 flag 2 set epoch")),
        words=("deadlock", "rank 1 dma:0 command 4 (wait flag 2 >= epoch)", "no command signals this flag"),
    )
    assert len(lines) == 1


def test_missing_wait() -> None:
    refused(
        gather(without(GATHER, "wait flag 3 >= epoch")),
        words=("unpaired signal", "rank 1 dma:0 command 3 (signal rank 0 flag 3 set epoch)", "no wait of rank 0"),
    )


def test_wrong_flag() -> None:
    program = gather(replace(GATHER, "signal rank 1 flag 2 set epoch", "signal rank 1 flag 5 set epoch"))
    refused(program, words=("deadlock", "rank 1 dma:0 command 4 (wait flag 2 >= epoch)", "no command signals"))
    refused(program, words=("unpaired signal", "rank 0 dma:0 command 3 (signal rank 1 flag 5 set epoch)"))


def test_flag_of_the_wrong_rank() -> None:
    program = gather(replace(GATHER, "signal rank 1 flag 2 set epoch", "signal rank 0 flag 2 set epoch"))
    refused(program, words=("deadlock", "rank 1 dma:0 command 4 (wait flag 2 >= epoch)", "no command signals"))


def test_values_that_never_come() -> None:
    low = GATHER.replace("flag 2 set epoch", "flag 2 set 2*epoch").replace("flag 2 >= epoch", "flag 2 >= 2*epoch+1")
    refused(gather(low), words=("deadlock", "in invocation 1", "waits for 3, the flag is only ever set to 2"), rounds=1)


def test_a_wait_that_older_signals_satisfy() -> None:
    for value in ("0", "epoch+-1"):
        never = gather(replace(GATHER, "wait flag 2 >= epoch", f"wait flag 2 >= {value}"))
        words = ("unpaired wait", "rank 1 dma:0 command 4", "is satisfied before anybody signals")
        refused(never, words=words, rounds=1)
    raised = without(RESET_BARRIER, "signal rank 1 flag 0 set 0", "signal rank 0 flag 1 set 0")
    refused(nothing(2, raised), words=("unpaired wait", "rank 1 dma:0 command 1", "in invocation 1"))


def test_two_signals_for_one_wait() -> None:
    twice = gather(GATHER.replace("wait flag 3 >= epoch", "signal rank 1 flag 2 set epoch\n  wait flag 3 >= epoch"))
    refused(twice, words=("unpaired signal", "rank 0 dma:0 command 4 (signal rank 1 flag 2 set epoch)"))


def test_cycle_of_waits() -> None:
    (line,) = refused(nothing(3, CYCLE), words="deadlock")
    # Starting anywhere, the chain goes once around and closes.
    assert line.count("which comes after") == 3
    assert line.count("waits for rank") == 3
    for rank in range(3):
        assert f"rank {rank} dma:0 command 0 (wait flag 0 >= epoch) in invocation 1" in line
        assert f"rank {rank} dma:0 command 1 (signal rank {(rank + 1) % 3} flag 0 set epoch) in invocation 1" in line


def test_waits_for_its_own_later_signal() -> None:
    listing = """
    rank 0 dma:0
      wait flag 0 >= epoch
      signal rank 0 flag 0 set epoch
    """
    refused(nothing(1, listing), words=("deadlock", "its signal comes after it", "rank 0 dma:0 command 1"))


def test_deadlock_across_two_engines_of_a_rank() -> None:
    """Rank 0 answers only after its own exit, which rank 1 gives only after the answer."""
    listing = """
    rank 0 dma:0
      signal rank 1 flag 0 set epoch
      wait flag 1 >= epoch
      signal rank 1 flag 2 set epoch
    rank 1 dma:0
      wait flag 0 >= epoch
      signal rank 1 flag 5 set epoch
    rank 1 dma:1
      wait flag 2 >= epoch
      signal rank 0 flag 1 set epoch
      wait flag 5 >= epoch
    """
    refused(nothing(2, listing), words=("deadlock", "rank 0 dma:0 command 1", "rank 1 dma:1 command 0"))


def test_lost_signal_of_flags_that_the_waiter_resets() -> None:
    """results/notes/hardware.md: a fast rank signals invocation i+1 before a slow one has reset invocation i."""
    program = nothing(2, RESET_BARRIER)
    verify(program, invocations=1)
    for rounds in (2, 3, 5):
        refused(
            program,
            words=(
                "lost signal on flag 0 of rank 1",
                "rank 1 dma:0 command 2 (signal rank 1 flag 0 set 0) in invocation 1",
                "rank 0 dma:0 command 0 (signal rank 1 flag 0 set 1) in invocation 2",
                "one can erase the other",
            ),
            rounds=rounds,
        )


def test_what_makes_resets_safe() -> None:
    """Two alternating sets of flags, epochs, or an entry handshake (results/notes/hardware.md)."""
    odd = nothing(2, RESET_BARRIER.replace("flag 0", "flag 2").replace("flag 1", "flag 3"))
    verify_sequence([nothing(2, RESET_BARRIER), odd])
    verify(nothing(2, EPOCH_BARRIER))
    verify(freeze(build(all_gather((8, 8)), "b2b")))


def test_one_flag_set_is_not_two() -> None:
    even, odd = nothing(2, RESET_BARRIER), nothing(2, RESET_BARRIER)
    refused(even, odd, words=("lost signal on flag 0 of rank 1", "in invocation 2"))


def test_forgotten_reset() -> None:
    odd = RESET_BARRIER.replace("flag 0", "flag 2").replace("flag 1", "flag 3")
    forgetful = nothing(2, without(RESET_BARRIER, "signal rank 1 flag 0 set 0"))
    refused(
        forgetful,
        nothing(2, odd),
        words=(
            "unpaired wait: rank 1 dma:0 command 1 (wait flag 0 == 1) in invocation 3 is already satisfied by",
            "rank 0 dma:0 command 0 (signal rank 1 flag 0 set 1) in invocation 1",
        ),
    )


def test_equal_epochs_where_fast_ranks_run_ahead() -> None:
    """Rank 0 may signal epoch 2 before rank 1 looks for epoch 1, which is then gone for good."""
    verify(nothing(2, EPOCH_BARRIER))
    program = nothing(2, EPOCH_BARRIER.replace(">=", "=="))
    verify(program, invocations=1)
    refused(
        program,
        words=(
            "lost signal",
            "rank 1 dma:0 command 1 (wait flag 0 == epoch) in invocation 1 may never see 1",
            "rank 0 dma:0 command 0 (signal rank 1 flag 0 set epoch) in invocation 2 may come first",
        ),
    )


def test_equal_epochs_are_fine_where_nobody_can_run_ahead() -> None:
    verify(gather(GATHER.replace(">=", "==")))


def test_two_writers_of_one_flag() -> None:
    listing = """
    rank 0 dma:0
      wait flag 0 >= epoch
    rank 1 dma:0
      signal rank 0 flag 0 set epoch
    rank 2 dma:0
      signal rank 0 flag 0 set epoch
    """
    refused(
        nothing(3, listing),
        words=("lost signal on flag 0 of rank 0", "rank 1 dma:0 command 0", "rank 2 dma:0 command 0"),
        rounds=1,
    )


# Ranks 1 and 2 add to a counter of rank 0, which takes it back to 0 and then lets them go.
COUNTER = """
rank 0 dma:0
  wait flag 0 >= 2
  signal rank 0 flag 0 set 0
  signal rank 1 flag 1 set epoch
  signal rank 2 flag 1 set epoch
rank 1 dma:0
  signal rank 0 flag 0 add 1
  wait flag 1 >= epoch
rank 2 dma:0
  signal rank 0 flag 0 add 1
  wait flag 1 >= epoch
"""


@pytest.mark.parametrize("comparison", [">=", "=="])
def test_counters(comparison: str) -> None:
    verify(nothing(3, COUNTER.replace("flag 0 >= 2", f"flag 0 {comparison} 2")))


def test_counter_that_is_let_go_before_its_reset() -> None:
    early = without(COUNTER, "signal rank 0 flag 0 set 0").replace(
        "signal rank 2 flag 1 set epoch", "signal rank 2 flag 1 set epoch\n signal rank 0 flag 0 set 0"
    )
    verify(nothing(3, early), invocations=1)
    refused(nothing(3, early), words=("lost signal on flag 0 of rank 0", "set 0) in invocation 1", "add 1"))


def test_counter_without_release() -> None:
    """A fast rank adds twice, and the wait ends without the slow one."""
    free = without(COUNTER, "signal rank 1 flag 1 set epoch", "rank 1 dma:0 / wait flag 1 >= epoch")
    free = without(free, "signal rank 0 flag 0 set 0")
    refused(nothing(3, free.replace("flag 0 >= 2", "flag 0 >= 2*epoch")), words="flag 0")


def test_counter_that_waits_for_too_many() -> None:
    refused(nothing(3, COUNTER.replace(">= 2", ">= 3")), words=("deadlock", "add up to 2, it waits for 3"), rounds=1)


def test_counter_that_waits_for_too_few() -> None:
    """It may end after either signal, so it proves neither."""
    few = nothing(3, COUNTER.replace(">= 2", ">= 1"))
    refused(
        few, words=("unpaired wait", "rank 0 dma:0 command 0", "needs none of its signals: others suffice"), rounds=1
    )
    refused(few, words=("lost signal on flag 0 of rank 0", "set 0", "add 1"), rounds=1)


def test_counter_that_is_overshot() -> None:
    listing = """
    rank 0 dma:0
      wait flag 0 == 1
    rank 1 dma:0
      signal rank 0 flag 0 add 1
      signal rank 0 flag 0 add 1
    """
    words = ("lost signal", "rank 0 dma:0 command 0", "may never see 1: more can be added before it looks")
    refused(nothing(2, listing), words=words, rounds=1)


def test_counter_of_which_some_signals_are_enough() -> None:
    listing = """
    rank 0 dma:0
      wait flag 0 >= 3
    rank 1 dma:0
      signal rank 0 flag 0 add 2
    rank 2 dma:0
      signal rank 0 flag 0 add 1
    rank 3 dma:0
      signal rank 0 flag 0 add 1
    """
    refused(nothing(4, listing), words="is not sure to see 3: only 2 is certain to come before it", rounds=1)


def test_prelaunched_queue_that_no_trigger_holds() -> None:
    program = prelaunch(gather())
    verify(program)
    listing = "\n".join(str(program).splitlines()[1:])
    # Rank 0's own copy goes without its trigger: it may run while the caller still fills the input.
    loose = without(
        listing, "rank 0 local:0 / 0: wait flag 17 >= epoch", "rank 0 caller:0 / 1: signal rank 0 flag 17 set epoch"
    )
    refused(
        gather(loose, flags=18, prelaunched=True),
        words=("race", "rank 0 local:0 command 0", "rank 0's caller", "before invocation 1"),
        rounds=1,
    )
    verify(gather(loose, flags=18))  # the same queues are fine when the caller starts them


def test_a_queue_that_the_one_trigger_does_not_hold() -> None:
    program = hold(gather())
    verify(program)
    listing = "\n".join(str(program).splitlines()[1:])
    for loose, words in (
        (without(listing, "rank 0 local:0 / 0: wait flag 16 >= epoch"), ("race", "rank 0 local:0 command 0")),
        (
            without(listing, "rank 0 caller:0 / 0: signal rank 0 flag 16 set epoch"),
            ("wait flag 16", "no command signals"),
        ),
    ):
        refused(gather(loose, flags=17, prelaunched=True), words=words, rounds=1)
    verify_sequence([program, gather(), hold(gather())])


def test_prelaunched_queues_of_two_programs_with_the_same_frozen_trigger() -> None:
    """The trigger of one frees the queues of the other, which were handed over ahead, too."""
    programs = [freeze(prelaunch(build(all_gather((n, n)), "b2b"))) for n in (4, 8)]
    for program in programs:
        verify(program)
    refused(*programs, words="lost signal on flag 4 of rank 0")
    verify_sequence([prelaunch(build(all_gather((n, n)), "b2b")) for n in (4, 8)])
