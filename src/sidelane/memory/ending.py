"""End of threads at exit: those that call torch must leave it before the interpreter ends.

Python does not wait for daemon threads at exit, and until 3.14 it ends one where it reacquires the GIL. Inside of
torch's C++ code (a store, a tensor's copy, a future) that ends the process: ``terminate called without an active
exception``. So owners of such threads register here, and are told to end them while all other threads still run.
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
"""Seconds in which calls under way may end by themselves: peers may depend on them."""

LEAVING_S = 5.0
"""Seconds in which calls may end after they were told to give up."""


class Ends(Protocol):
    """An object with a thread that calls torch."""

    def end(self, until: float) -> None:
        """End the thread: let its work complete until that moment of ``time.monotonic``, then give up. May raise."""
        ...


def at_exit(owner: Ends, *, first: bool = False) -> None:
    """Call ``owner.end`` at exit, if the object still exists.

    Args:
        owner: the object, to which only a weak reference is kept.
        first: end it before the others, since its thread uses their threads.
    """
    (_first if first else _then).add(owner)


def give_up_if_it_ends() -> None:
    """Raise in a wait for peers if the interpreter is ending.

    Raises:
        CommunicatorClosedError: the interpreter is ending, and this is not its main thread.
    """
    if _gives_up.is_set() and threading.current_thread() is not threading.main_thread():
        raise CommunicatorClosedError("the interpreter ends")


def give_up() -> None:
    """Let :func:`give_up_if_it_ends` raise from now on."""
    _gives_up.set()


def _end_all() -> None:
    until = time.monotonic() + GRACE_S
    for owner in (*_first, *_then):
        with contextlib.suppress(Exception):  # the others are still to end
            owner.end(until)


_gives_up = threading.Event()
_first: weakref.WeakSet[Ends] = weakref.WeakSet()
_then: weakref.WeakSet[Ends] = weakref.WeakSet()

# Finalizers end engines and unmap memory. They run after this function, since handlers run in reverse order.
weakref.finalize(_gives_up, lambda: None)
atexit.register(_end_all)
