"""Provenance: run the program on origins instead of bytes, and check that every output holds the specified contents.

One linearization stands for all, because no two unordered commands touch the same bytes: that is checked before. Before
each invocation every input and output is labelled with that invocation, so that older bytes can be told apart, and
outputs without a write hold the bytes of their caller.

One invocation of each program stands for all, too. The contents of staging before it are an origin of their own, which
no output may have: so outputs are correct whatever staging holds, and staging is all that invocations leave for each
other. Only for a wrong program are all invocations examined, since bytes may be stale.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import pairwise

from sidelane.program.batch import parts_of
from sidelane.program.collective import REDUCING, Buffer, Kind, Span
from sidelane.program.contract import Contract
from sidelane.program.ir import Broadcast, Command, Copy, Program, Reduce, Swap
from sidelane.program.verify.contents import Content, ContentRange, Contents, Mixture, Origin, reduced
from sidelane.program.verify.layout import Layout, Occurrence, event_at, in_sequence, name_bytes, name_event
from sidelane.program.verify.order import HappensBefore


def check_provenance(order: HappensBefore) -> list[str]:
    """Return a line for each range of an output that differs from the collective's definition.

    Inputs must be left as they were, except where the output of an in-place call lies in them.
    """
    distinct = {id(program): number for number, program in reversed(list(enumerate(order.layout.programs, 1)))}
    firsts = set(distinct.values())
    alone = [place for place in order.places if place[0] in firsts or place[1] is None]
    found = _go_through(order.layout, alone, firsts)
    everything = set(range(1, len(order.layout.programs) + 1))
    return found and _go_through(order.layout, order.places, everything)


def _go_through(layout: Layout, places: Sequence[Occurrence], checked: AbstractSet[int]) -> list[str]:
    run = _Run(layout)
    for place in places:
        invocation, plan, number = place
        if plan is None:
            if invocation in checked:
                run.check(number, invocation)
            run.relabel(number, invocation + 1)
            continue
        _, first, _, behind, _, _ = plan.steps[number]
        for index in range(first, behind):
            run.execute(place, index, plan.queue.commands[index])
    return list(run.violations.values())


class _Run:
    def __init__(self, layout: Layout) -> None:
        self.programs = layout.programs
        distinct = {id(program): program for program in layout.programs}
        self.names = tuple(dict.fromkeys(name for program in distinct.values() for name in program.collective.names))
        self.buffers = {
            (rank, buffer): Contents(
                max(program.buffer_bytes(rank, buffer) for program in distinct.values()),
                Content(Origin(rank, buffer, 0), 0),
            )
            for rank in range(layout.world_size)
            for buffer in (*self.names, Buffer.STAGING)
        }
        self.expected = {key: _expected(program) for key, program in distinct.items()}
        self.violations: dict[tuple[object, ...], str] = {}

    def relabel(self, rank: int, invocation: int) -> None:
        """Overwrite the buffers of a rank as its caller does before ``invocation``."""
        for buffer in self.names:
            if nbytes := self.buffers[rank, buffer].nbytes:
                self.buffers[rank, buffer].fill(0, nbytes, Content(Origin(rank, buffer, invocation), 0))

    def execute(self, place: Occurrence, index: int, command: Command) -> None:
        """Move origins in the way in which the command, number ``index`` of its queue, moves bytes."""
        match command:
            case Copy(dst, src):
                content = self.buffers[src.rank, src.buffer].whole(src.offset, src.end)
                if content is None:
                    self._write(dst, self._read(src))
                else:
                    moved = content.moved(dst.offset - src.offset)
                    self.buffers[dst.rank, dst.buffer].fill(dst.offset, dst.end, moved)
            case Broadcast(dsts, src):
                pieces = self._read(src)
                for dst in dsts:
                    self._write(dst, pieces)
            case Swap(a, b):
                from_a, from_b = self._read(a), self._read(b)
                self._write(a, from_b)
                self._write(b, from_a)
            case Reduce():
                self._write(command.dst, self._reduced(place, index, command))

    def check(self, rank: int, invocation: int) -> None:
        """Compare the contents of ``rank`` at the end of ``invocation`` with the specified contents."""
        program = self.programs[invocation - 1]
        found: dict[tuple[str, str], list[tuple[int, int]]] = {}
        stale: set[tuple[str, str]] = set()
        for buffer, start, end, right in self.expected[id(program)][rank]:
            if _is_origin(self.buffers[rank, buffer].whole(start, end), right, invocation):
                continue
            right = _of_invocation(right, invocation)
            for piece in self.buffers[rank, buffer].read(start, end):
                if piece.content != right:
                    text = f"holding {_name(piece, piece.content, invocation)}, not {_name(piece, right, invocation)}"
                    found.setdefault((buffer, text), []).append((piece.start, piece.end))
                    if _invocations(piece.content) != {invocation}:
                        stale.add((buffer, text))
        for (buffer, text), ranges in found.items():
            # An error of one invocation is in all: report it once, and once more if the bytes then become stale.
            self.violations.setdefault(
                (id(program), rank, buffer, invocation > 1 and (buffer, text) in stale, *in_sequence(ranges)),
                f"wrong bytes: rank {rank} ends invocation {invocation} with {name_bytes(rank, buffer, ranges)} {text}",
            )

    def _read(self, span: Span) -> list[ContentRange]:
        """Return the pieces of a span, with positions counted from its beginning."""
        return [
            ContentRange(start - span.offset, end - span.offset, content.moved(-span.offset))
            for start, end, content in self.buffers[span.rank, span.buffer].read(span.offset, span.end)
        ]

    def _write(self, span: Span, pieces: Sequence[ContentRange]) -> None:
        self.buffers[span.rank, span.buffer].write(
            ContentRange(start + span.offset, end + span.offset, content.moved(span.offset))
            for start, end, content in pieces
        )

    def _reduced(self, place: Occurrence, index: int, command: Reduce) -> list[ContentRange]:
        sources = [_joined(self._read(src)) for src in command.srcs]
        element = command.reduction.element_bytes
        if any(piece.start % element or piece.content.shift % element for pieces in sources for piece in pieces):
            event = event_at(place, index)
            text = f"wrong bytes: {name_event(event)} combines elements that begin inside others"
            self.violations.setdefault(event[1:4], text)
        edges = sorted({edge for pieces in sources for piece in pieces for edge in (piece.start, piece.end)})
        walks = [iter(pieces) for pieces in sources]
        current = [next(walk) for walk in walks]
        result = []
        for start, end in pairwise(edges):
            current = [piece if piece.end > start else next(walk) for piece, walk in zip(current, walks, strict=True)]
            result.append(ContentRange(start, end, reduced(command.reduction, [piece.content for piece in current])))
        return result


def _joined(pieces: Sequence[ContentRange]) -> list[ContentRange]:
    """Join neighbouring pieces of the same content: bytes may have come in any portions."""
    result = list(pieces[:1])
    for piece in pieces[1:]:
        if piece.content == result[-1].content:
            result[-1] = ContentRange(result[-1].start, piece.end, piece.content)
        else:
            result.append(piece)
    return result


Expected = tuple[str, int, int, Content]
"""Buffer, first byte, byte behind the last, content. Origins are of invocation 0 here."""


def _expected(program: Program) -> list[list[Expected]]:
    """Return the specified contents of each rank at the end."""
    if isinstance(program.collective, Contract):
        return _contracted(program.collective)
    ranks = range(program.world_size)
    found: list[list[Expected]] = [[] for _ in ranks]
    for collective, place in parts_of(program.collective):
        # Where a rank's part of the input, and of the output, begins: the same for all chunks.
        inputs = [place(collective.input_span(rank, 0, 0)) for rank in ranks]
        outputs = [place(collective.output_span(rank, 0, 0)) for rank in ranks]
        terms: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
        for chunk in collective.chunks():
            term = (chunk.src_rank, inputs[chunk.src_rank].offset + chunk.src_offset)
            if collective.kind in REDUCING:
                terms.setdefault((chunk.dst_rank, chunk.dst_offset, chunk.nbytes), []).append(term)
                continue
            out = outputs[chunk.dst_rank]
            start = out.offset + chunk.dst_offset
            content = Content(Origin(term[0], inputs[0].buffer, 0), term[1] - start)
            found[chunk.dst_rank].append((out.buffer, start, start + chunk.nbytes, content))
        if not collective.copies_own:
            for rank in ranks:
                start = outputs[rank].offset + sum(row[rank] for row in collective.counts[:rank])
                own = collective.counts[rank][rank]
                untouched = Content(Origin(rank, outputs[rank].buffer, 0), 0)
                found[rank] += [(outputs[rank].buffer, start, start + own, untouched)] * bool(own)
        for (rank, offset, nbytes), sources in terms.items():
            # Every rank of an all_reduce receives what the chunk's destination reduces, bit by bit the same.
            for receiver in ranks if collective.kind is Kind.ALL_REDUCE else (rank,):
                out = outputs[receiver]
                start = out.offset + offset
                contents = [Content(Origin(src, inputs[0].buffer, 0), at - start) for src, at in sources]
                assert collective.reduction is not None
                content = reduced(collective.reduction, contents)
                found[receiver].append((out.buffer, start, start + nbytes, content))
    for rank, pieces in enumerate(found):
        in_input = [(start, end) for buffer, start, end, _ in pieces if buffer == Buffer.INPUT]
        kept = Content(Origin(rank, Buffer.INPUT, 0), 0)
        gaps = list(_gaps(in_input, program.buffer_bytes(rank, Buffer.INPUT)))
        pieces += [(Buffer.INPUT, start, end, kept) for start, end in gaps]
    return found


def _contracted(contract: Contract) -> list[list[Expected]]:
    """Return for each rank the results of a contract, and all other bytes as the caller left them."""
    found: list[list[Expected]] = [[] for _ in range(contract.world_size)]
    for result in contract.results:
        dst = result.dst
        sources = [Content(Origin(src.rank, src.buffer, 0), src.offset - dst.offset) for src in result.srcs]
        content = sources[0] if result.reduction is None else reduced(result.reduction, sources)
        found[dst.rank].append((dst.buffer, dst.offset, dst.end, content))
    for rank, pieces in enumerate(found):
        results = list(pieces)
        for buffer in (name for name in contract.names if name not in contract.scratch):
            claimed = [(start, end) for name, start, end, _ in results if name == buffer]
            kept = Content(Origin(rank, buffer, 0), 0)
            gaps = _gaps(claimed, contract.buffer_bytes(rank, buffer))
            pieces += [(buffer, start, end, kept) for start, end in gaps]
    return found


def _gaps(ranges: Sequence[tuple[int, int]], nbytes: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of ``[0, nbytes)`` that ``ranges`` leave out."""
    position = 0
    for start, end in [*in_sequence(ranges), (nbytes, nbytes)]:
        if position < start:
            yield position, start
        position = end


def _is_origin(content: Content | None, right: Content, invocation: int) -> bool:
    """Return True if a content is ``right`` in this invocation, and of one rank: a faster :func:`_of_invocation`."""
    value = right.value
    if content is None or content.shift != right.shift or not isinstance(value, Origin):
        return False
    return content.value == (value.rank, value.buffer, invocation)


def _of_invocation(content: Content, invocation: int) -> Content:
    value = content.value
    if isinstance(value, Origin):
        return Content(value._replace(invocation=invocation), content.shift)
    return Content(Mixture(value.reduction, _terms_of(value.terms, invocation)), content.shift)


@functools.lru_cache(maxsize=4096)  # equal for all ranks of an all_reduce, and for all pieces of a shard
def _terms_of(terms: tuple[Content, ...], invocation: int) -> tuple[Content, ...]:
    return tuple(_of_invocation(term, invocation) for term in terms)


def _invocations(content: Content) -> set[int]:
    """Return the invocations for which the caller left the bytes that went into a content."""
    if isinstance(content.value, Origin):
        return {content.value.invocation}
    return {invocation for term in content.value.terms for invocation in _invocations(term)}


def _name(piece: ContentRange, content: Content, invocation: int) -> str:
    """Name the content of a piece, from the view of the invocation that ends."""
    value = content.value
    start, end = piece.start + content.shift, piece.end + content.shift
    if isinstance(value, Mixture):
        inner = ", ".join(_name(ContentRange(start, end, term), term, invocation) for term in value.terms)
        return f"the {value.reduction} of ({inner})"
    where = Span(value.rank, value.buffer, start, end - start)
    if value.buffer == Buffer.STAGING:
        return f"{where}, which nobody wrote"
    if value.invocation < invocation:
        return f"stale {where} of invocation {value.invocation}"
    return str(where)
