"""Operators without a kernel of their own: GEMMs in parts that copy engines carry, and unfused chains of our own.

    GEMM + all-to-all     parts for peers, then the own one; each is carried once it is computed
    GEMM + reduce-scatter the same, and a sum of what came
    GEMM + all-reduce     parts of rows; Sidelane's kernel adds one up beside the product of the next one
    all-gather + GEMM     the own rows, then each part once it has come
    all-to-all + GEMM     the same

The GEMM of each part is the vendor library's, and copies are the programs that run (``program/pieces.py``,
``model/collectives.py``), in virtual time.
"""

from __future__ import annotations

import functools
import itertools

from sidelane.c3 import strategies
from sidelane.program.builders import variants
from sidelane.program.collective import REDUCING, Kind, all_to_all, split_evenly
from sidelane.program.ir import Flag
from sidelane.program.pieces import (
    arriving_program,
    coming,
    gathering_program,
    going,
    row_parts,
    row_slices,
    split_program,
)
from sidelane.program.transform import arrivals_of
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.collectives import IN_PLACE, dependencies, executed_run, program_of
from sidelane_lab.model.kernels import own_gang
from sidelane_lab.model.operators import HALF, DispatchGemm, GatherGemm, GemmReduce, OperatorModel, TiledGemm
from sidelane_lab.model.strategies import BY_KERNEL, predict
from sidelane_lab.model.workgroups import resident, stream_gbps
from sidelane_lab.pairs.workload import Gemm, Workload
from sidelane_lab.sim import simulate

Table = tuple[tuple[int, ...], ...]
"""Rows from rank i to rank j in row i, column j."""
OWN = ("b2b", "pcpy", "striped")
"""Variants of which a chain takes the fastest."""
THROUGH_HOST = ("chunked",)
"""Further ones where host memory is between GPUs."""

BY_ENGINES = strategies.named("conccl")
"""Strategy by which an all-reduce of rows runs beside the product of the next ones where a description has no kernels
of Sidelane; else it is ``BY_KERNEL``."""


def split_us(machine: Machine, operator: OperatorModel, pieces: int) -> float | None:
    """Return the time of an operator in parts, so many for each peer; None: there is none.

    Args:
        machine: one node of it.
        operator: a GEMM next to a collective.
        pieces: of the rows for, or from, each peer.

    Raises:
        ValueError: the machine has several nodes.
    """
    machine.refuse_nodes("split_us")
    ranks = machine.world_size
    if isinstance(operator, TiledGemm) and operator.copies == 1 and operator.by_library:
        table = operator.counts or tuple(tuple(split_evenly(operator.rows, ranks)) for _ in range(ranks))
        return _to_all(machine, operator, table, pieces)
    if isinstance(operator, GemmReduce) and operator.gathers:
        return _in_rows(machine, operator, pieces)
    if isinstance(operator, GemmReduce):
        each = -(-operator.rows // ranks)
        owned = tuple(max(0, min(each, operator.rows - owner * each)) for owner in range(ranks))
        part = each * operator.columns * HALF
        return _to_all(machine, operator, (owned,) * ranks, pieces) + _pass_us(machine, (ranks + 1) * part)
    if isinstance(operator, DispatchGemm):
        return _by_counts(machine, operator, pieces)
    return _from_all(machine, operator, pieces) if isinstance(operator, GatherGemm) else None


def _in_rows(machine: Machine, operator: GemmReduce, pieces: int) -> float:
    """Time of a GEMM and an all-reduce in parts of rows, of which the last is added up beside nothing."""
    rows = [part.stop - part.start for part in row_parts(operator.rows, pieces)]
    if machine.world_size == 1:
        return sum(operator.rows_us(machine, some) for some in rows)
    time = operator.rows_us(machine, rows[0])
    own = machine.kernels
    captured = machine if own is None else machine.with_value("kernels.eager_us", 0.0)
    for added, computed in itertools.pairwise(rows):
        gemm = Gemm(computed, operator.columns, operator.depth)
        pair = Workload(gemm, Kind.ALL_REDUCE, added * operator.columns * HALF)
        time += predict(captured, pair, BY_ENGINES if own is None else BY_KERNEL).time_us
    return time + ours_us(machine, Kind.ALL_REDUCE, rows[-1] * operator.columns * HALF)


def chain_us(machine: Machine, operator: OperatorModel) -> float | None:
    """Return the time of an operator unfused: its computation, and then Sidelane's collective; None with one rank.

    On copy engines, or by a kernel where the description has them and that is faster, as calls choose.

    Raises:
        ValueError: the machine has several nodes.
    """
    machine.refuse_nodes("chain_us")
    if machine.world_size == 1:
        return None
    computing = operator.compute_us(machine)
    if isinstance(operator, TiledGemm | DispatchGemm) and operator.counts:
        collective = all_to_all([[rows * operator.row_bytes for rows in row] for row in operator.counts])
        programs = [program_of(collective, variant, machine.through_host) for variant in OWN]
        return computing + min(simulate(one, machine, edges=dependencies(one)).time_us for one in programs)
    return computing + ours_us(machine, operator.kind, operator.collective_bytes(machine.gpus))


def ours_us(machine: Machine, kind: Kind, nbytes: float) -> float:
    """Time of Sidelane's collective alone, on copy engines or, where the description has them, by kernels if faster.

    Both are captured in graphs.
    """
    engines = _engines_us(machine, kind, round(nbytes))
    if machine.kernels is None:
        return engines
    return min(engines, own_gang(machine, kind, round(nbytes), captured=True).alone_us)


@functools.lru_cache(maxsize=256)
def _engines_us(machine: Machine, kind: Kind, nbytes: int) -> float:
    """Return the time of a collective on copy engines, by its fastest program; one that reduces adds on units."""
    known = [one for one in (*OWN, *THROUGH_HOST * machine.through_host) if one in variants(kind)]
    assert known, kind
    place = kind in IN_PLACE or kind in REDUCING
    return min(executed_run(machine, kind, nbytes, variant, place).time_us for variant in known)


def _to_all(machine: Machine, operator: TiledGemm | GemmReduce, table: Table, pieces: int) -> float:
    """Until every rank has computed, and has what it gets."""
    fires: dict[Flag, float] = {}
    computed = []
    for rank, row in enumerate(table):
        now = 0.0
        for trigger, rows in enumerate(going(table, rank, pieces)):
            now += operator.rows_us(machine, rows.stop - rows.start)
            fires[Flag(rank, trigger)] = now
        computed.append(now + operator.rows_us(machine, row[rank]))
    if not fires:
        return max(computed)
    most = max(map(sum, (*table, *zip(*table, strict=True))))
    program = split_program(table, pieces, operator.columns * HALF, most)
    return max(*computed, simulate(program, machine, fires=fires).time_us)


def _from_all(machine: Machine, operator: GatherGemm, pieces: int) -> float:
    """Own rows are copied to where the peers' come, and multiplied; then the others', turn by turn."""
    ranks, row_bytes = machine.world_size, operator.depth * HALF
    parts = row_slices(operator.rows, pieces)
    begin = _pass_us(machine, 2 * operator.rows * row_bytes)
    now = begin + operator.rows_us(machine, operator.rows)
    program = gathering_program(ranks, operator.rows, pieces, row_bytes)
    raised = simulate(program, machine).raised
    for (waits,), (_, part) in zip(arrivals_of(program, 0), itertools.product(range(1, ranks), parts), strict=True):
        now = max(now, begin + raised[waits.flag]) + operator.rows_us(machine, part.stop - part.start)
    return now


def _by_counts(machine: Machine, operator: DispatchGemm, pieces: int) -> float:
    """Return the time until all is multiplied: rows that leave are copied first, and parts come one after the other."""
    table = operator.counts
    most = max(map(sum, (*table, *zip(*table, strict=True))))
    leaves = [sum(row) - row[rank] for rank, row in enumerate(table)]
    begins = [_pass_us(machine, 2 * rows * operator.row_bytes) if rows else 0.0 for rows in leaves]
    ends = [begin + operator.rows_us(machine, table[rank][rank]) for rank, begin in enumerate(begins)]
    program = arriving_program(table, pieces, operator.row_bytes, most)
    raised = simulate(program, machine).raised
    for rank in range(len(table)):
        for (waits,), part in zip(arrivals_of(program, rank), coming(table, rank, pieces), strict=True):
            there = max(begins) + raised[waits.flag]
            ends[rank] = max(ends[rank], there) + operator.rows_us(machine, part.stop - part.start)
    return max(ends)


def _pass_us(machine: Machine, nbytes: float) -> float:
    """Return the time of a kernel that reads and writes so many bytes."""
    return float(machine.matmul.launch_us) + nbytes / (stream_gbps(machine, resident(machine)) * 1e3)
