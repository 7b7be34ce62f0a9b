"""Programs in virtual time: hand-computed times, order, phases, timelines, and every program that builders make."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from sidelane.program.builders import Transport, build, variants
from sidelane.program.collective import Kind, ReduceOp, Reduction, all_gather, all_reduce, all_to_all, broadcast
from sidelane.program.ir import EPOCH, Engine, EngineKind, Flag, Program, Queue, Wait
from sidelane.program.transform import freeze, hold, lower
from sidelane_lab.machines.load import named
from sidelane_lab.model.collectives import bare, dma_run, published_program
from sidelane_lab.sim import DeadlockError, chrome_trace, simulate, write_chrome_trace
from sidelane_lab.sim.prelaunch import prelaunch

MACHINE = named("mi300x8")
DMA = MACHINE.dma
MB = 1 << 20


def copy_us(nbytes, gbps=float(MACHINE.links.usable_gbps)):
    return nbytes / (gbps * 1e3)


def test_one_copy_is_its_four_phases():
    run = simulate(bare(build(broadcast(MB, 2, root=0), "pcpy")), MACHINE)
    phases = 2 * DMA.control_us + DMA.doorbell_us + DMA.fetch_us + DMA.copy_us + copy_us(MB) + DMA.sync_us
    assert run.time_us == pytest.approx(phases)


def test_pcpy_rings_a_doorbell_for_every_pair_one_after_another():
    run = dma_run(MACHINE, Kind.ALL_GATHER, 8 * MB, "pcpy")
    assert run.host_us == pytest.approx(56 * (2 * DMA.control_us + DMA.doorbell_us))
    assert run.time_us == pytest.approx(run.host_us + DMA.fetch_us + DMA.copy_us + copy_us(MB) + DMA.sync_us)


def test_b2b_moves_its_copies_through_one_engine():
    run = dma_run(MACHINE, Kind.ALL_GATHER, 8 * MB, "b2b")
    assert run.host_us == pytest.approx(8 * (8 * DMA.control_us + DMA.doorbell_us))
    assert run.time_us == pytest.approx(run.host_us + DMA.fetch_us + DMA.copy_us + 7 * copy_us(MB) + DMA.sync_us)


def test_a_broadcast_writes_twice_through_its_engine_but_once_through_each_link():
    run = dma_run(MACHINE, Kind.ALL_GATHER, 8 * MB, "bcst")
    assert run.time_us == pytest.approx(
        run.host_us + DMA.fetch_us + DMA.copy_us + 2 * copy_us(MB) + DMA.sync_us, abs=0.6
    )


def test_prelaunch_leaves_triggers_copies_and_syncs():
    run = dma_run(MACHINE, Kind.ALL_GATHER, 8 * MB, "pcpy", prelaunched=True)
    triggers = 56 * DMA.trigger_us
    assert run.host_us == pytest.approx(triggers)
    assert run.time_us == pytest.approx(triggers + DMA.wait_us + DMA.copy_us + copy_us(MB) + DMA.sync_us)


def test_one_engine_for_all_peers_serialises_and_loses_with_several_queues():
    machine = named("h200x4")
    one, three = (dma_run(machine, Kind.ALL_GATHER, 896 * MB, variant).time_us for variant in ("b2b", "pcpy"))
    assert one == pytest.approx(3 * copy_us(224 * MB, 391), rel=0.02)  # and its start
    assert three == pytest.approx(one / machine.dma.shared_queues, rel=0.02)


@pytest.mark.parametrize("world_size", [2, 3, 5, 8])
@pytest.mark.parametrize("wrap", [lambda p: p, freeze, prelaunch, lambda p: freeze(prelaunch(p)), hold])
def test_every_program_that_builders_make_ends(world_size, wrap):
    reduction = Reduction(ReduceOp.SUM, "float32")
    equal = [[1 << 16] * world_size] * world_size
    collectives = [
        all_gather([1 << 16] * world_size),
        all_gather([1 << 16] * world_size, in_place=True),
        all_to_all(equal),
        all_reduce([1 << 16] * world_size, reduction),
        broadcast(1 << 16, world_size, root=world_size - 1),
    ]
    for collective in collectives:
        for variant in variants(collective.kind):
            run = simulate(wrap(build(collective, variant)), MACHINE)
            assert run.time_us > DMA.copy_us and run.commands > 0


def test_one_trigger_is_fired_sooner_than_one_for_each_queue():
    program = build(all_to_all([[MB] * 4] * 4), "pcpy")
    plain, each, one = (simulate(form, MACHINE).time_us for form in (program, prelaunch(program), hold(program)))
    assert one + DMA.trigger_us <= each < plain


def test_staging_and_lowering_cost_time():
    plain = simulate(build(all_gather([MB] * 4), "pcpy"), MACHINE).time_us
    staged = simulate(build(all_gather([MB] * 4), "pcpy", Transport.STAGED), MACHINE).time_us
    assert staged > plain
    swap = build(all_to_all([[MB] * 4] * 4, in_place=True), "swap")
    from sidelane.program.ir import Copy

    assert simulate(lower(swap, {Copy}), MACHINE).time_us > simulate(swap, MACHINE).time_us


def test_a_handshake_makes_the_fast_wait_for_the_slow():
    held = simulate(build(all_gather([MB] * 8, in_place=True), "pcpy"), MACHINE).time_us
    assert held > dma_run(MACHINE, Kind.ALL_GATHER, 8 * MB, "pcpy").time_us


def test_links_between_nodes_are_slower():
    cluster = dataclasses.replace(MACHINE, nodes=2)
    flat = simulate(build(all_gather([MB] * 8), "pcpy"), MACHINE).time_us
    across = simulate(build(all_gather([MB] * 16), "pcpy"), cluster).time_us
    assert across > 15 / 7 * flat


def test_a_program_that_can_not_end_is_named():
    collective = all_gather([8, 8])
    queue = Queue(1, Engine(EngineKind.DMA), (Wait(Flag(1, 0), EPOCH),))
    program = Program(collective, "stuck", (queue,), (0, 0), 1)
    with pytest.raises(DeadlockError, match="rank 1 dma:0 at wait flag 0"):
        simulate(program, MACHINE)


def test_more_ranks_than_gpus_are_refused():
    with pytest.raises(ValueError, match=r"ranks \(value=16, allowed=1..8\)"):
        simulate(build(all_gather([MB] * 16), "pcpy"), MACHINE)


def test_names_in_place_of_machines_and_programs_are_refused():
    with pytest.raises(TypeError, match=r"machine \(value='mi300x8', allowed=a Machine, as machine.load.named"):
        simulate(build(all_gather([MB] * 4), "pcpy"), "mi300x8")
    with pytest.raises(TypeError, match=r"program \(value='all_gather', allowed=a sidelane.program.ir.Program"):
        simulate("all_gather", MACHINE)


def test_the_timeline_holds_every_phase_within_the_run(tmp_path):
    run = dma_run(MACHINE, Kind.ALL_GATHER, MB, "b2b", record=True)
    labels = {interval.label.split()[0] for interval in run.timeline}
    assert labels == {"prepare", "doorbell", "fetch", "copy", "sync"}
    assert max(interval.end_us for interval in run.timeline) == pytest.approx(run.time_us)
    assert sum(interval.lane == "link 0 1" for interval in run.timeline) == 1
    trace = chrome_trace(run.timeline)
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == len(run.timeline)
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["ph"] == "M"}
    assert {"host", "rank 0", "rank 7", "links"} <= names
    assert write_chrome_trace(tmp_path / "run.json", run.timeline).stat().st_size > 1000


def test_an_engine_runs_one_thing_at_a_time():
    run = simulate(build(all_gather([MB] * 4), "b2b"), MACHINE, record=True)
    lanes: dict = {}
    for interval in run.timeline:
        if interval.group.startswith("rank"):
            lanes.setdefault((interval.group, interval.lane), []).append(interval)
    for intervals in lanes.values():
        ordered = sorted(intervals, key=lambda i: i.start_us)
        for first, second in itertools.pairwise(ordered):
            assert first.end_us <= second.start_us + 1e-9


@pytest.mark.parametrize("nbytes", [MB, 64 * MB + 4096, 256 * MB])
def test_neighbouring_packets_pass_as_one_move_of_as_many_bytes(nbytes):
    """A recorded run has each packet by itself."""
    program = published_program(Kind.ALL_GATHER, nbytes, 8, "bcst")
    joined, single = (simulate(program, MACHINE, record=record) for record in (False, True))
    assert joined.time_us == pytest.approx(single.time_us, rel=1e-9) and joined.commands == single.commands
    late = MACHINE.with_value("dma.next_copy_us", 1.0)
    packets = max(len(queue.commands) for queue in program.queues)
    more = simulate(program, late).time_us - joined.time_us
    assert more == pytest.approx(packets - 1, rel=0.01), "a packet that takes time does so for each"


def test_published_programs_have_the_engines_of_the_paper():
    engines = {
        variant: len(published_program(Kind.ALL_GATHER, MB, 8, variant).queues) for variant in ("pcpy", "bcst", "b2b")
    }
    assert engines == {"pcpy": 56, "bcst": 32, "b2b": 8}
    assert len(published_program(Kind.ALL_TO_ALL, MB, 8, "swap").queues) == 28
