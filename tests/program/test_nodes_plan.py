"""Plans of collectives among several nodes, carried out for all ranks at once by an interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sidelane.integrations.nodes import plan as plans
from sidelane.integrations.nodes.plan import make_plan
from sidelane.integrations.nodes.steps import Copies, Far, Join, Near, Plan, Span, Spread
from sidelane.integrations.nodes.topology import Nodes
from sidelane.program.collective import Kind

LAYOUTS = [
    *((0, 1), (0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 1), (0, 1, 1, 1, 0), (0, 0, 0, 0, 1), (0, 1, 2)),
    *((0, 1, 2, 2, 1, 0), (0, 0, 1, 1, 1, 1, 2), (0, 0, 0, 0, 1, 1, 1, 1), (0, 0, 0, 1, 1, 1, 2, 2, 2)),
]
KINDS = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.ALL_TO_ALL, Kind.BROADCAST)


def carry_out(nodes: Nodes, made: list[Plan], tensors: list[dict[Any, torch.Tensor]]) -> None:
    """Run the steps of all ranks: a collective happens when all of its ranks have come, which it checks."""
    size = len(nodes.of)
    at, begun = [0] * size, [0] * size
    far_done: dict[tuple[int, int], bool] = {}

    def view(rank: int, span: Span) -> torch.Tensor:
        found = tensors[rank][span.buffer, span.tensor][span.offset : span.offset + span.count]
        assert found.numel() == span.count, span
        return found

    def collective(ranks: tuple[int, ...], steps: list[Any]) -> None:
        kinds = {step.kind for step in steps}
        assert len(kinds) == 1, steps
        inputs = [view(rank, step.input).clone() for rank, step in zip(ranks, steps, strict=True)]
        outputs = [view(rank, step.output) for rank, step in zip(ranks, steps, strict=True)]
        sizes = {len(tensor) for tensor in inputs}, {len(tensor) for tensor in outputs}
        assert getattr(steps[0], "sent", ()) or (len(sizes[0]) == len(sizes[1]) == 1), steps
        for place, output in enumerate(outputs):
            match steps[0].kind:
                case Kind.ALL_GATHER:
                    output.copy_(torch.cat(inputs))
                case Kind.REDUCE_SCATTER:
                    output.copy_(sum(tensor.chunk(len(ranks))[place] for tensor in inputs))
                case Kind.ALL_REDUCE:
                    output.copy_(sum(inputs))
                case Kind.ALL_TO_ALL:
                    cuts = [
                        getattr(step, "sent", ()) or len(step_in) // len(ranks)
                        for step, step_in in zip(steps, inputs, strict=True)
                    ]
                    parts = [tensor.split(cut)[place] for tensor, cut in zip(inputs, cuts, strict=True)]
                    assert not getattr(steps[place], "received", ()) or steps[place].received == tuple(map(len, parts))
                    output.copy_(torch.cat(parts))
                case Kind.BROADCAST:
                    output.copy_(inputs[steps[0].root])

    while any(at[rank] < len(made[rank].steps) for rank in range(size)):
        before = list(at), list(begun), len(far_done)
        for rank in range(size):
            if at[rank] == len(made[rank].steps):
                continue
            step = made[rank].steps[at[rank]]
            if isinstance(step, Copies):
                for target, source in step.pairs:
                    view(rank, target).copy_(view(rank, source))
                at[rank] += 1
            elif isinstance(step, Far):
                begun[rank] += 1
                at[rank] += 1
            elif isinstance(step, Join):
                at[rank] += far_done.get((rank, step.number), False)
        for ranks in nodes.members:
            steps = [made[rank].steps[at[rank]] if at[rank] < len(made[rank].steps) else None for rank in ranks]
            if all(isinstance(step, Near) for step in steps):
                collective(ranks, steps)
            elif all(isinstance(step, Spread) for step in steps):
                assert len({repr(step) for step in steps}) == 1, steps
                for root, span in steps[0].parts:
                    told = view(ranks[root], span).clone()
                    for rank in ranks:
                        view(rank, span).copy_(told)
            else:
                continue
            for rank in ranks:
                at[rank] += 1
        for number in range(nodes.rails):
            ranks = nodes.rail(number)
            for turn in range(min(begun[rank] for rank in ranks)):
                if (ranks[0], turn) not in far_done:
                    steps = [[s for s in made[rank].steps if isinstance(s, Far)][turn] for rank in ranks]
                    collective(ranks, steps)
                    far_done |= {(rank, turn): True for rank in ranks}
        assert (list(at), list(begun), len(far_done)) != before, "nobody can go on"


def outcome(kind: Kind, inputs: list[torch.Tensor], rank: int, count: int, root: int) -> torch.Tensor:
    """What a rank must have in the end."""
    begin, end = rank * count, (rank + 1) * count
    if kind is Kind.ALL_GATHER:
        return torch.cat(inputs)
    if kind is Kind.BROADCAST:
        return inputs[root]
    if kind is Kind.ALL_TO_ALL:
        return torch.cat([given[begin:end] for given in inputs])
    total = torch.stack(inputs).sum(0)
    return total if kind is Kind.ALL_REDUCE else total[begin:end]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "".join(map(str, layout)))
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_element_arrives(layout: tuple[int, ...], kind: Kind) -> None:
    nodes = Nodes.named([str(node) for node in layout])
    if plans.objection(kind, nodes):
        with pytest.raises(ValueError, match="a node of more than 2 times the ranks of another"):
            make_plan(kind, nodes, 0, (5,), 1)
        return
    size = len(layout)
    lists = [((1,), 1), ((7,), 1), ((5,), 3), ((8,), 2), ((3,), 5)]
    for counts, pieces in lists if kind is Kind.BROADCAST else [*lists, ((4, 0, 1, 6), 1), ((4, 1, 6), 3)]:
        for root in (0, size - 1) if kind is Kind.BROADCAST else (0,):
            made = [make_plan(kind, nodes, rank, counts, pieces, root) for rank in range(size)]
            tensors: list[dict[Any, torch.Tensor]] = [
                {(name, 0): torch.full((length,), -1) for name, length in plan.scratch.items()} for plan in made
            ]
            wanted = {}
            for tensor, count in enumerate(counts):
                many = count * size if kind in (Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL) else count
                inputs = [torch.randint(0, 1 << 40, (many,)) for _ in range(size)]
                for rank in range(size):
                    wanted[rank, tensor] = result = outcome(kind, inputs, rank, count, root)
                    output = inputs[rank].clone() if kind is Kind.BROADCAST else torch.full_like(result, -1)
                    tensors[rank] |= {("input", tensor): inputs[rank], ("output", tensor): output}
            carry_out(nodes, made, tensors)
            for (rank, tensor), result in wanted.items():
                assert torch.equal(tensors[rank]["output", tensor], result), (counts, pieces, rank, tensor)


def test_scratch_is_used_again() -> None:
    """Two pieces are under way at once; the third has the memory of the first."""
    for kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.ALL_TO_ALL):
        for layout in ("aabb", "aabbb"):
            whole, cut = (make_plan(kind, Nodes.named(layout), 0, (800,), pieces).scratch for pieces in (1, 8))
            assert 4 * sum(cut.values()) <= sum(whole.values()) + 100, (kind, whole, cut)


def test_a_far_step_is_under_way_while_the_near_part_of_another_piece_runs() -> None:
    nodes = Nodes.named("aabb")
    steps = make_plan(Kind.ALL_REDUCE, nodes, 0, (100,), 3).steps
    names = [type(step).__name__ for step in steps]
    assert names.index("Join") > names.index("Near", names.index("Far")), names
    assert names.count("Far") == names.count("Join") == names.count("Near") == 3


def test_nodes_are_those_that_names_say() -> None:
    nodes = Nodes.named(["b", "a", "b", "b", "a"])
    assert nodes.members == ((0, 2, 3), (1, 4)) and nodes.rails == 2 and not nodes.even and nodes.spans
    assert nodes.seat(3) == (0, 2) and nodes.rail(1) == (2, 4) and str(nodes) == "2 nodes of 3, 2 ranks"
    assert not Nodes.named(["x"]).spans
