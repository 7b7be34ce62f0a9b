"""Choice of a kernel of Sidelane for a caller's call under strategies that move the bytes by kernels.

``sm_base`` and the other ``sm_`` strategies take the kernel that is expected to be fastest alone. ``cta_base`` and the
other ``cta_`` ones take one of few thread blocks (``NARROW_BLOCKS``), which reductions have: no other number is
offered.
"""

from __future__ import annotations

import torch

from sidelane.c3.strategy import Mover, Strategy
from sidelane.choice import choose
from sidelane.choice.candidate import SM, everything
from sidelane.program.collective import Kind
from sidelane.program.shape import CallShape
from sidelane.program.variant import Variant
from sidelane.session import Communicator

BY_KERNELS = (Mover.SM, Mover.LIBRARY_CTAS)
"""Movers that callers' calls select by a variant."""


def objection(device: torch.device) -> str:
    """Return the reason why no call on a device is made by kernels; empty if some are."""
    if device.type == "cpu":
        return "CPU ranks have no kernels for collectives"
    return "" if torch.version.hip is None else "communicators do not move bytes by kernels on AMD GPUs"


def variant_of(comm: Communicator, strategy: Strategy, kind: Kind, nbytes: int, dtype: str) -> str:
    """Return the variant of a call, alike on all ranks.

    Args:
        comm: communicator that makes it.
        strategy: strategy whose mover is one of ``BY_KERNELS``.
        kind: kind of the collective.
        nbytes: bytes of its largest tensor; of all, for lists.
        dtype: dtype of its elements.

    Raises:
        ValueError: no kernel of that kind runs the collective here.
    """
    narrow = strategy.mover is Mover.LIBRARY_CTAS
    found = [one.variant for one in everything(kind, comm.abilities) if one.implementation == SM]
    found = [name for name in found if Variant.of(name).narrow is narrow and not Variant.of(name).pushes]
    if not found:
        what = f"kernel of few thread blocks for {kind}" if narrow else f"kernel for {kind}"
        allowed = "reduce_scatter, all_reduce" if narrow else "what kernels run on this machine, see sidelane info"
        raise ValueError(f"overlap: {strategy.name}: there is no {what} here (value={kind}, allowed={allowed})")
    # As if in ordinary memory: the kind of memory must not make ranks choose differently.
    call = CallShape(kind, comm.world_size, nbytes, dtype, symmetric=False)
    if comm.world_size > 1 and not narrow:
        table = choose(comm.profile.profile, call, comm.abilities).table
        ranked = [candidate.variant for candidate, _ in table if candidate.variant in found]
        return (ranked or found)[0]
    return found[-1]  # of an all_reduce the one in two shots


def described(tensors: tuple[object, ...]) -> tuple[int, str]:
    """Return the bytes of the largest argument of a call, a tensor or a list of them, and the dtype of the elements."""
    sizes, dtypes = [0], ["bfloat16"]
    for given in tensors:
        listed = [
            one for one in (given if isinstance(given, list | tuple) else (given,)) if isinstance(one, torch.Tensor)
        ]
        sizes.append(sum(one.nbytes for one in listed))
        dtypes += [str(one.dtype).removeprefix("torch.") for one in listed]
    return max(sizes), dtypes[-1]
