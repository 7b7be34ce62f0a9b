"""The command ``sidelane fused``: fused operators, measured and predicted."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from sidelane_lab.harness.help import OUTPUT
from sidelane_lab.harness.options import (
    LAUNCHES,
    WRITTEN,
    StudyOptions,
    count,
    either,
    file_read,
    folder,
    implementations,
    loaded,
    names,
    option,
    study_command,
)
from sidelane_lab.harness.parameters import shapes

FUSED_OPS = (
    *("gemv_all_reduce", "all_reduce_rms_norm", "embedding_all_to_all", "gemm_all_to_all", "all_to_all_gemm"),
    *("gemm_reduce_scatter", "gemm_all_reduce", "all_gather_gemm"),
)

SINGLE = "single"
"""Launch of a graph of one call, replayed 1,000 times in a sample; a graph has several calls in a row."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FusedOptions(StudyOptions):
    """Compare fused operators with the same computation followed by a collective.

    With --machine: predict them for a machine that need not be here. Several nodes: of one GPU each (mi210x1x2).
    """

    study = "fused"
    examples = (
        ("sidelane fused", "every operator, at the shapes of the study"),
        ("sidelane fused --device cpu --ops gemv_all_reduce", "check one on CPU ranks"),
        ("sidelane fused --timeline traces", "and write what each workgroup did, and when"),
        ("sidelane fused --machine mi210x4", "predict them for four MI210"),
        ("sidelane fused --machine h200x4 --ops embedding_all_to_all --shape 2048,128,20", "a shape of your own"),
        ("sidelane fused --machine h100x4 --results results/h100x1/fused.json", "how far predictions are off"),
    )

    ops: tuple[str, ...] = names("--ops", (), "Operators.", allowed=FUSED_OPS, shown="all")
    shapes: tuple[tuple[int, ...], ...] = option(
        "--shape",
        (),
        "With --machine and one operator: GEMV rows, columns of all ranks, tokens; embedding batch, tables of a rank, "
        "pooling; GEMM rows of a rank, depth, columns. May be repeated.",
        predicted=True,
        multiple=True,
        metavar="N,N,...",
        callback=shapes,
    )
    launches: tuple[str, ...] = either(
        "--launch", (*LAUNCHES, SINGLE), "Call by call; in a graph of 8 calls; or single: of one, replayed 1,000 times."
    )
    repeats: int = count("--repeats", 21, "Rounds that are measured.")
    timeline: Path | None = folder(
        "--timeline",
        "Write a Perfetto trace, a picture of the workgroups and one of ranks' skew of each operator's first shape.",
    )
    keep: bool = option(
        "--keep",
        False,
        'Keep the times for this user: method="auto" of the operators goes by them.',
        group=OUTPUT,
        is_flag=True,
    )
    results: Path | None = file_read(
        "--results",
        "A file of sidelane fused. With --machine: hold predictions against it. With --keep: keep its times.",
        group=OUTPUT,
    )
    implementations: tuple[str, ...] = implementations()
    warmup: int = 3


def _fused(machine: str, options: FusedOptions) -> None:
    loaded("papers.operator_results").main(machine, options)


fused = study_command("fused", FusedOptions, _fused, ("ops", "shapes", "results", *WRITTEN))
