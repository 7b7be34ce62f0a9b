"""What a campaign says: a line while it runs, a table when it has ended, a file for other tools."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

from attack.campaign import SHOWN, Finding, Tally
from attack.interpreter import run
from attack.machine import Failure, Machine
from sidelane.program.ir import Program, describe
from sidelane_lab.harness import provenance


def progress(tally: Tally, seconds: float) -> str:
    """One line."""
    rate = tally.schedules / max(seconds, 1e-9)
    return (
        f"[attack] {seconds:.0f} s: {tally.cases:,} cases, {sum(tally.made.values()):,} mutants, "
        f"{tally.schedules:,} schedules ({rate:,.0f}/s), {len(tally.findings)} findings"
    )


def table(tally: Tally) -> Iterator[str]:
    """Mistakes, and refusals."""
    yield f"{'mistake':24}{'mutants':>10}{'refused':>10}{'accepted':>10}"
    for name, made in sorted(tally.made.items()):
        yield f"{name:24}{made:>10,}{made - tally.accepted[name]:>10,}{tally.accepted[name]:>10,}"
    made, accepted = sum(tally.made.values()), sum(tally.accepted.values())
    yield f"{'all':24}{made:>10,}{made - accepted:>10,}{accepted:>10,}"
    yield ""
    yield f"{'refused for':24}{'mutants':>10}{'fail':>10}{'no schedule shows it':>24}"
    for name, count in sorted(tally.refused.items()):
        hidden = tally.hidden[name]
        tried = (f"{count - hidden:,}", f"{hidden:,} ({100 * hidden / count:.1f} %)") if name in SHOWN else ("-", "-")
        yield f"{name:24}{count:>10,}{tried[0]:>10}{tried[1]:>24}"


def listing(program: Program) -> Iterator[str]:
    """The program with all that ``parse`` of the tests needs."""
    options = f"staging={program.staging_bytes}, flags={program.flag_count}, prelaunched={program.prelaunched}"
    yield f"{program.collective} {program.variant}: {options}"
    for queue in program.queues:
        yield f"  rank {queue.rank} {queue.engine}"
        for index, command in enumerate(queue.commands):
            try:
                words = describe(command)
            except IndexError:  # a broadcast without two destinations
                words = repr(command)
            yield f"    {index}: {words}"


def described(finding: Finding) -> Iterator[str]:
    """A finding with its programs, and how to see it again."""
    mistakes = ", ".join(finding.mistakes) or "none: the programs are right"
    yield f"case {finding.case} of seed {finding.seed}; mistakes: {mistakes}"
    yield f"  {finding.failure}"
    yield f'  again: make attack SEED={finding.seed} ATTACK="--case {finding.case}"'
    numbers: dict[int, int] = {}
    order = [numbers.setdefault(id(program), len(numbers)) for program in finding.programs]
    distinct = {numbers[id(program)]: program for program in finding.programs}
    yield f"  programs {', '.join(map(str, order))}; schedule {finding.schedule}"
    for number, program in distinct.items():
        yield f"  program {number}:"
        yield from (f"    {line}" for line in listing(program))


def trace(finding: Finding) -> Iterator[str]:
    """Every step of the schedule that fails."""
    if finding.schedule is None:
        return
    steps: list[str] = []
    try:
        run(Machine(finding.programs), finding.schedule, trace=steps)
    except Failure as failure:
        steps.append(str(failure))
    yield from steps


def as_json(tally: Tally, seed: int, seconds: float) -> dict[str, Any]:
    """Everything, with the listings of what was found."""
    counters = ("made", "accepted", "refused", "hidden")
    return {
        "study": "attack",
        "machine": "cpu",
        "date": time.strftime("%Y-%m-%d"),
        "commit": provenance.commit(),
        "command": f"make attack SECONDS={seconds:.0f} SEED={seed}",
        "software": provenance.software_versions(),
        "seed": seed,
        "seconds": round(seconds, 1),
        "cases": tally.cases,
        "programs": tally.programs,
        "schedules": tally.schedules,
        **{name: dict(sorted(getattr(tally, name).items())) for name in counters},
        "findings": [
            {
                **{name: value for name, value in dataclasses.asdict(_bare(found)).items() if name != "programs"},
                "listing": list(described(found)),
            }
            for found in tally.findings
        ],
    }


def _bare(finding: Finding) -> Finding:
    return dataclasses.replace(finding, programs=())
