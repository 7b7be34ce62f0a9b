"""What no GPU has, on what-if machines: copy engines that add, and memory that tells who uses it. Bounds hold."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from click.testing import CliRunner

from sidelane.cli.tool import main
from sidelane.errors import ProgramError
from sidelane.program.builders.registry import algorithms
from sidelane.program.collective import Kind, ReduceOp, Reduction, all_gather, all_reduce, reduce_scatter
from sidelane.program.ir import EngineKind
from sidelane.program.transform import freeze
from sidelane.program.verify import verify
from sidelane_lab.machines.load import named, parse
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.device import COLLECTIVES_FIRST, COMPUTATIONS_FIRST, Gang, Tiled, run_device
from sidelane_lab.model.engine_add import engine_add_tables, engine_add_us, least_us, reduce_on_engines
from sidelane_lab.model.gemm import gemm_us
from sidelane_lab.model.strategies import predict
from sidelane_lab.pairs.workload import parse_gemm, parse_workload

KINDS = (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER)
MI300X = named("mi300x8")
PEAK = float(MI300X.gpu.memory_gbps)
ADDS = 'base = "{}"\nname = "mine"\n[dma]\nadd_gbps = {}\n'


def what_if(**numbers: float) -> Machine:
    """Change numbers of ``interference``."""
    machine = MI300X
    for name, value in numbers.items():
        machine = machine.with_value(f"interference.{name}", value)
    return machine


def adds(base: str, gbps: float) -> Machine:
    return named(base).with_value("dma.add_gbps", gbps)


# Engines that add.


@pytest.mark.parametrize("make", [all_reduce, reduce_scatter])
@pytest.mark.parametrize(("in_place", "variant"), [(False, "b2b"), (True, "b2b"), (True, "pcpy")])
@pytest.mark.parametrize(("counts", "op"), [([64] * 2, "sum"), ([70] * 3, "avg"), ([6] * 8, "max"), ([4, 0, 6], "min")])
def test_programs_are_proved(make, in_place: bool, variant: str, counts: list[int], op: str) -> None:
    collective = dataclasses.replace(make(counts, Reduction(ReduceOp(op), "bfloat16")), in_place=in_place)
    program = reduce_on_engines(collective, variant)
    verify(program)
    verify(freeze(program))
    assert all(queue.engine.kind is EngineKind.DMA for queue in program.queues) and not any(program.staging_bytes)
    with pytest.raises(ProgramError, match="copy engines cannot add"):
        verify(dataclasses.replace(program, engines_add=False))


def test_nobody_is_offered_engines_that_add() -> None:
    for kind in Kind:
        assert "engine_add" not in {algorithm.name for algorithm in algorithms(kind)}
    verify(reduce_on_engines(all_reduce([64], Reduction(ReduceOp.SUM, "float32"))))
    with pytest.raises(ValueError, match="allowed=all_reduce, reduce_scatter|allowed=reduce_scatter, all_reduce"):
        reduce_on_engines(all_gather((4, 4)))
    assert MI300X.dma.add_gbps == 0 and not engine_add_tables(MI300X)
    with pytest.raises(ValueError, match="dma.add_gbps"):
        engine_add_us(MI300X, Kind.ALL_REDUCE, 1 << 20)
    with pytest.raises(ValueError, match="add_gbps: .value=50000, allowed=up to 5300, which is gpu.memory_gbps"):
        parse(ADDS.format("mi300x8", 50_000), "mine.toml")


@pytest.mark.parametrize("base", ["mi300x8", "h200x4", "h200x2"])
@pytest.mark.parametrize("kind", KINDS)
def test_times_keep_the_bound_of_bandwidth_and_come_near_it(base: str, kind: Kind) -> None:
    machine = adds(base, 800)
    for nbytes in (1 << 16, 1 << 24, 1 << 32):
        assert engine_add_us(machine, kind, nbytes) >= least_us(machine, kind, nbytes)
    assert engine_add_us(machine, kind, 1 << 32) <= 1.05 * least_us(machine, kind, 1 << 32)


def test_slow_adders_hold_up_what_links_could_carry() -> None:
    fast, slow = (adds("mi300x8", gbps) for gbps in (1000, 100))
    for kind in KINDS:
        assert engine_add_us(slow, kind, 1 << 30) > 1.5 * engine_add_us(fast, kind, 1 << 30)
    assert engine_add_us(slow, Kind.REDUCE_SCATTER, 1 << 30) >= (1 << 30) / 100e3


def test_the_command_shows_a_what_if_machine(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(ADDS.format("h200x2", 400))
    found = CliRunner().invoke(main, ["collective", "--machine", str(tmp_path / "mine.toml")])
    assert found.exit_code == 0, found.output
    assert "whose engines add" in found.output and "engine_add" in found.output


# Memory that tells traffic of collectives from that of computations.


def pair(machine: Machine, gemm_share: float, comm_share: float) -> tuple[float, float]:
    """Times of a computation of one wave, and of a collective on engines, that use such shares of the memory alone."""
    units = int(machine.gpu.units)
    gemm = Tiled("gemm", units, 1000.0, gemm_share * PEAK * 1e3 * 1000.0 / units)
    run = run_device(machine, [Gang("collective", 1000.0, comm_share * PEAK), gemm])
    return run.ended_us["gemm"], run.ended_us["collective"]


def test_who_comes_first_is_as_fast_as_alone() -> None:
    first = what_if(memory_first=COLLECTIVES_FIRST, copies=0)
    gemm, comm = pair(first, 0.7, 0.6)
    assert comm == pytest.approx(1000.0)
    # 0.4 of the memory for 1000 us, then all: (0.7 - 0.4 x 1) of its bytes are left.
    assert gemm >= 1000.0 + (0.7 - 0.4) / 0.7 * 1000.0 - 1
    gemm, comm = pair(what_if(memory_first=COMPUTATIONS_FIRST, copies=0), 0.7, 0.6)
    assert gemm == pytest.approx(1000.0) and comm > 1300.0


@pytest.mark.parametrize("numbers", [{"memory_first": 1}, {"memory_first": 2}, {"collective_channels": 0.3}, {}])
@pytest.mark.parametrize("shares", [(0.9, 0.9), (0.5, 0.4), (0.2, 0.8), (0.95, 0.1)])
def test_nothing_is_faster_than_alone_or_than_the_memory(
    numbers: dict[str, float], shares: tuple[float, float]
) -> None:
    gemm, comm = pair(what_if(**numbers), *shares)
    assert min(gemm, comm) >= 999.9
    assert max(gemm, comm) >= sum(shares) * 1000.0 - 0.1, "all bytes go through one memory"


def test_channels_of_their_own_keep_classes_out_of_each_others_way_and_bound_each() -> None:
    machine = what_if(collective_channels=0.3, copies=0)
    gemm, comm = pair(machine, 0.9, 0.6)
    reach = float(machine.matmul.memory_efficiency)  # of the peak
    assert comm == pytest.approx(1000.0 * 0.6 / 0.3 / reach) and gemm == pytest.approx(1000.0 * 0.9 / 0.7 / reach)
    assert pair(machine, 0.9, 0.1)[0] == gemm, "whatever the collective does"
    assert pair(machine, 0.5, 0.2) == (pytest.approx(1000.0), pytest.approx(1000.0)), "enough for both"


def test_what_runs_alone_has_all_channels() -> None:
    gemm = parse_gemm("mb1")
    assert gemm_us(what_if(collective_channels=0.5), gemm) == gemm_us(MI300X, gemm)


def test_a_pair_gains_by_a_priority_where_memory_is_what_it_shares() -> None:
    workload = parse_workload("mb1_13G")
    times = {n: predict(what_if(memory_first=n), workload, "conccl").time_us for n in (0, 1, 2)}
    assert times[1] <= times[0], "the collective is the longer part"
    for number in (0, 1, 2):
        found = predict(what_if(memory_first=number), workload, "conccl")
        assert found.time_us >= max(found.gemm_us, found.best_comm_us) * 0.999
