"""How long the host needs to learn of a stream's end: half of what host and stream need there and back."""

from __future__ import annotations

import time

import numpy as np

from sidelane.errors import UnavailableError
from sidelane.execute.cuda.driver import Driver

_SETTLE_S = 50e-6  # until the stream surely waits
_LONGEST_S = 1.0


def round_trip_us(driver: Driver, trips: int = 50) -> float:
    """Median of: the host writes a word that a stream waits for, and asks until the stream has run empty.

    The stream writes a word to the host in between, as the executor's last batch does. Neither half can be measured
    alone, since the clocks of host and device do not agree to a microsecond.

    Args:
        driver: of the device.
        trips: how many.

    Raises:
        UnavailableError: the stream did not get on.
    """
    words = driver.host_words(2)
    stream = driver.create_stream()
    taken = []
    with driver.current():
        for number in range(1, trips + 1):
            ops = driver.memory_ops()
            ops.wait(words.address, number, equal=False)
            ops.write(words.address + 4, number)
            driver.submit([driver.bind_memory_ops(ops, stream)])
            time.sleep(_SETTLE_S)
            begin = time.perf_counter_ns()
            words.array[0] = number
            while not driver.is_idle(stream):
                if time.perf_counter_ns() - begin > _LONGEST_S * 1e9:
                    raise UnavailableError("round_trip_us: a stream does not see what the host writes within a second")
            taken.append((time.perf_counter_ns() - begin) / 1e3)
        driver.destroy_stream(stream)
    return float(np.median(taken))
