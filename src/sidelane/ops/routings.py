"""Programs that GEMMs in parts keep: those for copy engines, for the counts of the last few routings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence

import torch

from sidelane.choice import fused_heuristic
from sidelane.ops.handle import FLOATS, check_tensor, power_of_two
from sidelane.ops.operands import MOST_ELEMENTS
from sidelane.program.ir import Program
from sidelane.session import BoundProgram, Communicator

MOST_PIECES, DEFAULT_PIECES = 64, fused_heuristic.PIECES
MOST_TABLES = 8
"""Largest number of routings whose programs a communicator keeps; an older one is proved and bound again."""

Counts = Sequence[Sequence[int]] | torch.Tensor
Table = tuple[tuple[int, ...], ...]
Maker = Callable[[Table, int, int, int], Program]


@dataclasses.dataclass(slots=True)
class Routing:
    """The program for one table and number of pieces.

    Attributes:
        program: program of all parts.
        in_a_graph: a graph holds it, so that it must stay.
    """

    program: BoundProgram
    in_a_graph: bool = False


class Routings:
    """Programs for some routings between two buffers of every rank.

    Args:
        comm: communicator of the ranks.
        make: function that makes the program of a table, pieces, bytes of a row and most rows (``program.pieces``).
        sent: rows that leave, [most_rows, columns] in symmetric memory.
        buffers: buffers of that program, by name, ``sent`` among them.
    """

    def __init__(self, comm: Communicator, make: Maker, sent: torch.Tensor, buffers: dict[str, torch.Tensor]) -> None:
        self._comm, self._make, self._buffers = comm, make, buffers
        self._sizes = sent.shape[1] * sent.element_size(), sent.shape[0]
        self.known: dict[tuple[Table, int], Routing] = {}

    def of(self, table: Table, pieces: int) -> Routing:
        """Return the program for such counts; all ranks make it together if they are new."""
        key = table, pieces
        found = self.known.pop(key, None)
        if found is None:
            found = Routing(self._comm.load(self._make(table, pieces, *self._sizes), self._buffers))
            # Programs that graphs hold stay.
            loose = [known for known, routing in self.known.items() if not routing.in_a_graph]
            if len(loose) >= MOST_TABLES:
                self.known.pop(loose[0]).program.close()
        self.known[key] = found  # the latest comes last
        return found


def suit_graphs(comm: Communicator, kept_as: Hashable, table: Table, pieces: int) -> bool:
    """Return True if a graph can hold a call with such counts: the ranks have made its resources."""
    handle = comm.kept.get(kept_as)
    return handle is not None and (table, pieces) in handle.routings.known


def most_of(table: Table, most_rows: int) -> int:
    """Return the rows of buffers for any rank's sent or received rows: few shapes, whatever the counts.

    >>> most_of(((3, 30), (2, 3)), 10), most_of(((3, 3), (2, 3)), 10)
    (64, 10)
    """
    return max(most_rows, power_of_two(max(map(sum, (*table, *zip(*table, strict=True))))))


def check_pieces(name: str, pieces: int) -> None:
    """Refuse an invalid number of pieces. Raises ValueError."""
    if not 1 <= pieces <= MOST_PIECES:
        raise ValueError(f"{name}: pieces (value={pieces}, allowed=1..{MOST_PIECES})")


def checked(
    name: str, comm: Communicator, x: object, weight: object, counts: Counts, most_rows: int, pieces: int
) -> Table:
    """Return the counts as numbers. Raises ValueError or TypeError for arguments that a GEMM in parts cannot take."""
    check_tensor(name, "weight", weight, comm.device, FLOATS, (2,))
    assert isinstance(weight, torch.Tensor)
    check_tensor(name, "x", x, comm.device, (weight.dtype,), (2,))
    assert isinstance(x, torch.Tensor)
    n = comm.world_size
    check_pieces(name, pieces)
    widest = max(weight.shape)
    if most_rows < 1 or not weight.shape[0] or most_rows * widest > MOST_ELEMENTS:
        given, allowed = f"{most_rows}, {weight.shape[0]}", f"1 and more, {MOST_ELEMENTS} together"
        raise ValueError(f"{name}: most_rows, columns of the result (value={given}, allowed={allowed})")
    if x.shape[1] != weight.shape[1] or not x.shape[1]:
        raise ValueError(f"{name}: columns of x (value={x.shape[1]}, allowed={weight.shape[1]}, those of the weight)")
    if isinstance(counts, torch.Tensor) and counts.device.type != "cpu":
        raise ValueError(f"{name}: device of counts (value={counts.device}, allowed=cpu: the host has to know them)")
    table = tuple(tuple(int(count) for count in row) for row in counts)
    if [len(row) for row in table] != [n] * n:
        raise ValueError(f"{name}: rows of counts (value={[len(row) for row in table]}, allowed={[n] * n})")
    sends, gets = list(map(sum, table)), list(map(sum, zip(*table, strict=True)))
    if min(map(min, table)) < 0 or sends[comm.rank] > x.shape[0] or max(*sends, *gets) > most_rows:
        given = f"{sends[comm.rank]} sent of {x.shape[0]}, {max(*sends, *gets)} to or from a rank"
        raise ValueError(f"{name}: counts (value={given}, allowed=rows of x, up to {most_rows}, none negative)")
    return table
