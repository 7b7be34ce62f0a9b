"""Programs on AMD GPUs through the HIP runtime. Never run on AMD hardware: see ``docs/guide/amd.md``."""

from sidelane.execute.hip.driver import HipDriver
from sidelane.execute.hip.executor import HipExecutor, probe_graphs

__all__ = ["HipDriver", "HipExecutor", "probe_graphs"]
