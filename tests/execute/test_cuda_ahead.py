"""Calls that go ahead, on GPUs with a made-up driver: each rank's own program, whoever misses."""

from __future__ import annotations

import random

import numpy as np
import pytest
from cuda_world import World, expected_outputs, world_of
from sidelane.program.builders.confirmed import confirmed

from sidelane.execute.base import Addresses
from sidelane.execute.cuda.plan import plan_calls
from sidelane.execute.cuda.release import READ_CAPACITY
from sidelane.program import collective as define
from sidelane.program.builders import Transport, build
from sidelane.program.collective import Buffer, Collective


class Memory:
    """Of one rank: inputs at one place and elsewhere, two outputs, staging and flags."""

    def __init__(self, nbytes: int) -> None:
        self.inputs = [np.zeros(nbytes, np.uint8) for _ in range(2)]
        self.outputs = [np.zeros(nbytes, np.uint8) for _ in range(2)]
        self.staging = np.zeros(nbytes, np.uint8)
        self.flags = np.zeros(READ_CAPACITY, np.uint32)


def call(world: World, memory: list[Memory], collective: Collective, draw: random.Random) -> None:
    """One call, in which some ranks miss; hosts come in any order."""
    n = world.world_size
    misses = [draw.choice((0, 0, 1, 2)) for _ in range(n)]  # an output that is new, an input that lies elsewhere
    changed, missing = ({rank for rank in range(n) if misses[rank] >= least} for least in (2, 1))
    known = {rank for rank in changed if draw.random() < 0.5}  # to have freed what is read there
    inputs = [memory[rank].inputs[rank in changed] for rank in range(n)]
    outputs = [memory[rank].outputs[draw.randrange(2)] for rank in range(n)]
    numbers = np.random.default_rng(draw.randrange(1 << 30))
    for rank in range(n):
        for array in (*memory[rank].inputs, *memory[rank].outputs, memory[rank].staging):
            array[:] = numbers.integers(0, 256, len(array))
    expected = expected_outputs(collective, [each[: collective.input_bytes(r)].copy() for r, each in enumerate(inputs)])
    world.epoch += 1
    others = [[each.copy() for each in (*m.inputs, *m.outputs)] for m in memory]
    for rank in draw.sample(range(n), n):
        program = confirmed(collective, missing) if rank in missing else confirmed(collective, known, unread=known)
        buffers = {(peer, str(Buffer.STAGING)): memory[peer].staging.ctypes.data for peer in range(n)}
        unread = set() if rank in missing else known
        buffers.update({(peer, Buffer.INPUT): memory[peer].inputs[0].ctypes.data for peer in set(range(n)) - unread})
        if rank in missing:  # a rank that has heard of them writes to outputs
            buffers.update({(peer, Buffer.OUTPUT): outputs[peer].ctypes.data for peer in set(range(n)) - missing})
        buffers[rank, Buffer.INPUT], buffers[rank, Buffer.OUTPUT] = inputs[rank].ctypes.data, outputs[rank].ctypes.data
        flags = tuple(each.flags.ctypes.data for each in memory)
        loaded = world.executors[rank].load(program, Addresses(buffers, flags))
        loaded.start(world.epoch, world.streams[rank])  # type: ignore[arg-type]
    world.synchronize()
    for driver in world.drivers:
        driver.synchronize()
    for rank in range(n):
        covered = expected[rank] >= 0
        size = collective.output_bytes(rank)
        assert np.array_equal(outputs[rank][:size][covered], expected[rank][covered]), (rank, misses)
        for before, after in zip(others[rank], (*memory[rank].inputs, *memory[rank].outputs), strict=True):
            if after is not outputs[rank]:
                assert np.array_equal(before, after), f"rank {rank}: what was not offered is written to: {misses}"


@pytest.mark.parametrize(("n", "channels"), [(2, None), (3, None), (3, 1)])
def test_bytes_are_right_whoever_misses(n: int, channels: int | None) -> None:
    draw = random.Random(n)
    with world_of(n, channels=channels) as world:
        memory = [Memory(4 * n * n) for _ in range(n)]
        for step in range(24):
            kinds = define.all_gather([4 * n] * n), define.all_to_all([[4] * n] * n), define.gather([4] * n, step % n)
            call(world, memory, draw.choice(kinds), draw)


@pytest.mark.parametrize("n", [2, 4])
def test_a_hit_costs_no_call_to_the_driver(n: int) -> None:
    collective = define.all_gather([1 << 20] * n)
    usual = plan_calls(build(collective, "b2b", Transport.PULL), 0)
    ahead = plan_calls(confirmed(collective), 0)
    assert [type(step.call) for step in ahead.steps] == [type(step.call) for step in usual.steps]
    assert (ahead.streams, ahead.events) == (usual.streams, usual.events)
