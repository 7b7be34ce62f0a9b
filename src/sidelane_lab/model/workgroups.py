"""Workgroups of one kernel on a GPU: how many are resident, and how fast they read memory together.

Reading is concave in the number of resident workgroups: each waits for its own loads, until the memory is full. Gathers
of scattered rows lose again where too many wait at once (fused operators paper, IV-C and Figure 13).

    bandwidth of gathers    rises as share / (share + half) | knee | falls as 1 / (1 + crowding x (share - knee))
"""

from __future__ import annotations

import math

from sidelane_lab.machines.spec import Fused, Machine
from sidelane_lab.model.blocks import occupancy as unit_limits

THREADS = 256
"""Threads of a workgroup: four rows of 64 lanes, as PyTorch's embedding bags have them."""


def fused_figures(machine: Machine) -> Fused:
    """Return the machine's figures of workgroups that compute and send.

    Raises:
        ValueError: it has none.
    """
    if machine.fused is None:
        raise ValueError(f"fused: of {machine.name} (value=none, allowed=a description with a section [fused])")
    return machine.fused


def resident(machine: Machine, occupancy: float = 1.0) -> int:
    """Return the workgroups that a GPU holds at once, at an occupancy from 0 to 1 of the threads of its units.

    Raises:
        ValueError: another occupancy.
    """
    if not 0 < occupancy <= 1:
        raise ValueError(f"fused: occupancy (value={occupancy}, allowed=more than 0, at most 1)")
    each = math.floor(unit_limits(machine).threads / THREADS * occupancy + 1e-9)
    return int(machine.gpu.units) * max(1, each)


def share_of(machine: Machine, workgroups: float) -> float:
    """Occupancy with so many workgroups resident."""
    return float(workgroups / resident(machine))


def stream_gbps(machine: Machine, workgroups: float) -> float:
    """Bandwidth of workgroups that read rows of a matrix one after another. Full occupancy reaches what kernels do."""
    half, share = float(fused_figures(machine).half_share), share_of(machine, workgroups)
    return _reachable(machine) * share / (share + half) * (1 + half)


def gather_gbps(machine: Machine, workgroups: float) -> float:
    """Return the bandwidth of workgroups that read scattered rows. Occupancy at the knee reaches what kernels do."""
    fused, share = fused_figures(machine), share_of(machine, workgroups)
    half, knee = float(fused.half_share), float(fused.knee_share)
    rise = share / (share + half) * (knee + half) / knee
    # Past the knee the memory is full: more workgroups make it no faster, but slower.
    return _reachable(machine) * min(1.0, rise) / (1 + fused.crowding * max(0.0, share - knee))


def units_gbps(machine: Machine, units: float) -> float:
    """Bandwidth of so many units that have all loads of a slice or a row on their way at once.

    Each takes no more than a unit gets from the cache that all share.
    """
    return min(_reachable(machine), float(unit_limits(machine).unit_gbps * units))


def _reachable(machine: Machine) -> float:
    return float(machine.gpu.memory_gbps * machine.matmul.memory_efficiency)
