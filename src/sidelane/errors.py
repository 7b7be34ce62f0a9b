"""Errors beyond ``ValueError`` and ``TypeError``, which mean that the caller passed something wrong.

Each names the page of the documentation to read on, as a note: tracebacks and the command ``sidelane`` show it at their
end, and ``str`` of an error, which other ranks repeat, does not hold it.
"""

from __future__ import annotations

import copy
import enum
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
E = TypeVar("E", bound=BaseException)

SEE = "See "

PACKAGES: Mapping[str, str] = MappingProxyType(
    {"cuda.bindings": "cuda-bindings>=13", "pynvml": "nvidia-ml-py", "triton": "triton>=3.6"}
)
"""Modules that nothing needs but GPUs, and what pip calls them: the extra ``cuda`` has them all."""


class Page(enum.StrEnum):
    """Where errors send their readers, from the root of the repository."""

    COMMANDS = "docs/guide/commands.md"
    ERRORS = "docs/guide/errors.md"
    FSDP = "docs/guide/fsdp.md"
    INSTALLATION = "docs/guide/installation.md"
    ONE_LINE = "docs/guide/one-line.md"
    OVERLAP = "docs/guide/overlap.md"
    OWN = "docs/guide/own.md"
    SETTINGS = "docs/reference/settings.md"
    TUNING = "docs/guide/tuning.md"


def see(error: E, page: Page) -> E:
    """Have ``error`` say at its end where to read on, and return it."""
    error.add_note(f"{SEE}{page}")
    return error


def page_of(error: BaseException) -> Page | None:
    """Where an error sends its readers."""
    named = [note.removeprefix(SEE) for note in getattr(error, "__notes__", ()) if note.startswith(SEE)]
    return Page(named[-1]) if named else None


def nearest(name: object, allowed: Iterable[str]) -> str:
    """A question at the end of an error: the name that was meant; empty where none is like it.

    >>> nearest("besides", ("beside", "debug"))
    " (did you mean 'beside'?)"
    """
    import difflib

    found = difflib.get_close_matches(str(name), list(allowed), 1)
    return f" (did you mean {found[0]!r}?)" if found else ""


def made_inside(name: str, outer: str) -> RuntimeError:
    """The error of a call that a thread makes while it is inside of another one, before it takes a place in any order.

    Args:
        name: of the call.
        outer: that is under way.
    """
    return RuntimeError(
        f"{name}: this thread is already inside of {outer}, and a signal handler or a finaliser makes another call "
        "there (allowed=when that has ended, or in another thread; with async_op=True of a process group, to be waited "
        "for later). Nothing has happened, and the call under way goes on where this error is caught in time"
    )


def unfit(problem: TypeError, function: Callable[..., object]) -> TypeError:
    """The error of a call that does not fit a signature: what Python says of it, and what is allowed.

    >>> def add(left, right, *, scale=1): ...
    >>> str(unfit(TypeError("add() got an unexpected keyword argument 'scales'"), add))
    "add() got an unexpected keyword argument 'scales' (allowed=left, right, scale=) (did you mean 'scale'?)"
    """
    import inspect

    parameters = [one for one in inspect.signature(function).parameters.values() if one.name != "self"]
    allowed = ", ".join(f"{one.name}{'' if one.default is one.empty else '='}" for one in parameters)
    _, unknown, name = str(problem).partition("unexpected keyword argument ")
    meant = nearest(name.strip("'"), (one.name for one in parameters)) if unknown else ""
    return TypeError(f"{problem} (allowed={allowed}){meant}")


def explained(page: Page) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate what users call: calls that do not fit its signature say what is allowed, and where to read on."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except TypeError as problem:
                if problem.__traceback__ is None or problem.__traceback__.tb_next is not None:
                    raise  # from inside
                unfitting = problem
            raise see(unfit(unfitting, function), page)

        return called

    return decorate


def last_line(text: str) -> str:
    """What a traceback ends with, less where to read on."""
    lines = [line for line in text.rstrip().split("\n") if not line.startswith(f"{SEE}docs/")]
    return lines[-1] if lines else ""


class SidelaneError(RuntimeError):
    """Base of every error that is not the caller's argument.

    Args:
        *arguments: the text, first of all.
        page: where to read on; None: the page of the class.
    """

    page: ClassVar[Page] = Page.ERRORS

    def __init__(self, *arguments: object, page: Page | None = None) -> None:
        super().__init__(*arguments)
        see(self, page or self.page)


def anew(error: BaseException) -> BaseException:
    """Copy an error that is kept, to raise it here: tracebacks grow on what is raised, and keep all that has led here.

    Whoever keeps an error that it has raised is kept by it, with memory, threads and connections, until garbage is
    collected.
    """
    try:
        made = copy.copy(error)
    except Exception:  # one of somebody else's, which cannot be copied
        return error
    made.__cause__, made.__context__ = error.__cause__, error.__context__
    made.__suppress_context__ = error.__suppress_context__
    return made.with_traceback(error.__traceback__)


class ProgramError(SidelaneError):
    """``verify`` refused a program.

    ``violations`` lists every finding as one line each; a line names the ranks, the commands and the bytes.
    """

    page = Page.OWN

    def __init__(self, title: str, violations: Sequence[str]) -> None:
        self.title, self.violations = title, tuple(violations)
        shown = "\n".join(f"  - {line}" for line in self.violations[:12])
        more = len(self.violations) - 12
        super().__init__(f"{title}:\n{shown}" + (f"\n  ... and {more} more" if more > 0 else ""))

    def __reduce__(self) -> tuple[type[ProgramError], tuple[str, tuple[str, ...]]]:
        return type(self), (self.title, self.violations)  # ranks of a study or a test hand errors to their parent


class UnavailableError(SidelaneError):
    """This machine or this installation lacks something that was asked for; the text says what and how to get it."""


def missing(what: str, module: str, problem: BaseException) -> UnavailableError:
    """The error where ``what`` needs a module of ``PACKAGES`` that is not there.

    >>> str(missing("power needs NVML", "pynvml", ImportError("No module named 'pynvml'")))
    "power needs NVML (No module named 'pynvml'): pip install nvidia-ml-py"
    """
    return UnavailableError(f"{what} ({problem}): {how_to_get(module)}", page=Page.INSTALLATION)


def how_to_get(module: str) -> str:
    """What to type for a module of ``PACKAGES``."""
    package = PACKAGES[module]
    return f"pip install '{package}'" if ">" in package else f"pip install {package}"


class CommunicatorClosedError(SidelaneError):
    """The communicator was closed, or broken by an earlier failure whose text is repeated."""


class MismatchError(SidelaneError):
    """Ranks of one group made different calls; the text names both calls."""


class PeerError(SidelaneError):
    """A peer failed, died or refused the call. ``ranks`` are the ranks at fault (group ranks)."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        self.ranks = tuple(ranks)
        super().__init__(message)


class PeerTimeoutError(PeerError):
    """A peer did not come, or stopped, within the time-out."""
