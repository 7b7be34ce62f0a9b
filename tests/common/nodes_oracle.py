"""Runs plans of several nodes on numbers, in an order that the runtime may take, drawn at random.

Every rank and every far step under way is a task; a task gives way between any two elements. Sums are taken modulo a
prime, so that an average has no rounding; whatever is about to be written may hold anything before.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

from sidelane.integrations.nodes.steps import Copies, ElementSpan, Far, Join, Near, NodeBroadcast, NodePlan
from sidelane.integrations.nodes.topology import Nodes
from sidelane.program.collective import REDUCING, Kind

PRIME = 2**61 - 1
Task = Iterator[bool]
"""Yields whether it has got on."""


def run(
    kind: Kind, nodes: Nodes, counts: Sequence[int], plans: Sequence[NodePlan], seed: int, root: int = 0, **form: bool
) -> str:
    """What is wrong in the end; "" for nothing. ``form``: ``in_place`` or not, ``average`` or not."""
    return _Run(kind, nodes, counts, plans, random.Random(seed), root, **form).wrong()


class _Run:
    def __init__(
        self,
        kind: Kind,
        nodes: Nodes,
        counts: Sequence[int],
        plans: Sequence[NodePlan],
        draw: random.Random,
        root: int,
        in_place: bool = False,
        average: bool = False,
    ) -> None:
        self.nodes, self.draw, self.plans = nodes, draw, plans
        self.size = len(nodes.of)
        self.weight = pow(self.size, -1, PRIME) if average else 1
        self.views: list[dict[Any, tuple[list[int], int, int]]] = []
        self.shared: dict[Any, list[dict[int, Any]]] = {}
        self.under_way: list[list[Task]] = [[] for _ in plans]
        inputs = [[self.junk(n * self._many(kind)) for n in counts] for _ in plans]
        self.wanted, self.kept = [], []
        for rank, plan in enumerate(plans):
            views = {(name, 0): (self.junk(n), 0, n) for name, n in plan.scratch.items()}
            for tensor, n in enumerate(counts):
                given = list(inputs[rank][tensor])
                wanted = _outcome(kind, [given[tensor] for given in inputs], rank, n, root, self.weight)
                output, at, shift = self.junk(len(wanted)), 0, 0
                if kind in (Kind.ALL_REDUCE, Kind.BROADCAST) or (in_place and kind is Kind.ALL_TO_ALL):
                    output = given
                elif in_place and kind is Kind.ALL_GATHER:
                    at = rank * n
                    output[at : at + n], given = given, output
                elif in_place:
                    shift, output = rank * n, given
                else:
                    self.kept.append((given, list(given)))
                views["input", tensor] = given, at, n * self._many(kind)
                views["output", tensor] = output, shift, len(wanted)
                self.wanted.append((rank, tensor, wanted))
            self.views.append(views)

    def _many(self, kind: Kind) -> int:
        return self.size if kind in (Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL) else 1

    def junk(self, count: int) -> list[int]:
        return [self.draw.randrange(PRIME) for _ in range(count)]

    def mixed(self, items: Sequence[Any]) -> list[Any]:
        return self.draw.sample(list(items), len(items))

    def wrong(self) -> str:
        for ranks in self.nodes.members:
            packed = [[i for i in self.plans[rank].scratch.items() if i[0].startswith("packed")] for rank in ranks]
            if any(each != packed[0] for each in packed):
                return "the ranks of a node take different symmetric memory"
        eager = self.draw.choice((0.02, 0.5, 0.98))  # how soon far steps get on, next to the others
        tasks: list[Task] = [self.rank(rank) for rank in range(self.size)]
        stuck = 0
        while tasks or any(self.under_way):
            far = [task for each in self.under_way for task in each]
            pool = far if far and (not tasks or self.draw.random() < eager) else tasks
            task = self.draw.choice(pool)
            try:
                stuck = 0 if next(task) else stuck + 1
            except StopIteration:
                stuck = 0
                next(each for each in (tasks, *self.under_way) if task in each).remove(task)
            except (LookupError, ValueError, TypeError, AttributeError, AssertionError) as error:
                return f"{type(error).__name__}: {error}"
            if stuck > 4000:
                return "nobody gets on"
        for rank, tensor, wanted in self.wanted:
            if self.get(rank, ElementSpan("output", 0, len(wanted), tensor)) != wanted:
                return f"output {tensor} of rank {rank}"
        return "" if all(now == before for now, before in self.kept) else "an input has changed"

    def view(self, rank: int, span: ElementSpan) -> tuple[list[int], int]:
        memory, shift, count = self.views[rank][span.buffer, span.tensor]
        assert 0 <= span.offset <= span.offset + span.count <= count, span
        return memory, shift + span.offset

    def get(self, rank: int, span: ElementSpan) -> list[int]:
        memory, begin = self.view(rank, span)
        return memory[begin : begin + span.count]

    def reading(self, rank: int, span: ElementSpan, into: dict[int, int]) -> list[tuple[Any, ...]]:
        memory, begin = self.view(rank, span)
        return [("read", memory, begin + at, into, at) for at in range(span.count)]

    def spoiling(self, rank: int, span: ElementSpan) -> list[tuple[Any, ...]]:
        memory, begin = self.view(rank, span)
        return [("spoil", memory, begin + at) for at in range(span.count)]

    def acting(self, acts: Sequence[tuple[Any, ...]]) -> Task:
        for what, memory, index, *more in self.mixed(acts):
            if what == "read":
                into, at = more
                into[at] = memory[index]
            else:
                memory[index] = self.draw.randrange(PRIME)
            yield True

    def writing(self, rank: int, span: ElementSpan, values: Sequence[int]) -> Task:
        memory, begin = self.view(rank, span)
        assert len(values) == span.count, span
        for at in self.mixed(range(span.count)):
            memory[begin + at] = values[at]
            yield True

    def rank(self, rank: int) -> Task:
        node, place = self.nodes.seat(rank)
        far: list[Task] = []
        near, joined = 0, set()
        for step in self.plans[rank].steps:
            if isinstance(step, Copies):
                yield from self.copies(rank, step)
            elif isinstance(step, Join):
                while far[step.number] in self.under_way[rank]:
                    yield False
                joined.add(step.number)
            elif isinstance(step, Far):
                assert place < self.nodes.rails
                task = self.collective(rank, step, ("far", place, len(far)), self.nodes.rail(place))
                far.append(task)
                self.under_way[rank].append(task)
            else:
                members, near = self.nodes.members[node], near + 1
                there = ("near", node, near)
                if isinstance(step, NodeBroadcast):
                    yield from self.spread(rank, step, there, members)
                else:
                    yield from self.collective(rank, step, there, members)
            yield True
        assert joined == set(range(len(far))), "a far step is under way at the end"

    def copies(self, rank: int, step: Copies) -> Task:
        moves = []
        for to, given in step.pairs:
            (target, at), (source, begin) = self.view(rank, to), self.view(rank, given)
            assert to.count == given.count
            if (target is not source) or at != begin:
                moves += [(target, at + n, source, begin + n) for n in range(to.count)]
        moves, at_once = self.mixed(moves), self.draw.choice((1, len(moves) or 1))
        for first in range(0, len(moves), at_once):
            some = moves[first : first + at_once]
            for (target, at, _, _), value in [(move, move[2][move[3]]) for move in some]:
                target[at] = value
            yield True

    def spread(self, rank: int, step: NodeBroadcast, where: Any, members: Sequence[int]) -> Task:
        if len(members) == 1:
            return
        shared = self.shared.setdefault(where, [{} for _ in step.parts])
        place = members.index(rank)
        assert len(shared) == len(step.parts)
        acts: list[tuple[Any, ...]] = []
        for told, (root, span) in zip(shared, step.parts, strict=True):
            assert 0 <= root < len(members)
            assert told.setdefault(-1, (root, span.count)) == (root, span.count)
            acts += self.reading(rank, span, told) if root == place else self.spoiling(rank, span)
        yield from self.acting(acts)
        for told, (root, span) in self.mixed(list(zip(shared, step.parts, strict=True))):
            while len(told) <= span.count:
                yield False
            if root != place:
                yield from self.writing(rank, span, [told[at] for at in range(span.count)])

    def collective(self, rank: int, step: Near | Far, where: Any, members: Sequence[int]) -> Task:
        shared = self.shared.setdefault(where, [{} for _ in members])
        place, many = members.index(rank), len(members)
        sent, received = getattr(step, "sent", ()), getattr(step, "received", ())
        same = ("kind", type(step), step.kind, getattr(step, "root", 0), bool(sent), bool(sent) or step.input.count)
        assert all(other.get(-1, same) == same for other in shared), where
        own = shared[place]
        if step.input == step.output:
            yield from self.acting(self.reading(rank, step.input, own))
            yield from self.acting(self.spoiling(rank, step.output))
        else:
            yield from self.acting(self.reading(rank, step.input, own) + self.spoiling(rank, step.output))
        own |= {-1: same, -2: sent or (step.input.count // many,) * many, -3: step.input.count}
        while not all(-3 in other and len(other) == other[-3] + 3 for other in shared):
            yield False
        assert all(other[-1] == same for other in shared)
        inputs = [[other[at] for at in range(other[-3])] for other in shared]
        if step.kind is Kind.ALL_GATHER:
            result = [*itertools.chain(*inputs)]
        elif step.kind is Kind.BROADCAST:
            result = inputs[step.root]  # type: ignore[union-attr]
        elif step.kind is Kind.SCATTER:
            given = inputs[step.root]
            assert len(given) == many * step.output.count
            result = given[place * step.output.count :][: step.output.count]
        elif step.kind is Kind.ALL_TO_ALL:
            assert all(sum(other[-2]) == other[-3] and len(other[-2]) == many for other in shared)
            starts = [sum(other[-2][:place]) for other in shared]
            parts = [given[at : at + other[-2][place]] for given, at, other in zip(inputs, starts, shared, strict=True)]
            assert not received or tuple(map(len, parts)) == received
            result = [*itertools.chain(*parts)]
        else:
            weight = self.weight if isinstance(step, Near) else 1
            result = [sum(values) * weight % PRIME for values in zip(*inputs, strict=True)]
            if step.kind is Kind.REDUCE_SCATTER:
                assert len(result) == many * step.output.count
                result = result[place * step.output.count :][: step.output.count]
        yield from self.writing(rank, step.output, result)


def _outcome(kind: Kind, inputs: list[list[int]], rank: int, count: int, root: int, weight: int) -> list[int]:
    begin, end = rank * count, (rank + 1) * count
    if kind is Kind.ALL_GATHER:
        return [*itertools.chain(*inputs)]
    if kind is Kind.BROADCAST:
        return list(inputs[root])
    if kind is Kind.ALL_TO_ALL:
        return [*itertools.chain(*(given[begin:end] for given in inputs))]
    assert kind in REDUCING
    total = [sum(values) * weight % PRIME for values in zip(*inputs, strict=True)]
    return total if kind is Kind.ALL_REDUCE else total[begin:end]
