"""Resources of this process that a forked copy must not share, handled in one place.

A copy that ``os.fork`` makes has all memory of its parent, all of its descriptors, and one of its threads. So locks may
be held there that no thread will release, sockets are open in two processes, and objects wait to be finalised that are
still in use. Owners of such resources register them here when they make them, and one hook handles them in each copy:
locks are freed, sockets are closed, resources that must not be finalised are kept for ever, and objects are disowned.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

from sidelane.errors import CommunicatorClosedError, made_inside

C = TypeVar("C", bound=Callable[[], object])
T = TypeVar("T")


def lock() -> threading.Lock:
    """Return a lock that is free in a copy, whichever thread held it."""
    made = threading.Lock()
    _locks.add(made)
    return made


def rlock() -> Any:
    """Return a lock like :func:`lock` that its owner may take again."""
    made = threading.RLock()
    _locks.add(made)
    return made


class Mutex:
    """Mutual exclusion: threads wait for each other, and a thread that holds the mutex and is interrupted is refused.

    A signal handler, or a finaliser that the garbage collector runs, may enter again on the thread that is inside.

    Args:
        names: function that returns the names of the refused call and of the one under way.
    """

    def __init__(self, names: Callable[[], tuple[str, str]]) -> None:
        self._names, self._lock = names, rlock()

    def run(self, function: Callable[[], T]) -> T:
        """Call a function with the mutex held.

        Raises:
            RuntimeError: the thread holds the mutex already, further out.
        """
        self.require_other()
        with self._lock:
            return function()

    def is_mine(self) -> bool:
        """Return whether the calling thread holds the mutex."""
        return bool(self._lock._is_owned())

    def require_other(self) -> None:
        """Raise as :meth:`run` does, before a wait for other threads to release the mutex."""
        if self.is_mine():
            raise made_inside(*self._names())


def never_finalize(what: object) -> None:
    """Never finalise ``what``, not at exit either: in a copy, a resource that its parent uses."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(what))


def in_copies_of(what: T, function: Callable[[T], object]) -> None:
    """Call ``function(what)`` in copies, once locks are free, as long as ``what`` lives.

    Such as ``close`` of an object that must only close descriptors there, or :func:`never_finalize` for one whose end
    would reach resources of the parent, or wait for the parent's threads.
    """
    _objects[what] = function


def in_copies(function: C) -> C:
    """Register a function to call in copies, once locks are free."""
    _functions.append(function)
    return function


def finalize(what: object, function: Callable[..., object], *arguments: Any) -> None:
    """Call ``function`` when ``what`` has gone, in this process alone, and not at exit."""
    weakref.finalize(what, _unless_copied, os.getpid(), function, arguments).atexit = False


def refusal(what: str, maker: int) -> CommunicatorClosedError:
    """Return the error of a copy that uses an object of its parent.

    Args:
        what: name of the object.
        maker: number of the process that made it.
    """
    return CommunicatorClosedError(
        f"{what}: it was made in another process (pid {maker}), of which this one (pid {os.getpid()}) is a forked copy "
        ". Make a group of its own here, and everything else from that: dist.destroy_process_group() drops the "
        "other process's group here, and changes nothing there"
    )


class Owner:
    """Owner of an object: the process that made it, which is the only one that may use it.

    Args:
        what: name of the object in texts.

    Attributes:
        is_copied: this process is a forked copy of that one.
    """

    def __init__(self, what: str) -> None:
        self.what, self.is_copied, self._maker = what, False, os.getpid()
        in_copies_of(self, Owner._lose)

    def _lose(self) -> None:
        self.is_copied = True

    def require(self) -> None:
        """Raise in a copy.

        Raises:
            CommunicatorClosedError: this process is a copy.
        """
        if self.is_copied:
            raise refusal(self.what, self._maker)


def _unless_copied(maker: int, function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    if os.getpid() == maker:
        function(*arguments)


def _in_copy() -> None:
    for held in list(_locks):
        held._at_fork_reinit()
    for function in _functions:
        function()
    for what, act in list(_objects.items()):
        act(what)


_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_functions: list[Callable[[], object]] = []
_objects: weakref.WeakKeyDictionary[Any, Callable[[Any], object]] = weakref.WeakKeyDictionary()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_copy)
