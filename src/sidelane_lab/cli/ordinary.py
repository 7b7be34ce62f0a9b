"""The command ``sidelane ordinary``: collectives on ordinary memory."""

from __future__ import annotations

import dataclasses

import click

from sidelane.program.collective import Kind
from sidelane_lab.harness.options import StudyOptions, count, kinds, option, size_span, study_command, words
from sidelane_lab.harness.parameters import say_rounding
from sidelane_lab.pairs.workload import parse_workload

COLLECTIVES = (Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)
ALONE, BESIDE = PARTS = ("alone", "beside")


def read_pairs(context: click.Context, option: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    """Read pairs, each once. Rounded sizes are reported on stderr."""
    say_rounding(*(pair.rpartition("_")[2] for pair in value))
    return tuple(dict.fromkeys(value))


@dataclasses.dataclass(frozen=True, kw_only=True)
class OrdinaryOptions(StudyOptions):
    """Measure what collectives cost where the caller's tensors are ordinary memory.

    Sidelane's auto on tensors in symmetric memory and on ordinary ones, which are staged, and NCCL (on CPUs Gloo):
    alone, and next to a GEMM.
    """

    study = "ordinary"
    examples = (
        ("sidelane ordinary --json ordinary.json", "all of it, as JSON too"),
        ("sidelane ordinary --part alone --collective all_gather --max-bytes 64M", "one collective by itself"),
        ("sidelane ordinary --part beside --pair 8192x8192x8192_330M", "next to one GEMM"),
    )

    parts: tuple[str, ...] = words(
        "--part",
        PARTS,
        PARTS,
        "Collectives alone, or next to a GEMM (beside). May be repeated.",
        some=True,
        show_default="all",
    )
    collectives: tuple[Kind, ...] = kinds(
        COLLECTIVES,
        tuple(map(str, COLLECTIVES)),
        "May be repeated. Next to a GEMM run all_gather and all_to_all.",
        show_default="all",
    )
    sizes: tuple[int, ...] = size_span(gpus=("16M", "1G"), cpus=("64K", "4M"))
    pairs: tuple[str, ...] = option(
        "--pair",
        (),
        "A GEMM and a size, such as cb1_896M. May be repeated. On CPUs all of it is divided, as in sidelane c3.",
        multiple=True,
        metavar="PAIR",
        show_default="8192x8192x8192 with 97M, 330M and 1.2G; on CPUs with 97M",
        callback=read_pairs,
    )
    warmup: int = count("--warmup", 2, "Rounds before the measured.", 0)
    repeats: int = count("--repeats", 9, "Measured rounds.")

    def __post_init__(self) -> None:
        StudyOptions.__post_init__(self)
        for pair in self.pairs:
            parse_workload(pair)


ordinary = study_command("ordinary", OrdinaryOptions)
