"""Plans of several nodes are proved, and wrong ones are found."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from common import nodes_oracle
from sidelane.integrations.nodes import plan
from sidelane.integrations.nodes.plan import make_plan, objection
from sidelane.integrations.nodes.steps import (
    BUFFERS,
    Copies,
    ElementSpan,
    Far,
    Join,
    Near,
    NodeBroadcast,
    NodePlan,
    Step,
)
from sidelane.integrations.nodes.topology import Nodes
from sidelane.integrations.nodes.verify import PlanError, verify_plans
from sidelane.program.collective import Kind

KINDS = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE, Kind.ALL_TO_ALL, Kind.BROADCAST)
MUTANTS, RUNS = 100, 4
LAYOUTS = ("ab", "aabb", "abab", "aab", "abbba", "aaaab", "abccba", "aabbbbc", "aabbccdd", "abbcccdddd", "abcd")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_plans_are_right(kind: Kind, layout: str) -> None:
    nodes = Nodes.named(layout)
    if objection(kind, nodes):
        pytest.skip("no steps for a node that is so much larger")
    lists = [(1,), (7,), (3,), (2, 0, 5)] if kind is not Kind.BROADCAST else [(1,), (7,), (3,)]
    for counts in lists:
        for pieces in (1, 3, 5):
            for root in (0, len(layout) - 1) if kind is Kind.BROADCAST else (0,):
                assert verify_plans(kind, nodes, counts, pieces, root) > 0


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_large_pieces_begin_at_whole_vectors(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with tensors of 16384 elements and more, whose pieces begin at multiples of 256."""
    monkeypatch.setattr(plan, "_CUT_AT", 4)
    counts = (301,) if kind is Kind.BROADCAST else (301, 5, 257)
    for layout in ("aabb", "aab"):
        for pieces in (3, 8):
            assert verify_plans(kind, Nodes.named(layout), counts, pieces) > 0
    cuts = [cut for piece in plan._cut(counts, 8) for cut in piece]
    assert len(cuts) > 8 - (kind is Kind.BROADCAST)
    assert all(cut.begin % 4 == 0 for cut in cuts if cut.count > 256), cuts


@pytest.mark.parametrize(
    ("kind", "without", "layout"),
    [
        *(
            (kind, step, "aabb")
            for kind in (Kind.ALL_GATHER, Kind.ALL_REDUCE)
            for step in (Copies, NodeBroadcast, Join)
        ),
        *((kind, step, "aabbb") for kind in (Kind.REDUCE_SCATTER, Kind.ALL_TO_ALL) for step in (Copies, Near, Join)),
    ],
    ids=str,
)
def test_a_step_that_is_left_out_is_found(kind: Kind, without: type, layout: str) -> None:
    def make(*arguments: Any) -> NodePlan:
        plan = make_plan(*arguments)
        if arguments[2] != 1:
            return plan
        lost = next(step for step in reversed(plan.steps) if isinstance(step, without))
        return dataclasses.replace(plan, steps=tuple(step for step in plan.steps if step is not lost))

    with pytest.raises(PlanError):
        verify_plans(kind, Nodes.named(layout), (6,), 2, make=make)


def test_a_join_that_comes_too_late_is_found() -> None:
    """What has come is copied before it is there."""

    def make(*arguments: Any) -> NodePlan:
        plan = make_plan(*arguments)
        joins = [step for step in plan.steps if isinstance(step, Join)]
        return dataclasses.replace(plan, steps=(*(step for step in plan.steps if step not in joins), *joins))

    with pytest.raises(PlanError, match="belongs to far step 0 under way"):
        verify_plans(Kind.ALL_GATHER, Nodes.named("aabb"), (6,), 2, make=make)


class Whole:
    def __init__(self, number: int) -> None:
        self.number = number

    def __index__(self) -> int:
        return self.number


def test_wrong_numbers_are_refused_where_they_are_made() -> None:
    """Of any type; and what is a whole number otherwise is one."""
    span = ElementSpan("output", Whole(2), torch.tensor(3))  # type: ignore[arg-type]
    assert span == ElementSpan("output", 2, 3) and type(span.offset) is type(span.count) is int
    assert Near("all_to_all", span, span).kind is Kind.ALL_TO_ALL
    wrong: list[Callable[[], object]] = [
        *(lambda n=n: ElementSpan("output", n, 1) for n in (-1, 1.0, "1", None, True, (1,))),
        *(lambda n=n: ElementSpan("output", 0, n) for n in (-1, 0.5)),
        *(lambda name=name: ElementSpan(name, 0, 1) for name in ("packed", "packed2", "", 3)),
        lambda: ElementSpan("packed0", 0, 1, 1),
        lambda: span.part(1, 3),
        lambda: Copies(((span, ElementSpan("input", 0, 2)),)),
        *(lambda pairs=pairs: Copies(pairs) for pairs in (None, (span,), ((span, 3),), ((span,),))),
        *(lambda root=root: NodeBroadcast(((root, span),)) for root in (-1, 1.5, None)),
        *(lambda kind=kind: Near(kind, span, span) for kind in (Kind.ALL_GATHER, "none", None)),
        *(lambda kind=kind: Far(kind, span, span) for kind in (Kind.SCATTER, 7)),
        lambda: Near(Kind.ALL_TO_ALL, ElementSpan("output", 0, 0), ElementSpan("input", 0, 0)),
        lambda: Far(Kind.ALL_REDUCE, span, ElementSpan("output", 3, 3)),
        lambda: Far(Kind.ALL_GATHER, span, span, 1),
        *(lambda root=root: Far(Kind.BROADCAST, span, span, root) for root in (-1, "0")),
        *(
            lambda parts=parts: Far(Kind.ALL_TO_ALL, span, span, 0, *parts)
            for parts in (((3, 1), (3, 0)), ((4, -1), (3, 0)), ((3,), (1, 2)), ((3,), ()), (3, 3))
        ),
        lambda: Far(Kind.ALL_GATHER, span, span, 0, (3,), (3,)),
        *(lambda number=number: Join(number) for number in (-1, None, 0.0)),
        *(lambda steps=steps: NodePlan(steps, {}) for steps in (None, ("join",), (Join,))),
        *(lambda scratch=scratch: NodePlan((), scratch) for scratch in (None, {"packed": 1}, {"packed0": -1})),
    ]
    for make in wrong:
        with pytest.raises(PlanError, match=r"value=.*allowed="):
            make()
    for of in ((), (1,), (0, 2), (0, -1)):
        with pytest.raises(ValueError, match=r"Nodes: of \(value=.*allowed="):
            Nodes(of)
    nodes = Nodes.named("aab")
    for arguments in ((0, (3,), 1, -1), (0, (3,), 1, 3), (-1, (3,), 1), (3, (3,), 1), (0, (-3,), 1), (0, (3,), 0)):
        with pytest.raises(ValueError, match=r"make_plan: .*value=.*allowed="):
            make_plan(Kind.BROADCAST, nodes, *arguments)  # type: ignore[arg-type]
    for root in (-1, 3, 1.0):
        with pytest.raises(PlanError, match=r"verify_plans: root"):
            verify_plans(Kind.BROADCAST, nodes, (3,), 1, root)  # type: ignore[arg-type]


IN, OUT, MIDDLE, CAME = (
    ElementSpan(name, 0, n) for name, n in (("input", 2), ("output", 4), ("middle0", 4), ("arrived0", 4))
)
GATHER = (Far(Kind.ALL_GATHER, CAME, MIDDLE.part(0, 2)), Join(0))
FIRST, LAST = Copies(((MIDDLE.part(0, 2), IN),)), Copies(((OUT, CAME),))


@pytest.mark.parametrize(
    ("steps", "words", "goes_wrong"),
    [
        ((FIRST, *GATHER, LAST), "", False),
        ((FIRST, *GATHER, LAST, Copies(((IN, OUT.part(0, 2)),))), r"step 4, .*input\[0:2\] is the caller's", True),
        ((FIRST, *GATHER, Copies(((CAME, OUT),)), Join(0), LAST), r"step 4, join of far step 0: .* once", True),
        (
            (FIRST, GATHER[0], Far(Kind.ALL_GATHER, MIDDLE, IN), Join(0), Join(1), LAST),
            r"step 2, far all_gather .*: middle0\[0:4\] belongs to far step 0 under way",
            True,
        ),
        (
            (FIRST, GATHER[0], Far(Kind.ALL_GATHER, CAME, IN), Join(1), Join(0), LAST),
            r"arrived0\[0:4\] belongs to far step 0",
            False,  # both bring the same
        ),
        (
            (Copies(((MIDDLE.part(2, 2), IN), (MIDDLE.part(0, 2), MIDDLE.part(2, 2)))), *GATHER, LAST),
            r"step 0, .*middle0\[2:4\] and middle0\[2:4\] overlap, and nothing says which comes first",
            True,
        ),
        ((Copies(((MIDDLE.part(0, 2), OUT.part(1, 2)), (MIDDLE.part(1, 2), IN))),), r"middle0\[1:3\] and mid", True),
        (
            (FIRST, *GATHER, LAST, NodeBroadcast(((1, OUT),))),
            r"step 4, .*root 1 of output\[0:4\] \(allowed=.* 0 to 0",
            False,
        ),
        ((FIRST, *GATHER, LAST, Far(Kind.BROADCAST, OUT, OUT, 2), Join(1)), r"step 4, .*root 2 .*0 to 1", True),
        ((Far(Kind.ALL_TO_ALL, CAME, MIDDLE, 0, (1, 3), (3, 1)), Join(0)), r"far step 0 of its rail takes 3 ", True),
        ((Far(Kind.ALL_TO_ALL, CAME, MIDDLE, 0, (1, 2, 1), (4, 0, 0)), Join(0)), r"one for each of 2 nodes", True),
        ((FIRST, *GATHER, Copies(((OUT.part(1, 3), CAME.part(0, 3)),))), r"ends with output\[0:4\], of which el", True),
        ((FIRST, *GATHER, Copies(((ElementSpan("output", 1, 4), CAME),))), r"output\[1:5\] sticks out of 4", True),
        (
            (FIRST, *GATHER, LAST, Copies(((ElementSpan("output", 0, 1, 1), OUT.part(0, 1)),))),
            "of tensor 1 sticks out",
            True,
        ),
        ((FIRST, *GATHER, LAST, Join(1)), r"step 4, join of far step 1: allowed=", True),
        ((FIRST, *GATHER, LAST, GATHER[0]), r"ends with far step 1 under way", True),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_the_runtime_may_spoil_is_refused(steps: tuple[Step, ...], words: str, goes_wrong: bool) -> None:
    """All-gathers of two nodes of one rank; where somebody would notice, an order of the runtime's is wrong."""
    nodes, made = Nodes.named("ab"), NodePlan(steps, {"middle0": 4, "arrived0": 4})

    def verify() -> int:
        return verify_plans(Kind.ALL_GATHER, nodes, (2,), 1, make=lambda *_: made)

    if words:
        with pytest.raises(PlanError, match=words):
            verify()
    else:
        assert verify() > 0
    runs = [nodes_oracle.run(Kind.ALL_GATHER, nodes, (2,), [made] * 2, seed) for seed in range(40)]
    assert any(runs) == goes_wrong, runs


def test_an_average_is_weighted_once_and_symmetric_scratch_is_alike_in_a_node() -> None:
    """A near step of one rank changes no sum; and what one rank takes alone, its node waits for."""
    packed, middle, nodes = ElementSpan("packed0", 0, 2), MIDDLE.part(0, 2), Nodes.named("ab")
    near, back = Near(Kind.REDUCE_SCATTER, middle, packed), Copies(((packed, middle),))
    ends = Far(Kind.ALL_REDUCE, middle, middle), Join(0), Copies(((OUT.part(0, 2), middle),))
    for steps, words in (((near, back, near), "2 near steps"), ((), "nothing"), ((near,), "")):
        made = NodePlan((Copies(((packed, IN),)), *steps, *ends), {"packed0": 2, "middle0": 2})
        with pytest.raises(PlanError, match=words) if words else contextlib.nullcontext():
            verify_plans(Kind.ALL_REDUCE, nodes, (2,), 1, make=lambda *_, made=made: made)
        assert bool(nodes_oracle.run(Kind.ALL_REDUCE, nodes, (2,), [made] * 2, 0, average=True)) == bool(words)

    def make(*arguments: Any) -> NodePlan:
        plan = make_plan(*arguments)
        more = {"packed0": plan.scratch["packed0"] + (arguments[2] == 1)}
        return dataclasses.replace(plan, scratch=plan.scratch | more)

    with pytest.raises(PlanError, match=r"symmetric scratch of rank 1 \(value=.*, as of rank 0 of its node\)"):
        verify_plans(Kind.ALL_REDUCE, Nodes.named("aab"), (2,), 1, make=make)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_whatever_is_accepted_is_right_in_every_order(kind: Kind) -> None:
    """Mutants of plans, alike on some or all ranks, in random orders; in place and not, averages and sums."""
    draw = random.Random(f"{kind}")
    accepted = refused = 0
    for number in range(MUTANTS):
        nodes = Nodes.named(draw.choice(("ab", "aab", "aabb", "abb", "abbab")))
        counts = draw.choice(((2,), (5,), (3,) if kind is Kind.BROADCAST else (2, 0, 3)))
        root = draw.randrange(len(nodes.of)) if kind is Kind.BROADCAST else 0
        pieces = draw.choice((1, 2, 3))
        plans = [make_plan(kind, nodes, rank, counts, pieces, root) for rank in range(len(nodes.of))]
        try:
            for _ in range(draw.choice((1, 1, 2))):
                plans = mutated(draw, nodes, plans)
            verify_plans(kind, nodes, counts, pieces, root, make=lambda _, __, rank, *___, plans=plans: plans[rank])
        except PlanError:
            refused += 1
            continue
        accepted += 1
        for seed in range(RUNS):
            form = {"in_place": seed % 2 == 1, "average": seed % 4 > 1}
            wrong = nodes_oracle.run(kind, nodes, counts, plans, seed, root, **form)
            assert not wrong, (number, nodes, counts, pieces, root, seed, form, wrong, plans)
    assert refused > MUTANTS / 2 and accepted > MUTANTS / 50, (accepted, refused)


def mutated(draw: random.Random, nodes: Nodes, plans: Sequence[NodePlan]) -> list[NodePlan]:
    """Plans with one mistake: of one rank, of all ranks of a node, or of all."""
    everyone = range(len(plans))
    whose = draw.choice(((draw.choice(everyone),), nodes.members[0], everyone, everyone))
    change, at, number = draw.choice(MUTATIONS), draw.random(), draw.getrandbits(64)
    return [change(plan, at, random.Random(number)) if rank in whose else plan for rank, plan in enumerate(plans)]


def _order(plan: NodePlan, at: float, draw: random.Random) -> NodePlan:
    """Steps change places, go, or are there twice."""
    steps = list(plan.steps)
    index = int(at * len(steps))
    match draw.randrange(4):
        case 0:
            steps[index : index + 2] = steps[index : index + 2][::-1]
        case 1:
            steps.insert(draw.randrange(len(steps)), steps.pop(index))
        case 2:
            steps.insert(draw.randrange(len(steps)), steps[index])
        case _:
            del steps[index]
    return dataclasses.replace(plan, steps=tuple(steps))


def _late(plan: NodePlan, at: float, draw: random.Random) -> NodePlan:
    """A join, or a far step, moves by a few steps: what lies between is beside it then."""
    steps = list(plan.steps)
    found = [index for index, step in enumerate(steps) if isinstance(step, Join | Far)]
    if found:
        index = found[int(at * len(found))]
        steps.insert(index + draw.choice((-2, -1, 1, 2, 3)), steps.pop(index))
    return dataclasses.replace(plan, steps=tuple(steps))


def _shared(plan: NodePlan, at: float, draw: random.Random) -> NodePlan:
    """Two tensors of scratch become one: the pieces under way share it."""
    one, other = draw.sample(sorted({*plan.scratch, "packed0", "middle1"}), 2)
    scratch = {name: max(plan.scratch.values(), default=0) for name in plan.scratch}

    def joined(span: ElementSpan) -> ElementSpan:
        return at_(span, buffer=other) if span.buffer == one else span

    return NodePlan(tuple(rewritten(step, joined) for step in plan.steps), scratch)


def _numbers(plan: NodePlan, at: float, draw: random.Random) -> NodePlan:
    """One step, or one span of it, is another."""
    steps = list(plan.steps)
    index = int(at * len(steps))
    step, chosen, by = steps[index], draw.randrange(8), draw.choice((-2, -1, 1, 2))
    field = draw.choice(("offset", "offset", "count", "tensor", "buffer"))

    which = chosen % max(len(spans_of(step)), 1)
    turn = itertools.count()

    def altered(span: ElementSpan) -> ElementSpan:
        if next(turn) != which:
            return span
        return at_(span, **{field: draw.choice(BUFFERS) if field == "buffer" else getattr(span, field) + by})

    match step:
        case Join(number):
            steps[index] = Join(number + by)
        case NodeBroadcast(parts) if parts and chosen < 3:
            where = draw.randrange(len(parts))
            root, span = parts[where]
            instead = (((root + by, span),), (), ((root, span),) * 2)[chosen]
            steps[index] = NodeBroadcast((*parts[:where], *parts[where + 1 :], *instead))
        case Copies(pairs) if pairs and chosen < 4:
            where = draw.randrange(len(pairs))
            (to, given), other = pairs[where], pairs[where - 1][0]
            more = [at_(other, count=to.count), at_(given, buffer="input", tensor=0)]
            changed = [((given, to),), (), ((to, given), (more[0], to)), ((to, given), (more[1], to))][chosen]
            steps[index] = Copies((*pairs[:where], *changed, *pairs[where + 1 :]))
        case Far(sent=(first, *rest)) if chosen < 3:
            steps[index] = dataclasses.replace(step, sent=(first + by, rest[0] - by, *rest[1:]))
        case Far() if chosen < 3:
            kind = draw.choice(KINDS)
            steps[index] = dataclasses.replace(step, kind=kind, root=max(step.root + by, 0) * (kind is Kind.BROADCAST))
        case Near() if chosen < 2:
            turned = Kind.ALL_TO_ALL if step.kind is Kind.REDUCE_SCATTER else Kind.REDUCE_SCATTER
            steps[index] = dataclasses.replace(step, kind=turned)
        case _:
            steps[index] = rewritten(step, altered)
    return dataclasses.replace(plan, steps=tuple(steps))


def _more(plan: NodePlan, at: float, draw: random.Random) -> NodePlan:
    """A copy between spans of the plan, somewhere; or two steps of copies are one."""
    steps = list(plan.steps)
    index = int(at * len(steps))
    copies = [number for number, step in enumerate(steps) if isinstance(step, Copies)]
    if draw.random() < 0.4 and len(copies) > 1:
        where = draw.randrange(len(copies) - 1)
        later = steps.pop(copies[where + 1])
        steps[copies[where]] = Copies((*steps[copies[where]].pairs, *later.pairs))  # type: ignore[union-attr]
        return dataclasses.replace(plan, steps=tuple(steps))
    spans = [span for step in steps for span in spans_of(step)]
    to, given = draw.choice(spans), draw.choice(spans)
    count = min(to.count, given.count)
    steps.insert(index, Copies(((at_(to, count=count), at_(given, count=count)),)))
    return dataclasses.replace(plan, steps=tuple(steps))


MUTATIONS = (_order, _late, _late, _shared, _numbers, _numbers, _more, _more)


def at_(span: ElementSpan, **changes: Any) -> ElementSpan:
    return dataclasses.replace(span, **changes)


def spans_of(step: Step) -> list[ElementSpan]:
    found: list[ElementSpan] = []

    def note(span: ElementSpan) -> ElementSpan:
        found.append(span)
        return span

    rewritten(step, note)
    return found


def rewritten(step: Step, change: Callable[[ElementSpan], ElementSpan]) -> Step:
    """With other spans; a far step in place has one."""
    match step:
        case Copies(pairs):
            return Copies(tuple((change(to), change(given)) for to, given in pairs))
        case NodeBroadcast(parts):
            return NodeBroadcast(tuple((root, change(span)) for root, span in parts))
        case Near():
            return dataclasses.replace(step, output=change(step.output), input=change(step.input))
        case Far():
            output = change(step.output)
            return dataclasses.replace(
                step, output=output, input=output if step.input == step.output else change(step.input)
            )
    return step
