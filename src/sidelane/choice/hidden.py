"""Share of an operation that disappears behind another one, for machines without measurements."""

from __future__ import annotations

from collections.abc import Mapping

# Share of the shorter operation that disappears behind the longer one, by strategy.
# mi300x: averages of the ConCCL paper (section V, figures 8 and 10), percent of ideal over all its pairs.
# h200: docs/lab/hardware.md, "GEMM next to a collective", the lower ends of its ranges; copy engines by the all-gathers
# of results/h200x2/c3.json (0.89 to 0.95 each; in place).
# h100: results/h100x2/c3.json, one pair.
HIDDEN: dict[str, dict[str, float]] = {
    "mi300x": {"c3_base": 0.21, "c3_sp": 0.42, "conccl": 0.66},
    "h200": {"c3_base": 0.0, "c3_sp": 0.02, "conccl": 0.92, "nccl_ce": 0.92},
    "h100": {"c3_base": 0.0, "c3_sp": 0.0, "conccl": 0.95, "nccl_ce": 0.95},
}
DEFAULT_MACHINE = "mi300x"


def hidden_shares(device_name: str) -> Mapping[str, float]:
    """Return the table's entry for a device, by a name like the driver's; the default machine's if there is none."""
    name = device_name.lower()
    return next((shares for machine, shares in HIDDEN.items() if machine in name), HIDDEN[DEFAULT_MACHINE])
