"""Compiler pass for torch.compile that puts Sidelane's fused operators in place of GEMMs, norms and collectives."""

from sidelane_fusion.compiler_pass import LOGGER, Fusion

__all__ = ["LOGGER", "Fusion"]
