"""The command ``sidelane explain``."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from sidelane.cli.help import PREDICT
from sidelane.config import BESIDE, NOTHING
from sidelane.program.collective import ELEMENT_BYTES, Kind
from sidelane_lab.harness import options
from sidelane_lab.harness.help import OUTPUT, WHERE, json_option
from sidelane_lab.harness.parameters import KINDS, NameChoice, size


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExplainOptions(options.CommandOptions):
    """Show what `auto` takes for a call, why, and what would be submitted.

    The first line is the answer: the implementation (dma: copy engines, sm: kernels), the time that it is expected to
    take, the next one, and whether Sidelane has run on such a machine. A second line says so where the vendor's library
    is predicted to be faster. What led to the answer follows.

    COLLECTIVE is all_gather, all_to_all, broadcast, scatter, gather, reduce_scatter or all_reduce. SIZE is the gathered
    size of an all_gather and the local buffer of the others: 64K, 1.2G.

    Without --machine: for the GPUs that are here, or for CPU processes where there are fewer than two. Needs no GPU.
    """

    examples = (
        ("sidelane explain all_gather 16M --machine h200x4", "what four H200s would do"),
        ("sidelane explain all_reduce 256K --machine mi300x8", "predicted, with the vendor's library"),
        ("sidelane explain all_reduce 1.2G --beside compute", "beside a GEMM, on this machine"),
        ("sidelane explain all_gather 64K --machine h200x4 --json -", "as JSON"),
        (
            "sidelane explain all_gather 64M --machine h200x2 --ordinary",
            "on ordinary tensors, which are staged",
        ),
        ("sidelane explain all_gather 64K --machine mi300x8 --packets", "as packets of AMD's copy engines"),
        (
            "sidelane explain all_reduce 64M --machine h100x8x2",
            "on two nodes of eight, with the predicted time of each step",
        ),
    )

    kind: Kind = options.argument(
        "collective", metavar="COLLECTIVE", type=NameChoice([kind.value for kind in Kind]), convert=Kind
    )
    # Rounded up to whole elements, and to as many for each rank where the collective gives all of them the same.
    nbytes: int = options.argument("nbytes", metavar="SIZE", callback=size)
    in_place: bool = options.option("--in-place", False, "Input and output share memory.", is_flag=True)
    captured: bool = options.option("--graph", False, "The call is captured into a graph.", is_flag=True)
    ordinary: bool = options.option("--ordinary", False, "The tensors are not in symmetric memory.", is_flag=True)
    beside: str = options.word("--beside", BESIDE, NOTHING, "What runs beside it.")
    beside_us: float | None = options.option(
        *("--beside-us", None, "Microseconds of a computation beside it, instead of --beside."),
        type=click.FloatRange(min=0, min_open=True),
    )
    dtype: str = options.word("--dtype", tuple(ELEMENT_BYTES), "bfloat16", "Type of the elements.")
    packets: bool = options.option(
        *("--packets", False, "With --machine mi300x8: the packets of its copy engines. Never run on AMD hardware."),
        is_flag=True,
    )
    tensors: int | None = options.option(
        "--tensors", None, "A list of this many in one call, each of SIZE.", type=click.IntRange(min=1)
    )
    commands: bool = options.option(
        *("--commands", False, "Also list the commands that a rank would submit."), group=OUTPUT, is_flag=True
    )
    world_size: int | None = options.option(
        *("--world-size", None, "Number of ranks."),
        group=WHERE,
        type=click.IntRange(min=1),
        show_default="as measured, or those of this machine",
    )
    machine: str | None = options.option(
        *("--machine", None, "A machine that need not be here: h200x4, mi300x8, ..."),
        group=WHERE,
        type=options.MACHINE_NAME,
        show_default="this one",
    )
    profile: Path | None = options.option(
        *("--profile", None, "Choose by this file of `sidelane tune`."),
        group=WHERE,
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
    )
    json: Path | None = options.shared(json_option, None)

    def __post_init__(self) -> None:
        options.CommandOptions.__post_init__(self)
        if self.nbytes < 1:
            raise ValueError(f"explain: SIZE (value={self.nbytes}, allowed=1 byte and more)")
        if self.beside_us is not None and self.beside != NOTHING:
            raise ValueError("explain: --beside and --beside-us exclude each other")
        if self.machine is not None and self.profile is not None:
            raise ValueError("explain: --machine and --profile exclude each other")
        if self.tensors is not None and (self.tensors < 1 or self.kind not in KINDS):
            allowed = f"{', '.join(KINDS)}: 1.."
            raise ValueError(f"explain: tensors of {self.kind} (value={self.tensors}, allowed={allowed})")
        if self.in_place and self.kind in (Kind.SCATTER, Kind.GATHER):
            raise ValueError(f"explain: {self.kind} has no in-place form")


def _explain(**parameters: Any) -> None:
    options.loaded("explain.call").main(ExplainOptions(**options.values_of(ExplainOptions, parameters)))


explain = options.command("explain", _explain, (ExplainOptions,), heading=PREDICT)
