"""The door of a communicator: methods that take a place in the order of its calls go in by it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

import torch

from sidelane.collectives.calls import Calls
from sidelane.errors import Page, page_of, see, unfit

P = ParamSpec("P")
R = TypeVar("R")


class HasCalls(Protocol):
    """Whatever makes calls of a communicator."""

    _calls: Calls


S = TypeVar("S", bound=HasCalls)


def entry(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Let one thread in at a time; tell the peers of a call whose arguments do not even fit; let no compiler in.

    Calls have one order, which is the same on all ranks. Two threads that call at once have none, so that this is an
    error on the rank where it is noticed, and ends the communicator: nobody knows which of the two calls its peers are
    in. (Threads that take turns, as backward passes do, are fine.) A call that Python refuses for its signature has its
    place in the order, too: the peers may have made it. Arguments that are refused say where to read on. And what a
    compiler traces would be done while it traces.

    It costs 0.5 us a call (two cores of an EPYC, Python 3.11; eager calls take the host 4 us and more).
    """

    @functools.wraps(method)
    def entered(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
        calls = self._calls
        entrance = calls.entrance  # a forked copy has another one
        if not entrance.acquire(False):
            calls.refuse_second_thread(method.__name__)
        try:
            return method(self, *args, **kwargs)
        except (TypeError, ValueError) as error:
            # No name for the traceback: it keeps this frame, which would keep it.
            if isinstance(error, TypeError) and error.__traceback__ is not None and error.__traceback__.tb_next is None:
                error = see(unfit(error, method), Page.ERRORS)  # raised here, not inside of the method
                calls.refuse(calls.number(), method.__name__, error)
                raise error from None
            if page_of(error) is None:
                see(error, Page.ERRORS)
            raise
        finally:
            entrance.release()

    _keep_compilers_out(entered)
    return cast("Callable[Concatenate[S, P], R]", entered)


def _keep_compilers_out(function: Any) -> None:
    """Make ``torch.compile`` break its graph here, and leave alone whatever runs behind; without importing Dynamo."""
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = "a call of sidelane.Communicator runs as it is"
    with contextlib.suppress(AttributeError, ImportError):  # a compiler that does not know these traces the call
        dynamo = torch._C._dynamo.eval_frame
        skip = dynamo._FrameAction.SKIP
        dynamo.set_code_exec_strategy(function.__code__, dynamo._FrameExecStrategy(skip, skip))
