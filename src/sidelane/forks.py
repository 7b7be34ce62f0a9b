"""Resources of this process that a forked copy must not share, handled in one place.

A copy that ``os.fork`` makes has all memory of its parent, all of its descriptors, and one of its threads. So locks may
be held there that no thread will release, sockets are open in two processes, and objects wait to be finalised that are
still in use. Owners of such resources register them here when they make them, and one hook handles them in each copy:
locks are freed, sockets are closed, resources that must not be finalised are kept for ever, and objects are disowned.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from sidelane.errors import CommunicatorClosedError, made_inside

C = TypeVar("C", bound=Callable[[], object])
T = TypeVar("T")


class Closable(Protocol):
    """An object with a descriptor."""

    def close(self) -> object: ...


class Disownable(Protocol):
    """An object that belongs to the process that made it."""

    def disown(self) -> object:
        """Mark the object as a copy: this process has been forked from its owner."""
        ...


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


class Turn:
    """Mutual exclusion: threads wait for each other, and a thread that is interrupted inside of its own turn is
    refused.

    A signal handler, or a finaliser that the garbage collector runs, may enter again on the thread that is inside.

    Args:
        names: function that returns the names of the refused call and of the one under way.
    """

    def __init__(self, names: Callable[[], tuple[str, str]]) -> None:
        self._names, self._lock, self._is_taken = names, rlock(), False
        telling(self)

    def disown(self) -> None:
        """Free the turn in a copy, which has none of the threads that could hold it."""
        self._is_taken = False

    def run(self, function: Callable[[], T]) -> T:
        """Call a function when it is this thread's turn.

        Raises:
            RuntimeError: the thread holds the turn already, further out.
        """
        with self._lock:
            if self._is_taken:
                raise made_inside(*self._names())
            self._is_taken = True
            try:
                return function()
            finally:
                self._is_taken = False

    def is_mine(self) -> bool:
        """Return whether it is the turn of the thread that asks."""
        return bool(self._is_taken and self._lock._is_owned())

    def require_other(self) -> None:
        """Raise as :meth:`run` does, before a wait for other threads to have their turn."""
        if self.is_mine():
            raise made_inside(*self._names())


def closing(what: Closable) -> None:
    """Close ``what`` in copies. Its ``close`` must only close descriptors."""
    _closing.add(what)


def keeping(what: object) -> None:
    """Never finalise ``what`` in a copy: that would reach resources of the parent, or wait for the parent's threads."""
    _kept.add(what)


def keep_for_ever(what: object) -> None:
    """Never finalise ``what``, not at exit either: in a copy, a resource that its parent uses."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(what))


def telling(what: Disownable) -> None:
    """Call ``what.disown()`` in copies, as long as it lives."""
    _told.add(what)


def in_copies(function: C) -> C:
    """Register a function to call in copies, when locks are free and before objects are disowned."""
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
        "(allowed=a group of its own and what is made from that: dist.destroy_process_group() lets go of the other "
        "process's here, and changes nothing there)"
    )


class Owner:
    """Owner of an object: the process that made it, which is the only one that may use it.

    Args:
        what: name of the object in texts.

    Attributes:
        is_copied: this process is a forked copy of that one.
    """

    def __init__(self, what: str) -> None:
        self.what, self.is_copied = what, False
        self._maker = os.getpid()
        telling(self)

    def disown(self) -> None:
        """Mark this process as a copy."""
        self.is_copied = True

    def require(self) -> None:
        """Raise in a copy.

        Raises:
            CommunicatorClosedError: this process is a copy.
        """
        if self.is_copied:
            raise refusal(self.what, self._maker)


class OwnFolder:
    """A folder that is removed with this object, or at the end of its process; the end of a copy leaves it.

    Args:
        prefix: prefix of its name.
        parent: folder that contains it; None for the system's temporary files.
    """

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        self._remove = weakref.finalize(self, _unless_copied, os.getpid(), _remove, (self.path,))

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self._remove()


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


def _unless_copied(maker: int, function: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    if os.getpid() == maker:
        function(*arguments)


def _in_copy() -> None:
    for held in list(_locks):
        held._at_fork_reinit()
    for what in list(_closing):
        what.close()
    _closing.clear()
    for kept in list(_kept):
        keep_for_ever(kept)
    _kept.clear()
    for function in _functions:
        function()
    for told in list(_told):
        told.disown()


_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_closing: weakref.WeakSet[Closable] = weakref.WeakSet()
_kept: weakref.WeakSet[object] = weakref.WeakSet()
_told: weakref.WeakSet[Disownable] = weakref.WeakSet()
_functions: list[Callable[[], object]] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_copy)
