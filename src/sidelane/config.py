"""Every setting that comes from the environment, read once into one object.

============================  ===========================================================================  =======
variable                      meaning                                                                      default
============================  ===========================================================================  =======
``SIDELANE_TIMEOUT_S``        seconds that a wait for a peer may take before it becomes an error           600
``SIDELANE_WARN_S``           seconds after which a wait for a peer is a warning in the log                30
``SIDELANE_DEBUG``            1: compare the calls of all ranks before each one runs                       0
``SIDELANE_BESIDE``           hint for calls without ``beside``: ``nothing`` or ``compute``                nothing
``SIDELANE_PROFILE``          file of measured times to choose by; ``builtin``: never the user's           (a)
``SIDELANE_NATIVE``           0: repeat calls on GPUs in Python, compile nothing                           1
``SIDELANE_MEMORY_BYTES``     most bytes that ``empty`` may reserve on a rank, for each communicator       (b)
``SIDELANE_PEERS``            ``host``: host memory between GPUs; ``gpu``: their own                         auto
``SIDELANE_VIRTUAL_NODES``    nodes of the world's ranks, as in ``0,0,1,1``, in place of their machines    (d)
``SIDELANE_DETERMINISTIC``    1: refuse sums of floats between ranks that are not added in rank order       0
``SIDELANE_LOG``              what is printed of Python's logger ``sidelane``: INFO, WARN or DEBUG         (e)
``SIDELANE_NVTX``             1: mark calls with NVTX ranges, for Nsight Systems (package ``nvtx``)         0
``SIDELANE_METRICS``          file of metrics for Prometheus; ``{rank}`` in its name is replaced           (f)
``SIDELANE_FLIGHT_RECORDER``  folder or prefix of files for the last calls before a failure                (g)
``SIDELANE_SERVERS``          1: servers use Sidelane, as if their own variable of plug-ins named it            (h)
``SIDELANE_COMMIT``           name of the code in result files, if there is no checkout                    (c)
============================  ===========================================================================  =======

(a) ``sidelane/profiles/<machine>.json`` in ``XDG_CONFIG_HOME``, else in ``~/.config`` (docs/internals/choice.md).
(b) size of the device's memory. A number of bytes, or a size such as ``512M`` or ``1.5G``.
(c) the checkout's commit, or ``unknown``.
(d) the ranks of a machine share a node; others are for tests (docs/internals/several-nodes.md).
(e) nothing; what the program's own logging prints (docs/reference/settings.md).
(f) none is written (docs/guide/observability.md).
(g) none are recorded (docs/guide/observability.md); 1: the folder of torch's own.
(h) 0 (docs/guide/vllm.md).

What is compiled is kept in ``sidelane`` in ``XDG_CACHE_HOME``, else in ``~/.cache`` (results/notes/performance.md).
A user without a home, as a container's whose user is only a number, goes without both folders.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from sidelane import log
from sidelane.errors import SEE, Page, nearest, see
from sidelane.fields import Rule, at_least, number, optional, plain_text, several, switch, whole
from sidelane.sizes import parse_bytes

DEFAULT_TIMEOUT_S = 600.0
DEFAULT_WARN_S = 30.0
MOST_TIMEOUT_S = 1e9
"""Largest number of seconds that the clocks of torch and Python take."""

NOTHING, COMPUTE = "nothing", "compute"
BESIDE = (NOTHING, COMPUTE)
"""Values of the hint ``beside``: the computation that runs next to a call."""

CHOSEN, GPU, HOST = "auto", "gpu", "host"
PEERS = (CHOSEN, GPU, HOST)
"""Values of ``Config.peers``: memory through which GPUs reach each other."""

BUILTIN = "builtin"
"""Value of ``Config.profile``: choose by the tables of this package."""


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """Settings of a communicator.

    Attributes:
        timeout_s: seconds that a wait for a peer may take, > 0. A process group that was made with a ``timeout`` has
            that one instead; torch's default of 30 minutes counts as none.
        debug: compare the calls of all ranks before each one runs (a host round trip a call).
        beside: hint for collectives whose calls do not have one (``nothing`` or ``compute``).
        profile: file of measured times to choose by; ``builtin`` for the tables of this package; None for the user's
            file of this machine, if there is one. Rank 0's value counts.
        native: repeat calls on GPUs in compiled code, if there is a C compiler.
        memory_bytes: largest number of bytes of symmetric memory that ``empty`` of a communicator may reserve on a
            rank; None for the size of the device's memory. Where host memory is between GPUs: of that memory, with the
            staging of all calls; None for what is free.
        deterministic: refuse every sum of floats between ranks that is not made in the order of the ranks, in float32,
            rounded once (docs/guide/determinism.md); fused operators choose no other way by themselves. The same on all
            ranks.
        peers: memory through which GPUs reach each other: ``gpu`` is their own, ``host`` is host memory; ``auto``
            takes host memory if some pair of GPUs cannot reach each other's (docs/guide/without-nvlink.md). The same on
            all ranks.
        virtual_nodes: number of the node of each rank of the world, for process groups; None: ranks of one machine
            share one.
        warn_s: seconds after which a wait for a peer is a line of the log, once, that names the call and the ranks
            that have not come, > 0.
    """

    timeout_s: float = DEFAULT_TIMEOUT_S
    debug: bool = False
    beside: str = NOTHING
    profile: str | None = None
    native: bool = True
    memory_bytes: int | None = None
    peers: str = CHOSEN
    virtual_nodes: tuple[int, ...] | None = None
    deterministic: bool = False
    warn_s: float = DEFAULT_WARN_S

    def __new__(cls, *_: object, **given: object) -> Self:
        """Refuse unknown names before the others are checked."""
        if unknown := [name for name in given if name not in cls.__slots__]:
            shown = f"value={given[unknown[0]]!r}, allowed={', '.join(cls.__slots__)}"
            problem = f"Config: {unknown[0]}: no such setting ({shown}){nearest(unknown[0], cls.__slots__)}"
            raise see(TypeError(problem), Page.SETTINGS)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name, (rule, allowed, _) in _SETTINGS.items():
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, rule(name, value))
            except TypeError:
                raise see(TypeError(f"Config: {name} (value={value!r}, allowed={allowed})"), Page.SETTINGS) from None
            except ValueError as problem:
                raise _refused(f"Config: {problem}") from None


# ``help`` and editors take that of ``__new__`` otherwise, which names no setting.
_, *_parameters = inspect.signature(Config.__init__).parameters.values()
setattr(Config, "__signature__", inspect.Signature(_parameters))  # noqa: B010


def from_environment(environment: Mapping[str, str]) -> Config:
    """Read a :class:`Config` from variables.

    Raises:
        ValueError: a variable holds a value that the table above does not allow.
    """
    for name in environment:
        if name.startswith("SIDELANE_") and name not in VARIABLES:
            import difflib

            warnings.warn(
                f"{name}: no such setting, ignored (the nearest={difflib.get_close_matches(name, VARIABLES, 1, 0)[0]}, "
                f"allowed={', '.join(VARIABLES)}). {SEE}{Page.SETTINGS.shown}",
                stacklevel=2,
            )
    _log_level(environment)
    _switch("SIDELANE_NVTX", environment.get("SIDELANE_NVTX", "0"))
    known = {f"SIDELANE_{name.upper()}": (name, read) for name, (_, _, read) in _SETTINGS.items()}
    return Config(
        **{name: read(each, environment[each]) for each, (name, read) in known.items() if each in environment}
    )


def profile_folder() -> Path | None:
    """Return the folder of a user's profiles from ``sidelane tune``, by the XDG base directory specification.

    None if this user has no home, as in containers whose user is a number only.
    """
    return _user_folder("XDG_CONFIG_HOME", ".config", "sidelane/profiles")


def cache_folder() -> Path | None:
    """Return the folder in which compiled code is kept for later processes of this user; None if there is no home."""
    return _user_folder("XDG_CACHE_HOME", ".cache", "sidelane")


def current() -> Config:
    """Return the settings in force: of the innermost :func:`override`, else the environment at the first call."""
    if not _stack:
        _stack.append(from_environment(os.environ))
    return _stack[-1]


@functools.cache
def show_log() -> None:
    """Print what ``SIDELANE_LOG`` asks for; once, whatever the settings of communicators are.

    Raises:
        ValueError: there is no such level.
    """
    if (level := _log_level(os.environ)) is not None:
        log.show(level)


def is_for_servers() -> bool:
    """Return whether ``SIDELANE_SERVERS`` asks the plug-ins for servers to replace what they can.

    Raises:
        ValueError: its value is neither 0 nor 1.
    """
    return _switch("SIDELANE_SERVERS", os.environ.get("SIDELANE_SERVERS", "0"))


def name_of(field: str, value: object) -> str:
    """Return the name under which a value was set: the variable if the environment has that value, else the field."""
    variable = f"SIDELANE_{field.upper()}"
    return variable if os.environ.get(variable) == str(value) else f"Config.{field}"


def start_observers() -> None:
    """Start what the environment asks for: log, NVTX ranges, metrics and flight recorder. Again it changes nothing.

    Raises:
        ValueError: a value of the environment is not allowed, or the package ``nvtx`` is not installed.
    """
    from sidelane import flight_recorder, metrics, ranges  # which import PyTorch

    show_log()
    if _switch("SIDELANE_NVTX", os.environ.get("SIDELANE_NVTX", "0")):
        try:
            ranges.mark_by_nvtx()
        except (ImportError, AttributeError) as error:
            # No UnavailableError: a process group would let other backends make its calls, and say nothing.
            raise _refused(f"SIDELANE_NVTX=1 needs the package nvtx: {error}") from None
    if file := os.environ.get("SIDELANE_METRICS"):
        metrics.start(file)
    if (prefix := os.environ.get("SIDELANE_FLIGHT_RECORDER", "0")) not in ("", "0"):
        flight_recorder.start(prefix)


@contextlib.contextmanager
def override(config: Config) -> Iterator[Config]:
    """Use ``config`` for communicators made inside the ``with`` block."""
    current()
    _stack.append(config)
    try:
        yield config
    finally:
        _stack.pop()


_stack: list[Config] = []


def _user_folder(variable: str, default: str, name: str) -> Path | None:
    home = os.path.expanduser("~")  # unchanged for a user without a home
    for base in (os.environ.get(variable, ""), os.path.join(home, default)):
        if os.path.isabs(base):
            return Path(base) / name
    return None


def _log_level(environment: Mapping[str, str]) -> int | None:
    found = environment.get("SIDELANE_LOG", "")
    if not found:
        return None
    if found.upper() not in log.LEVELS:
        raise _refused(f"SIDELANE_LOG: no such level (value={found!r}, allowed={', '.join(log.LEVELS)})")
    return log.LEVELS[found.upper()]


def _positive(name: str, value: Any) -> float:
    seconds = number(name, value)
    if not 0 < seconds <= MOST_TIMEOUT_S:
        allowed = f"allowed=above 0, up to {MOST_TIMEOUT_S:g}"
        raise ValueError(f"{name} must be a positive number of seconds (value={seconds!r}, {allowed})")
    return seconds


def _one_of(*allowed: str) -> tuple[Rule, str, Callable[[str, str], Any]]:
    """Return the rule of a setting with these values. The first is the default, and that of an empty variable."""

    def rule(name: str, value: Any) -> str:
        found = plain_text(name, value)
        if found not in allowed:
            raise ValueError(f"{name} (value={found!r}, allowed={', '.join(allowed)})")
        return found

    def read(variable: str, value: str) -> str:
        try:
            return rule(variable, value or allowed[0])
        except ValueError as problem:
            raise _refused(str(problem)) from None

    return rule, ", ".join(allowed), read


def _file(name: str, value: Any) -> str:
    return plain_text(name, os.fspath(value))


def _nodes(name: str, value: Any) -> tuple[int, ...]:
    found: tuple[int, ...] = several(whole, int)(name, value)
    if min(found, default=-1) < 0:
        raise ValueError(f"{name} (value={found}, allowed=numbers from 0)")
    return found


def _seconds(variable: str, value: str) -> float:
    try:
        return _positive(variable, float(value))
    except ValueError:
        allowed = f"allowed=a number above 0, up to {MOST_TIMEOUT_S:g}"
        raise _refused(f"{variable}: not a number of seconds (value={value!r}, {allowed})") from None


def _bytes(name: str, value: str) -> int | None:
    try:
        return parse_bytes(value) if value else None
    except ValueError:
        raise _refused(f"{name}: not a size (value={value!r}, allowed=numbers, also ending in K, M, G)") from None


def _numbers(name: str, value: str) -> tuple[int, ...] | None:
    try:
        return tuple(map(int, value.split(","))) if value else None
    except ValueError:
        raise _refused(f"{name}: a list of numbers is expected, for example 0,0,1,1 (value={value!r})") from None


def _switch(name: str, value: str) -> bool:
    if value not in ("0", "1"):
        raise _refused(f"{name}: not a switch (value={value!r}, allowed='0' or '1')")
    return value == "1"


def _refused(text: str) -> ValueError:
    """Return the error of a setting, with the page that describes all of them."""
    return see(ValueError(text), Page.SETTINGS)


_SECONDS = (_positive, "a number of seconds", _seconds)
_SWITCH = (switch, "True, False", _switch)
_SETTINGS: Mapping[str, tuple[Rule, str, Callable[[str, str], Any]]] = {
    "timeout_s": _SECONDS,
    "warn_s": _SECONDS,
    "debug": _SWITCH,
    "beside": _one_of(*BESIDE),
    "peers": _one_of(*PEERS),
    "profile": (optional(_file), f"a file, {BUILTIN!r}, None", lambda _, value: value or None),
    "native": _SWITCH,
    "memory_bytes": (optional(at_least(0)), "a whole number of bytes, None", _bytes),
    "virtual_nodes": (optional(_nodes), "the number of each rank's node, None", _numbers),
    "deterministic": _SWITCH,
}
"""Fields of :class:`Config`: rule, values of the right type for an error, and function that reads the variable."""

VARIABLES = (
    *(f"SIDELANE_{name.upper()}" for name in _SETTINGS),
    *("SIDELANE_LOG", "SIDELANE_NVTX", "SIDELANE_METRICS", "SIDELANE_FLIGHT_RECORDER"),  # settings of the process
    "SIDELANE_SERVERS",  # for processes of vLLM and SGLang
    "SIDELANE_COMMIT",  # for results: which code ran
)
