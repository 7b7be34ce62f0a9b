"""Prove plans of several nodes: carry out all ranks' steps at once, on the origins of elements.

A rank's steps follow each other, but for far ones: those run from their begin to their join, beside all steps in
between and beside each other, and may read their input and write their output at any time until then. Within a step,
the copies, and the broadcasts of a node broadcast, run in any order; so do a collective's reads and writes. The proof
refuses any two accesses to an element, one of which writes, that could meet because no join stands between. All orders
then give the same outcome, and one order of all ranks' steps stands for all others, as ranks meet in collectives only:
a near one is in step on all ranks of a node, the n-th far one on all ranks of a rail.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

from sidelane.integrations.nodes.plan import make_plan
from sidelane.integrations.nodes.steps import (
    IN_PLACE,
    INPUT,
    OUTPUT,
    PACKED,
    Copies,
    ElementSpan,
    Far,
    Join,
    Near,
    NodeBroadcast,
    NodePlan,
    PlanError,
    Step,
    whole,
)
from sidelane.integrations.nodes.topology import Nodes
from sidelane.program.collective import REDUCING, Kind

__all__ = ["PlanError", "verify_plans"]

Origins = frozenset[tuple[int, int, int]]
"""Rank, tensor and element of each term of a sum."""

Value = tuple[int, Origins] | None
"""Number of near reductions of an element (which weights an average), and its origins; None for unreadable elements."""


def verify_plans(
    kind: Kind,
    nodes: Nodes,
    counts: Sequence[int],
    pieces: int,
    root: int = 0,
    *,
    make: Callable[..., NodePlan] = make_plan,
) -> int:
    """Prove that each output is what the collective defines, in every order in which steps may run, and that all end.

    Calls may be in place or not, with the same plans; both are proved.

    Args:
        kind: all_gather, reduce_scatter, all_reduce (in place), all_to_all or broadcast (in place).
        nodes: nodes of the group.
        counts: elements of each tensor, as for :func:`make_plan`.
        pieces: largest number of pieces, as for :func:`make_plan`.
        root: root of a broadcast.
        make: function that makes the plans.

    Returns:
        Number of steps that were carried out.

    Raises:
        PlanError: a plan is wrong.
        ValueError: there are no such plans.
    """
    call = _Call(kind, nodes, tuple(counts), root)
    plans = [make(call.kind, nodes, rank, call.counts, pieces, call.root) for rank in range(len(nodes.of))]
    for rank, plan in enumerate(plans):
        if not isinstance(plan, NodePlan):
            raise PlanError(f"{call}: plan of rank {rank} (value={plan!r}, allowed=a Plan)")
    for ranks in nodes.members:
        _check_scratch(call, ranks, plans)
    done = _carry_out(call, plans)
    if call.kind not in IN_PLACE:
        _carry_out(dataclasses.replace(call, in_place=True), plans)
    return done


@dataclasses.dataclass(frozen=True, slots=True)
class _Call:
    kind: Kind
    nodes: Nodes
    counts: tuple[int, ...]
    root: int
    in_place: bool = False

    def __post_init__(self) -> None:
        settle = object.__setattr__
        settle(self, "kind", Kind(self.kind))
        settle(self, "counts", tuple(whole("verify_plans: counts", count) for count in self.counts))
        settle(self, "root", whole("verify_plans: root", self.root, most=len(self.nodes.of) - 1))

    def __str__(self) -> str:
        return f"{self.kind} on {self.nodes}{', in place' if self.in_place else ''}"

    def wanted(self, rank: int, tensor: int) -> list[Value]:
        """Return the collective's specified output of a rank."""
        count, everyone = self.counts[tensor], range(len(self.nodes.of))
        if self.kind in REDUCING:
            begin = rank * count if self.kind is Kind.REDUCE_SCATTER else 0
            return [(1, frozenset((other, tensor, begin + at) for other in everyone)) for at in range(count)]
        begin = rank * count if self.kind is Kind.ALL_TO_ALL else 0
        givers = (self.root,) if self.kind is Kind.BROADCAST else everyone
        return [(0, frozenset({(other, tensor, begin + at)})) for other in givers for at in range(count)]


def _check_scratch(call: _Call, ranks: Sequence[int], plans: Sequence[NodePlan]) -> None:
    """Check that the ranks of a node take the same symmetric memory."""
    taken = {rank: [item for item in plans[rank].scratch.items() if item[0].startswith(PACKED)] for rank in ranks}
    for rank, items in taken.items():
        if items != taken[ranks[0]]:
            first = f"{taken[ranks[0]]}, as of rank {ranks[0]} of its node"
            raise PlanError(f"{call}: symmetric scratch of rank {rank} (value={items}, allowed={first})")


def _carry_out(call: _Call, plans: Sequence[NodePlan]) -> int:
    ranks = [_Rank(call, rank, plan) for rank, plan in enumerate(plans)]
    done = 0
    while any(rank.step is not None for rank in ranks):
        before = done
        done += sum(rank.go_on() for rank in ranks)
        for members in call.nodes.members:
            done += _meet([ranks[member] for member in members])
        for number in range(call.nodes.rails):
            _carry([ranks[member] for member in call.nodes.rail(number)])
        if done == before and not any(rank.can_join() for rank in ranks):
            stuck = "; ".join(f"rank {rank.rank} at step {rank.at}, {rank.step}" for rank in ranks if rank.step)
            raise PlanError(f"{call}: nobody can go on: {stuck}")
    for rank in ranks:
        rank.check_end()
    return done


@dataclasses.dataclass(frozen=True, slots=True)
class _Access:
    """Elements ``begin`` to ``end`` of a piece of memory, as a step names them."""

    memory: tuple[str, int]
    begin: int
    end: int
    writes: bool
    span: ElementSpan

    def meets(self, other: _Access) -> bool:
        """Return True if both touch an element, and one writes."""
        return (
            (self.writes or other.writes)
            and self.memory == other.memory
            and max(self.begin, other.begin) < min(self.end, other.end)
        )


class _Rank:
    """One rank: its memory, and its position in its plan."""

    def __init__(self, call: _Call, rank: int, plan: NodePlan) -> None:
        self.call, self.rank, self.steps, self.at = call, rank, plan.steps, 0
        self.node, self.place = call.nodes.seat(rank)
        self.far: list[tuple[Far, list[Value], tuple[_Access, ...]]] = []  # with the input at its begin
        self.arrived: dict[int, list[Value]] = {}
        self.joined: set[int] = set()
        self._memory: dict[tuple[str, int], list[Value]] = {(name, 0): [None] * n for name, n in plan.scratch.items()}
        self._sizes = {key: len(values) for key, values in self._memory.items()}
        self._shift: dict[tuple[str, int], tuple[tuple[str, int], int]] = {}  # tensors that lie in others, from where
        size, kind = len(call.nodes.of), call.kind
        for tensor, count in enumerate(call.counts):
            source, target = (INPUT, tensor), (OUTPUT, tensor)
            many = count * size if kind in (Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL) else count
            given: list[Value] = [(0, frozenset({(rank, tensor, at)})) for at in range(many)]
            self._sizes[source] = many
            self._sizes[target] = count * size if kind in (Kind.ALL_GATHER, Kind.ALL_TO_ALL) else count
            if kind in IN_PLACE or (call.in_place and kind is Kind.ALL_TO_ALL):
                self._memory[target], self._shift[source] = given, (target, 0)
            elif call.in_place and kind is Kind.ALL_GATHER:
                rest: list[Value] = [None] * count
                self._memory[target] = rest * rank + given + rest * (size - rank - 1)
                self._shift[source] = target, rank * count
            elif call.in_place:
                self._memory[source], self._shift[target] = given, (source, rank * count)
            else:
                self._memory[source], self._memory[target] = given, [None] * self._sizes[target]

    @property
    def step(self) -> Step | None:
        return self.steps[self.at] if self.at < len(self.steps) else None

    def can_join(self) -> bool:
        return isinstance(self.step, Join) and self.step.number in self.arrived

    def refuse(self, why: str) -> NoReturn:
        raise PlanError(f"{self.call}: rank {self.rank} step {self.at}, {self.step}: {why}")

    def go_on(self) -> int:
        """Carry out the steps that need no other rank; return their number."""
        begun = self.at
        while True:
            match self.step:
                case Copies() as step:
                    self._copy(step)
                case Far() as step:
                    self._begin(step)
                case Join(number) if number in self.joined or number >= len(self.far):
                    self.refuse(f"allowed=a far step under way, of {len(self.far)}, once")
                case Join(number) if number in self.arrived:
                    self.joined.add(number)
                    self.write(self.far[number][0].output, self.arrived[number])
                case _:
                    return self.at - begun
            self.at += 1

    def check_end(self) -> None:
        """Check that all far steps have ended, and that the outputs are right."""
        for number, (step, *_) in enumerate(self.far):
            if number not in self.joined:
                raise PlanError(f"{self.call}: rank {self.rank} ends with far step {number} under way, {step}")
        for tensor in range(len(self.call.counts)):
            found = self.read(ElementSpan(OUTPUT, 0, self._sizes[OUTPUT, tensor], tensor))
            wanted = self.call.wanted(self.rank, tensor)
            if found == wanted:
                continue
            wrong = [at for at, (value, right) in enumerate(zip(found, wanted, strict=True)) if value != right]
            first = wrong[0]
            end = next((first + n for n, at in enumerate(wrong) if at != first + n), wrong[-1] + 1)
            which = f"{ElementSpan(OUTPUT, first, end - first, tensor)}, of which element {first}"
            said = f"is {_said(found[first])}, not {_said(wanted[first])}"
            raise PlanError(f"{self.call}: rank {self.rank} ends with {which} {said}")

    def read(self, span: ElementSpan) -> list[Value]:
        memory, begin, end = self._where(span)
        return self._memory[memory][begin:end]

    def write(self, span: ElementSpan, values: list[Value]) -> None:
        memory, begin, end = self._where(span)
        if end - begin != len(values):
            self.refuse(f"{len(values)} elements for {span}")
        self._memory[memory][begin:end] = values

    def check(self, reads: Sequence[ElementSpan], writes: Sequence[ElementSpan]) -> tuple[_Access, ...]:
        """Check that this step's accesses are safe in any order and beside the far steps under way; return them."""
        found = [_Access(*self._where(span), False, span) for span in reads]
        for span in writes:
            if span.buffer == INPUT and self.call.kind not in IN_PLACE:
                self.refuse(f"{span} is the caller's, and is only read")
            found.append(_Access(*self._where(span), True, span))
        last: dict[bool, _Access] = {}  # the access that reaches furthest, of the reads and of the writes
        for access in sorted(found, key=lambda each: (each.memory, each.begin)):
            for other in last.values():
                if access.meets(other):
                    self.refuse(f"{access.span} and {other.span} overlap, and nothing says which comes first")
            before = last.get(access.writes)
            if before is None or before.memory != access.memory or before.end < access.end:
                last[access.writes] = access
        for number, (step, _, touched) in enumerate(self.far):
            if number not in self.joined:
                for access in found:
                    if any(access.meets(other) for other in touched):
                        self.refuse(f"{access.span} belongs to far step {number} under way, {step}")
        return tuple(found)

    def _where(self, span: ElementSpan) -> tuple[tuple[str, int], int, int]:
        named = span.buffer, span.tensor
        size = self._sizes.get(named)
        if size is None or span.end > size:
            self.refuse(f"{span} sticks out of {'nothing' if size is None else size}")
        memory, shift = self._shift.get(named, (named, 0))
        return memory, span.offset + shift, span.end + shift

    def _copy(self, step: Copies) -> None:
        pairs = [pair for pair in step.pairs if self._where(pair[0]) != self._where(pair[1])]  # others do nothing
        self.check([given for _, given in pairs], [to for to, _ in pairs])
        for to, given in pairs:
            self.write(to, self.read(given))

    def _begin(self, step: Far) -> None:
        nodes = self.call.nodes
        many = len(nodes.members)
        if self.place >= nodes.rails:
            self.refuse(f"place {self.place} of its node (allowed=one of {nodes.rails} rails)")
        if step.root >= many:
            self.refuse(f"root {step.root} (allowed=a node, 0 to {many - 1})")
        if step.sent and len(step.sent) != many:
            self.refuse(f"parts (allowed=one for each of {many} nodes)")
        if not step.sent:
            self._check_sizes(step, many)
        in_place = step.kind in IN_PLACE
        touched = self.check(() if in_place else (step.input,), (step.output,))
        self.far.append((step, self.read(step.input), touched))

    def _check_sizes(self, step: Near | Far, many: int) -> None:
        given, taken = step.input.count, step.output.count
        wanted = {Kind.ALL_GATHER: given * many == taken, Kind.REDUCE_SCATTER: given == taken * many}
        wanted[Kind.ALL_TO_ALL] = given == taken and not given % many
        wanted[Kind.SCATTER] = given == taken * many
        if not wanted.get(step.kind, given == taken):
            self.refuse(f"{given} elements, and {taken} from {many} ranks")

    def begin_near(self, step: Near, many: int) -> list[Value]:
        """Check a near step, and return its input."""
        self._check_sizes(step, many)
        if step.root >= many:
            self.refuse(f"root {step.root} (allowed=a rank of the node, 0 to {many - 1})")
        reads = step.kind is not Kind.SCATTER or step.root == self.place
        self.check((step.input,) if reads else (), (step.output,))
        return self.read(step.input) if reads else []

    def begin_spread(self, step: NodeBroadcast, many: int) -> None:
        """Check a near step of broadcasts."""
        for root, span in step.parts:
            if root >= many:
                self.refuse(f"root {root} of {span} (allowed=a rank of the node, 0 to {many - 1})")
        own = [span for root, span in step.parts if root == self.place]
        self.check(own, [span for root, span in step.parts if root != self.place])


def _meet(ranks: Sequence[_Rank]) -> int:
    """Carry out a near step if all ranks of a node have come to one; return the number of steps."""
    steps = [rank.step for rank in ranks]
    if not all(isinstance(step, Near | NodeBroadcast) for step in steps):
        return 0
    first = steps[0]
    for rank in ranks:
        if _asks(rank.step) != _asks(first):
            rank.refuse(f"rank {ranks[0].rank} of its node has {first}")
    if isinstance(first, NodeBroadcast):
        for rank in ranks:
            rank.begin_spread(first, len(ranks))
        for root, span in first.parts:
            told = ranks[root].read(span)
            for rank in ranks:
                if rank is not ranks[root]:  # the root only reads
                    rank.write(span, told)
    else:
        nears = [step for step in steps if isinstance(step, Near)]
        inputs = [rank.begin_near(step, len(ranks)) for rank, step in zip(ranks, nears, strict=True)]
        outputs = _result(nears[0].kind, inputs, nears[0].root, is_near=True)
        for rank, step, values in zip(ranks, nears, outputs, strict=True):
            rank.write(step.output, values)
    for rank in ranks:
        rank.at += 1
    return len(ranks)


def _carry(ranks: Sequence[_Rank]) -> None:
    """Carry out the far steps that all ranks of a rail have begun."""
    for number in range(len(ranks[0].arrived), min(len(rank.far) for rank in ranks)):
        steps, inputs = [rank.far[number][0] for rank in ranks], [rank.far[number][1] for rank in ranks]
        first = steps[0]
        for rank, step in zip(ranks, steps, strict=True):
            if _asks(step) != _asks(first):
                whose = f"far step {number} of its rail is {step}"
                raise PlanError(f"{rank.call}: rank {rank.rank}: {whose}, and {first} of rank {ranks[0].rank}")
        if first.sent:
            outputs = list(_exchanged(ranks, number, steps, inputs))
        else:
            outputs = _result(first.kind, inputs, first.root, is_near=False)
        for rank, values in zip(ranks, outputs, strict=True):
            rank.arrived[number] = values


def _asks(step: Step | None) -> tuple[object, ...]:
    """Return the properties of a step that the ranks of a collective must have alike."""
    if isinstance(step, Near):
        return Near, step.kind, step.root, step.input.count
    if isinstance(step, Far):
        return Far, step.kind, step.root, len(step.sent), 0 if step.sent else step.input.count
    return NodeBroadcast, step


def _result(kind: Kind, inputs: Sequence[list[Value]], root: int, *, is_near: bool) -> list[list[Value]]:
    """Return the result of a collective on each rank."""
    many = len(inputs)
    each = len(inputs[root]) // many
    if kind is Kind.ALL_GATHER:
        return [[value for values in inputs for value in values]] * many
    if kind is Kind.BROADCAST:
        return [inputs[root]] * many
    if kind is Kind.SCATTER:
        return [inputs[root][at * each : (at + 1) * each] for at in range(many)]
    if kind is Kind.ALL_TO_ALL:
        return [[v for values in inputs for v in values[at * each : (at + 1) * each]] for at in range(many)]
    total = [_added(values, is_near) for values in zip(*inputs, strict=True)]
    if kind is Kind.ALL_REDUCE:
        return [total] * many
    return [total[at * each : (at + 1) * each] for at in range(many)]


def _exchanged(
    ranks: Sequence[_Rank], number: int, steps: Sequence[Far], inputs: Sequence[list[Value]]
) -> Iterator[list[Value]]:
    """Yield the outputs of an all-to-all whose parts differ."""
    for taker, step in enumerate(steps):
        output: list[Value] = []
        for giver, other in enumerate(steps):
            if other.sent[taker] != step.received[giver]:
                whose = f"rank {ranks[taker].rank}: far step {number} of its rail takes {step.received[giver]} elements"
                raise PlanError(f"{whose} from node {giver}, which sends {other.sent[taker]}: {step}")
            begin = sum(other.sent[:taker])
            output += inputs[giver][begin : begin + other.sent[taker]]
        yield output


def _added(values: Sequence[Value], is_near: bool) -> Value:
    """Return a sum; None if a part is missing, counts twice, or is weighted otherwise than the others."""
    parts = [value for value in values if value is not None]
    total = frozenset[tuple[int, int, int]]().union(*(origins for _, origins in parts))
    if len(parts) < len(values) or len(total) != sum(len(origins) for _, origins in parts):
        return None
    weights = {weight for weight, _ in parts}
    return (weights.pop() + is_near, total) if len(weights) == 1 else None


def _said(value: Value) -> str:
    if value is None:
        return "nothing, or a sum of parts that are missing or count twice"
    weight, origins = value
    shown = ", ".join(f"element {at} of tensor {tensor} of rank {rank}" for rank, tensor, at in sorted(origins)[:4])
    more = f" and {len(origins) - 4} more" if len(origins) > 4 else ""
    return f"{shown}{more}{f', reduced in {weight} near steps' if weight else ''}"
