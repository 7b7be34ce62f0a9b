"""Metrics of calls: how many, how large, how long, waits for late peers, fallbacks. Off by default.

``SIDELANE_METRICS=calls-{rank}.prom`` writes them as a Prometheus text file, which node_exporter's textfile collector
reads; :func:`start` does the same from a program, and :func:`subscribe` passes each call to a function.
"""

from __future__ import annotations

import atexit
import dataclasses
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
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

_CALL = ("group", "collective", "dtype", "device")
_TABLES: Mapping[str, tuple[tuple[str, ...], Mapping[str, str]]] = {
    "calls": (
        _CALL,
        {
            "calls_total": "Calls that have returned to their caller.",
            "bytes_total": "Bytes of these calls, of the larger side.",
            "host_microseconds_total": "Microseconds until these calls returned to their caller.",
        },
    ),
    "timed": (
        _CALL,
        {
            "timed_calls_total": "Calls whose end the host knows: those on CPU tensors.",
            "duration_microseconds_total": "Microseconds of these calls from their begin to their end.",
        },
    ),
    "errors": ((*_CALL[:2], "error"), {"errors_total": "Calls that have raised an error."}),
    "waits": (
        ("peer",),
        {
            "late_peer_waits_total": f"Waits of the host for a peer that took {LATE_S * 1e3:g} ms or longer.",
            "late_peer_microseconds_total": "Microseconds of these waits.",
        },
    ),
    "fallbacks": (
        ("collective", "backend", "reason"),
        {"fallbacks_total": "Calls that another backend made, by the reason; slower ways of calls."},
    ),
}
"""Names of the labels, and the help of each metric, of the metrics that have the same labels."""


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


class _Subscription(Observer):
    """Observer that passes calls to a function."""

    def __init__(self, subscriber: Subscriber) -> None:
        self._subscriber = subscriber

    def end(self, call: ObservedCall, note: Any, error: BaseException | None) -> None:
        labels, failed = (call.group, call.name, call.dtype, call.device), "" if error is None else type(error).__name__
        self._subscriber(CallMetrics(*labels, call.nbytes, call.host_us, call.duration_us(error), failed))


class Sums(Observer):
    """Sums of all calls of this process.

    Args:
        file: file to write, with placeholders; None for none.
    """

    def __init__(self, file: str | None) -> None:
        self._file, self._lock, self._process = file, forks.lock(), os.getpid()
        self._rows: dict[str, dict[tuple[str, ...], list[float]]] = {table: {} for table in _TABLES}
        self._ends, self._is_warned = threading.Event(), False
        if file is not None:
            threading.Thread(target=self._run, name="sidelane-metrics", daemon=True).start()

    def end(self, call: ObservedCall, note: Any, error: BaseException | None) -> None:
        labels, nbytes = (call.group, call.name, call.dtype, call.device), call.nbytes
        host_us, duration_us = call.host_us, call.duration_us(error)
        with self._lock:
            row = self._row("calls", labels)
            row[0] += 1
            row[1] += nbytes
            row[2] += host_us
            if duration_us is not None:
                row[3] += 1
                row[4] += duration_us
            if error is not None:
                self._row("errors", (*labels[:2], type(error).__name__))[0] += 1

    def waited(self, ranks: Sequence[int], seconds: float) -> None:
        if seconds >= LATE_S:
            with self._lock:
                for rank in ranks:
                    row = self._row("waits", (str(rank),))
                    row[0] += 1
                    row[1] += seconds * 1e6

    def fell_back(self, name: str, where: str, why: str) -> None:
        with self._lock:
            self._row("fallbacks", (name, where, why))[0] += 1

    def _row(self, table: str, labels: tuple[str, ...]) -> list[float]:
        rows = self._rows[table]
        return rows.get(labels) or rows.setdefault(ranges.row_of(labels, rows), [0.0] * 5)

    def text(self) -> str:
        """Return the sums in Prometheus' text format."""
        rank = str(ranges.world_rank())
        lines = [
            "# HELP sidelane_info Version of the package.",
            "# TYPE sidelane_info gauge",
            f"sidelane_info{_shown({'rank': rank, 'version': VERSION, 'torch': torch.__version__})} 1",
        ]
        with self._lock:
            found = {table: {labels: [*row] for labels, row in rows.items()} for table, rows in self._rows.items()}
        found["timed"] = {labels: row[3:] for labels, row in found["calls"].items() if row[3]}
        for table, (names, metrics) in _TABLES.items():
            for column, (metric, text) in enumerate(metrics.items()):
                lines += [f"# HELP sidelane_{metric} {text}", f"# TYPE sidelane_{metric} counter"]
                for values, row in found[table].items():
                    labels = {"rank": rank, **dict(zip(names, values, strict=True))}
                    lines.append(f"sidelane_{metric}{_shown(labels)} {row[column]:.15g}")
        return "\n".join(lines) + "\n"

    def write(self) -> None:
        """Write the file, in one step: readers see the file of before or the new one."""
        if self._file is None or self._process != os.getpid():  # a forked copy has the parent's rank
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


def _shown(labels: Mapping[str, str]) -> str:
    escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    return "{" + ",".join(f'{name}="{value.translate(escapes)}"' for name, value in labels.items()) + "}"


_sums: Sums | None = None
_starting = forks.lock()
forks.in_copies(stop)  # the calls of a copy are its own
