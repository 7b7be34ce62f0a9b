"""What numbers of a machine's description can be: each alone, and beside each other.

The ranges are wide: a number outside of one is a wrong unit (bytes a second where 10^9 of them belong, seconds for
microseconds) or no machine at all. What contradicts another number is refused as well, since predictions would go by
whichever of the two a formula happens to use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from sidelane_lab.machines.spec import Machine

UNITS = {
    "_us": "microseconds",
    "_gbps": "10^9 bytes a second",
    "_tflops": "10^12 operations a second",
    "_kb": "kilobytes",
    "_mb": "megabytes",
    "_gb": "gigabytes",
    "_w": "watts",
}
"""What a name's end says of its number."""


@dataclasses.dataclass(frozen=True, slots=True)
class Limit:
    """Least and greatest value. ``zero``: or 0. ``whole``: without a fraction."""

    low: float
    high: float
    zero: bool = False
    whole: bool = False

    def holds(self, value: float) -> bool:
        """True if a number can be that."""
        inside = self.low <= value <= self.high or (self.zero and value == 0)
        return inside and not (self.whole and value != int(value))

    def __str__(self) -> str:
        text = f"{self.low:g} to {self.high:g}"
        return ("a whole number from " if self.whole else "") + ("0, or " if self.zero and self.low else "") + text


_TIME = Limit(1e-3, 1e4, zero=True)
_LATENCY = Limit(0.1, 1e4)
_SPEED = Limit(0.1, 1e4)
_MEMORY = Limit(10, 1e5)
_SHARE = Limit(0.01, 1)
_PART = Limit(0, 1)
_SWITCH = Limit(0, 1, whole=True)
_COUNT = Limit(1, 1024, whole=True)
_WATTS = Limit(0, 3000)

LIMITS: dict[str, Limit] = {
    "gpu.units": Limit(16, 1024, whole=True),  # half of them are enough for the smallest share of a collective, 8
    "gpu.peak_tflops": Limit(1, 1e5),
    "gpu.memory_gbps": _MEMORY,
    "gpu.memory_gb": Limit(1, 4096),
    "gpu.l2_mb": Limit(0, 4096),
    "gpu.cache_mb": Limit(0, 4096),
    "gpu.shared_kb": Limit(8, 4096),
    "gpu.blocks_per_unit": Limit(1, 128, whole=True),
    "links.peak_gbps": _SPEED,
    "links.usable_gbps": _SPEED,
    "links.network_gbps": Limit(0.1, 1e4, zero=True),
    "links.network_us": _TIME,
    "dma.engines": Limit(1, 256, whole=True),
    "dma.engine_gbps": _SPEED,
    "dma.runtime_share": _SHARE,
    "dma.shared_queues": _SHARE,
    "dma.local_gbps": _MEMORY,
    "dma.control_us": _TIME,
    "dma.doorbell_us": _TIME,
    "dma.fetch_us": _TIME,
    "dma.copy_us": _TIME,
    "dma.next_copy_us": _TIME,
    "dma.signal_us": _TIME,
    "dma.wait_us": _TIME,
    "dma.trigger_us": _TIME,
    "dma.sync_us": _TIME,
    "dma.reduce_us": _TIME,
    "dma.reduce_gbps": _MEMORY,
    "library.all_gather_us": _LATENCY,
    "library.all_to_all_us": _LATENCY,
    "library.all_reduce_us": _LATENCY,
    "library.reduce_scatter_us": _LATENCY,
    "library.all_gather_gbps": _SPEED,
    "library.all_to_all_gbps": _SPEED,
    "library.all_reduce_gbps": _SPEED,
    "library.reduce_scatter_gbps": _SPEED,
    "library.bulk_us": _TIME,
    "library.low_latency_share": _SHARE,
    "library.default_units": _COUNT,
    "library.all_to_all_units": _COUNT,
    "library.all_gather_need": _COUNT,
    "library.all_to_all_need": _COUNT,
    "library.traffic": Limit(1, 20),
    "library.all_to_all_traffic": Limit(1, 20),
    "matmul.launch_us": _TIME,
    "matmul.efficiency": _SHARE,
    "matmul.ramp_k": Limit(0, 4096),
    "matmul.row_step": Limit(1, 4096, whole=True),
    "matmul.blend": _PART,
    "matmul.split_us": _TIME,
    "matmul.tile_m": Limit(8, 4096, whole=True),
    "matmul.tile_n": Limit(8, 4096, whole=True),
    "matmul.persistent": _SWITCH,
    "matmul.memory_efficiency": _SHARE,
    "matmul.intensity": Limit(1, 1e5),
    "matmul.bound_intensity": Limit(1, 1e5),
    "matmul.cache_gain": Limit(0, 0.5),
    "matmul.partition_loss": Limit(0, 1),
    "matmul.partition_gain": _PART,
    "interference.memory": Limit(0, 100),
    "interference.late_share": _PART,
    "interference.copies": _PART,
    "interference.kernels": _PART,
    "interference.local_waits": _SWITCH,
    "interference.either_first": _SWITCH,
    "power.idle_w": _WATTS,
    "power.compute_idle_w": _WATTS,
    "power.compute_w": _WATTS,
    "power.memory_w": _WATTS,
    "power.links_on_w": _WATTS,
    "power.links_w": _WATTS,
    "power.engine_w": _WATTS,
    "power.cap_w": _WATTS,
    "occupancy.registers": Limit(1024, 1 << 20, whole=True),
    "occupancy.threads": Limit(64, 16384, whole=True),
    "occupancy.unit_gbps": Limit(1, 1e4),
    "occupancy.cache": Limit(0, 100),
    "occupancy.drains": _SWITCH,
    "occupancy.step_us": Limit(0.01, 100),
    "occupancy.library_threads": Limit(32, 16384, whole=True),
    "occupancy.library_registers": Limit(8, 1024, whole=True),
    "occupancy.library_shared_kb": Limit(0, 4096),
    "fused.half_share": Limit(0.001, 10),
    "fused.knee_share": _SHARE,
    "fused.crowding": Limit(0, 100),
    "fused.kept_share": _SHARE,
    "fused.generic_share": _SHARE,
    "fused.store_share": _SHARE,
    "fused.put_us": _TIME,
    "fused.flag_us": _TIME,
    "fused.bag_row_us": _TIME,
    "fused.bag_us": _TIME,
    "kernels.latency_us": _TIME,
    "kernels.gather_gbps": _SPEED,
    "kernels.reduce_scatter_gbps": _SPEED,
    "kernels.all_reduce_gbps": _SPEED,
    "kernels.need": Limit(1, 4096),
    "kernels.all_reduce_need": Limit(1, 4096),
    "kernels.traffic": Limit(1, 20),
}

LIBRARY_SPEEDS = tuple(path for path in LIMITS if path.startswith("library.") and path.endswith("_gbps"))

AT_MOST: tuple[tuple[str, str], ...] = (
    ("links.usable_gbps", "links.peak_gbps"),
    *((speed, "links.peak_gbps") for speed in LIBRARY_SPEEDS),
    ("links.peak_gbps", "gpu.memory_gbps"),
    ("dma.engine_gbps", "gpu.memory_gbps"),
    ("dma.local_gbps", "gpu.memory_gbps"),
    ("dma.reduce_gbps", "gpu.memory_gbps"),
    ("dma.next_copy_us", "dma.copy_us"),
    ("library.default_units", "gpu.units"),
    ("library.all_to_all_units", "gpu.units"),
    ("library.all_gather_need", "gpu.units"),
    ("library.all_to_all_need", "gpu.units"),
    ("matmul.bound_intensity", "matmul.intensity"),
    ("gpu.l2_mb", "gpu.cache_mb"),
    ("power.compute_idle_w", "power.idle_w"),
    ("power.idle_w", "power.cap_w"),
    ("occupancy.library_threads", "occupancy.threads"),
    ("occupancy.library_shared_kb", "gpu.shared_kb"),
)
"""Pairs of numbers of which the first cannot be greater than the second."""


def outside(path: str, value: float) -> str:
    """Why a number cannot be that, in words; empty if it can."""
    limit = LIMITS[path]
    if limit.holds(value):
        return ""
    unit = next((f" {words}" for end, words in UNITS.items() if path.endswith(end)), "")
    return f"(value={value:g}, allowed={limit}{unit})"


def contradictions(machine: Machine) -> Iterator[tuple[str, str, str]]:
    """Pairs of numbers that cannot both be so: the path of the first, of the second, and the reason in words."""
    known = machine.quantities()
    for path, ceiling in AT_MOST:
        if path in known and ceiling in known and known[path] > known[ceiling]:
            yield path, ceiling, f"(value={known[path]:g}, allowed=up to {known[ceiling]:g}, which is {ceiling})"
