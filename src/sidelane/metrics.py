"""Metrics of calls: how many, how large, how long, waits for late peers, fallbacks. Off by default.

``SIDELANE_METRICS=calls-{rank}.prom`` writes them as a Prometheus text file, which node_exporter's textfile collector
reads; :func:`start` does the same from a program, and :func:`subscribe` passes each call to a function.
"""

from __future__ import annotations

import atexit
import collections
import dataclasses
import os
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from sidelane import forks, log, ranges
from sidelane.ranges import ObservedCall, Observer
from sidelane.user_files import write_whole
from sidelane.version import VERSION

INTERVAL_S = 5.0
"""Seconds between two writes of the file."""

LATE_S = 1e-3
"""Seconds from which on a wait of the host for a peer counts as one for a late peer."""


@dataclasses.dataclass(frozen=True, slots=True)
class CallMetrics:
    """One call, as subscribers get it.

    Attributes:
        group: name of the process group, or of the communicator.
        collective: name of the method or operation.
        dtype: dtype of its first tensor; "" without tensors.
        device: type of the device of its first tensor; "" without tensors.
        nbytes: size of the larger side in bytes: what a gather gathers, the whole buffer of others.
        host_us: microseconds until the call returned to its caller.
        duration_us: microseconds from its begin to its end; None if the host does not know the end, as on GPUs.
        error: name of the error's class; "" for none.
    """

    group: str
    collective: str
    dtype: str
    device: str
    nbytes: int
    host_us: float
    duration_us: float | None
    error: str = ""


Subscriber = Callable[[CallMetrics], object]


def subscribe(subscriber: Subscriber) -> Callable[[], None]:
    """Call a function for each call from now on.

    It is called on the caller's thread when the call returns; for an asynchronous call on CPU tensors when that has
    ended, on another thread. What it raises is logged, and changes nothing for the call.

    Args:
        subscriber: function of one argument, a :class:`CallMetrics`.

    Returns:
        A function that ends the subscription.
    """
    subscription = _Subscription(subscriber)
    ranges.observe(subscription)
    return lambda: ranges.leave(subscription)


def start(file: str | os.PathLike[str] | None = None) -> None:
    """Begin to sum up calls; a second time it changes nothing.

    Args:
        file: file to write every ``INTERVAL_S`` seconds, when a communicator is closed, and at exit. ``{rank}``,
            ``{pid}`` and ``{host}`` in its name are replaced; without one of them the rank is added to the name.
            None: write none; :func:`text` returns the sums.
    """
    global _sums
    with _starting:
        if _sums is None:
            _sums = Sums(None if file is None else os.fspath(file))
            ranges.world_rank()
            ranges.observe(_sums)
            atexit.register(_sums.write)


def stop() -> None:
    """Write the file a last time, and sum up no more calls."""
    global _sums
    with _starting:
        if _sums is not None:
            ranges.leave(_sums)
            atexit.unregister(_sums.write)
            _sums.close()
            _sums = None


def text() -> str:
    """Return the sums since :func:`start` in Prometheus' text format; "" if they were not started."""
    return "" if _sums is None else _sums.text()


def flush() -> None:
    """Write the file now, if there is one."""
    if _sums is not None:
        _sums.write()


Known = tuple[str, str, str, str]
"""Group, collective, dtype and device of a call."""


class _Measurer(Observer):
    """Observer that measures calls: a base, whose :meth:`add` takes what was measured."""

    def add(self, known: Known, nbytes: int, host_us: float, duration_us: float | None, error: str) -> None:
        """Take a call; see :class:`CallMetrics`."""
        raise NotImplementedError

    def end(self, call: ObservedCall, note: Any, error: BaseException | None) -> None:
        device, duration_us = call.device, None
        if error is None and call.finished_ns and device == "cpu":
            duration_us = (call.finished_ns - call.began_ns) / 1e3
        known = (call.group, call.name, ranges.name_of_dtype(call.outputs or call.inputs), device)
        host_us = (call.ended_ns - call.began_ns) / 1e3
        self.add(known, call.nbytes, host_us, duration_us, "" if error is None else type(error).__name__)


class _Subscription(_Measurer):
    """Observer that passes calls to a function."""

    def __init__(self, subscriber: Subscriber) -> None:
        self._subscriber = subscriber

    def add(self, known: Known, nbytes: int, host_us: float, duration_us: float | None, error: str) -> None:
        self._subscriber(CallMetrics(*known, nbytes, host_us, duration_us, error))


@dataclasses.dataclass(slots=True)
class _Sum:
    calls: int = 0
    nbytes: int = 0
    host_us: float = 0.0
    timed: int = 0
    duration_us: float = 0.0


class Sums(_Measurer):
    """Sums of all calls of this process.

    Args:
        file: file to write, with placeholders; None for none.
    """

    def __init__(self, file: str | None) -> None:
        self._file, self._lock = file, forks.lock()
        self._sums: dict[Known, _Sum] = collections.defaultdict(_Sum)
        self._errors: dict[tuple[str, str, str], int] = collections.Counter()
        self._waits: dict[int, list[float]] = collections.defaultdict(lambda: [0, 0.0])
        self._fallbacks: dict[tuple[str, str, str], int] = collections.Counter()
        self._ends, self._is_warned = threading.Event(), False
        if file is not None:
            threading.Thread(target=self._run, name="sidelane-metrics", daemon=True).start()

    def add(self, known: Known, nbytes: int, host_us: float, duration_us: float | None, error: str) -> None:
        with self._lock:
            found = self._sums[ranges.row_of(known, self._sums)]
            found.calls += 1
            found.nbytes += nbytes
            found.host_us += host_us
            if duration_us is not None:
                found.timed += 1
                found.duration_us += duration_us
            if error:
                self._errors[ranges.row_of((*known[:2], error), self._errors)] += 1

    def waited(self, ranks: Sequence[int], seconds: float) -> None:
        if seconds >= LATE_S:
            with self._lock:
                for rank in ranks:
                    self._waits[rank][0] += 1
                    self._waits[rank][1] += seconds * 1e6

    def fell_back(self, name: str, where: str, why: str) -> None:
        with self._lock:
            self._fallbacks[ranges.row_of((name, where, why), self._fallbacks)] += 1

    def text(self) -> str:
        """Return the sums in Prometheus' text format."""
        of_call, rank = ("group", "collective", "dtype", "device"), str(ranges.world_rank())
        with self._lock:
            calls = [
                (dict(zip(of_call, key, strict=True)), dataclasses.replace(one)) for key, one in self._sums.items()
            ]
            errors = [(dict(zip((*of_call[:2], "error"), key, strict=True)), n) for key, n in self._errors.items()]
            waits = [({"peer": str(peer)}, number, us) for peer, (number, us) in sorted(self._waits.items())]
            reasons = ("collective", "backend", "reason")
            fallbacks = [(dict(zip(reasons, key, strict=True)), n) for key, n in self._fallbacks.items()]
        timed = [(labels, one) for labels, one in calls if one.timed]
        families: tuple[tuple[str, str, Iterable[tuple[Mapping[str, str], float]]], ...] = (
            ("calls_total", "Calls that have returned to their caller.", [(of, one.calls) for of, one in calls]),
            ("bytes_total", "Bytes of these calls, of the larger side.", [(of, one.nbytes) for of, one in calls]),
            (
                "host_microseconds_total",
                "Microseconds until these calls returned to their caller.",
                [(of, one.host_us) for of, one in calls],
            ),
            (
                "timed_calls_total",
                "Calls whose end the host knows: those on CPU tensors.",
                [(of, one.timed) for of, one in timed],
            ),
            (
                "duration_microseconds_total",
                "Microseconds of these calls from their begin to their end.",
                [(of, one.duration_us) for of, one in timed],
            ),
            ("errors_total", "Calls that have raised an error.", errors),
            (
                "late_peer_waits_total",
                f"Waits of the host for a peer that took {LATE_S * 1e3:g} ms or longer.",
                [(of, n) for of, n, _ in waits],
            ),
            ("late_peer_microseconds_total", "Microseconds of these waits.", [(of, us) for of, _, us in waits]),
            ("fallbacks_total", "Calls that another backend made, by the reason; slower ways of calls.", fallbacks),
        )
        lines = [
            "# HELP sidelane_info Version of the package.",
            "# TYPE sidelane_info gauge",
            f"sidelane_info{_labels({'rank': rank, 'version': VERSION, 'torch': torch.__version__})} 1",
        ]
        for name, text, rows in families:
            lines += [f"# HELP sidelane_{name} {text}", f"# TYPE sidelane_{name} counter"]
            lines += [f"sidelane_{name}{_labels({'rank': rank, **labels})} {value:.15g}" for labels, value in rows]
        return "\n".join(lines) + "\n"

    def write(self) -> None:
        """Write the file, in one step: readers see the file of before or the new one."""
        if self._file is None:
            return
        try:
            write_whole(path_of(self._file), self.text().encode())
        except OSError as error:
            if not self._is_warned:
                self._is_warned = True
                log.calls.warning("metrics cannot be written: %s", error)

    def close(self) -> None:
        """Write the file, and end the thread."""
        self._ends.set()
        self.write()

    def _run(self) -> None:
        while not self._ends.wait(INTERVAL_S):
            self.write()


def path_of(file: str) -> Path:
    """Return the file of this process: placeholders are replaced, or the rank is added to the name.

    >>> path_of("calls-{rank}.prom").name, path_of("calls.prom").name
    ('calls-0.prom', 'calls-0.prom')
    """
    names = {"{rank}": str(ranges.world_rank()), "{pid}": str(os.getpid()), "{host}": socket.gethostname()}
    if not any(name in file for name in ("{rank}", "{pid}")):
        path = Path(file)
        file = str(path.with_name(f"{path.stem}-{{rank}}{path.suffix}"))
    for name, value in names.items():
        file = file.replace(name, value)
    return Path(file)


def _labels(labels: Mapping[str, str]) -> str:
    escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    return "{" + ",".join(f'{name}="{value.translate(escapes)}"' for name, value in labels.items()) + "}"


@forks.in_copies
def _forget() -> None:
    """Forget the sums in a forked copy, whose calls are its own."""
    global _sums
    if _sums is not None:
        ranges.leave(_sums)
        atexit.unregister(_sums.write)
        _sums = None


_sums: Sums | None = None
_starting = forks.lock()
