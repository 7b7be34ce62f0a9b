"""What a new profile changes: the choices that it makes and the one before it did not."""

from __future__ import annotations

from collections.abc import Sequence

from sidelane.choice import Abilities, Candidate, Curve, Profile, choose
from sidelane.choice.store import InForce
from sidelane.cli.table import Line, Table
from sidelane.program.shape import CallShape
from sidelane.sizes import format_bytes

COLUMNS = ("<collective", "<call", "bytes", "<before", "<now", "us", "instead of")


def changes_table(before: InForce, after: Profile, curves: Sequence[Curve]) -> Table:
    """A line for each way to call a collective and each measured size at which the choice differs.

    Args:
        before: what was in force.
        after: the new profile.
        curves: what was measured: where to look for changes, and what this machine has.
    """
    calls = sorted({call for curve in curves for call in _calls(curve)}, key=_order)
    abilities = abilities_of([curve.candidate for curve in curves])
    lines = []
    for call in calls:
        old, new = (choose(profile, call, abilities) for profile in (before.profile, after))
        if old.candidate == new.candidate:
            continue
        times = dict(new.table)
        place = "in place" if call.in_place else "out of place"
        cells = (str(call.kind), f"{place}, {'graph' if call.captured else 'eager'}", format_bytes(call.nbytes))
        figures = (_shown(times.get(new.candidate)), _shown(times.get(old.candidate)))
        lines.append(Line((*cells, str(old.candidate), str(new.candidate), *figures)))
    notes = (
        f"{len(calls) - len(lines)} of {len(calls)} choices stay as they are; before: {before.where}",
        "us: measured now; instead of: what the choice before would take now",
    )
    return Table("What auto will do differently", COLUMNS, tuple(lines), notes, keys=3)


def abilities_of(candidates: Sequence[Candidate]) -> Abilities:
    """What a machine has that ran these."""
    return Abilities(tuple(dict.fromkeys(found.implementation for found in candidates)), captures=True)


def _calls(curve: Curve) -> Sequence[CallShape]:
    return [
        CallShape(curve.kind, curve.world_size, nbytes, curve.dtype, curve.in_place, captured=curve.captured)
        for nbytes, _ in curve.times
    ]


def _order(call: CallShape) -> tuple[str, bool, bool, int]:
    return str(call.kind), call.in_place, call.captured, call.nbytes


def _shown(time_us: float | None) -> str:
    return "-" if time_us is None else f"{time_us:.3g}" if time_us < 100 else f"{time_us:.0f}"
