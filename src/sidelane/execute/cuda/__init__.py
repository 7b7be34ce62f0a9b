"""Programs on NVIDIA GPUs: copy engines and stream memory operations."""

from sidelane.execute.cuda.executor import CudaExecutor
from sidelane.execute.cuda.loaded import CudaProgram
from sidelane.execute.cuda.probe import DriverFeatures, probe, probe_device

__all__ = ["CudaExecutor", "CudaProgram", "DriverFeatures", "probe", "probe_device"]
