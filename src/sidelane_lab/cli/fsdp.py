"""The command ``sidelane fsdp``: training steps with FSDP2, by who communicates."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from sidelane.cli.help import MEASURE
from sidelane_lab.harness.help import HOW
from sidelane_lab.harness.options import StudyOptions, count, loaded, names, option, study_command, word

DEFAULT = ("8b:2x4096", "8b:1x4096", "8b:1x8192", "70b:1x2048", "70b:1x4096")
REDUCE_DTYPES = ("bfloat16", "float32")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FsdpOptions(StudyOptions):
    """Measure a training step with FSDP2, with each implementation of its collectives.

    Loss and gradients are compared with those of NCCL (on CPUs Gloo) before any time is shown.
    """

    study = "fsdp"
    examples = (
        ("sidelane fsdp --json fsdp.json", "five cases, every implementation; with --report a page and a picture"),
        ("sidelane fsdp --cases 8b:1x4096 --profile", "one case, and where its time goes"),
        ("sidelane fsdp --cases 70b:1x2048 --layers 8 --optimizer", "more layers, and steps that end with AdamW's"),
        ("sidelane fsdp --device cpu --ranks 2", "the same between CPU processes, with small layers"),
    )

    cases: tuple[str, ...] = names(
        "--cases", DEFAULT, "Models, with sequences x tokens of a rank.", metavar="CASE,...", some=True
    )
    layers: int | None = option(
        "--layers", None, "Layers of each model.", type=click.IntRange(min=1), show_default="10 of 8b, 4 of 70b"
    )
    implementations: tuple[str, ...] = names(
        "--implementations",
        (),
        "Measure only these, besides nccl (gloo): nccl_ce (NCCL gathers on copy engines), sidelane_ag (Sidelane "
        "gathers, NCCL reduces), sidelane, sidelane_copies (parameters copied out of buffers), compute_only (no byte "
        "moves), compute_only_straight (nor is copied).",
        shown="all that this machine has",
    )
    reduce_dtype: str = word(
        "--reduce-dtype", REDUCE_DTYPES, "bfloat16", "Type in which gradients are added.", group=HOW
    )
    optimizer: bool = option("--optimizer", False, "End each step with the optimizer, AdamW.", group=HOW, is_flag=True)
    profile: bool = option(
        "--profile",
        False,
        "Profile one step of each implementation; later times are longer, so use it with one case.",
        group=HOW,
        is_flag=True,
    )
    warmup: int = count("--warmup", 1, "Rounds before the measured ones, after two compared steps.", 0)
    repeats: int = count("--repeats", 7, "Rounds that are measured.")

    def __post_init__(self) -> None:
        StudyOptions.__post_init__(self)
        self.parsed()

    def parsed(self) -> list[Any]:
        """Return the cases, of type ``StepCase``."""
        cases = loaded("studies.fsdp.cases")  # models take a while to load, for help
        return [cases.parse_case(text, self.layers) for text in dict.fromkeys(self.cases)]


fsdp = study_command("fsdp", FsdpOptions, heading=MEASURE)
