from sidelane.execute.cpu.executor import CpuExecutor, CpuProgram
from sidelane.execute.cpu.invocation import Invocation

__all__ = ["CpuExecutor", "CpuProgram", "Invocation"]
