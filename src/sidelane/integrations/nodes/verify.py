"""Proves plans of several nodes: all ranks' steps are carried out at once, on the origins of elements.

A value is the set of elements that were added up to it, or None where nothing was written; what a far step brings does
not exist before its join. Ranks meet in collectives only, so that one order of their steps stands for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sidelane.integrations.nodes.plan import make_plan
from sidelane.integrations.nodes.steps import INPUT, OUTPUT, Copies, Far, Join, Near, Plan, Span, Spread, Step
from sidelane.integrations.nodes.topology import Nodes
from sidelane.program.collective import REDUCING, Kind

Value = frozenset[tuple[int, int, int]] | None
"""Of rank, tensor and element."""


class PlanError(ValueError):
    """A plan is wrong; says which rank, step and element."""


def verify_plans(
    kind: Kind,
    nodes: Nodes,
    counts: Sequence[int],
    pieces: int,
    root: int = 0,
    *,
    make: Callable[..., Plan] = make_plan,
) -> int:
    """Prove that every element arrives, that nobody waits for ever, and that no far step's memory is touched.

    Args:
        kind: all_gather, reduce_scatter, all_reduce (in place), all_to_all or broadcast (in place).
        nodes: of the group.
        counts: elements of each tensor, as for :func:`make_plan`.
        pieces: as for :func:`make_plan`.
        root: as for :func:`make_plan`.
        make: of the plans.

    Returns:
        How many steps were carried out.

    Raises:
        PlanError: a plan is wrong.
        ValueError: there are no such plans.
    """
    plans = [make(kind, nodes, rank, counts, pieces, root) for rank in range(len(nodes.of))]
    ranks = [_Rank(kind, nodes, rank, counts, plan) for rank, plan in enumerate(plans)]
    done = 0
    while any(rank.step is not None for rank in ranks):
        before = done
        done += sum(rank.go_on() for rank in ranks)
        for members in nodes.members:
            done += _meet([ranks[member] for member in members])
        for number in range(nodes.rails):
            _carry([ranks[member] for member in nodes.rail(number)])
        if done == before and not any(rank.can_join() for rank in ranks):
            stuck = "; ".join(f"rank {rank.rank} at {rank.step}" for rank in ranks if rank.step is not None)
            raise PlanError(f"{kind} on {nodes}: nobody can go on: {stuck}")
    for rank in ranks:
        if any(number not in rank.joined for number in range(len(rank.far))):
            raise PlanError(f"{kind} on {nodes}: rank {rank.rank} ends with a far step under way")
        for tensor, count in enumerate(counts):
            wanted = _wanted(kind, len(nodes.of), rank.rank, tensor, count, root)
            for at, (value, right) in enumerate(zip(rank.tensors[OUTPUT, tensor], wanted, strict=True)):
                if value != right:
                    where = f"rank {rank.rank} element {at} of tensor {tensor}"
                    raise PlanError(f"{kind} on {nodes}: {where} is {value}, not {right}")
    return done


class _Rank:
    """One rank: its memory, and how far it has come."""

    def __init__(self, kind: Kind, nodes: Nodes, rank: int, counts: Sequence[int], plan: Plan) -> None:
        self.rank, self.steps, self.at = rank, plan.steps, 0
        self.far: list[tuple[Far, list[Value]]] = []  # with what was there when it was begun
        self.arrived: dict[int, list[Value]] = {}
        self.joined: set[int] = set()
        size = len(nodes.of)
        in_place = kind in (Kind.ALL_REDUCE, Kind.BROADCAST)
        self._alias = {INPUT: OUTPUT} if in_place else {}
        self.tensors: dict[tuple[str, int], list[Value]] = {(name, 0): [None] * n for name, n in plan.scratch.items()}
        for tensor, count in enumerate(counts):
            many = count * size if kind in (Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL) else count
            given: list[Value] = [frozenset({(rank, tensor, at)}) for at in range(many)]
            results = count * size if kind in (Kind.ALL_GATHER, Kind.ALL_TO_ALL) else count
            self.tensors[INPUT, tensor] = given
            self.tensors[OUTPUT, tensor] = given if in_place else [None] * results

    @property
    def step(self) -> Step | None:
        return self.steps[self.at] if self.at < len(self.steps) else None

    def can_join(self) -> bool:
        return isinstance(self.step, Join) and self.step.number in self.arrived

    def go_on(self) -> int:
        """Make the steps that need nobody else; how many."""
        begun = self.at
        while isinstance(step := self.step, Copies | Far) or self.can_join():
            if isinstance(step, Copies):
                for to, given in step.pairs:
                    self.write(to, self.read(given))
            elif isinstance(step, Far):
                self.far.append((step, self.read(step.input)))
                self._inside(step.output)
            else:
                assert isinstance(step, Join)
                self.joined.add(step.number)
                self.write(self.far[step.number][0].output, self.arrived[step.number])
            self.at += 1
        return self.at - begun

    def read(self, span: Span) -> list[Value]:
        self._untouched(span, reads=True)
        return self._inside(span)

    def write(self, span: Span, values: Sequence[Value]) -> None:
        self._untouched(span, reads=False)
        if len(self._inside(span)) != len(values):
            raise PlanError(f"rank {self.rank} step {self.at}: {len(values)} elements for {span}")
        self.tensors[span.buffer, span.tensor][span.offset : span.offset + span.count] = values

    def _inside(self, span: Span) -> list[Value]:
        found = self.tensors[span.buffer, span.tensor][span.offset : span.offset + span.count]
        if len(found) != span.count or span.offset < 0:
            raise PlanError(
                f"rank {self.rank} step {self.at}: {span} sticks out of {len(self.tensors[span.buffer, span.tensor])}"
            )
        return found

    def _untouched(self, span: Span, *, reads: bool) -> None:
        """What a far step under way writes is not for others, nor may they write what it reads."""
        for number, (step, _) in enumerate(self.far):
            if number in self.joined:
                continue
            if self._overlap(span, step.output) or (not reads and self._overlap(span, step.input)):
                raise PlanError(
                    f"rank {self.rank} step {self.at}: {span} belongs to far step {number} under way: {step}"
                )

    def _overlap(self, one: Span, other: Span) -> bool:
        first, second = (self._alias.get(span.buffer, span.buffer) for span in (one, other))
        return (first, one.tensor) == (second, other.tensor) and max(one.offset, other.offset) < min(
            one.offset + one.count, other.offset + other.count
        )


def _meet(ranks: Sequence[_Rank]) -> int:
    """A near step, if all ranks of a node have come to one."""
    steps = [rank.step for rank in ranks]
    if not all(isinstance(step, Near | Spread) for step in steps):
        return 0
    first = steps[0]
    if isinstance(first, Spread):
        if any(step != first for step in steps):
            raise PlanError(f"ranks {[rank.rank for rank in ranks]}: different near steps: {steps}")
        for root, span in first.parts:
            told = ranks[root].read(span)
            for rank in ranks:
                if rank is not ranks[root]:  # which only reads
                    rank.write(span, told)
    else:
        nears = [step for step in steps if isinstance(step, Near)]
        if len(nears) != len(ranks):
            raise PlanError(f"ranks {[rank.rank for rank in ranks]}: different near steps: {steps}")
        inputs = [rank.read(step.input) for rank, step in zip(ranks, nears, strict=True)]
        outputs = _result({step.kind for step in nears}, inputs, 0)
        for rank, step, values in zip(ranks, nears, outputs, strict=True):
            rank.write(step.output, values)
    for rank in ranks:
        rank.at += 1
    return len(ranks)


def _carry(ranks: Sequence[_Rank]) -> None:
    """The far steps that all ranks of a rail have begun."""
    for number in range(min(len(rank.far) for rank in ranks)):
        if number in ranks[0].arrived:
            continue
        begun = [rank.far[number] for rank in ranks]
        if len({step.root for step, _ in begun}) > 1:
            raise PlanError(f"ranks {[rank.rank for rank in ranks]}: roots of far step {number} differ")
        if begun[0][0].sent:
            outputs = _exchanged([step for step, _ in begun], [values for _, values in begun])
        else:
            outputs = _result({step.kind for step, _ in begun}, [values for _, values in begun], begun[0][0].root)
        for rank, values in zip(ranks, outputs, strict=True):
            rank.arrived[number] = values


def _result(kinds: set[Kind], inputs: Sequence[list[Value]], root: int) -> list[list[Value]]:
    """What a collective gives each rank."""
    if len(kinds) > 1 or len({len(values) for values in inputs}) > 1:
        raise PlanError(f"a collective of {kinds} with {[len(values) for values in inputs]} elements")
    (kind,), many = kinds, len(inputs)
    each = len(inputs[0]) // many
    if kind is Kind.ALL_GATHER:
        return [[value for values in inputs for value in values]] * many
    if kind is Kind.BROADCAST:
        return [inputs[root]] * many
    if kind in (Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL) and each * many != len(inputs[0]):
        raise PlanError(f"{kind}: {len(inputs[0])} elements for {many} ranks")
    if kind is Kind.ALL_TO_ALL:
        return [[v for values in inputs for v in values[at * each : (at + 1) * each]] for at in range(many)]
    total = [_added(values) for values in zip(*inputs, strict=True)]
    if kind is Kind.ALL_REDUCE:
        return [total] * many
    return [total[at * each : (at + 1) * each] for at in range(many)]


def _exchanged(steps: Sequence[Far], inputs: Sequence[list[Value]]) -> list[list[Value]]:
    """An all-to-all whose parts differ."""
    outputs: list[list[Value]] = [[] for _ in steps]
    for giver, (step, values) in enumerate(zip(steps, inputs, strict=True)):
        if step.kind is not Kind.ALL_TO_ALL or sum(step.sent) != len(values):
            raise PlanError(f"{step.kind} of {len(values)} elements as {step.sent}")
        at = 0
        for taker, count in enumerate(step.sent):
            if steps[taker].received[giver] != count:
                raise PlanError(f"node {giver} sends {count} elements to {taker}, which takes {steps[taker].received}")
            outputs[taker] += values[at : at + count]
            at += count
    return outputs


def _added(values: Sequence[Value]) -> Value:
    """A sum; None where a part is missing, or counts twice."""
    parts = [value for value in values if value is not None]
    total = frozenset[tuple[int, int, int]]().union(*parts)
    return total if len(parts) == len(values) and len(total) == sum(map(len, parts)) else None


def _wanted(kind: Kind, size: int, rank: int, tensor: int, count: int, root: int) -> list[Value]:
    if kind is Kind.ALL_GATHER:
        return [frozenset({(other, tensor, at)}) for other in range(size) for at in range(count)]
    if kind is Kind.BROADCAST:
        return [frozenset({(root, tensor, at)}) for at in range(count)]
    if kind is Kind.ALL_TO_ALL:
        return [frozenset({(other, tensor, rank * count + at)}) for other in range(size) for at in range(count)]
    assert kind in REDUCING
    begin = rank * count if kind is Kind.REDUCE_SCATTER else 0
    return [frozenset((other, tensor, begin + at) for other in range(size)) for at in range(count)]
