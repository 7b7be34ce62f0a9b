"""Counts of calls by place and reason, kept for each group; ``sidelane.report()`` returns them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from sidelane import forks, log, ranges
from sidelane.machine.peers import SHARED

SIDELANE = "sidelane"
_MOST_GROUPS = 256

RowKey = tuple[str, str, str, str, str]
_FIELDS = {"bytes": "nbytes"}
"""Fields of rows by the heads of their columns, where these differ."""


@dataclasses.dataclass(slots=True)
class _Sum:
    calls: int = 0
    nbytes: int = 0
    reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class ReportRow:
    """Calls of one kind.

    Attributes:
        group: name of the group, as torch has it.
        ranks: its ranks, in the world.
        operation: name in ``torch.distributed``; behind ``fsdp`` if that was enabled.
        dtype, device: dtype and device of the tensors; "" if there are none.
        where: ``sidelane``, or the backend that made the calls (``gloo``, ``nccl``).
        why: variant that Sidelane chose, with the reason of the latest of these calls, or "several sizes" where
            it depends on their bytes; or the reason why it made none.
        calls: number of calls.
        nbytes: bytes of all calls: gathered bytes for an all_gather, the whole buffer for the others.
    """

    group: str
    ranks: tuple[int, ...]
    operation: str
    dtype: str
    device: str
    where: str
    why: str
    calls: int
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """Calls of this process's groups on this rank; printed, it is a table.

    Attributes:
        rows: sums, group by group in the order in which they were made; calls of more kinds than ``ranges.MOST_ROWS``
            in a group are one row for each maker, ``others``.
        last: last call that has ended (on GPUs: that was queued), with 1 for ``calls``; None before the first.
        notes: a line for each group whose GPUs reach each other through host memory, with the reason.
    """

    rows: tuple[ReportRow, ...]
    last: ReportRow | None
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.rows:
            return 'no calls of a Sidelane process group so far: dist.init_process_group("sidelane") makes one'
        heads = ("group", "operation", "dtype", "device", "where", "calls", "bytes", "why")
        lines = [heads, *(tuple(str(getattr(row, _FIELDS.get(head, head))) for head in heads) for row in self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
        numbers = (heads.index("calls"), heads.index("bytes"))
        table = [
            "  ".join(
                cell.rjust(width) if column in numbers else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        return "\n".join((*table, *self.notes))


class Ledger:
    """The calls of one group on this rank.

    Args:
        ranks: ranks of the group, in the world.

    Attributes:
        group: name of the group, as torch has it.
        sums: calls by the key of their row.
        peers: memory between the ranks' devices.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self.group = ""  # torch sets the name after the group was made
        self._ranks = tuple(ranks)
        self.sums: dict[RowKey, _Sum] = {}
        self.peers = SHARED
        with _lock:
            _ledgers.append(self)
            del _ledgers[:-_MOST_GROUPS]

    def note(self, key: RowKey, reason: str, nbytes: int) -> None:
        """Count a call; a reason that is of one size is kept as long as all calls have it.

        >>> calls, key = Ledger([0]), ("all_reduce", "float32", "cpu", "sidelane", "b2b")
        >>> for nbytes, reason in ((4, "5 us"), (4, "4 us"), (8, "6 us"), (4, "4 us")):
        ...     calls.note(key, reason, nbytes)
        ...     calls.sums[key].reason
        '5 us'
        '4 us'
        'several sizes'
        'several sizes'
        >>> reset()

        Args:
            key: operation, dtype, device, maker, and the key of its row: the variant, or the reason against Sidelane.
            reason: reason for the variant; "" for none.
            nbytes: size of the call in bytes.
        """
        global _last
        _last = (self, key, nbytes, reason)
        is_new = False
        with _lock:
            entry = self.sums.get(key)
            if entry is None:
                row = ranges.row_of(key, self.sums)
                if row is not key:
                    row, reason = (*row[:3], key[3], row[4]), ""
                is_new = row not in self.sums
                entry = self.sums.setdefault(row, _Sum())
            is_several = entry.reason == "several sizes" or entry.nbytes != entry.calls * nbytes
            entry.reason = "several sizes" if is_several and reason not in ("", entry.reason) else reason
            entry.calls += 1
            entry.nbytes += nbytes
        operation, _, _, where, why = key
        if is_new:
            level = logging.INFO if where == SIDELANE else logging.WARNING
            log.calls.log(level, "group %s: %s", self.group, maker_in_words(key))
        if where != SIDELANE and ranges.observers:
            ranges.notify("fell_back", operation, where, why)

    def row(self, key: RowKey, entry: _Sum) -> ReportRow:
        """Return a sum as a row of the report."""
        operation, dtype, device, where, why = key
        why = f"{why}: {entry.reason}" if entry.reason else why
        return ReportRow(self.group, self._ranks, operation, dtype, device, where, why, entry.calls, entry.nbytes)


def maker_in_words(key: RowKey) -> str:
    """Return a sentence about calls of one kind: their maker, and the reason.

    >>> maker_in_words(("all_reduce", "float64", "cpu", "gloo", "sum of float64"))
    'all_reduce of float64 on cpu is made by gloo: sum of float64'
    """
    operation, dtype, device, where, why = key
    return f"{operation}{f' of {dtype} on {device}' if dtype else ''} is made by {where}: {why}"


def report() -> Report:
    """Return the calls of every Sidelane group of this process on this rank: their makers, and the reasons.

    Groups that were destroyed are in it, too. Asynchronous calls appear when they have ended.
    """
    with _lock:
        rows = tuple(ledger.row(*entry) for ledger in list(_ledgers) for entry in list(ledger.sums.items()))
        through_host = [ledger for ledger in _ledgers if ledger.sums and ledger.peers.through_host]
    notes = tuple(f"group {ledger.group}: between ranks: {ledger.peers}" for ledger in through_host)
    if _last is None:
        return Report(rows, None, notes)
    ledger, key, nbytes, reason = _last
    return Report(rows, ledger.row(key, _Sum(1, nbytes, reason)), notes)


def reset() -> None:
    """Reset the counts."""
    global _last
    with _lock:
        for ledger in list(_ledgers):
            ledger.sums.clear()
        _last = None


_lock = forks.rlock()  # a signal handler, or a finaliser, may make a call or a report in the middle of one
_ledgers: list[Ledger] = []
_last: tuple[Ledger, RowKey, int, str] | None = None
