"""Declarations of fused operators, and the one cache through which all of them are called.

An operator has up to three methods: ``fused`` (one kernel), ``split`` (parts that copy engines move) and ``unfused``
(a product and a collective). A call is made in two steps::

    launch = OPERATOR.launch(comm, words, tensors, check)    one dictionary look-up, if these layouts were seen before
    return launch(*tensors)                                  no argument is checked again

A new call is checked first. If its shape is new and its method ``auto``, the ranks choose a method together for eager
calls and for graphs, by sizes on which they agree, and make the resources of both. Columns of ``x`` may differ between
ranks, so no rank can tell by them that a shape is new: their mean in that call counts for all later ones. Calls inside
of a capture are checked each time, and not remembered.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from sidelane.choice.fused import FUSED, SPLIT, UNFUSED, FusedTime, FusedTimes, Method, choose_method
from sidelane.choice.key import key_here
from sidelane.choice.selection import Selection
from sidelane.choice.store import fused_times
from sidelane.errors import UnavailableError, in_no_order
from sidelane.ops.handle import INTERPRETED, check_choice, is_captured, reporting_refusals
from sidelane.session import Communicator
from sidelane.session.answers import lookup, remember

AUTO = "auto"
MOST_PIECES = 64

NO_HOST_KERNEL = "it has no kernel through host memory"

HOST_CELLS_BYTES = 128 << 10
"""Largest number of bytes that ``auto`` sends to all peers in words with flags through host memory, the flags not
counted. Between two H200s a norm of 128 KiB took 23.9 us so and 26.0 in separate calls, of 256 KiB 39.1 and 36.1, when
all cells still crossed PCIe twice (results/notes/kernels.md)."""

CachedLaunch = Callable[..., Any]
"""Function that runs a method on tensors of checked layouts."""

ProblemSizes = tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class OperatorCall:
    """Properties of a checked call by which its method is chosen and made ready.

    Attributes:
        key: key that distinguishes the shapes of calls on all ranks.
        sizes: sizes of this rank, by which times are looked up.
        element_bytes: size of an element in bytes, by which times are looked up; alike on all ranks. None: any.
        make: function of each method that makes its resources, with all ranks if they are new, and returns its launch;
            it gets the number of pieces of a split one.
        without: names of methods that these arguments rule out.
    """

    key: Hashable
    sizes: ProblemSizes
    element_bytes: int | None
    make: Mapping[str, Callable[[int], CachedLaunch]] = dataclasses.field(default_factory=dict)
    without: tuple[str, ...] = ()


def find_launch(
    comm: Communicator, words: tuple[object, ...] | None, tensors: tuple[object, ...]
) -> tuple[CachedLaunch | None, Hashable]:
    """Return the cached launch of a call, None if it is new, and the key under which its launch is to be cached.

    Args:
        comm: communicator of the ranks.
        words: name of the operator, and all on which its checks depend that is no tensor; None for a call that is
            checked each time, as calls inside of a capture are.
        tensors: tensors of the call, None for missing ones. Properties other than their layouts are ``words``.
    """
    if words is None or is_captured(comm):
        return None, None
    key = words
    try:
        for t in tensors:  # plainly, since every call comes here
            key += (t,) if t is None else (t.dtype, t.device, t.shape, t.stride())  # type: ignore[attr-defined]
        answers = comm.cache.get(lookup)
        return None if answers is None else answers.get(key), key
    except (AttributeError, TypeError, RuntimeError):  # refused by checks, which tell the peers
        return None, None


def cached(
    comm: Communicator, words: tuple[object, ...] | None, tensors: tuple[object, ...], make: Callable[[], CachedLaunch]
) -> CachedLaunch:
    """Return the cached launch of a call; ``make`` checks a new call and makes its launch. See :func:`find_launch`."""
    launch, key = find_launch(comm, words, tensors)
    if launch is None:
        launch = make()
        remember(comm, key, launch)
    return launch


def host_objection(ranks: int, nbytes: int) -> str:
    """Return the reason for which ``auto`` sends no words with flags of so many bytes to each peer through host memory;
    empty: it does.
    """
    if torch.version.hip is not None:
        return "no kernel through host memory has run on AMD's GPUs"
    most = HOST_CELLS_BYTES // max(1, ranks - 1)
    return f"fused takes up to {most} bytes through host memory" if nbytes > most else ""


def runs_kernels(comm: Communicator) -> bool:
    """Return True unless this is a CPU rank whose environment lacks Triton's interpreter."""
    return INTERPRETED or not comm.backend.hosts_meet


def mean_of(columns: Sequence[Sequence[int]]) -> ProblemSizes:
    """Return the mean of each size over the ranks, at least 1."""
    return tuple(max(1, round(sum(column) / len(column))) for column in columns)


@dataclasses.dataclass(frozen=True, slots=True)
class FusedOperator:
    """Declaration of a fused operator. It enters ``OPERATORS`` when it is made.

    Attributes:
        name: name of the function.
        sizes: names of the sizes by which its times are measured and looked up.
        methods: methods of eager calls.
        captured: methods inside of a graph, which has none that needs the host.
        pieces: default number of pieces of ``split``; 0 without this method.
        has_sum: ranks' results are added up, so that bits depend on the method.
        split_adds_in_order: ``split`` adds the ranks' results up in the order of the ranks.
        agreed: function that returns one list of sizes for all ranks, given each size of all ranks.
        too_large: function of the sizes that returns the reason for which ``auto`` excludes ``fused``; empty: none.
        order: function of the number of ranks and the sizes that returns the order of a fused call which leaves it
            open, with the reason; None without orders.
        through_host: function of the number of ranks, the sizes and the bytes of an element that returns the reason for
            which ``auto`` excludes ``fused`` where host memory is between the GPUs; empty: none.
    """

    name: str
    sizes: tuple[str, ...]
    methods: tuple[str, ...] = (FUSED, UNFUSED)
    captured: tuple[str, ...] = (FUSED, UNFUSED)
    pieces: int = 0
    has_sum: bool = False
    split_adds_in_order: bool = True
    agreed: Callable[[Sequence[Sequence[int]]], ProblemSizes] = mean_of
    too_large: Callable[[ProblemSizes], str] = lambda sizes: ""
    order: Callable[[int, ProblemSizes], Selection[str]] | None = None
    through_host: Callable[[int, ProblemSizes, int], str] = lambda ranks, sizes, element_bytes: NO_HOST_KERNEL

    def __post_init__(self) -> None:
        OPERATORS[self.name] = self

    def launch(
        self,
        comm: Communicator,
        words: tuple[object, ...] | None,
        tensors: tuple[object, ...],
        check: Callable[[], OperatorCall],
        method: str,
        pieces: int | None = None,
    ) -> CachedLaunch:
        """Return the function that runs a call. Collective if it makes new resources.

        Args:
            comm: communicator of the ranks.
            words: all arguments that are no tensors, except for method and pieces; None for a call that is checked each
                time.
            tensors: tensors of the call, None for missing ones. Properties other than their layouts are ``words``.
            check: function that refuses wrong arguments.
            method: name of one of the methods, or ``auto``; the same on all ranks.
            pieces: number of pieces of ``split`` that the caller asks for.
        """
        asked = None if words is None else (self.name, method, pieces, words)
        known, key = find_launch(comm, asked, tensors)
        if known is not None:
            return known
        with reporting_refusals(comm, self.name):
            self.check_method(comm, method, pieces)
            call = check()
        chosen = self.choose(comm, method, pieces, call)
        with torch.inference_mode(False):  # later calls in any mode may write to it
            made = call.make[chosen.name](chosen.pieces or self.pieces)
        remember(comm, key, made)
        return made

    def check_method(self, comm: Communicator, method: str, pieces: int | None = None) -> None:
        """Refuse a method that is unknown or that a graph cannot have, and pieces of a method without any."""
        check_choice(self.name, "method", method, (AUTO, *self.methods))
        if method not in (AUTO, *self.captured) and is_captured(comm):
            allowed = ", ".join((AUTO, *self.captured))
            raise ValueError(f"{self.name}: method inside of a capture (value={method}, allowed={allowed})")
        if method == SPLIT and not self.split_adds_in_order and comm.config.deterministic:
            raise in_no_order(self.name, "split adds the ranks' parts with torch.sum (allowed=unfused, auto)")
        if pieces is not None and method != SPLIT:
            raise ValueError(f"{self.name}: pieces with method {method} (value={pieces}, allowed=None)")
        if pieces is not None and not 1 <= pieces <= MOST_PIECES:
            raise ValueError(f"{self.name}: pieces (value={pieces}, allowed=1..{MOST_PIECES})")

    def choose(self, comm: Communicator, method: str, pieces: int | None, call: OperatorCall) -> Method:
        """Return the method of a checked call. Collective if its shape is new and ``method`` is ``auto``: then the
        ranks choose for eager calls and for graphs, and make the resources of both.
        """
        if method != AUTO:
            return Method(method, pieces or 0)
        if comm.config.deterministic and self.has_sum:  # one way for all shapes
            return Method(UNFUSED)
        captured = is_captured(comm)
        key = FusedOperator, self.name, call.key
        known: tuple[Method, Method] | None = comm.cache.get(key)
        if known is None:
            if captured:
                return Method(self.captured[0])  # making it raises the error
            sizes, has_kernels = self._agreed_sizes(comm, call.sizes)
            eager, in_graph = (
                self._selected(comm, sizes, call, captured=is_in, has_kernels=has_kernels).candidate
                for is_in in (False, True)
            )
            self._require_legal(comm, call, eager, captured=False)
            known = comm.cache[key] = eager, in_graph
            if comm.device.type != "cpu" and in_graph.name in call.make:
                call.make[in_graph.name](in_graph.pieces or self.pieces)
        self._require_legal(comm, call, known[captured], captured=captured)
        return known[captured]

    def _require_legal(self, comm: Communicator, call: OperatorCall, chosen: Method, *, captured: bool) -> None:
        """Refuse a call that only a kernel can run, which ``auto`` does not take without a measurement here."""
        legal = self._legal(call, captured=captured)
        if chosen.name not in legal:
            with reporting_refusals(comm, self.name):
                where = "inside of a capture" if captured else "of a call with such arguments"
                text = f"{where}, on GPUs that have never run its kernel (value={AUTO}, allowed={', '.join(legal)})"
                raise UnavailableError(f"{self.name}: method {text}")

    def _legal(self, call: OperatorCall, *, captured: bool) -> list[str]:
        return [method for method in (self.captured if captured else self.methods) if method not in call.without]

    def _selected(
        self, comm: Communicator, sizes: ProblemSizes, call: OperatorCall, *, captured: bool, has_kernels: bool
    ) -> Selection[Method]:
        through_host = comm.backend.peers.through_host
        reason = (
            "CPU ranks run kernels by Triton's interpreter only (TRITON_INTERPRET=1)"
            if not has_kernels and FUSED in self.methods and UNFUSED in self._legal(call, captured=captured)
            else self.too_large(sizes)
        )
        if reason:
            return Selection(Method(UNFUSED), reason)
        found = choose_method(
            tables_of(comm),
            self.name,
            comm.world_size,
            sizes,
            ways=self._legal(call, captured=captured),
            element_bytes=call.element_bytes,
            captured=captured,
            device_type=comm.device.type,
            guesses=comm.abilities.kernels_have_run and not through_host,
        )
        if through_host and not found.table:  # of measured times
            reason = self.through_host(comm.world_size, sizes, call.element_bytes or 2)
            return Selection(Method(UNFUSED if reason else FUSED), reason or "words with flags through host memory")
        return found

    def _agreed_sizes(self, comm: Communicator, sizes: ProblemSizes) -> tuple[ProblemSizes, bool]:
        """Return one list of sizes for all ranks, whose own may differ, and whether kernels run on all. Collective."""
        tables_of(comm)
        own = torch.tensor((runs_kernels(comm), *sizes), dtype=torch.int64, device=comm.device)
        of_all = torch.empty(comm.world_size * len(own), dtype=torch.int64, device=comm.device)
        comm.all_gather(of_all, own)
        comm.synchronize()
        run, *columns = zip(*of_all.view(comm.world_size, -1).tolist(), strict=True)
        return self.agreed(columns), all(run)

    def explain(self, comm: Communicator, call: OperatorCall, *, captured: bool) -> str:
        """Return the choice for a shape in words, with the order if the operator has one. See :func:`explain`."""
        found = self._selected(comm, call.sizes, call, captured=captured, has_kernels=runs_kernels(comm))
        if self.order is None or found.candidate.name != FUSED:
            return f"{self.name}: {found}"
        return f"{self.name}: {found}; order {self.order(comm.world_size, call.sizes)}"


OPERATORS: dict[str, FusedOperator] = {}
"""Operators that have a ``method``, by name."""


def explain(
    comm: Communicator,
    op: str,
    *sizes: int,
    captured: bool = False,
    dtype: torch.dtype | None = None,
    without: Sequence[str] = (),
) -> str:
    """Explain the choice of ``method="auto"`` for a shape, and of ``order="auto"`` if the operator has it. Collective
    the first time, as the times are rank 0's.

    Args:
        comm: communicator of the ranks.
        op: name of an operator that has a ``method``.
        sizes: rows, columns, tokens; tokens, hidden; batch, tables, pooling; or rows, depth, columns.
        captured: the call is in a graph.
        dtype: dtype of the weight, tables or rows; None for any that was measured.
        without: methods that the call lacks: ``split`` with counts on the device, or with several experts.

    Returns:
        A line with the method that a call takes, and the times by which it was chosen.

    Raises:
        ValueError: no such operator, or not as many sizes as it has; the peers raise PeerError with the reason.
        UnavailableError: the first time, inside of a capture.
    """
    with reporting_refusals(comm, "explain"):
        check_choice("explain", "op", op, tuple(OPERATORS))
        if len(sizes) != len(wanted := OPERATORS[op].sizes) or min(sizes) < 1:
            raise ValueError(f"explain: sizes of {op} (value={sizes}, allowed={len(wanted)} numbers from 1)")
    call = OperatorCall((), sizes, None if dtype is None else dtype.itemsize, without=tuple(without))
    return OPERATORS[op].explain(comm, call, captured=captured)


def tables_of(comm: Communicator) -> FusedTimes:
    """Return rank 0's tables of times on all ranks, by which they choose alike. Collective, the first time.

    Raises:
        UnavailableError: the tables were not sent yet, and a graph is being captured.
    """
    found: FusedTimes | None = comm.cache.get(tables_of)
    if found is None:
        if is_captured(comm):
            raise UnavailableError("fused operators: auto in a capture needs an eager call, or explain, before it")
        content = b""
        if comm.rank == 0:
            tables = fused_times(
                comm.config.profile, key_here(comm.device.type, comm.world_size).between(comm.backend.peers)
            )
            rows = {where: [time.to_dict() for time in times] for where, times in tables.items()}
            content = json.dumps(rows).encode()
        sent = json.loads(_sent_by_rank_0(comm, content))
        found = comm.cache[tables_of] = {where: tuple(map(FusedTime.from_dict, rows)) for where, rows in sent.items()}
    return found


def _sent_by_rank_0(comm: Communicator, content: bytes) -> bytes:
    length = torch.tensor([len(content)], dtype=torch.int64, device=comm.device)
    comm.broadcast(length, root=0)
    comm.synchronize()  # raises if a peer failed, so that the length is one
    words = torch.zeros(int(length), dtype=torch.uint8, device="cpu")
    if comm.rank == 0:
        words.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    words = words.to(comm.device)
    comm.broadcast(words, root=0)
    comm.synchronize()
    return bytes(words.cpu().tolist())
