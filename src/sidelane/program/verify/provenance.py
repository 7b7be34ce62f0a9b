"""Provenance: run the program on origins instead of bytes, and see whether every output holds what it should.

One linearization stands for all: it is checked only once no two unordered commands touch the same bytes. Before each
invocation every input and output is relabelled with that invocation, so that bytes of an earlier one are told apart,
and outputs that nobody writes hold what their caller left there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from sidelane.program.batch import parts_of
from sidelane.program.collective import REDUCING, Buffer, Kind, Reduction, Span
from sidelane.program.ir import Broadcast, Command, Copy, Program, Reduce, Swap
from sidelane.program.verify.contents import Content, Contents, Mixture, Origin, Piece, combine
from sidelane.program.verify.order import Order
from sidelane.program.verify.report import joined, name_bytes, name_event
from sidelane.program.verify.unroll import Event, Unrolled


def check_provenance(order: Order) -> list[str]:
    """Return a line for each range of an output that holds something else than its collective defines.

    Inputs must be left as they were, except where the output of an in-place call lies in them.
    """
    run = _Run(order.unrolled)
    for number in order.sequence:
        event = order.unrolled.events[number]
        if event.command is not None:
            for index, command in enumerate(event.run):
                run.execute(event, index, command)
            continue
        if event.invocation:
            run.check(event.rank, event.invocation)
        run.relabel(event.rank, event.invocation + 1)
    return list(run.violations.values())


class _Run:
    def __init__(self, unrolled: Unrolled) -> None:
        self.programs = unrolled.programs
        self.buffers = {
            (rank, buffer): Contents(unrolled.buffer_bytes(rank, buffer), Content(Origin(rank, buffer, 0), 0))
            for rank in range(unrolled.world_size)
            for buffer in Buffer
        }
        distinct = {id(program): program for program in unrolled.programs}
        self.expected = {key: _expected(program) for key, program in distinct.items()}
        self.violations: dict[tuple[object, ...], str] = {}

    def relabel(self, rank: int, invocation: int) -> None:
        """The caller overwrites its buffers for ``invocation``."""
        for buffer in (Buffer.INPUT, Buffer.OUTPUT):
            if nbytes := self.buffers[rank, buffer].nbytes:
                self.buffers[rank, buffer].fill(0, nbytes, Content(Origin(rank, buffer, invocation), 0))

    def execute(self, event: Event, index: int, command: Command) -> None:
        """Move origins as the command, number ``index`` of the event's run, moves bytes."""
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
                self._write(command.dst, self._reduced(event, index, command))

    def check(self, rank: int, invocation: int) -> None:
        """Compare what ``rank`` holds at the end of ``invocation`` with what it should hold."""
        program = self.programs[invocation - 1]
        found: dict[tuple[Buffer, str], list[tuple[int, int]]] = {}
        stale: set[tuple[Buffer, str]] = set()
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
            # What is wrong in one invocation is wrong in all: say it once, and once more if it then becomes stale.
            self.violations.setdefault(
                (id(program), rank, buffer, invocation > 1 and (buffer, text) in stale, *joined(ranges)),
                f"wrong bytes: rank {rank} ends invocation {invocation} with {name_bytes(rank, buffer, ranges)} {text}",
            )

    def _read(self, span: Span) -> list[Piece]:
        """Pieces of a span, with positions counted from its beginning."""
        return [
            Piece(start - span.offset, end - span.offset, content.moved(-span.offset))
            for start, end, content in self.buffers[span.rank, span.buffer].read(span.offset, span.end)
        ]

    def _write(self, span: Span, pieces: Sequence[Piece]) -> None:
        self.buffers[span.rank, span.buffer].write(
            Piece(start + span.offset, end + span.offset, content.moved(span.offset)) for start, end, content in pieces
        )

    def _reduced(self, event: Event, index: int, command: Reduce) -> list[Piece]:
        sources = [self._read(src) for src in command.srcs]
        element = command.reduction.element_bytes
        if any(piece.start % element or piece.content.shift % element for pieces in sources for piece in pieces):
            text = f"wrong bytes: {name_event(event.at(index))} combines elements that begin inside others"
            self.violations.setdefault((event.rank, event.engine, event.step + index), text)
        edges = sorted({edge for pieces in sources for piece in pieces for edge in (piece.start, piece.end)})
        walks = [iter(pieces) for pieces in sources]
        current = [next(walk) for walk in walks]
        result = []
        for start, end in pairwise(edges):
            current = [piece if piece.end > start else next(walk) for piece, walk in zip(current, walks, strict=True)]
            result.append(Piece(start, end, combine(command.reduction, [piece.content for piece in current])))
        return result


def _expected(program: Program) -> list[list[tuple[Buffer, int, int, Content]]]:
    """For each rank: (buffer, start, end, content) that it must hold in the end. Origins are of invocation 0 here."""
    ranks = range(program.world_size)
    collected: list[dict[tuple[Buffer, int, int, Reduction | None], list[Content]]] = [{} for _ in ranks]
    for collective, place in parts_of(program.collective):
        reduction = collective.reduction if collective.kind in REDUCING else None
        for chunk in collective.chunks():
            src = place(collective.input_span(chunk.src_rank, chunk.src_offset, chunk.nbytes))
            # Every rank of an all_reduce receives what the chunk's destination reduces.
            everyone = collective.kind is Kind.ALL_REDUCE
            for rank in ranks if everyone else (chunk.dst_rank,):
                dst = place(collective.output_span(rank, chunk.dst_offset, chunk.nbytes))
                content = Content(Origin(src.rank, src.buffer, 0), src.offset - dst.offset)
                collected[rank].setdefault((dst.buffer, dst.offset, dst.end, reduction), []).append(content)
    result = []
    for rank, outputs in enumerate(collected):
        pieces = [
            (buffer, start, end, combine(reduction, contents) if reduction else contents[0])
            for (buffer, start, end, reduction), contents in outputs.items()
        ]
        in_input = [(start, end) for buffer, start, end, _ in pieces if buffer is Buffer.INPUT]
        kept = Content(Origin(rank, Buffer.INPUT, 0), 0)
        gaps = _gaps(in_input, program.buffer_bytes(rank, Buffer.INPUT))
        result.append([*pieces, *((Buffer.INPUT, start, end, kept) for start, end in gaps)])
    return result


def _gaps(ranges: Sequence[tuple[int, int]], nbytes: int) -> Iterator[tuple[int, int]]:
    """Ranges of ``[0, nbytes)`` that ``ranges`` leave out."""
    position = 0
    for start, end in [*joined(ranges), (nbytes, nbytes)]:
        if position < start:
            yield position, start
        position = end


def _is_origin(content: Content | None, right: Content, invocation: int) -> bool:
    """True if a content is ``right``, in this invocation, and of one rank: as :func:`_of_invocation` tells, faster."""
    value = right.value
    if content is None or content.shift != right.shift or not isinstance(value, Origin):
        return False
    return content.value == (value.rank, value.buffer, invocation)


def _of_invocation(content: Content, invocation: int) -> Content:
    value = content.value
    if isinstance(value, Origin):
        return Content(value._replace(invocation=invocation), content.shift)
    terms = frozenset((_of_invocation(term, invocation), count) for term, count in value.terms)
    return Content(Mixture(value.reduction, terms), content.shift)


def _invocations(content: Content) -> set[int]:
    """Invocations for which the caller left what went into a content."""
    if isinstance(content.value, Origin):
        return {content.value.invocation}
    return {invocation for term, _ in content.value.terms for invocation in _invocations(term)}


def _name(piece: Piece, content: Content, invocation: int) -> str:
    """Name what a piece holds, from the view of the invocation that ends."""
    value = content.value
    start, end = piece.start + content.shift, piece.end + content.shift
    if isinstance(value, Mixture):
        terms = sorted(value.terms, key=str)
        inner = [
            (f"{count} times " if count > 1 else "") + _name(Piece(start, end, term), term, invocation)
            for term, count in terms
        ]
        return f"the {value.reduction} of ({', '.join(inner)})"
    where = Span(value.rank, value.buffer, start, end - start)
    if value.buffer is Buffer.STAGING:
        return f"{where}, which nobody wrote"
    if value.invocation < invocation:
        return f"stale {where} of invocation {value.invocation}"
    return str(where)
