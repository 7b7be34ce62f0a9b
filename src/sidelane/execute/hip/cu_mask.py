"""Two sets of an AMD GPU's compute units (CUs), as streams with CU masks.

A mask has a bit for each CU. Linux gives consecutive bits to the dies in turn, and on a die to its shader engines in
turn (``mqd_symmetrically_map_cu_mask`` of the kernel's amdkfd). So the first ``n`` bits are ``n`` CUs that are spread
over all shader engines, and so are the bits that are left.
"""

from __future__ import annotations

import ctypes

from sidelane.errors import UnavailableError
from sidelane.execute.cuda.partition import SmGroup
from sidelane.execute.hip.runtime import Runtime

_BITS = 32


def mask_words(units: range, total: int) -> list[int]:
    """Return the mask of a range of CUs as 32-bit words.

    >>> [hex(word) for word in mask_words(range(30, 34), 40)]
    ['0xc0000000', '0x3']
    """
    bits = sum(1 << unit for unit in units)
    return [bits >> _BITS * word & 0xFFFFFFFF for word in range(-(-total // _BITS))]


class CuSplit:
    """The CUs of a device, divided into two sets (see ``execute.cuda.partition.UnitSplit``).

    A masked stream has normal priority only, since the runtime takes a mask or a priority: ``urgent`` is a second one.
    It is ordered with the legacy default stream in both directions: the runtime has no flag to prevent that.

    Args:
        runtime: the HIP runtime; its device is current.
        units: number of CUs of the first set.
        total: number of CUs of the device.

    Attributes:
        taken: the first set.
        left: the set of all other CUs.

    Raises:
        UnavailableError: the device has no set of that size.
        DriverError: the runtime refused a mask.
    """

    def __init__(self, runtime: Runtime, units: int, total: int) -> None:
        if not 0 < units < total:
            raise UnavailableError(f"partition: units (value={units}, allowed=1..{total - 1})")
        self._runtime = runtime
        self._streams: list[int] = []
        try:
            self.taken, self.left = (self._part(part, total) for part in (range(units), range(units, total)))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Destroy the streams, on which no work may be running. Idempotent."""
        while self._streams:
            self._runtime.call("hipStreamDestroy", self._streams.pop())

    def _part(self, units: range, total: int) -> SmGroup:
        normal, urgent = (masked_stream(self._runtime, mask_words(units, total)) for _ in range(2))
        self._streams += [normal, urgent]
        return SmGroup(len(units), normal, urgent)


def masked_stream(runtime: Runtime, words: list[int]) -> int:
    """Make a stream whose kernels run on the CUs of a mask.

    Raises:
        DriverError: the runtime refused the mask.
    """
    mask = (ctypes.c_uint32 * len(words))(*words)
    return int(runtime.query(ctypes.c_void_p, "hipExtStreamCreateWithCUMask", len(words), ctypes.addressof(mask)))
