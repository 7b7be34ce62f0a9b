"""Decorators for the methods of a communicator that are calls: one at a time, in one order on all ranks."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import nullcontext
from types import FunctionType
from typing import Concatenate, ParamSpec, Protocol, TypeVar, cast

from sidelane import ranges
from sidelane.collectives.calls import Calls
from sidelane.errors import Page, made_inside, page_of, see, unfit
from sidelane.modes import exclude_compilers, is_in_modes, outside_of_modes

P = ParamSpec("P")
R = TypeVar("R")


class HasCalls(Protocol):
    """An object that makes calls of a communicator."""

    _calls: Calls


S = TypeVar("S", bound=HasCalls)

_INSIDE = nullcontext()


def entry(method: Callable[Concatenate[S, P], R], *, leaves_modes: bool = True) -> Callable[Concatenate[S, P], R]:
    """Wrap a method that is a call: one thread at a time, wrong signatures told to the peers, no tracing by compilers.

    Calls have one order, which is the same on all ranks. Two threads that call at once have no defined order. This is
    an error, which ends the communicator: it is not known which of the two calls the peers are in. (Threads that take
    turns, as backward passes do, are fine.) A signal handler or a finaliser that calls inside of a call of its own
    thread is refused before its call gets a number, so that the communicator goes on. A call that Python refuses for
    its signature gets a number, too: the peers may have made it. Errors about arguments name the page to read. Tracing
    by torch.compile is disabled, since a traced call would run while the compiler traces.

    The method runs outside of the caller's modes of PyTorch (``sidelane.modes``). Profilers see its range.

    It costs 0.5 us a call (two cores of an EPYC, Python 3.11; eager calls take the host 4 us and more).
    """
    code = cast("FunctionType", method).__code__
    places = ranges.argument_indices(code.co_varnames[1 : code.co_argcount])  # behind self

    @functools.wraps(method)
    def entered(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        calls = self._calls
        entrance = calls.entrance  # read each time, since a forked copy has another lock
        if not entrance.acquire(False):
            if (outer := _inside(calls)) is not None:
                raise made_inside(method.__name__, outer)
            calls.refuse_second_thread(method.__name__)
        try:
            is_recorded = ranges.is_active()
            leaves = (leaves_modes or is_recorded) and is_in_modes()
            if leaves or is_recorded:
                with (
                    outside_of_modes() if leaves else _INSIDE,
                    ranges.method_call(
                        getattr(self, "range_name", method.__name__), places, args, kwargs, calls
                    ) as observed,
                ):
                    observed.work = made = method(self, *args, **kwargs)
                    return made
            return method(self, *args, **kwargs)
        except (TypeError, ValueError) as error:
            # The traceback gets no local name: it refers to this frame, and the name would close a reference cycle.
            if isinstance(error, TypeError) and error.__traceback__ is not None and error.__traceback__.tb_next is None:
                error = see(unfit(error, method), Page.ERRORS)  # raised here, not inside of the method
                calls.refuse(calls.number(), method.__name__, error)
                raise error from None
            if page_of(error) is None:
                see(error, Page.ERRORS)
            raise
        finally:
            entrance.release()

    exclude_compilers(entered)
    return cast("Callable[Concatenate[S, P], R]", entered)


def repeated_entry(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Wrap a method as :func:`entry` does, but without leaving modes: a repeated call need not, ``CallPath`` does."""
    return entry(method, leaves_modes=False)


def _inside(calls: Calls) -> str | None:
    """Return the method of this thread that a signal handler or finaliser has interrupted; None if there is none."""
    door = sys._getframe(1)
    frame = door.f_back
    while frame is not None:
        if frame.f_code is door.f_code and frame.f_locals.get("calls") is calls:
            return str(frame.f_locals["method"].__name__)
        frame = frame.f_back
    return None
