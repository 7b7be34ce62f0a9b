"""In which order a host hands over the commands of a rank, read without a GPU."""

from __future__ import annotations

import pytest
from small_programs import SUM, programs

from sidelane.execute.cuda.order import submission_order
from sidelane.program import collective as define
from sidelane.program.builders import Transport
from sidelane.program.builders.reducing import reduce
from sidelane.program.ir import Flag, Signal, Wait
from sidelane.program.transform import freeze


@pytest.mark.parametrize("inline", [False, True], ids=["aside", "inline"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8])
def test_one_channel_a_rank_is_enough(world_size: int, inline: bool) -> None:
    """Run every rank's commands one after the other, as if all its streams shared one first-in-first-out channel."""
    uneven = [(rank % 3) * 3000 for rank in range(world_size)]
    in_pieces = [
        reduce(collective, variant, transport, pieces=(3, 2, 1))
        for collective in (define.reduce_scatter(uneven, SUM), define.all_reduce(uneven, SUM))
        for variant in ("b2b", "pcpy")
        for transport in (Transport.PUSH, Transport.STAGED)
    ]
    eager = programs(world_size) + in_pieces
    for program in eager + [freeze(program) for program in eager]:
        order = submission_order(program, lambda queue: inline)
        for rank, places in enumerate(order):
            queues = program.queues_of(rank)
            assert sorted(places) == [(q, i) for q in range(len(queues)) for i in range(len(queues[q].commands))]
        left = [[program.queues_of(rank)[q].commands[i] for q, i in places] for rank, places in enumerate(order)]
        words: dict[Flag, int] = {}
        moved = True
        while moved:
            moved = False
            for commands in left:
                while commands and not (
                    isinstance(commands[0], Wait) and words.get(commands[0].flag, 0) < commands[0].value.at(1)
                ):
                    command = commands.pop(0)
                    if isinstance(command, Signal):
                        words[command.flag] = command.value.at(1)
                    moved = True
        assert not any(left), f"{program.collective} {program.variant}: stuck"
