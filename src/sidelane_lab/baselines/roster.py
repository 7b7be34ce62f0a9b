"""Which implementations take part on this machine: made together by all ranks, or left out by all with a reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from sidelane import config as settings
from sidelane.choice import Abilities, Candidate
from sidelane.choice.candidate import (
    DMA,
    EVERYTHING,
    IMPLEMENTATIONS,
    SM,
    everything,
    find,
    takes_one_tensor,
)
from sidelane.choice.key import CPU
from sidelane.collectives.plan import AUTO
from sidelane.config import COMPUTE, HOST, NOTHING
from sidelane.errors import UnavailableError
from sidelane.program.collective import Kind
from sidelane.program.shape import CallShape
from sidelane.session import Communicator, Work
from sidelane_lab.baselines.candidate import (
    Entrant,
    Implementation,
    TensorLists,
    Tensors,
    nothing_to_wait_for,
    separately,
)
from sidelane_lab.baselines.reference import ROOT, Case
from sidelane_lab.harness.launch import Rank
from sidelane_lab.harness.measure import Meter

ON_CPUS = ("gloo", "dma", "auto")
ON_GPUS = ("nccl", "nccl_ce", "symm_mem", "dma", "auto", "sm")
"""Names of implementations, in the order of a study."""

OTHER_CALLS = ("dma_left",)
"""Implementations that make another call next to a computation: all-to-alls without a copy inside a GPU."""

ONE_TENSOR = {
    "symm_mem": "PyTorch's operators on symmetric memory take one tensor a call",
}
"""Implementations that take no part in a study of lists, with the reason."""

BY_PEERS = ("nccl_ce", "symm_mem")
"""Implementations that use peers' memory, whatever settings of Sidelane and NCCL say."""
NOT_THROUGH_HOST = "it uses peers' memory over NVLink in spite of SIDELANE_PEERS=host and NCCL_P2P_DISABLE"
"""Reason why they are not compared with collectives through host memory."""


def implementations(device_type: str, *, with_auto: bool = False, with_others: bool = False) -> tuple[str, ...]:
    """Names that a study knows on a kind of device.

    Args:
        device_type: where the ranks' tensors are.
        with_auto: ``auto`` is a variant of ``dma`` in this study.
        with_others: so are ``OTHER_CALLS``, each by itself.

    >>> implementations("cpu")
    ('gloo', 'dma', 'auto')
    """
    names = (ON_CPUS if device_type == CPU else ON_GPUS) + (OTHER_CALLS if with_others else ())
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
    unknown = [name for name in variants if name not in known]
    if unknown:
        lists = "lists of " if listed else ""
        raise ValueError(
            f"variants: no such variant of {' or '.join(own)} for {lists}{' or '.join(kinds)} "
            f"(value={', '.join(unknown)}, allowed={', '.join(known)})"
        )


Given = torch.Tensor | list[torch.Tensor]


class Own(Implementation):
    """Sidelane's collectives on symmetric tensors.

    Args:
        shared: the communicator; or an implementation whose communicator and buffers this one has, too.

    Attributes:
        communicator: whose collectives these are.
    """

    name = ""

    def __init__(self, shared: Communicator | Own) -> None:
        self._shared: Own = shared._shared if isinstance(shared, Own) else self
        self.communicator: Communicator = shared.communicator if isinstance(shared, Own) else shared
        self.device = self.communicator.device
        self.launches: tuple[str, ...] = ("eager",) if self.device.type == "cpu" else ("eager", "graph")

    def variants(self, kind: Kind, in_place: bool) -> tuple[str, ...]:
        """Return the variants that this machine has of ``name``'s."""
        if kind is Kind.BROADCAST and not in_place:
            return ()
        found = applicable(kind, self.communicator.world_size, self.communicator.abilities)
        return tuple(candidate.variant for candidate in found if candidate.implementation == self.name)

    def list_variants(self, kind: Kind, in_place: bool) -> tuple[str, ...]:
        names = self.variants(kind, in_place)
        return tuple(name for name in names if (one := find(kind, name)) is None or not takes_one_tensor(one))

    def memory(self, nbytes: int) -> torch.Tensor:
        return self.communicator.empty(nbytes, dtype=torch.uint8)

    def reserve(self, output_bytes: int, input_bytes: int) -> None:
        have = self._shared.buffers
        if have is None or have[0].nbytes < output_bytes or have[1].nbytes < input_bytes:
            Implementation.reserve(self._shared, output_bytes, input_bytes)

    def tensors(self, case: Case, candidate: Entrant) -> Tensors:
        return Implementation.tensors(self._shared, case, candidate)

    def bind(self, case: Case, tensors: Tensors, variant: str) -> Callable[[], Work | None]:
        assert tensors.output is not None
        return self._bind(case.kind, tensors.output, tensors.input, variant=variant)

    def start(self, case: Case, tensors: Tensors, variant: str) -> Callable[[], None]:
        work = self.bind(case, tensors, variant)()
        return nothing_to_wait_for if work is None else work.synchronize

    def start_list(self, lists: TensorLists, variant: str) -> Callable[[], None]:
        work = self._bind(lists.parts[0].kind, lists.outputs, lists.inputs, variant=variant)()
        return nothing_to_wait_for if work is None else work.synchronize

    def _bind(self, kind: Kind, output: Given, input: Given, **options: Any) -> Callable[[], Work | None]:
        if self.device.type == "cpu":
            options["async_op"] = True  # a synchronous call returns when it has ended, and nothing could run next to it
        return bound_call(self.communicator, kind, output, input, **options)

    def close(self) -> None:
        super().close()
        self.communicator.close()


class OwnDma(Own):
    """Sidelane's collectives by copy engines. ``with_auto``: its choice next to a computation is one more variant."""

    name = DMA

    def __init__(self, shared: Communicator | Own, *, with_auto: bool = False) -> None:
        super().__init__(shared)
        self._auto = (AUTO,) if with_auto else ()

    def variants(self, kind: Kind, in_place: bool) -> tuple[str, ...]:
        if self._auto and in_place and kind is Kind.ALL_TO_ALL:
            return ()  # it overwrites its input: next to a computation that is another call
        names = super().variants(kind, in_place)
        return self._auto + names if names else ()


class OwnKernels(Own):
    """Sidelane's collectives that kernels run.

    Raises:
        UnavailableError: this machine does not have them.
    """

    name = SM

    def __init__(self, shared: Own) -> None:
        super().__init__(shared)
        if SM not in self.communicator.abilities.implementations:
            raise UnavailableError("this device or this installation has no kernels for collectives")


class OwnAuto(Own):
    """Sidelane's own choice among its collectives. Its rows name what it chose as their variant."""

    name = AUTO

    def variants(self, kind: Kind, in_place: bool) -> tuple[str, ...]:
        return (AUTO,) if self._shared.variants(kind, in_place) else ()

    def list_variants(self, kind: Kind, in_place: bool) -> tuple[str, ...]:
        """Return the list in one call, and for comparison a call for each tensor, which may run as something else."""
        return tuple(name for auto in self.variants(kind, in_place) for name in (auto, separately(auto)))

    def chosen(self) -> str:
        """Return what the last call was run as."""
        choice = self.communicator.last_choice()
        assert choice is not None, "a call comes first"
        return choice.candidate.variant


class OwnPartLeft(Own):
    """All-to-alls on copy engines, out of place, that leave every rank's own part in its input."""

    name = "dma_left"
    leaves_own_part = True

    def variants(self, kind: Kind, in_place: bool) -> tuple[str, ...]:
        return (AUTO,) if kind is Kind.ALL_TO_ALL and not in_place else ()

    def list_variants(self, kind: Kind, in_place: bool) -> tuple[str, ...]:
        return ()

    def _bind(self, kind: Kind, output: Given, input: Given, **options: Any) -> Callable[[], Work | None]:
        return super()._bind(kind, output, input, copy_own_part=False, **options)


def bound_call(
    communicator: Communicator, kind: Kind, output: Given, input: Given, **options: Any
) -> Callable[[], Work | None]:
    """Return what makes a call of Sidelane's, and nothing else.

    Args:
        communicator: whose call.
        kind: which collective.
        output: what it writes; of a broadcast all that there is.
        input: what it reads.
        options: of the call, such as ``variant``.
    """
    match kind:
        case Kind.ALL_REDUCE:
            return partial(communicator.all_reduce, input, output=output, **options)
        case Kind.BROADCAST:
            return partial(communicator.broadcast, output, root=ROOT, **options)
    collective: Callable[..., Work | None] = getattr(communicator, kind)
    return partial(collective, output, input, **options)


@dataclasses.dataclass(slots=True)
class Roster:
    """Implementations that take part on this rank, in the same order on every rank.

    Attributes:
        meter: measures, and lets ranks agree.
        implementations: by name.
        unavailable: those that belong here but cannot take part, with the reason.
        kernels_of: finds the names of the kernels that a run launches; None where there are no kernels.
    """

    meter: Meter
    implementations: dict[str, Implementation] = dataclasses.field(default_factory=dict)
    unavailable: dict[str, str] = dataclasses.field(default_factory=dict)
    kernels_of: Callable[[Callable[[], None]], list[str]] | None = None

    def add(self, name: str, make: Callable[[], Implementation]) -> None:
        """Make an implementation on all ranks, or note why one of them could not. Collective."""

        def step() -> None:
            self.implementations[name] = make()

        with self.meter.on_stream():
            self._settle(name, self.meter.attempt(step))

    def reserve(self, output_bytes: int, input_bytes: int) -> None:
        """Allocate the buffers of every implementation; those that cannot are left out. Collective."""
        for name, implementation in list(self.implementations.items()):

            def step(implementation: Implementation = implementation) -> None:
                implementation.reserve(output_bytes, input_bytes)

            with self.meter.on_stream():
                self._settle(name, self.meter.attempt(step))
                self.meter.finish(f"allocating the buffers of {name}")
        # Some allocate, and clear, on the default stream whatever the current one is.
        self.meter.finish("allocating the buffers")

    def reserve_for(self, cases: Collection[Case], note: Callable[[str], None]) -> None:
        """Allocate buffers for the largest of some cases, and say what takes no part. Collective."""
        self.reserve(max(case.output_room for case in cases), max(case.input_room for case in cases))
        for name, reason in self.unavailable.items():
            note(f"{name} takes no part: {reason}")

    def close(self) -> None:
        """Release everything, last made first. Not after a failure: releasing can wait for a peer."""
        for name in reversed(list(self.implementations)):
            self.implementations.pop(name).close()

    def _settle(self, name: str, error: str | None) -> None:
        if error is not None:
            self.implementations.pop(name, None)
            self.unavailable[name] = error


def make_roster(
    rank: Rank,
    *,
    wanted: Collection[str] = (),
    timeout_s: float = 60.0,
    with_auto: bool = False,
    with_others: bool = False,
    listed: bool = False,
) -> Roster:
    """Make the meter and the implementations of this machine. Collective.

    Args:
        rank: of this process.
        wanted: names to keep; empty keeps all.
        timeout_s: longest that one step may take, on the device or for a peer.
        with_auto: list the variant ``auto`` of Sidelane's copy-engine collectives, for what runs beside a computation,
            in the place of the implementation ``auto``.
        with_others: add those that make another call than was asked for, by which nobody is measured.
        listed: calls will have lists of tensors; what takes one tensor a call is left out, with the reason.

    Raises:
        ValueError: a name is not known on this kind of device.
    """
    check_implementations(wanted, rank.device.type, with_auto=with_auto, with_others=with_others, listed=listed)
    meter = make_meter(rank, timeout_s)
    makers: dict[str, Callable[[], Implementation]]
    find_kernels: Callable[[Callable[[], None]], list[str]] | None = None
    if rank.device.type == "cpu":
        from sidelane_lab.baselines.baselines_cpu import Gloo

        makers = {"gloo": Gloo}
    else:
        from sidelane_lab.baselines.baselines_cuda import (
            Nccl,
            NcclCopyEngines,
            kernels_of,
        )
        from sidelane_lab.baselines.baselines_symm_mem import SymmetricMemoryOperators

        find_kernels = kernels_of
        makers = {
            "nccl": lambda: Nccl(rank.device, meter),
            "nccl_ce": lambda: NcclCopyEngines(rank.device, timeout_s, meter),
            "symm_mem": lambda: SymmetricMemoryOperators(rank.device, meter),
        }
    own: list[OwnDma] = []

    def make_own() -> OwnDma:
        # Next to a computation the choice is among what leaves it its compute units.
        config = dataclasses.replace(settings.current(), timeout_s=timeout_s, beside=COMPUTE if with_auto else NOTHING)
        own.append(OwnDma(Communicator(dist.group.WORLD, device=rank.device, config=config), with_auto=with_auto))
        return own[0]

    def needs_own(make: Callable[[OwnDma], Implementation]) -> Callable[[], Implementation]:
        return lambda: make(own[0] if own else make_own())

    makers["dma"] = make_own
    makers["auto"] = needs_own(OwnAuto)
    makers["sm"] = needs_own(OwnKernels)
    makers["dma_left"] = needs_own(OwnPartLeft)
    roster = Roster(meter, kernels_of=find_kernels)
    for name in implementations(rank.device.type, with_auto=with_auto, with_others=with_others):
        if wanted and name not in wanted:
            continue
        if listed and name in ONE_TENSOR:
            roster.unavailable[name] = ONE_TENSOR[name]
        elif name in BY_PEERS and settings.current().peers == HOST:
            roster.unavailable[name] = NOT_THROUGH_HOST
        else:
            roster.add(name, makers[name])
    return roster


def make_meter(rank: Rank, timeout_s: float) -> Meter:
    """Make what measures on this rank. Collective.

    Args:
        rank: of this process.
        timeout_s: longest that one step may take on the device.
    """
    # A group of the study's own: what ranks tell each other after a failure must not meet what a communicator was in
    # the middle of saying.
    control = dist.new_group(backend="gloo")
    if rank.device.type == "cpu":
        return Meter(rank.device, timeout_s=timeout_s, group=control)
    from sidelane_lab.baselines.baselines_cuda import device_barrier

    return Meter(rank.device, device_barrier=device_barrier(rank.device), timeout_s=timeout_s, group=control)


def applicable(kind: Kind, world_size: int, abilities: Abilities) -> tuple[Candidate, ...]:
    """Return the candidates worth measuring: not algorithms that object to so many ranks, or are for other memory."""

    def applies(candidate: Candidate) -> bool:
        algorithm = candidate.algorithm(kind)
        if algorithm is None:
            return True
        memory = abilities.through_host or not algorithm.through_host
        return memory and not algorithm.objection(CallShape(kind, world_size, 1))

    return tuple(filter(applies, everything(kind, abilities)))
