"""What a study is asked for by name, held against what there is: mistakes are found before any rank starts."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sidelane.choice import Abilities
from sidelane.choice.candidate import DMA, EVERYTHING, IMPLEMENTATIONS, everything, takes_one_tensor
from sidelane.choice.key import CPU
from sidelane.collectives.plan import AUTO
from sidelane.program.collective import Kind
from sidelane.program.variant import PRELAUNCH, Variant
from sidelane.session.prelaunch import prelaunchable

ON_CPUS = ("gloo", "dma", "auto")
ON_GPUS = ("nccl", "nccl_ce", "symm_mem", "dma", "auto", "sm")
"""Names of implementations, in the order of a study."""

BESIDE = ("nccl_ctas",)
"""What runs next to a computation only, behind the others."""

OTHER_CALLS = ("dma_left", "dma_in_place")
"""What makes another call than the others, next to a computation: all-to-alls without a copy inside a GPU."""

ONE_TENSOR = {
    "symm_mem": "PyTorch's operators on symmetric memory take one tensor a call",
}
"""What takes no part in a study of lists, with the reason."""


def implementations(device_type: str, *, with_auto: bool = False, with_others: bool = False) -> tuple[str, ...]:
    """Names that a study knows on a kind of device.

    Args:
        device_type: where the ranks' tensors are.
        with_auto: ``auto`` is a variant of ``dma`` in this study.
        with_others: so are ``OTHER_CALLS``, each by itself.

    >>> implementations("cpu")
    ('gloo', 'dma', 'auto')
    """
    names = ON_CPUS if device_type == CPU else ON_GPUS + (BESIDE if with_auto else ())
    names += OTHER_CALLS if with_others else ()
    return tuple(name for name in names if not (with_auto and name == "auto"))


def check_implementations(
    wanted: Collection[str],
    device_type: str,
    *,
    with_auto: bool = False,
    with_others: bool = False,
    listed: bool = False,
) -> None:
    """Refuse an implementation that is not known on a kind of device, or (``listed``) that takes no lists.

    Raises:
        ValueError: with the allowed names.
    """
    known = implementations(device_type, with_auto=with_auto, with_others=with_others)
    unknown = [name for name in wanted if name not in known]
    if unknown:
        where = "CPU ranks" if device_type == CPU else "GPUs"
        raise ValueError(
            f"implementations: not known on {where} (value={', '.join(unknown)}, allowed={', '.join(known)})"
        )
    refused = [name for name in wanted if listed and name in ONE_TENSOR]
    if refused:
        reasons = "; ".join(ONE_TENSOR[name] for name in refused)
        allowed = ", ".join(name for name in known if name not in ONE_TENSOR)
        raise ValueError(
            f"implementations: not with lists of tensors: {reasons} (value={', '.join(refused)}, allowed={allowed})"
        )


def check_asked(
    device_type: str,
    kinds: Sequence[Kind],
    *,
    implementations: Collection[str] = (),
    variants: Sequence[str] = (),
    launches: Collection[str] = (),
    chosen_from: Sequence[str] = IMPLEMENTATIONS,
    with_auto: bool = False,
    with_others: bool = False,
    listed: bool = False,
) -> None:
    """Refuse names that a study could only leave out in silence. A variant of one of the collectives is enough.

    Args:
        device_type: where the ranks' tensors are.
        kinds: collectives of the study.
        implementations: asked for; empty for all.
        variants: asked for; empty for all.
        launches: asked for; empty for all.
        chosen_from: Sidelane's implementations whose variants can be chosen.
        with_auto: as :func:`implementations` has it.
        with_others: likewise.
        listed: calls with lists of tensors.

    Raises:
        ValueError: with what was given and what is allowed.
    """
    check_implementations(implementations, device_type, with_auto=with_auto, with_others=with_others, listed=listed)
    if device_type == CPU and set(launches) == {"graph"}:
        raise ValueError(f"launch: CPU ranks have no graphs (value={', '.join(launches)}, allowed=eager)")
    abilities = Abilities() if device_type == CPU else EVERYTHING
    here = [name for name in chosen_from if name in abilities.implementations and not (listed and name in ONE_TENSOR)]
    own = [name for name in here if name in implementations] or here
    found = [one for kind in kinds for one in everything(kind, abilities) if one.implementation in own]
    found = [one for one in found if not (listed and takes_one_tensor(one))]
    known = [*([AUTO] if with_auto else []), *dict.fromkeys(one.variant for one in found)]
    ahead = dict.fromkeys(name for kind in kinds if DMA in own for name in prelaunchable(everything(kind, abilities)))
    unknown = [name for name in variants if name not in known and Variant.of(name).called not in ahead]
    if unknown:
        suffixed = f"; {', '.join(ahead)} also with {PRELAUNCH}" if ahead else ""
        lists = "lists of " if listed else ""
        raise ValueError(
            f"variants: no such variant of {' or '.join(own)} for {lists}{' or '.join(kinds)} "
            f"(value={', '.join(unknown)}, allowed={', '.join(known)}{suffixed})"
        )
