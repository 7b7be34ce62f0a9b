"""From rows of a study of collectives to a profile that ``auto`` chooses by."""

from __future__ import annotations

from collections.abc import Iterable

from sidelane.choice import Candidate, Curve, Profile
from sidelane.choice.candidate import IMPLEMENTATIONS, find
from sidelane.choice.key import CPU, SOFTWARE, Key
from sidelane.program.collective import Kind
from sidelane_lab.harness.study import Results
from sidelane_lab.studies.collectives.rows import CollectiveRow

Way = tuple[Kind, str, bool, bool, Candidate]


def curves_of(rows: Iterable[CollectiveRow], world_size: int) -> tuple[Curve, ...]:
    """The times of Sidelane's own collectives, in the order of the rows.

    Rows without a time are left out, and those of other libraries, of ``auto``, of prelaunched programs and of lists:
    ``auto`` expects of a list what one tensor of all its bytes takes.

    Args:
        rows: of one run.
        world_size: ranks that took part.
    """
    found: dict[Way, dict[int, float]] = {}
    for row in rows:
        if row.implementation not in IMPLEMENTATIONS or row.time_us is None or row.tensors > 1:
            continue
        kind = Kind(row.collective)
        candidate = find(kind, row.variant)
        if candidate is not None and candidate.implementation == row.implementation:
            way = (kind, row.dtype, row.in_place, row.launch == "graph", candidate)
            found.setdefault(way, {})[row.bytes] = float(f"{row.time_us:.4g}")  # as the file has it
    return tuple(
        Curve(kind, world_size, dtype, in_place, captured, candidate, tuple(sorted(times.items())))
        for (kind, dtype, in_place, captured, candidate), times in found.items()
    )


def profile_of(results: Results) -> Profile:
    """The profile that a result file holds: how the built-in tables are made.

    Raises:
        ValueError: the file has no times of Sidelane's collectives.
    """
    curves = curves_of((row for row in results.rows if isinstance(row, CollectiveRow)), results.ranks)
    if not curves:
        raise ValueError(
            f"profile_of: no times of dma or sm with one tensor a call (value=results of {results.study} on "
            f"{results.machine}, allowed=a file of sidelane collective --json)"
        )
    versions = results.software
    software = tuple(sorted((name, versions[name]) for name in SOFTWARE if name in versions))
    key = (
        Key(CPU, results.device.partition(",")[0], 0, software=software)
        if results.on_cpu
        else Key("cuda", results.device, results.gpus, software=software)
    )
    return Profile(results.machine, key, results.date, results.command, curves)
