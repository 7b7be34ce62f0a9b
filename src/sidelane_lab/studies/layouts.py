"""All-to-alls that change the layout, as sequence parallelism has them before and behind its attention.

``there``: [batch, positions / N, heads, size] becomes [batch, positions, heads / N, size]; ``back``: the other way;
``contiguous``: as many bytes without another layout, which is the least that an exchange can take. The library permutes
into contiguous parts, exchanges and permutes, in three ways (``layout_exchanges.LIBRARY``). All ways of a shape take
turns round by round, the slowest rank counts, and outputs are compared before and behind.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import click

from sidelane.config import COMPUTE, NOTHING
from sidelane_lab.harness.options import LAUNCHES, StudyOptions, count, launches, option, study_command, words
from sidelane_lab.harness.report import Cell, spread, table_of
from sidelane_lab.harness.study import OF_LIBRARY, Allowed, FlatRow, Study
from sidelane_lab.harness.table import Table, grouped
from sidelane_lab.harness.ways import Rounds, WayOutcome, outcome
from sidelane_lab.pairs.workload import Gemm
from sidelane_lab.studies.c3.rows import spread_percent
from sidelane_lab.studies.layout_exchanges import (
    BACK,
    CONTIGUOUS,
    ITEM_BYTES,
    LAYOUTS,
    MEMORIES,
    THERE,
    LayoutCase,
    LayoutExchange,
    LayoutExchanges,
    Shape,
)

if TYPE_CHECKING:
    from sidelane.session import Communicator
    from sidelane_lab.harness.launch import Rank
    from sidelane_lab.harness.measure import Meter
    from sidelane_lab.harness.running import Sender

ALONE, BESIDE = PARTS = ("alone", "beside")


def parse_shape(text: str) -> Shape:
    """Read a shape such as ``1x32760x40x128``.

    Raises:
        ValueError: it is not four whole numbers above 0.
    """
    parts = text.split("x")
    if len(parts) != 4 or not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"layouts: shape (value={text!r}, allowed=BATCHxPOSITIONSxHEADSxSIZE, as 1x32760x40x128)")
    batch, positions, heads, size = map(int, parts)
    return batch, positions, heads, size


def read_shapes(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> tuple[Shape, ...]:
    """Read shapes, each once."""
    return tuple(dict.fromkeys(map(parse_shape, value)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutOptions(StudyOptions):
    """Time the all-to-all of sequence parallelism, from positions to heads and back.

    Sidelane's all-to-all with a layout, on symmetric and ordinary tensors, compared with permute + NCCL (on CPUs Gloo)
    + permute, and with contiguous all-to-alls of as many bytes: alone, eager and in graphs, and beside a GEMM.
    """

    study = "layouts"
    examples = (
        ("sidelane layouts --json layouts.json", "all of it, as JSON too"),
        ("sidelane layouts --part alone --shape 1x32760x40x128", "one shape of q, k and v by itself"),
        ("sidelane layouts --part beside --launch eager", "beside a GEMM only"),
    )

    parts: tuple[str, ...] = words(
        "--part", PARTS, PARTS, "Alone, or beside a GEMM. May be repeated.", some=True, show_default="both"
    )
    shapes: tuple[Shape, ...] = option(
        "--shape",
        (),
        "BATCHxPOSITIONSxHEADSxSIZE of all ranks. May be repeated.",
        multiple=True,
        metavar="SHAPE",
        show_default="Wan's, Llama's, and rows of 128 B to 64 KiB; on CPUs a small one",
        callback=read_shapes,
    )
    tensors: int = count("--tensors", 3, "Tensors in an exchange, as q, k and v are.")
    launches: tuple[str, ...] = launches()
    warmup: int = count("--warmup", 2, "Rounds before the measured ones.", 0)
    repeats: int = count("--repeats", 9, "Measured rounds.")


layouts = study_command("layouts", LayoutOptions)


DTYPE = "bfloat16"
WAN, LLAMA = (1, 32760, 40, 128), (1, 8192, 32, 128)
ROW_BYTES = (128, 512, 1 << 10, 4 << 10, 16 << 10, 64 << 10)
"""Bytes of the heads of a position that go to one rank, which lie side by side."""

TENSOR_BYTES = 64 << 20
"""Bytes of a tensor of all ranks whose rows are so wide."""

SMALL = (2, 48, 8, 16)
BESIDE_SHAPES = WAN, LLAMA, SMALL
GEMM = Gemm(8192, 8192, 8192)


@dataclasses.dataclass(frozen=True, slots=True)
class LayoutRow(FlatRow):
    """An exchange of several tensors of one shape, alone or beside a GEMM.

    Attributes:
        shape: batch, positions and heads of all ranks, and the size of a head.
        tensors: number of tensors of that shape in an exchange.
        layout: ``there``: from positions to heads; ``back``: the other way; ``contiguous``: as many bytes in parts that
            lie side by side.
        row_bytes: bytes of one position for one rank.
        bytes: bytes that leave a GPU in an exchange.
        launch: ``eager`` or ``graph``.
        implementation: ``auto`` is Sidelane's; ``nccl`` and ``gloo`` permute before and after their exchange.
        memory: ``symmetric``, or ``ordinary``.
        variant: Sidelane's, or how the library is called: ``each`` tensor, ``grouped`` calls, or all ``together`` in
            one buffer.
        time_us: time of an exchange with its permutes, or of both together beside a GEMM, median over the rounds of
            the slowest rank.
        gbps: ``bytes`` over the time; null beside a GEMM.
        correct: True if outputs agreed in this run; None when it could not run.
        note: reason why there is no time.
        gemm: GEMM that ran beside it; empty if it ran alone.
        gemm_us: isolated time of the GEMM, in the same rounds.
        comm_us: isolated time of the same exchange, in the same rounds.
        best_comm_us: fastest isolated time of the exchange, of all ways.
        speedup, ideal, percent_of_ideal, percent_least, percent_most: as in :class:`C3Row`.
    """

    allowed: ClassVar[Allowed] = (("layout", LAYOUTS), ("launch", LAUNCHES), ("memory", MEMORIES))
    figures: ClassVar[tuple[str, ...]] = ("time_us",)

    shape: str
    tensors: int
    layout: str
    row_bytes: int
    bytes: int
    dtype: str
    launch: str
    implementation: str
    memory: str
    variant: str
    time_us: float | None
    p10_us: float | None
    p90_us: float | None
    gbps: float | None
    correct: bool | None
    note: str = ""
    gemm: str = ""
    gemm_us: float | None = None
    comm_us: float | None = None
    best_comm_us: float | None = None
    speedup: float | None = None
    ideal: float | None = None
    percent_of_ideal: float | None = None
    percent_least: float | None = None
    percent_most: float | None = None


def shapes_of(options: LayoutOptions, rank: Rank) -> list[Shape]:
    """Return the shapes that are measured, positions and heads as multiples of the number of ranks."""
    n = rank.world_size
    if options.shapes:
        chosen = list(options.shapes)
    elif rank.device.type == "cpu":
        chosen = [SMALL]
    else:
        chosen = [WAN, LLAMA]
        for nbytes in ROW_BYTES:
            size = 64 if nbytes <= 512 else 128
            heads = n * nbytes // (size * ITEM_BYTES)
            chosen.append((1, TENSOR_BYTES // (heads * size * ITEM_BYTES), heads, size))
    return list(dict.fromkeys(rounded(shape, n) for shape in chosen))


def rounded(shape: Shape, n: int) -> Shape:
    """Round positions and heads up to multiples of the number of ranks.

    >>> rounded((1, 10, 7, 64), 4)
    (1, 12, 8, 64)
    """
    batch, positions, heads, size = shape
    return batch, -(-positions // n) * n, -(-heads // n) * n, size


def _measure(rank: Rank, options: LayoutOptions, sender: Sender) -> Iterator[LayoutRow]:
    """Make the rows. Collective."""
    import torch

    from sidelane import config as settings
    from sidelane.session import Communicator
    from sidelane_lab.baselines.roster import make_meter

    if rank.device.type == "cpu":
        torch.set_num_threads(1)  # the ranks share the cores
    shapes = shapes_of(options, rank)
    usual = {rounded(shape, rank.world_size) for shape in BESIDE_SHAPES}
    beside = [shape for shape in shapes if options.shapes or shape in usual]
    meter = make_meter(rank, options.step_s)
    config = dataclasses.replace(settings.current(), timeout_s=options.step_s, beside=NOTHING)
    comm, seeds = Communicator(device=rank.device, config=config), itertools.count(options.seed + 1)
    sender.steps = (ALONE in options.parts) * len(shapes) + (BESIDE in options.parts) * len(beside)
    for part, some, measure in ((ALONE, shapes, alone_rows), (BESIDE, beside, beside_rows)):
        for shape in some if part in options.parts else ():
            case = LayoutCase(shape, options.tensors, rank.rank, rank.world_size, rank.device)
            sender.step(f"{options.tensors} tensors of {case.name}{', beside a GEMM' * (part == BESIDE)}")
            yield from measure(meter, comm, case, options, seeds)
    meter.finish("layouts")
    comm.close()


def alone_rows(
    meter: Meter, comm: Communicator, case: LayoutCase, options: LayoutOptions, seeds: Iterator[int]
) -> Iterator[LayoutRow]:
    """Measure every way, eager and in graphs. Collective."""
    launches = [one for one in options.launches or LAUNCHES if one == LAUNCHES[0] or case.device.type != "cpu"]
    with meter.on_stream():
        exchanges = LayoutExchanges(comm, case)
        # One each for a launch: results of a graph lie where it was captured.
        makers = {
            (launch, *key): functools.partial(make, launch)
            for launch in launches
            for key, make in exchanges.ways(LAYOUTS, NOTHING).items()
        }

    def timed(ready: dict[tuple[str, ...], LayoutExchange]) -> dict[tuple[str, ...], Rounds]:
        return meter.in_turns({key: way.job() for key, way in ready.items()}, options)

    for one in meter.compare(makers, seeds, timed):
        launch, *names = one.key
        yield row_of(case, launch, names, one, one.way)


def beside_rows(
    meter: Meter, comm: Communicator, case: LayoutCase, options: LayoutOptions, seeds: Iterator[int]
) -> Iterator[LayoutRow]:
    """Measure every way that changes the layout alone and beside a GEMM, the exchange first. Collective."""
    from sidelane_lab.pairs.beside import compare_beside
    from sidelane_lab.pairs.pair import pair_streams

    gemm = GEMM if case.device.type != "cpu" else GEMM.for_cpu()
    streams, eager = pair_streams(case.device), LAUNCHES[0]
    with meter.on_stream():
        ways = LayoutExchanges(comm, case).ways((THERE, BACK), COMPUTE)
    makers = {key: functools.partial(make, eager) for key, make in ways.items()}
    for one, columns in compare_beside(meter, makers, gemm, streams, seeds, options, alike=lambda key: key[0]):
        yield row_of(case, eager, one.key, one, None if one.way is None else one.way.call, gemm=gemm.name, **columns)


def row_of(
    case: LayoutCase,
    launch: str,
    names: Sequence[str],
    found: WayOutcome[Any, Any],
    way: LayoutExchange | None,
    **more: Any,
) -> LayoutRow:
    """Make a row. ``names``: layout, implementation, memory and variant; ``more``: columns of a pair."""
    layout, implementation, memory, variant = names
    columns = outcome(found.rounds, found.problem)
    time_us = columns["time_us"]
    return LayoutRow(
        shape=case.name,
        tensors=case.tensors,
        layout=layout,
        row_bytes=case.row_bytes,
        bytes=case.leaving_bytes,
        dtype=DTYPE,
        launch=launch,
        implementation=implementation,
        memory=memory,
        variant=variant if way is None else way.variant,
        gbps=None if time_us is None or more else case.leaving_bytes / time_us / 1e3,
        **columns,
        **more,
    )


def _over_library(row: LayoutRow, same: Sequence[LayoutRow]) -> str:
    """Return the library's best time for the same over that of a row; more than 1: the row is faster."""
    theirs = [one for one in same if one.layout == row.layout and one.implementation in OF_LIBRARY]
    alike = [one.time_us for one in theirs if one.time_us]
    return f"{min(alike) / row.time_us:.3f}" if alike and row.time_us and row.implementation not in OF_LIBRARY else ""


def _over_contiguous(row: LayoutRow, same: Sequence[LayoutRow]) -> str:
    """Return the time of a row over that of the contiguous exchange of the same implementation and memory."""
    alike = [
        one.time_us
        for one in same
        if one.layout == CONTIGUOUS
        and (one.implementation, one.memory) == (row.implementation, row.memory)
        and one.time_us
    ]
    return f"{row.time_us / min(alike):.3f}" if alike and row.time_us and row.layout != CONTIGUOUS else ""


WHO: Mapping[str, Cell] = {
    "<layout": "layout",
    "<implementation": "implementation",
    "<memory": "memory",
    "<variant": "variant",
}
TIMES: Mapping[str, Cell] = {"time\nus": "time_us", "p10-p90\nus": spread}
ALONE_COLUMNS: Mapping[str, Cell] = {
    **WHO,
    **TIMES,
    "GB/s": "gbps",
    "library\nover it": _over_library,
    "over con-\ntiguous": _over_contiguous,
    "<correct": "correct",
}
BESIDE_COLUMNS: Mapping[str, Cell] = {
    **WHO,
    "alone\nus": "comm_us",
    **TIMES,
    "speed-up": "speedup:.3f",
    "ideal": "ideal:.3f",
    "% of\nideal": "percent_of_ideal:.0f",
    "by\nround": spread_percent,
    "<correct": "correct",
}


def layout_tables(rows: Sequence[LayoutRow]) -> list[Table]:
    """Make a table for each shape and launch, and one for each shape beside a GEMM."""
    tables = []
    by = grouped(rows, lambda row: (row.shape, row.tensors, row.launch, row.gemm), ordered=False)
    for (_, _, launch, gemm), alike in by:
        first = alike[0]
        title = f"{first.tensors} tensors of {first.shape}, rows of {first.row_bytes} bytes, {first.dtype}, {launch}"
        if gemm:
            gemm_us = next((row.gemm_us for row in alike if row.gemm_us is not None), None)
            title += f", next to {gemm}" + ("" if gemm_us is None else f" of {gemm_us:.0f} us")
        columns = BESIDE_COLUMNS if gemm else ALONE_COLUMNS
        tables.append(table_of(title, alike, columns, keys=4, value=None))
    return tables


STUDY = Study(
    name="layouts",
    title="All-to-alls with a layout",
    legend=(
        "Exchanges of sequence parallelism. there: from positions to heads; back; contiguous: as many bytes in parts "
        "that lie side by side. The library permutes before and behind: each tensor by itself, calls in one group, or "
        "all tensors together in one buffer. Medians over rounds of the slowest rank. 'library over it': the library's "
        "fastest way over the time of the line; 'over contiguous': the time over that of the same implementation and "
        "memory without another layout. Beside a GEMM the exchange is released first; % of ideal is that of the C3 "
        "study, with the fastest exchange of the table."
    ),
    row=LayoutRow,
    tables=layout_tables,
    measure=_measure,
    progress="layouts",
)
