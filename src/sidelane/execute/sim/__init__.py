"""Programs in virtual time on machines that are described, not present."""

from sidelane.execute.sim.simulate import DeadlockError, Run, simulate
from sidelane.execute.sim.timeline import Interval, chrome_trace, write_chrome_trace

__all__ = ["DeadlockError", "Interval", "Run", "chrome_trace", "simulate", "write_chrome_trace"]
