"""Baselines on NVIDIA GPUs: NCCL's kernels, and NCCL on copy engines.

How each gets its best configuration:

- ``nccl``: the default group's communicator. Calls are synchronous in torch's sense (``async_op=False``), which puts
  NCCL on the caller's stream without a detour. Variant ``window`` has its buffers in symmetric windows, which let
  NCCL take other kernels.
  Variants ``window_efficiency`` and ``window_zero``, with NCCL 2.32 and newer: windows, and a CTA policy with each call
  (``nccl_policies.py``), next to collectives alone as well as next to a GEMM.
- ``nccl_ce``: a communicator of its own with ``NCCL_CTA_POLICY_ZERO``. NCCL takes the copy engines only if input and
  output lie in symmetric windows at equal offsets, and not on the legacy default stream. The windows are a memory pool
  of ``ncclMemAlloc``: both buffers are allocated first and registered then, because registering is collective and
  PyTorch's hook for later allocations would do it inside the allocator. (``symm_mem.set_backend("NCCL")`` is the other
  way, but it is global and Sidelane itself uses the CUDA backend.) An all-to-all in place does not exist in NCCL.

A list of tensors is a group of NCCL's calls (``ncclGroupStart`` to ``ncclGroupEnd``), which NCCL may run as one kernel:
torch's coalesced operations where it has them (all_gather, reduce_scatter, all_reduce), the manager with the calls
between its begin and its end elsewhere. The variants ``separate`` are the same calls without the group. So much holds
for ordinary memory, for windows (all tensors lie in the two that there are) and for copy engines alike; what NCCL or
torch does not take in a group is a row with a note.

PyTorch's own operators are in ``baselines_symm_mem.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from sidelane import config as settings
from sidelane.config import HOST
from sidelane.errors import UnavailableError
from sidelane.machine.nvidia import nccl_version
from sidelane.program.collective import Kind
from sidelane_lab.baselines.candidate import (
    COALESCED,
    Entrant,
    Implementation,
    TensorLists,
    Tensors,
    coalesced,
    library_call,
    nothing_to_wait_for,
    separately,
    views,
)
from sidelane_lab.baselines.nccl_policies import call_with_policy, policies_of
from sidelane_lab.baselines.reference import Case
from sidelane_lab.harness.measure import Meter

BOTH, OUT_OF_PLACE, IN_PLACE = (False, True), (False,), (True,)
WINDOW = "window"


class Nccl(Implementation):
    """NCCL as it comes: kernels on SMs."""

    name = "nccl"
    launches: tuple[str, ...] = ("eager", "graph")
    places: Mapping[Kind, tuple[bool, ...]] = MappingProxyType(
        {
            Kind.ALL_GATHER: BOTH,
            Kind.ALL_TO_ALL: OUT_OF_PLACE,
            Kind.REDUCE_SCATTER: BOTH,
            Kind.ALL_REDUCE: IN_PLACE,
            Kind.BROADCAST: IN_PLACE,
        }
    )

    def __init__(self, device: torch.device, meter: Meter, group: dist.ProcessGroup | None = None) -> None:
        self.device, self._meter, self.group = device, meter, group
        self._windows: Windows | None = None
        self._no_windows = ""

    def variants(self, kind: Kind, in_place: bool) -> tuple[str, ...]:
        if in_place not in self.places.get(kind, ()):
            return ()
        if settings.current().peers == HOST:  # windows use NVLink in spite of NCCL_P2P_DISABLE
            return ("",)
        return ("", WINDOW, *(f"{WINDOW}_{policy}" for policy in policies_of(kind, nccl_version())))

    def list_variants(self, kind: Kind, in_place: bool) -> tuple[str, ...]:
        names = self.variants(kind, in_place)[:2]
        return tuple(name for one in names for name in (one, separately(one)))

    def reserve(self, output_bytes: int, input_bytes: int) -> None:
        super().reserve(output_bytes, input_bytes)
        try:
            # NCCL on copy engines has nothing but windows, and Sidelane is what is compared.
            self._windows = Windows(self.device, self._meter, self.group, output_bytes, input_bytes, others=2)
        except UnavailableError as error:
            self._no_windows = str(error)

    def tensors(self, case: Case, candidate: Entrant) -> Tensors:
        if not candidate.variant.startswith(WINDOW):
            return super().tensors(case, candidate)
        if self._windows is None:
            raise UnavailableError(self._no_windows)
        return views(case, candidate.in_place, *self._windows.buffers)

    def start(self, case: Case, tensors: Tensors, variant: str) -> Callable[[], None]:
        self.bind(case, tensors, variant)()
        return nothing_to_wait_for

    def bind(self, case: Case, tensors: Tensors, variant: str) -> Callable[[], object]:
        assert tensors.output is not None
        _, _, policy = variant.partition("_")
        if variant.startswith(WINDOW) and policy:
            return call_with_policy(case.kind, tensors.output, tensors.input, policy, self.group)
        return library_call(case.kind, tensors.output, tensors.input, group=self.group)

    def start_list(self, lists: TensorLists, variant: str) -> Callable[[], None]:
        with coalesced(self.group, None if lists.parts[0].kind in COALESCED else self.device):
            for part, pair in zip(lists.parts, lists.pairs, strict=True):
                self.start(part, pair, variant)
        return nothing_to_wait_for

    def close(self) -> None:
        super().close()
        if self._windows is not None:
            self._windows.close()
        self._windows = None


class NcclCopyEngines(Nccl):
    """NCCL told to use no SM (``NCCL_CTA_POLICY_ZERO``), with its buffers in symmetric windows.

    Args:
        device: of this rank.
        timeout_s: of its process group.
        meter: ranks agree through it before each step that is collective.

    Raises:
        UnavailableError: on every rank, if any rank could not make the communicator; the text says why.
    """

    name = "nccl_ce"
    places = MappingProxyType({Kind.ALL_GATHER: BOTH, Kind.ALL_TO_ALL: OUT_OF_PLACE})

    def __init__(self, device: torch.device, timeout_s: float, meter: Meter) -> None:
        timeout = timedelta(seconds=timeout_s)
        options: Any = None

        def check() -> str | None:
            nonlocal options
            options = _zero_sm_options()
            options._timeout = timeout  # torch warns if it differs from the group's
            return None

        _require(meter.attempt(check), "NCCL on copy engines")
        group = dist.new_group(
            backend="nccl", timeout=timeout, pg_options=options, group_desc="nccl_ce", device_id=device
        )
        assert isinstance(group, dist.ProcessGroup)
        super().__init__(device, meter, group)

    def variants(self, kind: Kind, in_place: bool) -> tuple[str, ...]:
        return ("",) if in_place in self.places.get(kind, ()) else ()

    def reserve(self, output_bytes: int, input_bytes: int) -> None:
        self._windows = Windows(self.device, self._meter, self.group, output_bytes, input_bytes)

    def tensors(self, case: Case, candidate: Entrant) -> Tensors:
        assert self._windows is not None, "reserve comes first"
        return views(case, candidate.in_place, *self._windows.buffers)


class Windows:
    """An output and an input buffer in symmetric windows of a group's NCCL communicator. Collective.

    Args:
        device: of this rank.
        meter: ranks agree through it before each step that is collective.
        group: whose communicator; None for the default group's.
        output_bytes: size of the first buffer.
        input_bytes: size of the second.
        others: implementations that need as much memory and come later.

    Raises:
        UnavailableError: on every rank, if any rank could not allocate or register them, or would leave no room for
            buffers of the same size that are allocated after them.
    """

    def __init__(
        self,
        device: torch.device,
        meter: Meter,
        group: dist.ProcessGroup | None,
        output_bytes: int,
        input_bytes: int,
        others: int = 1,
    ) -> None:
        chosen = group if group is not None else dist.group.WORLD
        assert chosen is not None
        backend: Any = chosen._get_backend(device)
        self._backend = backend
        self._pool: torch.cuda.MemPool | None = None
        # Connections are made on first use, and a window can be registered only with a communicator that exists.
        dist.all_reduce(torch.ones(1, device=device), group=group)
        buffers: list[torch.Tensor] = []

        def leaves_room() -> str | None:
            nbytes, (free, _) = output_bytes + input_bytes, torch.cuda.mem_get_info(device)
            lacking = free < nbytes * (1 + others)
            return f"{nbytes} of {free} bytes leave no room for those of {others} others" if lacking else None

        _require(meter.attempt(leaves_room), "NCCL's symmetric windows")

        def allocate() -> None:
            self._pool = torch.cuda.MemPool(backend.mem_allocator)
            with torch.cuda.use_mem_pool(self._pool):
                # Two allocations of more than the allocator's 20 MiB segments, so that each is a window of its own and
                # begins at offset 0 on every rank.
                for nbytes in (output_bytes, input_bytes):
                    buffers.append(torch.empty(max(nbytes, _OWN_SEGMENT_BYTES), dtype=torch.uint8, device=device))

        _require(meter.attempt(allocate), "NCCL's symmetric windows")
        _require(meter.attempt(lambda: backend.register_mem_pool(self._pool, symm=True)), "NCCL's symmetric windows")
        self.buffers: tuple[torch.Tensor, torch.Tensor] = (buffers[0], buffers[1])

    def close(self) -> None:
        """Deregister. The buffers must not be used any more."""
        self._backend.deregister_mem_pool(self._pool)
        del self.buffers
        self._pool = None  # the communicator goes when the process group of the run is destroyed


def device_barrier(device: torch.device, group: dist.ProcessGroup | None = None) -> Callable[[], None]:
    """A barrier of all ranks on the current stream: a one-element all-reduce.

    Args:
        device: of this rank.
        group: whose NCCL communicator to use; None for the default group's.
    """
    token = torch.zeros(1, device=device)

    def barrier() -> None:
        dist.all_reduce(token, group=group)

    return barrier


def kernels_of(run: Callable[[], None]) -> list[str]:
    """Names of the kernels that ``run`` launches on this rank; empty means that copy engines did all the work.

    Nothing else tells whether NCCL took the path that it was asked for. Profiling disturbs whatever is timed later in
    the process, so call it last.
    """
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    names = {event.name for event in recorded.events() if event.device_type == DeviceType.CUDA}
    return sorted(name for name in names if not name.startswith(_NO_KERNELS))


_NO_KERNELS = ("Memcpy", "Memset", "nccl:", "c10d::")  # copies, and marks that torch sets around a collective

_OWN_SEGMENT_BYTES = 32 << 20


def _zero_sm_options() -> Any:
    process_group = getattr(dist, "ProcessGroupNCCL", None)
    policy = getattr(process_group, "NCCL_CTA_POLICY_ZERO", None)
    if process_group is None or policy is None:
        raise UnavailableError("this PyTorch has no NCCL_CTA_POLICY_ZERO (needs PyTorch 2.11 with NCCL 2.28 or newer)")
    options = process_group.Options()
    options.config.cta_policy = policy
    return options


def _require(error: str | None, what: str) -> None:
    if error is not None:
        raise UnavailableError(f"{what}: {error}")
