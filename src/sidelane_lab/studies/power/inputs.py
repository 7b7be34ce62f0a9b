"""What reductions are given while power is read: values that stay numbers however often they are added up.

Watts follow the bits that change. Run back to back, an all_reduce in place multiplies what it is given by the number of
ranks in every call: the small whole numbers of the checks would be infinite after some sixty calls on four ranks, then
no numbers at all, and the same bits would cross the links from there on. So inputs are random and tiny, and calls that
overwrite theirs get them anew long before they overflow.
"""

from __future__ import annotations

import math

import torch

from sidelane.program.collective import REDUCING
from sidelane_lab.baselines.candidate import PreparedCall
from sidelane_lab.baselines.reference import Case

SMALLEST = -100
LARGEST = 100
"""Powers of two between which values are kept; bfloat16 and float32 reach from -126 to 127."""


def calls_between(world_size: int) -> int:
    """Calls of an all_reduce in place after which its values come near to ``LARGEST``.

    >>> calls_between(2), calls_between(4), calls_between(8)
    (200, 100, 66)
    """
    return max(1, math.floor((LARGEST - SMALLEST) / math.log2(max(2, world_size))))


class ReducedInput:
    """This rank's input of one case, to be given to everything that is compared.

    Args:
        case: a reduction.
        seed: of its values.

    Raises:
        ValueError: no reduction, or a dtype whose exponents are too short for it.
    """

    def __init__(self, case: Case, seed: int) -> None:
        if case.kind not in REDUCING:
            raise ValueError(f"ReducedInput: kind (value={case.kind}, allowed={', '.join(sorted(REDUCING))})")
        if not case.dtype.is_floating_point or math.log2(torch.finfo(case.dtype).max) < LARGEST:
            raise ValueError(f"ReducedInput: dtype (value={case.dtype}, allowed=bfloat16, float32, float64)")
        generator = torch.Generator(device=case.device).manual_seed(64 * seed + case.rank)
        self._values = torch.empty(case.input_bytes // case.dtype.itemsize, dtype=case.dtype, device=case.device)
        self._values.uniform_(-1.0, 1.0, generator=generator).mul_(2.0**SMALLEST)
        self._calls = calls_between(case.world_size)

    def put(self, prepared: PreparedCall) -> None:
        """Give a candidate these values, on the current stream."""
        prepared.tensors.input.copy_(self._values)

    def replays_between(self, prepared: PreparedCall, calls: int) -> int | None:
        """Samples of ``calls`` after which a candidate needs them again; None if it leaves its input as it is."""
        return None if prepared.repeatable else max(1, self._calls // calls)
