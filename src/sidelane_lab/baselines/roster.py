"""Which implementations take part on this machine: made together by all ranks, or left out by all with a reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection

import torch.distributed as dist

from sidelane import config as settings
from sidelane.cli.launch import Rank
from sidelane.config import COMPUTE, NOTHING
from sidelane.session import Communicator
from sidelane_lab.baselines.candidate import Implementation
from sidelane_lab.baselines.own import Auto, Dma, InPlace, Kernels, OwnPartLeft
from sidelane_lab.baselines.reference import Case
from sidelane_lab.harness.asked import ONE_TENSOR, check_implementations, implementations
from sidelane_lab.harness.measure import Meter


@dataclasses.dataclass(slots=True)
class Roster:
    """What takes part on this rank, in the same order on every rank.

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
            NcclCtas,
            kernels_of,
        )
        from sidelane_lab.baselines.baselines_symm_mem import SymmetricMemory

        find_kernels = kernels_of
        makers = {
            "nccl": lambda: Nccl(rank.device, meter),
            "nccl_ctas": lambda: NcclCtas(rank.device, timeout_s, meter),
            "nccl_ce": lambda: NcclCopyEngines(rank.device, timeout_s, meter),
            "symm_mem": lambda: SymmetricMemory(rank.device, meter),
        }
    own: list[Dma] = []

    def make_own() -> Dma:
        # Next to a computation the choice is among what leaves it its compute units.
        config = dataclasses.replace(settings.current(), timeout_s=timeout_s, beside=COMPUTE if with_auto else NOTHING)
        own.append(Dma(Communicator(dist.group.WORLD, device=rank.device, config=config), with_auto=with_auto))
        return own[0]

    def needs_own(make: Callable[[Dma], Implementation]) -> Callable[[], Implementation]:
        return lambda: make(own[0] if own else make_own())

    makers["dma"] = make_own
    makers["auto"] = needs_own(Auto)
    makers["sm"] = needs_own(Kernels)
    makers["dma_left"] = needs_own(OwnPartLeft)
    makers["dma_in_place"] = needs_own(InPlace)
    roster = Roster(meter, kernels_of=find_kernels)
    for name in implementations(rank.device.type, with_auto=with_auto, with_others=with_others):
        if wanted and name not in wanted:
            continue
        if listed and name in ONE_TENSOR:
            roster.unavailable[name] = ONE_TENSOR[name]
        else:
            roster.add(name, makers[name])
    return roster


def make_meter(rank: Rank, timeout_s: float) -> Meter:
    """What measures on this rank. Collective.

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
