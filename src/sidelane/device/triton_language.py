"""Triton for modules that need it when they are imported, with an error that says how to get it.

Modules whose kernels can wait until they are compiled take ``sidelane.device.language``.
"""

from __future__ import annotations

from sidelane.errors import missing

try:
    import triton
    import triton.language as tl
    from triton.language.extra import hip
    from triton.language.extra.cuda import globaltimer
    from triton.runtime import interpreter
except ModuleNotFoundError as problem:
    raise missing("kernels need Triton", "triton", problem) from problem

__all__ = ["globaltimer", "hip", "interpreter", "tl", "triton"]
