"""Arithmetic of the speedups of a GEMM and a collective at once (ConCCL paper, section IV-B3)."""

from __future__ import annotations

LEAST_GAIN = 0.05
"""Ideal gain below which a percentage of it is meaningless."""


def ideal_speedup(gemm_us: float, comm_us: float) -> float:
    """Return the speedup over serial if the shorter of the two were hidden entirely (ConCCL paper, section IV-B3).

    >>> round(ideal_speedup(1410.0, 1840.0), 3)
    1.766
    """
    return (gemm_us + comm_us) / max(gemm_us, comm_us)


def speedup(gemm_us: float, comm_us: float, time_us: float) -> float:
    """Return the speedup of a concurrent run over the sum of the isolated times."""
    return (gemm_us + comm_us) / time_us


def percent_of_ideal(gemm_us: float, comm_us: float, time_us: float) -> float | None:
    """Return the reached share of the ideal gain: 0 is serial, 100 the longer of the two alone; it can be negative.

    It is undefined (None) if the shorter of the two is less than 5% of the longer: the possible gain is then no more
    than the noise from run to run, and the number would be meaningless.

    Args:
        gemm_us: isolated time of the GEMM in microseconds.
        comm_us: isolated time of the collective. The strict number takes the fastest measured implementation, the
            papers' number takes the vendor library's.
        time_us: time of both together.

    >>> round(percent_of_ideal(1410.0, 1840.0, 1860.0), 1)
    97.5
    >>> percent_of_ideal(1410.0, 10.0, 1430.0) is None
    True
    """
    possible = ideal_speedup(gemm_us, comm_us) - 1.0
    if possible < LEAST_GAIN:
        return None
    return 100.0 * (speedup(gemm_us, comm_us, time_us) - 1.0) / possible
