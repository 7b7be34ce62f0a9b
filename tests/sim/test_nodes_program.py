"""Programs of all ranks of several nodes: proved, and simulated by the ranks that stand for all others."""

from __future__ import annotations

import dataclasses

import pytest
from marks import long
from refusals import refused

from sidelane.integrations.nodes import collectives
from sidelane.program.collective import Kind
from sidelane.program.ir import Copy, Program, Wait
from sidelane.program.verify import verify
from sidelane_lab.machines.load import named, parse
from sidelane_lab.model.node_steps import Copies, Far, NodeBroadcast, make_plan, nodes_of
from sidelane_lab.model.nodes import KINDS, least_us
from sidelane_lab.model.nodes_baselines import TREES, flat, tree
from sidelane_lab.model.nodes_program import planned
from sidelane_lab.model.world import NodesProgram
from sidelane_lab.sim import Fold, fold_of


def machine_of(text: str = "", nodes: int = 8, base: str = "h100x8x2"):
    return parse(f'base = "{base}"\nname = "x"\nnodes = {nodes}\n[links]\n{text}', "x.toml")


NETWORKS = {
    "rails": "",
    "oversubscribed rails": "leaf_nodes = 4\noversubscription = 4",
    "oversubscribed tree": 'network = "fat_tree"\nleaf_nodes = 2\noversubscription = 4',
    "shared NICs": "nics_per_gpu = 0.5",
}
EIGHT = {
    **{name: machine_of(text) for name, text in NETWORKS.items()},
    "mesh": dataclasses.replace(named("mi300x8x2"), nodes=8),
    "torus": machine_of('network = "torus"\ntorus_row = 8\nnics_per_gpu = 4', 64, "mi210x1x2"),
}
WAYS = [
    *(("hierarchical", kind) for kind in KINDS),
    *(("flat", kind) for kind in KINDS),
    *(("tree", kind) for kind in TREES),
]


def built(machine, way: str, kind: Kind, nbytes: int, *, pieces: int = 2, full: bool = False) -> NodesProgram:
    fold = Fold.whole(machine) if full else None
    if way == "hierarchical":
        return planned(machine, kind, nbytes, pieces, fold)
    found = (flat if way == "flat" else tree)(machine, kind, nbytes, fold)
    assert found is not None
    return found


@pytest.mark.parametrize(("way", "kind"), WAYS, ids=str)
def test_programs_are_proved(way, kind):
    """On nodes of four and of three, with blocks of one size and not, in pieces that use scratch again."""
    for gpus, nodes in ((4, 2), (3, 3)):
        machine = dataclasses.replace(named("h100x8x2"), gpus=gpus, nodes=nodes)
        for nbytes, pieces in ((1 << 16, 1), (100_000, 4), (4, 1)) if way == "hierarchical" else ((100_000, 0),):
            program = built(machine, way, kind, nbytes, pieces=pieces, full=True).program
            assert program.world_size == gpus * nodes and verify(program).commands > 0
            assert {queue.rank for queue in program.queues} == set(range(program.world_size))


@pytest.mark.parametrize(("way", "kind"), [(way, kind) for way, kind in WAYS if way != "flat"], ids=str)
def test_mistakes_are_found(way, kind):
    machine = dataclasses.replace(named("h100x8x2"), gpus=2, nodes=3)
    program = built(machine, way, kind, 1 << 16, full=True).program
    for kept in (Wait, Copy):
        number, index = max(
            (number, index)
            for number, queue in enumerate(program.queues)
            for index, command in enumerate(queue.commands)
            if isinstance(command, kept) and queue.engine.index < 16
        )
        queue = program.queues[number]
        commands = (*queue.commands[:index], *queue.commands[index + 1 :])
        queues = list(program.queues)
        queues[number] = dataclasses.replace(queue, commands=commands)
        refused(dataclasses.replace(program, queues=tuple(queues)), words=())


def cases():
    for name, machine in EIGHT.items():
        for way, kind in WAYS:
            if kind is not Kind.BROADCAST and (way != "hierarchical" or machine.gpus > 1):
                # Of exchanges the flat one: ranks that exchange by nodes are also compared in many pieces, below.
                slow = (way == "flat") != (kind is Kind.ALL_TO_ALL)
                yield long(name, way, kind) if slow or name != "rails" else (name, way, kind)


@pytest.mark.parametrize(("name", "way", "kind"), list(cases()), ids=str)
def test_ranks_that_stand_for_all_others_take_exactly_their_time(name, way, kind):
    """Among 64 ranks, to the last bit. Nodes of a tree differ, and so do its places where these share a port."""
    machine = EIGHT[name]
    some, everyone = (built(machine, way, kind, 1 << 20, full=full) for full in (False, True))
    stand = way != "tree" or name not in ("oversubscribed tree", "shared NICs", "torus")
    assert (some.fold is not None) == stand and everyone.fold is None
    ranks, fold = {queue.rank for queue in some.program.queues}, some.fold or Fold.whole(machine)
    assert ranks == set(fold.ranks) and len(everyone.program.queues) >= len(some.program.queues)
    assert some.simulate().time_us == everyone.simulate().time_us


@pytest.mark.long
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not Kind.BROADCAST], ids=str)
def test_many_pieces_of_many_bytes_take_exactly_their_time(kind):
    rails = EIGHT["rails"]
    some, everyone = (planned(rails, kind, 64 << 20, 3, fold) for fold in (None, Fold.whole(rails)))
    assert some.simulate().time_us == everyone.simulate().time_us


def test_nobody_stands_for_others_where_they_do_not_do_the_same():
    rails = EIGHT["rails"]
    for way in ("hierarchical", "flat", "tree"):
        assert built(rails, way, Kind.BROADCAST, 1 << 18).fold is None, "which has a root"
    assert planned(machine_of(nodes=3), Kind.ALL_REDUCE, 1 << 20, 1).fold is None, "blocks of two sizes"
    assert flat(machine_of(nodes=3), Kind.ALL_GATHER, 1 << 20).fold is None, "the last node is left by another place"
    slower = named("h100x8x2").with_value("links.usable_gbps", 372.2)
    some, everyone = (planned(slower, Kind.ALL_TO_ALL, 32 << 20, 8, fold) for fold in (None, Fold.whole(slower)))
    assert some.fold is not None and some.fold.places == 8, "two ranks of a node exchange blocks, one of them copies"
    assert some.simulate().time_us == everyone.simulate().time_us


def test_the_smallest_fold_of_a_network():
    ring, exchange = ((1, 0),), tuple((by, 0) for by in range(1, 8))
    found = {name: fold_of(machine, ring, places=1) for name, machine in EIGHT.items()}
    assert {name: (fold.nodes, fold.places) for name, fold in found.items()} == {
        "rails": (1, 1),
        "oversubscribed rails": (4, 1),  # a leaf switch
        "oversubscribed tree": (2, 8),  # and all places of its nodes share what leads up from it
        "shared NICs": (1, 8),
        "mesh": (1, 1),
        "torus": (8, 1),  # a row
    }
    assert fold_of(EIGHT["oversubscribed rails"], exchange).nodes == 4
    torus = machine_of('network = "torus"\ntorus_row = 4')
    assert fold_of(torus, exchange).nodes == 8, "two ways of one length are taken in turn"
    fold = Fold(EIGHT["mesh"], 1, 1)
    assert fold.ranks == (0,) and fold.rank(13) == 0
    assert fold.resource(("link", 13, 10)) == ("link", 0, 5) and fold.resource(("network in", 1, 5)) == (
        "network in",
        0,
        0,
    )


@pytest.mark.parametrize(("way", "kind"), WAYS, ids=str)
def test_no_program_is_faster_than_the_floor(way, kind):
    narrow = machine_of('network = "fat_tree"\nleaf_nodes = 1\noversubscription = 8\nnics_per_gpu = 0.5', nodes=2)
    for machine, nbytes in ((narrow, 1), (narrow, 3 << 20), (dataclasses.replace(named("mi300x8x2"), nodes=3), 1)):
        assert built(machine, way, kind, nbytes).simulate().time_us >= least_us(machine, kind, nbytes)


def test_the_far_steps_of_a_program_are_those_of_the_plan():
    """The bytes that leave a node, and no others, pass the network."""
    machine = machine_of(nodes=4)
    for kind in KINDS:
        program = planned(machine, kind, 1 << 20, 2, Fold.whole(machine)).program
        nodes, plan_bytes = nodes_of([8] * 4), 0
        count = (1 << 20) // 4 // (1 if kind in (Kind.ALL_REDUCE, Kind.BROADCAST) else 32)
        for rank in range(32):
            for step in make_plan(kind, nodes, rank, (count,), 2).steps:
                assert not isinstance(step, Copies) or all(to.count for to, _ in step.pairs)
                if isinstance(step, Far):
                    larger = max(step.input.count, step.output.count) * 4
                    passed = {Kind.ALL_REDUCE: 6 / 4, Kind.BROADCAST: 3 / 4}.get(kind, 3 / 4)
                    plan_bytes += larger * passed
        assert crossing(program, 8) == plan_bytes


def test_the_third_piece_has_the_scratch_of_the_first():
    """Two are under way at once."""
    for kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.ALL_TO_ALL):
        whole, cut = (make_plan(kind, nodes_of([2, 2]), 0, (800,), pieces).sizes for pieces in (1, 8))
        assert 4 * sum(cut.values()) <= sum(whole.values()) + 100, (kind, whole, cut)


def test_large_pieces_begin_at_whole_vectors(monkeypatch):
    """As with tensors of 16384 elements and more, whose pieces begin at multiples of 256."""
    monkeypatch.setattr(collectives, "CUT_AT", 4)
    counts = (301, 5, 257)
    steps = make_plan(Kind.ALL_GATHER, nodes_of([2, 2]), 0, counts, 8).steps
    rows = {row for step in steps if isinstance(step, NodeBroadcast) for _, row in step.parts}
    begins = [row.offset % counts[row.tensor] for row in rows if counts[row.tensor] > 256]
    assert len(begins) > 4 * 8 and all(begin % 4 == 0 for begin in begins), begins
    for tensor, count in enumerate(counts):
        covered = sorted((row.offset, row.end) for row in rows if row.tensor == tensor)
        assert [begin for begin, _ in covered] == [0, *(end for _, end in covered[:-1])] and covered[-1][1] == 4 * count


def crossing(program: Program, gpus: int) -> int:
    """Bytes of copies between nodes."""
    copies = (command for queue in program.queues for command in queue.commands if isinstance(command, Copy))
    return sum(copy.src.nbytes for copy in copies if copy.src.rank // gpus != copy.dst.rank // gpus)


def test_a_root_sends_each_rail_its_slice():
    """All of a broadcast passed the root's port seven times."""
    machine = machine_of(nodes=2)
    program = planned(machine, Kind.BROADCAST, 8 << 20, 1, Fold.whole(machine)).program
    copies = (command for queue in program.queues for command in queue.commands if isinstance(command, Copy))
    sent = sum(copy.src.nbytes for copy in copies if copy.src.rank == 0 and 0 < copy.dst.rank < 8)
    assert sent == 2 * 7 * (1 << 20)


@pytest.mark.long
@pytest.mark.parametrize("nodes", [16, 128])
@pytest.mark.parametrize(("way", "kind"), WAYS, ids=str)
def test_large_groups_end(way, kind, nodes):
    machine = machine_of(nodes=nodes)
    for nbytes in (64 << 10, 16 << 20):
        if way == "flat" and kind is Kind.BROADCAST and nbytes > 64 << 10:
            continue
        assert built(machine, way, kind, nbytes).simulate().time_us >= least_us(machine, kind, nbytes)
