"""Communicators that have made billions of calls, for tests: what comes behind them, and at the renewals in between."""

from __future__ import annotations

from sidelane import Communicator
from sidelane.program.ir import RENEWAL_CALLS


def skip(comm: Communicator, to: int) -> None:
    """Let the communicator have made calls of other kinds, up to about number ``to``, renewals included. Collective."""
    calls = comm.calls
    number = calls.number()  # which nobody makes: all ranks leave it out
    while number < to - 3:
        number = min(to - 3, (number // RENEWAL_CALLS + 1) * RENEWAL_CALLS - 1)
        calls.count_from(number)
        number = calls.number()
        if number % RENEWAL_CALLS == RENEWAL_CALLS - 1:
            number = calls.number()  # the next one renews


def come_close_to_a_renewal(comm: Communicator, calls: int) -> None:
    """Let the next renewal come after so many calls. Collective."""
    skip(comm, (comm.calls.number() // RENEWAL_CALLS + 1) * RENEWAL_CALLS - calls)
