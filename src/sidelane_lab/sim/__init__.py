"""Programs in virtual time on machines that are described, not present."""

from sidelane.execute.timeline import Interval, chrome_trace, write_chrome_trace
from sidelane_lab.sim.simulate import DeadlockError, SimulatedRun, simulate

__all__ = ["DeadlockError", "Interval", "SimulatedRun", "chrome_trace", "simulate", "write_chrome_trace"]
