"""Proofs by the ranks that stand for all others, with the verdicts of ``verify`` on the same programs, and what is
recorded of large programs.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from marks import long

from sidelane.errors import ProgramError
from sidelane.program.collective import Kind
from sidelane.program.ir import Command, Copy, Flag, Program, Reduce, Signal, Wait
from sidelane.program.verify import verify
from sidelane_lab.machines.load import named
from sidelane_lab.model.nodes import KINDS
from sidelane_lab.sim import simulate
from sidelane_lab.sim.flows import FlowNetwork
from sidelane_large_programs import nodes as study
from sidelane_large_programs import scale
from sidelane_large_programs.action import Action, AsymmetryError, act
from sidelane_large_programs.quotient import prove

RECORDED = Path(__file__).resolve().parents[3] / "results" / "simulator"
RINGED = [kind for kind in Kind if kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.ALL_TO_ALL)]
WAYS = [(way, kind) for kind in RINGED for way in ("hierarchical", "flat")] + [("tree", Kind.ALL_REDUCE)]


def cluster(nodes: int, gpus: int = 8):
    return dataclasses.replace(named("h100x8x2"), nodes=nodes, gpus=gpus)


def symmetric(nodes: int, way: str, kind: Kind, nbytes: int, pieces: int, gpus: int = 8) -> tuple[Program, Action]:
    by_place = way != "hierarchical" or kind is not Kind.REDUCE_SCATTER
    return study.symmetric(cluster(nodes, gpus), kind, nbytes, way, pieces, alike=by_place)


def cases() -> Iterator[object]:
    for way, kind in WAYS:
        for nodes, gpus in ((2, 4), (4, 4), (8, 8)):
            if way == "hierarchical" or nodes * gpus < 64 or kind is Kind.ALL_TO_ALL:
                yield (
                    long(way, kind, nodes, gpus)
                    if nodes == 8 or (nodes, way) == (4, "flat")
                    else (
                        way,
                        kind,
                        nodes,
                        gpus,
                    )
                )


@pytest.mark.parametrize(("way", "kind", "nodes", "gpus"), list(cases()), ids=str)
def test_moves_make_the_program_of_all_ranks_and_both_proofs_accept_it(way, kind, nodes, gpus):
    """Rank by rank, what is built for it is what the moves make; the library proves that it is right."""
    for pieces in (1, 4) if way == "hierarchical" else (0,):
        program, moves = symmetric(nodes, way, kind, 1 << 20, pieces, gpus)
        for element in range(moves.size):
            along, across = divmod(element, moves.across)
            by = along * moves.fold.nodes, across * moves.fold.places
            fold = dataclasses.replace(moves.fold, moved=by)
            image = study.build(cluster(nodes, gpus), kind, 1 << 20, way, pieces, fold)
            moves.compare(program, image.program, element)
        assert prove(program, moves) > 0
        everyone = moves.expand(program)
        assert {queue.rank for queue in everyone.queues} == set(range(nodes * gpus))
        assert verify(everyone).commands == sum(len(queue.commands) for queue in everyone.queues)


def mutants(program: Program, moves: Action) -> Iterator[tuple[str, Program]]:
    """Mistakes in one queue of each kind of engine, first and last of each: all ranks make them alike."""
    for number, queue in enumerate(program.queues):

        def put(*commands: Command, number: int = number) -> Program:
            queues = list(program.queues)
            queues[number] = dataclasses.replace(queues[number], commands=commands)
            return dataclasses.replace(program, queues=tuple(queues))

        before = queue.commands
        for kind in (Wait, Signal, Copy, Reduce):
            places = [at for at, command in enumerate(before) if isinstance(command, kind)]
            for at in {*places[:1], *places[-1:]}:
                rest, command = before[at + 1 :], before[at]
                yield f"without {kind.__name__} {at}", put(*before[:at], *rest)
                if isinstance(command, Signal):
                    ranks = moves.fold.machine.world_size
                    flag = Flag((command.flag.rank + moves.fold.machine.gpus) % ranks, command.flag.index)
                    yield (
                        f"signal {at} to another rank",
                        put(*before[:at], dataclasses.replace(command, flag=flag), *rest),
                    )
                    yield f"signal {at} at the end", put(*before[:at], *rest, command)
                    yield f"signal {at} first", put(command, *before[:at], *rest)
                if isinstance(command, Wait):
                    yield f"wait {at} first", put(command, *before[:at], *rest)
                    yield f"wait {at} at the end", put(*before[:at], *rest, command)
                if isinstance(command, Copy):
                    for which in ("dst", "src"):
                        span = getattr(command, which)
                        for other in before:
                            found = getattr(other, which, None) if isinstance(other, Copy) else None
                            if found is not None and found != span and found.nbytes == span.nbytes:
                                wrong = dataclasses.replace(command, **{which: found})
                                yield f"{which} of copy {at} moved", put(*before[:at], wrong, *rest)
                                break
                        rank = (span.rank + moves.fold.machine.gpus) % moves.fold.machine.world_size
                        wrong = dataclasses.replace(command, **{which: dataclasses.replace(span, rank=rank)})
                        yield f"{which} of copy {at} of another rank", put(*before[:at], wrong, *rest)


def verdict(check) -> str:
    try:
        check()
    except ProgramError as error:
        return str(error).split("\n")[1].strip().split(" ")[0] if "\n" in str(error) else "refused"
    return "accepted"


@pytest.mark.parametrize(
    ("way", "kind", "nodes", "gpus"),
    [(way, kind, 2, 2) if kind is Kind.ALL_REDUCE else long(way, kind, 2, 2) for way, kind in WAYS]
    + [long(way, kind, 4, 4) for way, kind in WAYS],
    ids=str,
)
def test_both_proofs_refuse_the_same_mistakes(way, kind, nodes, gpus):
    program, moves = symmetric(nodes, way, kind, 1 << 16, 2, gpus)
    refused = 0
    for name, mutant in mutants(program, moves):
        try:
            everyone = moves.expand(mutant)
        except AsymmetryError:
            continue
        verdicts = [verdict(lambda: prove(mutant, moves)), verdict(lambda: verify(everyone))]  # noqa: B023
        assert len({each == "accepted" for each in verdicts}) == 1, (name, verdicts)
        refused += verdicts[0] != "accepted"
    assert refused >= 8


def test_a_wait_in_a_circle_of_ranks_is_a_deadlock():
    program, moves = symmetric(4, "flat", Kind.ALL_GATHER, 1 << 16, 0, 4)
    queues = []
    for queue in program.queues:
        tells = next(n for n, command in enumerate(queue.commands) if isinstance(command, Signal))
        commands = [*queue.commands]
        if any(isinstance(command, Copy) for command in commands):
            commands[tells], commands[tells + 1] = commands[tells + 1], commands[tells]  # waits before it tells
        queues.append(dataclasses.replace(queue, commands=tuple(commands)))
    mutant = dataclasses.replace(program, queues=tuple(queues))
    for check in (lambda: prove(mutant, moves), lambda: verify(moves.expand(mutant))):
        with pytest.raises(ProgramError, match="deadlock"):
            check()


def test_programs_that_are_not_alike_are_refused():
    program, moves = symmetric(4, "flat", Kind.ALL_GATHER, 1 << 16, 0, 4)
    other, _ = symmetric(4, "flat", Kind.ALL_GATHER, 1 << 17, 0, 4)
    with pytest.raises(AsymmetryError, match="moves: "):
        act(lambda by: other if any(by) else program, moves.fold)
    with pytest.raises(AsymmetryError, match="no rank stands"):
        symmetric(4, "hierarchical", Kind.BROADCAST, 1 << 16, 1, 4)


@pytest.mark.long
@pytest.mark.parametrize(("way", "kind"), WAYS, ids=str)
def test_large_groups_are_proved_at_their_own_size(way, kind):
    program, moves = symmetric(64, way, kind, 1 << 24, 2)
    assert moves.fold.machine.world_size == 512 and prove(program, moves) > 0


@pytest.mark.parametrize("kinds", [(Kind.ALL_GATHER, Kind.ALL_REDUCE), long(KINDS)], ids=len)
def test_the_recorded_predictions_are_those_of_this_simulator(monkeypatch, kinds):
    recorded = json.loads((RECORDED / "nodes.json").read_text())
    rows = recorded["rows"]
    assert recorded["command"].endswith("python -m sidelane_large_programs.nodes nodes.json")
    assert {row["ranks"] for row in rows} == set(study.RANKS) and {row["bytes"] for row in rows} == set(study.SIZES)
    assert {row["collective"] for row in rows} == set(map(str, KINDS))
    monkeypatch.setattr(study, "KINDS", kinds)
    for row in rows:
        assert row["us"] is None or row["us"] >= row["floor_us"], row
        assert row["us"] is not None or (row["way"], row["collective"]) == ("flat", "broadcast"), row
    chosen = [row for row in rows if row["ranks"] == 16 and row["bytes"] == 64 << 10]
    again = {(row.collective, row.bytes, row.way): row for row in study.rows((16,), (64 << 10,))}
    for row in chosen:
        found = again.get((row["collective"], row["bytes"], row["way"]))
        if found is not None:
            assert (row["pieces"], row["commands"]) == (found.pieces, found.commands)
            assert row["us"] == pytest.approx(found.us, rel=1e-4)


def test_a_study_is_recorded_with_its_command(monkeypatch, tmp_path):
    monkeypatch.setattr(study, "KINDS", (Kind.ALL_REDUCE,))
    study.record(tmp_path / "nodes.json", list(study.rows((8,), (64 << 10,))))
    written = json.loads((tmp_path / "nodes.json").read_text())
    assert {row["way"] for row in written["rows"]} == {"flat", "tree"} and written["commit"]
    assert all(row["verified_ranks"] == 8 for row in written["rows"])


@pytest.mark.parametrize("nodes", [1, 2, 4])
def test_two_levels_move_the_expected_bytes(nodes):
    program, machine = (
        scale.two_level_all_gather(nodes, 8, scale.PART),
        dataclasses.replace(named("mi300x8"), nodes=nodes),
    )
    moved = sum(c.src.nbytes for q in program.queues for c in q.commands if hasattr(c, "src"))
    # Each rank sends its shard to 7 peers, and the nodes' blocks of 8 shards once around the ring.
    assert moved == nodes * 8 * scale.PART * (7 + 8 * (nodes - 1))
    assert simulate(program, machine).time_us > 7 * scale.PART / (float(machine.links.usable_gbps) * 1e3)


def test_work_grows_in_proportion_to_commands():
    """Counted, not timed: flows whose rates are computed again per command stay few as ranks grow."""
    counts = []
    original = FlowNetwork._fair_rates
    for nodes in (4, 16):
        touched = 0

        def counting(self, group):
            nonlocal touched
            touched += len(group)
            return original(self, group)

        FlowNetwork._fair_rates = counting
        try:
            machine = dataclasses.replace(named("mi300x8"), nodes=nodes)
            run = simulate(scale.two_level_all_gather(nodes, 8, scale.PART), machine)
        finally:
            FlowNetwork._fair_rates = original
        counts.append(touched / run.commands)
    assert counts[1] < 1.5 * counts[0]


def test_scale_rows_count_commands():
    rows = scale.measure((16, 32))
    assert [row.ranks for row in rows] == [16, 32]
    assert rows[1].commands > rows[0].commands and rows[0].seconds > 0 and rows[0].peak_mb > 0


def test_scale_is_recorded_with_its_command(tmp_path):
    path = tmp_path / "deep" / "scale.json"
    scale.record(path, scale.measure((16,)))
    ours = json.loads(path.read_text())
    recorded = json.loads((RECORDED / "scale.json").read_text())
    assert ours["command"].endswith("python -m sidelane_large_programs.scale scale.json")
    assert recorded["command"] == ours["command"]
    assert set(ours) == set(recorded) and set(ours["rows"][0]) == set(recorded["rows"][0])
    assert tuple(row["ranks"] for row in recorded["rows"]) == scale.RANKS
    first, last = recorded["rows"][0], recorded["rows"][-1]
    # Near-linear in commands, of which the last has 150 times as many.
    assert last["seconds"] / first["seconds"] < 2 * last["commands"] / first["commands"]
    assert last["peak_mb"] / first["peak_mb"] < 2 * last["commands"] / first["commands"]


def test_the_recorded_scale_is_that_of_this_simulator():
    recorded = json.loads((RECORDED / "scale.json").read_text())
    again = scale.measure((64,))[0]
    assert (again.commands, again.simulated_us) == (
        recorded["rows"][0]["commands"],
        pytest.approx(recorded["rows"][0]["simulated_us"], rel=1e-3),
    )
