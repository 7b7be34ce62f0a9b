"""The command ``sidelane e2e``: whole workloads, by who communicates."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from sidelane_lab.harness.help import HOW, OUTPUT
from sidelane_lab.harness.options import (
    StudyOptions,
    count,
    file_read,
    loaded,
    names,
    option,
    require_file_to_resume,
    study_command,
)

WORKLOADS = ("attention", "decode", "experts", "mlp", "recommendation")
SECONDS: Any = {"group": HOW, "type": click.FloatRange(min=0, min_open=True), "metavar": "SECONDS"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class EndToEndOptions(StudyOptions):
    """Measure whole workloads end to end, with each way to communicate.

    Sequence-parallel attention, decoding, experts, recommendation and a tensor-parallel MLP in half batches, at public
    sizes: by NCCL (Gloo), by the same code on a Sidelane group, by Sidelane's operators, and without communication.
    Results are compared with those of NCCL.
    With --machine: predict what they expose on a machine that need not be here.
    """

    study = "e2e"
    examples = (
        ("sidelane e2e --json e2e.json --resume", "all of it, in several goes if need be"),
        ("sidelane e2e --workloads decode --sizes llama-3.2-1b-x8", "one workload, at one size"),
        ("sidelane e2e --device cpu --ranks 2", "the same between CPU processes, with tiny models"),
        ("sidelane e2e --machine h200x2", "what a model of two H200s expects to be exposed"),
        ("sidelane e2e --machine h200x2 --results e2e.json", "and how far that is off a file"),
    )

    workloads: tuple[str, ...] = names(
        "--workloads", WORKLOADS, "Measure only these.", allowed=WORKLOADS, some=True, shown="all of them"
    )
    cases: tuple[str, ...] = names(
        "--sizes", (), "Measure only these sizes of the workloads.", shown="all but tiny ones, on CPUs these"
    )
    warmup: int = count("--warmup", 3, "Steps before the measured ones.")
    rounds: int = count("--rounds", 12, "Rounds in which the ways take turns.")
    steps: int = count("--steps", 5, "Steps of a round, if they are short.")
    size_s: float = option("--seconds", 10.0, "For the rounds of a size; four are run in any case.", **SECONDS)
    budget_s: float = option(
        "--budget", 420.0, "Begin no further size after so much time; --resume goes on.", **SECONDS
    )
    resume: bool = option(
        "--resume", False, "Keep what --json has, and measure what it lacks.", group=HOW, is_flag=True
    )
    results: Path | None = file_read(
        "--results",
        "With --machine: a file of sidelane e2e, whose rows --json writes with predictions.",
        group=OUTPUT,
        predicted=True,
    )
    done: frozenset[Any] = frozenset()  # keys of rows that are there: the study fills them in

    def __post_init__(self) -> None:
        StudyOptions.__post_init__(self)
        require_file_to_resume(self)


def _predict(machine: str, options: EndToEndOptions) -> None:
    loaded("studies.e2e.prediction").main(machine, options)


e2e = study_command("e2e", EndToEndOptions, _predict, ("workloads", "cases", "results", "json"))
