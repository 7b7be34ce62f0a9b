"""Pairs of every class: bytes of a collective that make it shorter than a computation, as long, or longer.

The ConCCL paper sorts pairs by two properties (section III): which side is longer, and what limits the GEMM. Table I's
memory-bound GEMMs are so on an MI300X only. Here both properties are predicted of a described machine, and the bytes
follow from the times.
"""

from __future__ import annotations

import dataclasses
import math

from sidelane.program.collective import Kind
from sidelane.sizes import format_bytes
from sidelane_lab.machines.spec import Machine
from sidelane_lab.model.collectives import library_us
from sidelane_lab.model.gemm import bound_of, gemm_us
from sidelane_lab.model.kernels import dma_us
from sidelane_lab.pairs.workload import Bound, C3Class, Gemm, Workload, classify, parse_gemm

KINDS = (Kind.ALL_GATHER, Kind.ALL_TO_ALL)

LENGTHS = {C3Class.G_LONG: 0.5, C3Class.GC_EQUAL: 1.0, C3Class.C_LONG: 2.0}
"""Time of the collective over that of the computation, by class."""

COMPUTATIONS = (
    *("cb1", "4096x8192x8192"),
    *("64x57344x8192", "128x16384x53248", "bag", "attend", "add"),
)
"""Computations of the pairs. Their bounds depend on the machine: an embedding bag is limited by its bytes where nothing
is known of its rows."""

LEAST = 2
"""Fewest computations of a bound. With two collectives, every class and bound has four pairs or more."""

STEP_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class ClassPair:
    """A computation, and bytes at which each of ``KINDS`` makes a pair of one class with it.

    Attributes:
        gemm_us, comm_us: predicted times alone; of the collectives the geometric mean.
    """

    gemm: Gemm
    nbytes: int
    c3_class: C3Class
    bound: Bound
    gemm_us: float
    comm_us: float

    @property
    def name(self) -> str:
        """Name as ``sidelane c3`` takes it."""
        return f"{self.gemm.name}_{format_bytes(self.nbytes)}"

    def __str__(self) -> str:
        return f"{self.name}: {self.c3_class}, {self.bound}, {self.gemm_us:.0f} and {self.comm_us:.0f} us"


def pairs_by_class(machine: Machine) -> list[ClassPair]:
    """Return pairs of every class and bound, as predicted of a machine of one node.

    Raises:
        ValueError: the machine has several nodes or one GPU, or too few computations of a bound.
    """
    machine.refuse_nodes("c3 --pairs-by-class")
    if machine.gpus < 2:
        raise ValueError(f"c3 --pairs-by-class: machine (value={machine.name}, allowed=two GPUs or more)")
    gemms = [parse_gemm(text) for text in COMPUTATIONS]
    found = []
    for bound in Bound:
        alike = [gemm for gemm in gemms if bound_of(machine, gemm) is bound]
        if len(alike) < LEAST:
            raise ValueError(f"c3 --pairs-by-class: {machine.name} has {len(alike)} {bound}-bound of {COMPUTATIONS}")
        found += [_pair(machine, gemm, wanted, bound) for gemm in alike for wanted in LENGTHS]
    return found


def _pair(machine: Machine, gemm: Gemm, wanted: C3Class, bound: Bound) -> ClassPair:
    alone_us = gemm_us(machine, gemm)
    least, most = 1, 1 << 16  # steps
    while least < most:
        middle = (least + most) // 2
        if _mean_us(machine, middle * STEP_BYTES) < LENGTHS[wanted] * alone_us:
            least = middle + 1
        else:
            most = middle
    nbytes = least * STEP_BYTES
    return ClassPair(gemm, nbytes, wanted, bound, alone_us, _mean_us(machine, nbytes))


def class_of(machine: Machine, workload: Workload) -> C3Class:
    """Return the predicted class of a pair, by the fastest collective as in the study."""
    return classify(gemm_us(machine, workload.gemm), _fastest_us(machine, workload.collective, workload.nbytes))


def _mean_us(machine: Machine, nbytes: int) -> float:
    return math.prod(_fastest_us(machine, kind, nbytes) for kind in KINDS) ** (1 / len(KINDS))


def _fastest_us(machine: Machine, kind: Kind, nbytes: int) -> float:
    return min(library_us(machine, kind, nbytes), dma_us(machine, kind, nbytes))
