"""``verify``, the values of flags: invocations are alike by rule, from the first to those behind 2**31 and after."""

from __future__ import annotations

import pytest
from refusals import nothing, refused

from sidelane.program.ir import RENEWAL_CALLS
from sidelane.program.verify import verify, verify_sequence
from sidelane.program.verify.flags import MAX_BASE, MAX_FLAG_VALUE, MAX_SLOPE

# Rank 1 tells rank 0, who tells rank 1: nobody can be a call ahead. What rank 1 tells is to be filled in.
PING = """
rank 0 dma:0
  wait flag 0 {wait}
  signal rank 1 flag 1 set epoch
rank 1 dma:0
  signal rank 0 flag 0 {signal}
  wait flag 1 >= epoch
"""

COUNTER = """
rank 0 dma:0
  wait flag 0 {wait}
  signal rank 0 flag 0 set 0
  signal rank 1 flag 1 set epoch
rank 1 dma:0
  signal rank 0 flag 0 {signal}
  wait flag 1 >= epoch
"""


def ping(signal: str, wait: str):
    return nothing(2, PING.format(signal=signal, wait=wait))


@pytest.mark.parametrize(
    ("signal", "wait", "words"),
    [
        # Each fits the first calls. It lets a later one through on an older signal, or hangs, or wraps.
        ("set 2*epoch", ">= epoch+1", "changes by 2 an epoch here, and by 1 in rank 0 dma:0 command 0"),
        ("set 3*epoch", ">= 2*epoch+1", "changes by 3 an epoch here, and by 2 in"),
        ("set 10*epoch", ">= 11*epoch+-4", "changes by 11 an epoch here, and by 10 in"),
        ("add epoch", ">= 2*epoch+-1", "adds epoch; a counter adds the same in all epochs, and is reset to 0"),
        ("add 10", ">= 7*epoch+-2", "changes by 7 an epoch here, and by 0 in"),
        ("set 1073741824*epoch", ">= 1073741824*epoch", "does not fit (allowed=changes of 0..16 an epoch)"),
        ("set 2147483649*epoch+-2147483648", ">= epoch", "does not fit (allowed=changes of 0..16 an epoch)"),
        ("set epoch+1", ">= epoch", "1 more than rank 0 dma:0 command 0"),
        ("set epoch", ">= epoch+1", "1 more than rank 1 dma:0 command 0"),
        ("set 4*epoch+5", ">= 4*epoch+1", "of flag 0 of rank 0, which changes by 4 an epoch"),
        (f"set epoch+{MAX_BASE + 1}", f">= epoch+{MAX_BASE + 1}", f"at most {MAX_BASE} beside what changes"),
        (f"set {MAX_SLOPE + 1}*epoch", f">= {MAX_SLOPE + 1}*epoch", "does not fit"),
        ("set epoch", ">= 1", "changes by 1 an epoch here, and by 0 in"),
        ("set 1", "== epoch", "changes by 1 an epoch here, and by 0 in"),
    ],
)
def test_values_that_fit_the_first_calls_only(signal: str, wait: str, words: str) -> None:
    for rounds in (1, 2, 5):
        refused(ping(signal, wait), words=words, rounds=rounds)


@pytest.mark.parametrize(
    ("signal", "wait"),
    [
        ("set epoch", ">= epoch"),
        ("set epoch", "== epoch"),
        ("set 2*epoch", ">= 2*epoch"),
        ("set 2*epoch+1", ">= 2*epoch"),
        (f"set {MAX_SLOPE}*epoch+15", f">= {MAX_SLOPE}*epoch"),
        (f"set epoch+{MAX_BASE}", f"== epoch+{MAX_BASE}"),
    ],
)
def test_values_that_fit_all_calls(signal: str, wait: str) -> None:
    for rounds in (1, 2, 5):
        verify(ping(signal, wait), invocations=rounds)


def test_phases_of_one_flag() -> None:
    """Two signals an invocation on one flag, told apart by their values."""
    listing = """
    rank 0 dma:0
      wait flag 0 >= 2*epoch
      signal rank 1 flag 1 set 2*epoch
      wait flag 0 >= 2*epoch+1
      signal rank 1 flag 1 set 2*epoch+1
    rank 1 dma:0
      signal rank 0 flag 0 set 2*epoch
      wait flag 1 >= 2*epoch
      signal rank 0 flag 0 set 2*epoch+1
      wait flag 1 >= 2*epoch+1
    """
    verify(nothing(2, listing))
    refused(nothing(2, listing.replace("2*epoch", "epoch")), words="1 more than")


def test_the_circle_has_room_for_what_may_meet() -> None:
    """The oldest value that a flag may hold and the largest that is waited for: less than half of it apart."""
    oldest, newest = MAX_SLOPE * 1, MAX_SLOPE * (1 + RENEWAL_CALLS) + MAX_BASE
    assert newest - oldest < 2**31
    assert 0 < MAX_SLOPE * RENEWAL_CALLS + MAX_BASE <= MAX_FLAG_VALUE  # and from flags that nobody has written


def test_counters() -> None:
    verify(nothing(2, COUNTER.format(signal="add 3", wait=">= 3")))
    verify(nothing(2, COUNTER.format(signal=f"add {MAX_FLAG_VALUE}", wait=f"== {MAX_FLAG_VALUE}")))
    refused(nothing(2, COUNTER.format(signal=f"add {MAX_FLAG_VALUE + 1}", wait=">= 1")), words="does not fit")
    twice = f"add {MAX_FLAG_VALUE}\n signal rank 0 flag 0 add 1"
    refused(nothing(2, COUNTER.format(signal=twice, wait=">= 1")), words="all that is added to it is 2147483648")


def test_counters_that_follow_epochs() -> None:
    """A communicator shares its epochs among programs, so a program sees them grow by more than 1."""
    refused(
        nothing(2, COUNTER.format(signal="add 1", wait=">= epoch").replace("signal rank 0 flag 0 set 0", "")),
        words="flag 0 of rank 0 changes by 1 an epoch here, and by 0 in rank 1 dma:0 command 0",
        rounds=1,
    )


def test_a_counter_that_is_never_reset() -> None:
    endless = COUNTER.format(signal="add 1", wait=">= 1").replace("signal rank 0 flag 0 set 0", "")
    refused(nothing(2, endless), words=("unpaired wait", "rank 0 dma:0 command 0", "in invocation 2"))


def test_a_flag_that_one_program_counts_with_and_another_one_sets() -> None:
    """Neither deadlocks; what is wrong is that they share a flag."""
    counts = nothing(2, COUNTER.format(signal="add 1", wait="== 1"))
    sets = nothing(2, COUNTER.format(signal="set 1", wait="== 1"))
    verify(counts)
    verify(sets)
    for pair in ((counts, sets), (sets, counts)):
        lines = refused(*pair, words=("signal rank 0 flag 0 set 1", "other signals add to this flag"))
        assert not any("deadlock" in line for line in lines)
    apart = nothing(2, COUNTER.format(signal="set 1", wait="== 1").replace("flag 0", "flag 3"))
    verify_sequence((counts, apart))


def test_programs_that_use_a_flag_alike_alone_but_not_together() -> None:
    one, two = ping("set 2*epoch", ">= 2*epoch"), ping("set epoch", ">= epoch")
    refused(one, two, words="flag 0 of rank 0 changes by 2 an epoch here, and by 1 in")
    low, high = ping("set 2*epoch", ">= 2*epoch"), ping("set 2*epoch+1", ">= 2*epoch+1")
    verify_sequence((low, high))
    refused(low, ping("set 2*epoch+2", ">= 2*epoch+2"), words="2 more than")
