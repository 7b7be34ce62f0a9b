"""The library's collective with a number of CTAs that is varied (NCCL's ``max_ctas``): the best of them is reported.

Fewer CTAs leave more of the GPU to the GEMM, and take longer. Nobody keeps the GEMM off them; under ``cta_target`` it
leaves as many units as there are CTAs of its own accord.
"""

from __future__ import annotations

from sidelane.c3.strategies.c3_base import C3_BASE
from sidelane.c3.strategies.c3_sp import C3_SP
from sidelane.c3.strategies.c3_target import C3_TARGET
from sidelane.c3.strategies.priority import PRIORITY
from sidelane.c3.strategies.registry import register

register(C3_BASE.by_ctas("cta_base"))
register(C3_SP.by_ctas("cta_sp"))
register(PRIORITY.by_ctas("cta_priority"))
register(C3_TARGET.by_ctas("cta_target"))
