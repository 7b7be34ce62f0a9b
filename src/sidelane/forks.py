"""What a forked copy of this process must not share with it, in one place.

A copy that ``os.fork`` makes has all memory of its parent, all of its descriptors, and one of its threads. So locks may
be held there that nobody will give back, sockets are open in two processes, and objects wait to be finalised that are
still in use. Whoever has such things says so here when it makes them, and one hook sees to them in each copy: locks are
free, sockets are closed, what must not be finalised is kept for ever, and objects are told that they are copies.
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
    """Has a descriptor."""

    def close(self) -> object: ...


class Disownable(Protocol):
    """Belongs to the process that made it."""

    def disown(self) -> object:
        """This process is a copy of that one."""
        ...


def lock() -> threading.Lock:
    """A lock that is free in a copy, whoever held it."""
    made = threading.Lock()
    _locks.add(made)
    return made


def rlock() -> Any:
    """As :func:`lock`, for a thread that may take it again."""
    made = threading.RLock()
    _locks.add(made)
    return made


class Turn:
    """One at a time: threads wait for each other, and a thread that is interrupted inside of its own is refused.

    A signal handler, or a finaliser that the garbage collector runs, may come back here on the thread that is inside.

    Args:
        names: of what is refused, and of what is under way, for people.
    """

    def __init__(self, names: Callable[[], tuple[str, str]]) -> None:
        self._names, self._lock, self._is_taken = names, rlock(), False
        telling(self)

    def disown(self) -> None:
        """In a copy: of the threads that had their turn there is none."""
        self._is_taken = False

    def run(self, function: Callable[[], T]) -> T:
        """Call a function when it is this thread's turn.

        Raises:
            RuntimeError: it is already, further out.
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
        """Raise as :meth:`run`, before something that waits for other threads to have their turn."""
        if self.is_mine():
            raise made_inside(*self._names())


def closing(what: Closable) -> None:
    """Close ``what`` in copies. It must do no more than to close descriptors."""
    _closing.add(what)


def keeping(what: object) -> None:
    """Never finalise ``what`` in a copy: its end would reach what the parent uses, or wait for the parent's threads."""
    _kept.add(what)


def keep_for_ever(what: object) -> None:
    """Never finalise ``what``, not at the end of the interpreter either: in a copy, what its parent uses."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(what))


def telling(what: Disownable) -> None:
    """Call ``what.disown()`` in copies, as long as it lives."""
    _told.add(what)


def in_copies(function: C) -> C:
    """Call a function in copies. Locks are free then; objects have not been told yet."""
    _functions.append(function)
    return function


def finalize(what: object, function: Callable[..., object], *arguments: Any) -> None:
    """Call ``function`` when ``what`` has gone, in this process alone, and not at its end."""
    weakref.finalize(what, _unless_copied, os.getpid(), function, arguments).atexit = False


def refusal(what: str, maker: int) -> CommunicatorClosedError:
    """What a copy raises where it uses something of its parent's.

    Args:
        what: was used, for people.
        maker: the process that made it.
    """
    return CommunicatorClosedError(
        f"{what}: it was made in another process (pid {maker}), of which this one (pid {os.getpid()}) is a forked copy "
        "(allowed=a group of its own and what is made from that: dist.destroy_process_group() lets go of the other "
        "process's here, and changes nothing there)"
    )


class Owner:
    """The process that made something, which is the only one that may use it.

    Args:
        what: it is, for people.

    Attributes:
        is_copied: this process is a forked copy of that one.
    """

    def __init__(self, what: str) -> None:
        self.what, self.is_copied = what, False
        self._maker = os.getpid()
        telling(self)

    def disown(self) -> None:
        """This process is a copy."""
        self.is_copied = True

    def require(self) -> None:
        """Raise in a copy.

        Raises:
            CommunicatorClosedError: this process is one.
        """
        if self.is_copied:
            raise refusal(self.what, self._maker)


class OwnFolder:
    """A folder that goes with this object, or with the process that made it; a copy's end leaves it alone.

    Args:
        prefix: of its name.
        parent: where; None for the system's temporary files.
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
