"""The flight recorder: the last calls of this process, written when a peer fails, in the form of torch's own dumps.

torch's flight recorder has no function to add an entry from Python, so that calls on copy engines are not in it. This
one writes files that torch's analyser (``torch.distributed.flight_recorder.fr_trace``) reads, and ``sidelane
recorder`` too, which says which rank is behind, in which call, and which calls differ.

``SIDELANE_FLIGHT_RECORDER=FOLDER/`` (or a prefix, to which the rank is added; or 1) switches it on.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
import pickle
import socket
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from sidelane import forks, log, ranges
from sidelane.errors import MismatchError, PeerError, SidelaneError
from sidelane.ranges import ObservedCall, Observer
from sidelane.user_files import write_whole
from sidelane.version import VERSION

FORMAT = "2.10"
"""Version of torch's dumps whose fields are written."""

NAME = "sidelane_trace_rank_"
"""Name of the files, without the rank, if only a folder is given."""

MOST_CALLS = 2000
"""Number of calls that are kept unless ``TORCH_FR_BUFFER_SIZE`` says otherwise: torch's own default."""

_MOST_FAILURES = 100  # texts that are kept

_STATES = {
    "scheduled": "last_enqueued_collective",
    "started": "last_started_collective",
    "completed": "last_completed_collective",
}
"""States of a call in their order, and torch's names for the last call of a group that has come so far."""

DESCRIPTION = "sidelane"
COALESCED = "coalesced"

TORCH_NAMES = {
    "all_gather": "_all_gather_base",
    "all_gather_into_tensor": "_all_gather_base",
    "all_reduce": "all_reduce",
    "all_to_all": "all_to_all",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
    "gather": "gather",
    "reduce_scatter": "_reduce_scatter_base",
    "reduce_scatter_tensor": "_reduce_scatter_base",
    "scatter": "scatter",
}
"""Names under which torch's analyser knows calls of one tensor a side; it compares no sizes of others."""


_Side = tuple[torch.Size, torch.dtype]


def start(prefix: str | os.PathLike[str]) -> None:
    """Begin to record calls; a second time it changes nothing.

    Args:
        prefix: beginning of the file's name, to which the rank in the world is added; or a folder, which ends with a
            slash or exists. "1": the folder of torch's dumps (``TORCH_FR_DUMP_TEMP_FILE``, or
            ``TORCH_NCCL_DEBUG_INFO_TEMP_FILE``), else that of temporary files.
    """
    global _recorder
    with _starting:
        if _recorder is None:
            _recorder = FlightRecorder(
                prefix_of(os.fspath(prefix)), int(os.environ.get("TORCH_FR_BUFFER_SIZE") or MOST_CALLS)
            )
            ranges.world_rank()
            ranges.observe(_recorder)


def stop() -> None:
    """Record no more calls, and forget those that were recorded."""
    global _recorder
    with _starting:
        if _recorder is not None:
            ranges.leave(_recorder)
            _recorder = None


def dump() -> Path | None:
    """Write the calls so far, as an error would. Return the file; None if nothing is recorded."""
    return None if _recorder is None else _recorder.dump()


def prefix_of(setting: str) -> str:
    """Return the beginning of the file's name for a value of ``SIDELANE_FLIGHT_RECORDER``."""
    if setting == "1":
        given = os.environ.get("TORCH_FR_DUMP_TEMP_FILE") or os.environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
        return os.path.join(os.path.dirname(given) if given else tempfile.gettempdir(), NAME)
    return os.path.join(setting, NAME) if setting.endswith(os.sep) or os.path.isdir(setting) else setting


@dataclasses.dataclass(slots=True, eq=False)
class _Entry:
    """One recorded call. It keeps shapes and dtypes of the tensors, not the tensors.

    Attributes:
        record: its number in this process.
        sequence: its number in the group.
        is_on_host: the host learns of its end from the call itself.
        ended_ns: time of its end, if the host knows it; 0 before.
        maker, number: on GPUs, the communicator's calls, and its number there.
        work: handle of a call of another backend.
        error: class and text of its error.
    """

    record: int
    sequence: int
    group: str
    name: str
    inputs: Sequence[_Side]
    outputs: Sequence[_Side]
    is_on_host: bool
    thread: int
    began_ns: int
    ended_ns: int = 0
    maker: weakref.ref[Any] | None = None
    number: int = 0
    work: weakref.ref[Any] | None = None
    error: str = ""


class FlightRecorder(Observer):
    """Observer that keeps the last calls, and writes them when a communicator fails.

    Args:
        prefix: beginning of the file's name.
        most: number of calls that are kept.
    """

    def __init__(self, prefix: str, most: int) -> None:
        self._prefix = prefix
        self._entries: collections.deque[_Entry] = collections.deque(maxlen=max(most, 1))
        self._records = itertools.count()
        self._sequences: dict[str, Any] = collections.defaultdict(lambda: itertools.count(1))
        self._groups: dict[str, Sequence[int]] = {}
        self._failures: dict[str, Sequence[int]] = {}  # texts, with the ranks at fault
        self._more_failures = 0
        self._writing = forks.rlock()

    def begin(self, call: ObservedCall) -> _Entry:
        group, outputs, thread = call.group, _sides(call.outputs), threading.get_ident()
        if group not in self._groups:
            self._add_group(group, call.ranks)
        inputs, is_on_host = _sides(call.inputs) or outputs, call.device != "cuda"
        record, sequence = next(self._records), next(self._sequences[group])
        entry = _Entry(record, sequence, group, call.name, inputs, outputs, is_on_host, thread, call.began_ns)
        self._entries.append(entry)
        return entry

    def _add_group(self, group: str, ranks: Sequence[int]) -> None:
        """Note a group, and once they are many, forget those of which no call is kept: programs make ever new ones."""
        most = self._entries.maxlen
        assert most is not None
        if len(self._groups) >= 2 * most:
            kept = {entry.group for entry in self._recent()}
            for old in [old for old in list(self._groups) if old not in kept]:
                self._groups.pop(old, None)
                self._sequences.pop(old, None)
        self._groups[group] = ranks

    def returned(self, call: ObservedCall, note: _Entry, error: BaseException | None) -> None:
        if error is not None:
            return
        if not note.is_on_host:
            if (maker := call.maker) is not None:
                note.maker, note.number = weakref.ref(maker), maker.control.begun(maker.control.rank)
        elif call.work is not None and not hasattr(call.work, "when_ended"):  # another backend's
            note.work = weakref.ref(call.work)

    def end(self, call: ObservedCall, note: _Entry, error: BaseException | None) -> None:
        if error is None:
            note.ended_ns = call.finished_ns
            return
        note.error = f"{type(error).__name__}: {error}"
        if isinstance(error, PeerError | MismatchError):
            self._fail(error)

    def failed(self, error: BaseException) -> None:
        if isinstance(error, SidelaneError):
            self._fail(error)

    def _fail(self, error: SidelaneError) -> None:
        text = f"{type(error).__name__}: {error}"
        if text not in self._failures and len(self._failures) >= _MOST_FAILURES:  # the first one names the cause
            self._more_failures += 1
        else:
            self._failures[text] = getattr(error, "ranks", ())
        file = self.dump()
        if file is not None and len(self._failures) == 1:
            log.calls.warning("the last calls of this rank are in %s; `sidelane recorder` reads it", file)

    def dump(self) -> Path | None:
        """Write the calls. Return the file; None if it cannot be written, which is logged."""
        with self._writing:
            file = Path(f"{self._prefix}{ranges.world_rank()}")
            try:
                write_whole(file, pickle.dumps(self.content()), 0o600)
            except OSError as error:
                log.calls.warning("the last calls of this rank cannot be written: %s", error)
                return None
            return file

    def content(self) -> dict[str, Any]:
        """Return the calls in the form of torch's dumps, with one key more: ``sidelane``."""
        kept = self._recent()
        groups = dict(self._groups)  # other threads may make calls of new groups
        numbers = {group: number for number, group in enumerate(groups)}
        entries = [self._row(entry, numbers[entry.group]) for entry in kept if entry.group in numbers]
        failures = [*self._failures.items()]
        if self._more_failures:
            failures.append((f"{ranges.OTHERS}: {self._more_failures} more failures", ()))
        status: dict[str, dict[str, int]] = {}
        for row in entries:
            found = status.setdefault(str(row["pg_id"]), dict.fromkeys(_STATES.values(), -1))
            for state, last in _STATES.items():
                found[last] = row["collective_seq_id"]
                if state == row["state"]:
                    break
        return {
            "version": FORMAT,
            "comm_lib_version": f"sidelane {VERSION}",
            "pg_config": {
                group: {"name": group, "desc": DESCRIPTION, "ranks": str(list(ranks))}
                for group, ranks in groups.items()
            },
            "pg_status": status,
            "entries": entries,
            "sidelane": {
                "rank": ranges.world_rank(),
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "written_ns": time.time_ns(),
                "failures": [{"text": text, "ranks": list(ranks)} for text, ranks in failures],
            },
        }

    def _recent(self) -> list[_Entry]:
        while True:
            try:
                return list(self._entries)
            except RuntimeError:  # another thread has made a call meanwhile
                continue

    def _row(self, entry: _Entry, number: int) -> dict[str, Any]:
        is_known = len(entry.inputs) == len(entry.outputs) == 1 or entry.name in ("gather", "scatter")
        return {
            "record_id": entry.record,
            "pg_id": number,
            "process_group": (entry.group, DESCRIPTION),
            "collective_seq_id": entry.sequence,
            "p2p_seq_id": 0,
            "op_id": entry.sequence,
            # A name of nccl, since torch's analyser takes no other.
            "profiling_name": f"nccl:{TORCH_NAMES.get(entry.name, COALESCED) if is_known else COALESCED}",
            "time_created_ns": entry.began_ns,
            "input_sizes": [list(shape) for shape, _ in entry.inputs],
            "input_dtypes": [ranges.torch_name(dtype) for _, dtype in entry.inputs],
            "output_sizes": [list(shape) for shape, _ in entry.outputs],
            "output_dtypes": [ranges.torch_name(dtype) for _, dtype in entry.outputs],
            "state": _state_of(entry),
            "time_discovered_started_ns": entry.began_ns,
            "time_discovered_completed_ns": entry.ended_ns or None,
            "retired": bool(entry.ended_ns),
            "timeout_ms": 0,
            "is_p2p": False,
            "thread_id": str(entry.thread),
            "thread_name": "",
            "frames": [],
            "sidelane_name": entry.name,
            "sidelane_error": entry.error,
        }


def _state_of(entry: _Entry) -> str:
    """Return the state of a call in torch's words."""
    if entry.ended_ns:
        return "completed"
    if entry.work is not None:  # who drops it has waited for it
        work = entry.work()
        return "completed" if work is None or work.is_completed() else "started"
    if entry.maker is None:
        return "started" if entry.is_on_host or entry.error else "scheduled"
    maker = entry.maker()
    # The host posts which calls of copy engines have ended; kernels in front of these have ended, too.
    has_ended = maker is None or maker.closed or maker.control.ended(maker.control.rank) >= entry.number
    return "completed" if has_ended else "scheduled"


def _sides(tensors: Sequence[torch.Tensor]) -> list[_Side]:
    return [(tensor.shape, tensor.dtype) for tensor in tensors]


_recorder: FlightRecorder | None = None
_starting = forks.lock()
forks.in_copies(stop)  # the calls of the parent are not those of a copy
