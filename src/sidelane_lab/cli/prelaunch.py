"""The command ``sidelane prelaunch``: calls that were submitted ahead, from their trigger to their end."""

from __future__ import annotations

import dataclasses

from sidelane.program.collective import Kind
from sidelane_lab.harness.options import StudyOptions, count, implementations, kinds, names, size_span, study_command

CALL, STREAM, HOST, KERNEL = TRIGGERS = ("call", "stream", "host", "kernel")
"""Beginnings of a collective: the call itself, or a write of the stream, the host or a kernel."""

MOVING = ("all_gather", "all_to_all")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrelaunchOptions(StudyOptions):
    """Time prelaunched collectives from their trigger to their end, next to ordinary calls.

    A call is armed outside of the time, and fired by the stream, by the host or by a running kernel. Next to it are the
    same variant as an eager call and in a graph, and the library's in a graph.
    """

    study = "prelaunch"
    examples = (
        ("sidelane prelaunch --json prelaunch.json", "all variants, triggers and sizes"),
        ("sidelane prelaunch --collective all_gather --variants b2b --max-bytes 1M", "one variant at small sizes"),
    )

    collectives: tuple[Kind, ...] = kinds((Kind.ALL_GATHER, Kind.ALL_TO_ALL), MOVING)
    sizes: tuple[int, ...] = size_span(gpus=("1K", "4G"), cpus=("1K", "64K"))
    variants: tuple[str, ...] = names(
        "--variants", ("pcpy", "bcst", "swap", "b2b"), "Of Sidelane's copy engines.", some=True
    )
    triggers: tuple[str, ...] = names(
        "--triggers", TRIGGERS, "What begins the collective.", allowed=TRIGGERS, some=True
    )
    implementations: tuple[str, ...] = implementations()
    warmup: int = count("--warmup", 3, "Rounds before the measured ones.", 0)
    repeats: int = count("--repeats", 15, "Measured rounds.")


prelaunch = study_command("prelaunch", PrelaunchOptions)
