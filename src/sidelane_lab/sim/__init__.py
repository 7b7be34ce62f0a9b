"""Programs in virtual time on machines that are described, not present."""

from sidelane.execute.timeline import Interval, chrome_trace, write_chrome_trace
from sidelane_lab.sim.fold import Fold, fold_of
from sidelane_lab.sim.simulate import DeadlockError, KernelPart, SimulatedRun, simulate

__all__ = [
    "DeadlockError",
    "Fold",
    "Interval",
    "KernelPart",
    "SimulatedRun",
    "chrome_trace",
    "fold_of",
    "simulate",
    "write_chrome_trace",
]
