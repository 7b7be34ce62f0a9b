"""Threads leave torch before the interpreter ends.

Python waits for no daemon thread at exit, and until 3.14 ends one where it comes back from code that runs without the
interpreter's lock. In C++ of torch (a store, a tensor's copy, a future) that ends the process: ``terminate called
without an active exception``. So whoever has such a thread is asked here to end it, while all others still run.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from typing import Protocol

from sidelane.errors import CommunicatorClosedError

GRACE_S = 2.0
"""For calls under way to end by themselves: peers may count on them."""

LEAVING_S = 5.0
"""For those that were told to give up."""


class Ends(Protocol):
    """Has a thread that makes calls of torch."""

    def end(self, until: float) -> None:
        """End it, in good order up to that moment of ``time.monotonic``, and soon from there. May raise."""
        ...


def at_exit(owner: Ends, *, first: bool = False) -> None:
    """Have ``owner`` end its thread at exit, if it is still there.

    Args:
        owner: is not kept.
        first: its thread makes calls by threads of others.
    """
    (_first if first else _then).add(owner)


def give_up_if_it_ends() -> None:
    """Called by what waits for peers, on any thread.

    Raises:
        CommunicatorClosedError: the interpreter ends, and this is not its main thread.
    """
    if _gives_up.is_set() and threading.current_thread() is not threading.main_thread():
        raise CommunicatorClosedError("the interpreter ends")


def give_up() -> None:
    """From now on, :func:`give_up_if_it_ends` raises."""
    _gives_up.set()


def _end_all() -> None:
    until = time.monotonic() + GRACE_S
    for owner in (*_first, *_then):
        with contextlib.suppress(Exception):  # the others are still to end
            owner.end(until)


_gives_up = threading.Event()
_first: weakref.WeakSet[Ends] = weakref.WeakSet()
_then: weakref.WeakSet[Ends] = weakref.WeakSet()

# Finalizers end engines and unmap memory: they run behind this, as what is registered first runs last.
weakref.finalize(_gives_up, lambda: None)
atexit.register(_end_all)
