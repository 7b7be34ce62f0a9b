"""Errors beyond ``ValueError`` and ``TypeError``, which mean that the caller passed a wrong argument.

Each names the page of the documentation to read, as a note: tracebacks and the command ``sidelane`` show it at their
end, and ``str`` of an error, which other ranks repeat, does not contain it.
"""

from __future__ import annotations

import copy
import enum
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
E = TypeVar("E", bound=BaseException)

SEE = "See "

PACKAGES: Mapping[str, str] = MappingProxyType(
    {"cuda.bindings": "cuda-bindings>=13", "pynvml": "nvidia-ml-py", "triton": "triton>=3.6"}
)
"""Packages on PyPI of modules that only GPUs and kernels need: the extra ``cuda`` has them all, ``kernels`` Triton."""


class Page(enum.StrEnum):
    """Page of the documentation that an error names, from the root of the repository.

    Where there is no checkout, errors show the copy that the wheel has installed (``shown``).
    """

    COMMANDS = "docs/guide/commands.md"
    DETERMINISM = "docs/guide/determinism.md"
    ERRORS = "docs/guide/errors.md"
    FSDP = "docs/guide/fsdp.md"
    NO_PEERS = "docs/guide/without-nvlink.md"
    INSTALLATION = "docs/guide/installation.md"
    OVERLAP = "docs/guide/overlap.md"
    OWN = "docs/guide/own.md"
    SETTINGS = "docs/reference/settings.md"
    TUNING = "docs/guide/tuning.md"

    @property
    def shown(self) -> str:
        """The page as an error shows it."""
        return installed_pages(Path(__file__).resolve()) + self


@functools.lru_cache(maxsize=1)
def installed_pages(module: Path) -> str:
    """Return the folder of the pages that a wheel has installed, with a slash; empty in a checkout.

    Args:
        module: file of this module.
    """
    if (module.parents[2] / Page.ERRORS).exists():
        return ""
    folders = (parent / "share" / "doc" / "sidelane" for parent in module.parents)
    return next((f"{folder}/" for folder in folders if (folder / Page.ERRORS).exists()), "")


def see(error: E, page: Page) -> E:
    """Add a note with the page to read to ``error``, and return it."""
    error.add_note(f"{SEE}{page.shown}")
    return error


def page_of(error: BaseException) -> Page | None:
    """Return the page that an error names; None if it names none."""
    named = [note for note in getattr(error, "__notes__", ()) if note.startswith(SEE)]
    return next((page for page in Page if named and named[-1].endswith(page)), None)


def nearest(name: object, allowed: Iterable[str]) -> str:
    """Return a question for the end of an error, with the most similar name; empty if none is similar.

    >>> nearest("besides", ("beside", "debug"))
    " (did you mean 'beside'?)"
    """
    import difflib

    found = difflib.get_close_matches(str(name), list(allowed), 1)
    return f" (did you mean {found[0]!r}?)" if found else ""


def made_inside(name: str, outer: str) -> RuntimeError:
    """Return the error of a call that a thread makes inside of another one, before the call takes a place in any order.

    Args:
        name: name of the call.
        outer: name of the call under way.
    """
    return RuntimeError(
        f"{name}: this thread is already inside of {outer}, and a signal handler or a finaliser makes another call "
        "there. Make it when that has ended, in another thread, or with async_op=True of a process group and wait for "
        "it later. Nothing has happened, and the call under way goes on where this error is caught in time"
    )


def unfit(problem: TypeError, function: Callable[..., object]) -> TypeError:
    """Return the error of a call that does not fit a signature: Python's text, and the allowed parameters.

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
    """Decorate a function for users: errors of calls that do not fit its signature list the parameters, and a page."""

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
    """Return the last line of a traceback, without the note about the page to read."""
    pages = tuple(Page)
    lines = [line for line in text.rstrip().split("\n") if not (line.startswith(SEE) and line.endswith(pages))]
    return lines[-1] if lines else ""


def visible(text: str) -> str:
    r"""Return a text with control characters as escapes, since they act on terminals. Line breaks and tabs stay.

    >>> print(visible("a peer's \x1b[31mred\x1b[0m text"))
    a peer's \x1b[31mred\x1b[0m text
    """
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else letter.encode("unicode_escape").decode()
        for letter in text
    )


class SidelaneError(RuntimeError):
    """Base of all errors except those of the caller's arguments.

    Texts of peers reach users in these errors.

    Args:
        *arguments: arguments of the exception, the text first, whose control characters are made visible.
        page: page to read; None: the page of the class.
    """

    page: ClassVar[Page] = Page.ERRORS

    def __init__(self, *arguments: object, page: Page | None = None) -> None:
        super().__init__(*(visible(each) if isinstance(each, str) else each for each in arguments))
        see(self, page or self.page)


def anew(error: BaseException) -> BaseException:
    """Copy a kept error to raise it here: tracebacks grow on a raised error, and keep all frames that led here alive.

    An object that keeps an error it has raised is kept alive by it, with memory, threads and connections, until garbage
    is collected.
    """
    try:
        made = copy.copy(error)
    except Exception:  # an error of another library that cannot be copied
        return error
    made.__cause__, made.__context__ = error.__cause__, error.__context__
    made.__suppress_context__ = error.__suppress_context__
    return made.with_traceback(error.__traceback__)


class ProgramError(SidelaneError):
    """Refusal of a program by ``verify``.

    ``violations`` lists every finding as one line each; a line names the ranks, the commands and the bytes.
    """

    page = Page.OWN

    def __init__(self, title: str, violations: Sequence[str]) -> None:
        self.title: str = title
        self.violations: tuple[str, ...] = tuple(violations)
        shown = "\n".join(f"  - {line}" for line in self.violations[:12])
        more = len(self.violations) - 12
        super().__init__(f"{title}:\n{shown}" + (f"\n  ... and {more} more" if more > 0 else ""))

    def __reduce__(self) -> tuple[type[ProgramError], tuple[str, tuple[str, ...]]]:
        return type(self), (self.title, self.violations)  # ranks of a study or a test hand errors to their parent


class UnavailableError(SidelaneError):
    """This machine or this installation lacks a requested feature; the text says which and how to get it."""


class MissingPackageError(UnavailableError, ModuleNotFoundError):
    """An optional package is not installed; a program that imports what needs it may catch an ``ImportError``."""


def in_no_order(what: str, why: str) -> UnavailableError:
    """Return the error of a sum between ranks that ``Config.deterministic`` refuses.

    Args:
        what: name of the call.
        why: reason why its terms are not added in the order of the ranks in float32, and what is instead allowed.
    """
    return UnavailableError(f"{what}: refused by Config.deterministic: {why}", page=Page.DETERMINISM)


def missing(what: str, module: str, problem: BaseException) -> MissingPackageError:
    """Return the error of ``what``, which needs a module of ``PACKAGES`` that is not installed.

    >>> str(missing("power needs NVML", "pynvml", ImportError("No module named 'pynvml'")))
    "power needs NVML (No module named 'pynvml'): pip install nvidia-ml-py"
    """
    return MissingPackageError(f"{what} ({problem}): {how_to_get(module)}", page=Page.INSTALLATION)


def how_to_get(module: str) -> str:
    """Return the command that installs a module of ``PACKAGES``."""
    package = PACKAGES[module]
    return f"pip install '{package}'" if ">" in package else f"pip install {package}"


class CommunicatorClosedError(SidelaneError):
    """The communicator was closed, or broken by an earlier failure whose text is repeated."""


class MismatchError(SidelaneError):
    """Ranks of one group made different calls; the text names both calls."""


class PeerError(SidelaneError):
    """A peer failed, died or refused the call. ``ranks`` are the ranks at fault (group ranks)."""

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        self.ranks: tuple[int, ...] = tuple(ranks)
        super().__init__(message)


class PeerTimeoutError(PeerError):
    """A peer did not issue the call, or stopped, within the time-out."""
