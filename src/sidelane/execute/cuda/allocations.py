"""Which allocations a graph's copies lie in: a node of a copy refers to them, not to the addresses alone.

Memory that was freed may be given out again at the same addresses, as after ``torch.cuda.empty_cache()``. The driver
crashed when it launched graphs that had been made before that (decision 64), so that they are made anew.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

from sidelane.execute.cuda.driver import Driver
from sidelane.memory.ordinary import Standing


class Allocations:
    """The allocations in which bytes lie.

    Args:
        driver: of the device.
        spans: (address, bytes) of what may be freed.

    Attributes:
        standing: what :meth:`stand` asks, for code that asks itself; None where there is nothing to ask.
    """

    def __init__(self, driver: Driver, spans: Iterable[tuple[int, int]]) -> None:
        self._ask = driver.allocation_question()
        places = sorted({place for span in spans for place in driver.allocations_in(*span)})
        numbers = tuple((place, question, self._number(place, question)) for place, question in places)
        self._numbers = [(ctypes.c_void_p(place), question, number) for place, question, number in numbers]
        function = ctypes.cast(self._ask, ctypes.c_void_p).value or 0
        self.standing: Standing | None = (function, numbers) if numbers else None

    def stand(self) -> bool:
        """True while none of them has been freed, even if its addresses have been given out again since."""
        return all(self._number(place, question) == number for place, question, number in self._numbers)

    def _number(self, place: int | ctypes.c_void_p, question: int) -> int:
        """Of the allocation around an address, unique in this process; 0 where there is none."""
        number = ctypes.c_uint64()
        failed = self._ask(ctypes.byref(number), question, ctypes.c_void_p(place) if isinstance(place, int) else place)
        return 0 if failed else number.value
