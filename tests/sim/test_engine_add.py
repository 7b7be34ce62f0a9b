"""Copy engines that add, on what-if machines: programs that are proved, and times that keep the bounds."""

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
from sidelane_lab.machines.load import find, named
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.engine_add import engine_add_tables, engine_add_us, least_us, reduce_on_engines

KINDS = (Kind.ALL_REDUCE, Kind.REDUCE_SCATTER)


def what_if(folder: Path, base: str, **numbers: float) -> Machine:
    lines = [f'base = "{base}"', 'name = "mine"', "[dma]", *(f"{name} = {value}" for name, value in numbers.items())]
    (folder / "mine.toml").write_text("\n".join(lines))
    return find(str(folder / "mine.toml"))


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


@pytest.mark.parametrize("base", ["mi300x8", "h200x4", "h200x2"])
@pytest.mark.parametrize("kind", KINDS)
def test_times_keep_the_bound_of_bandwidth_and_come_near_it(tmp_path: Path, base: str, kind: Kind) -> None:
    machine = what_if(tmp_path, base, add_gbps=800)
    for nbytes in (1 << 16, 1 << 24, 1 << 32):
        assert engine_add_us(machine, kind, nbytes) >= least_us(machine, kind, nbytes)
    assert engine_add_us(machine, kind, 1 << 32) <= 1.05 * least_us(machine, kind, 1 << 32)


def test_slow_adders_hold_up_what_links_could_carry(tmp_path: Path) -> None:
    fast, slow = (what_if(tmp_path, "mi300x8", add_gbps=gbps) for gbps in (1000, 100))
    for kind in KINDS:
        assert engine_add_us(slow, kind, 1 << 30) > 1.5 * engine_add_us(fast, kind, 1 << 30)
    assert engine_add_us(slow, Kind.REDUCE_SCATTER, 1 << 30) >= (1 << 30) / 100e3


def test_engines_of_the_catalogue_do_not_add(tmp_path: Path) -> None:
    machine = named("mi300x8")
    assert machine.dma.add_gbps == 0 and not engine_add_tables(machine)
    with pytest.raises(ValueError, match="dma.add_gbps"):
        engine_add_us(machine, Kind.ALL_REDUCE, 1 << 20)
    with pytest.raises(ValueError, match="add_gbps"):
        what_if(tmp_path, "mi300x8", add_gbps=50_000)  # above the memory's


def test_the_command_shows_a_what_if_machine(tmp_path: Path) -> None:
    what_if(tmp_path, "h200x2", add_gbps=400)
    found = CliRunner().invoke(main, ["collective", "--machine", str(tmp_path / "mine.toml")])
    assert found.exit_code == 0, found.output
    assert "whose engines add" in found.output and "engine_add" in found.output
