"""All-to-alls on copy engines without the copy of the own part inside a GPU, which takes turns with the GEMM.

``conccl_left``: the own part stays where it is (``copy_own_part=False``). ``conccl_in_place``: input and output are the
same bytes, and what is sent is staged first, which among two ranks is a copy of as many bytes.
"""

from __future__ import annotations

import dataclasses

from sidelane.c3.strategies.conccl import CONCCL
from sidelane.c3.strategies.conccl_rp import CONCCL_RP
from sidelane.c3.strategies.registry import register
from sidelane.c3.strategy import Mover

LEAVING = "an all-to-all leaves own parts where they are"

for _strategy, _name in ((CONCCL, "conccl_left"), (CONCCL_RP, "conccl_rp_left")):
    _recipe = f"{_strategy.recipe}; {LEAVING}"
    register(dataclasses.replace(_strategy, name=_name, mover=Mover.DMA_LEFT, recipe=_recipe, preference=100))
register(
    dataclasses.replace(
        CONCCL,
        name="conccl_in_place",
        mover=Mover.DMA_IN_PLACE,
        recipe=f"{CONCCL.recipe}; an all-to-all in place",
        preference=100,
    )
)
