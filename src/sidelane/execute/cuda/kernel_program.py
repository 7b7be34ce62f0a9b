"""Collectives on compute units: one kernel launch per call.

Kernels count generations in device memory (``device/layout.py``), so that every launch is the same, eager or in a
graph. A kernel reports to the host only if it waits for long (``watch``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from sidelane.device.launch import Launch, LaunchSite
from sidelane.execute.base import Addresses, Place, Repetition
from sidelane.execute.cuda.kernel_plan import PlaceTable, arrange
from sidelane.execute.cuda.native import Bound, Located, locate, movable_steps, steps_of
from sidelane.execute.cuda.site import CudaSite, ExecutableGraph
from sidelane.execute.cuda.tables import DeviceTable
from sidelane.execute.submitted import Counts, Entry, Submitted
from sidelane.native import Effect
from sidelane.program.kernel import KernelProgram

_MOST_CALLERS = 64  # streams for which launches are remembered

FAR = 1 << 20
"""Bytes by which a buffer is moved to find its arguments: a multiple of every alignment that kernels depend on."""


class CudaKernel:
    """A collective of one kernel, bound to addresses (see :class:`sidelane.execute.base.Runnable`).

    Args:
        executor: executor of this rank; its lock is held and its device current.
        program: the program.
        addresses: addresses of its buffers.
        frozen: it is for a graph under capture.
    """

    def __init__(self, executor: CudaSite, program: KernelProgram, addresses: Addresses, *, frozen: bool) -> None:
        self.program = program
        self.addresses = addresses
        self._executor = executor
        self._frozen = frozen
        self._table: DeviceTable | None = None
        self._launch = arranger(program, executor, self._place_table)(addresses)
        self._by_stream: dict[int, tuple[Bound, ...]] = {}
        self._graph: ExecutableGraph | None = None
        self._places: Places | None = None
        if self._launch is not None:
            self._bind(executor.internal)  # compiles and loads it; inside a capture it would be too late
        self._entry = self._enter(Counts() if self._launch is None else Counts(kernels=1, calls=1))

    @property
    def moves(self) -> bool:
        """True if :meth:`at` may work: only arguments of the kernel depend on the addresses."""
        return not self.program.listed and self._launch is not None and not self._frozen

    def at(self, addresses: Addresses) -> CudaKernel | None:
        """Return the same kernel at other addresses of its buffers, without calls to the driver.

        None if more of the launch than arguments changes with the addresses.
        """
        if self._places is None:
            self._places = Places(arranger(self.program, self._executor), self.addresses)
        launch = self._places.move(addresses)
        if launch is None:
            return None
        moved = CudaKernel.__new__(CudaKernel)
        moved.program, moved.addresses, moved._executor, moved._frozen = self.program, addresses, self._executor, False
        moved._launch, moved._table, moved._by_stream, moved._graph, moved._places = launch, None, {}, None, None
        moved._entry = self._entry
        return moved

    def run(self, epoch: int, place: Place) -> None:
        """Launch the kernel (see :class:`sidelane.execute.base.Runnable`).

        Raises:
            PeerError, PeerTimeoutError: an earlier invocation failed; nothing was submitted.
            DriverError: the driver refused the launch. The executor is unusable from now on.
        """
        executor = self._executor
        if executor.watch.failure is not None or executor.closed:
            executor.check_usable("start")
        with executor.lock:
            if executor.driver.is_current():
                self._submit(epoch, place[0])
            else:
                with executor.driver.current():
                    self._submit(epoch, place[0])

    def repetition(self, place: Place) -> Repetition | None:
        """See :class:`sidelane.execute.base.Runnable`."""
        if self._frozen or self._launch is None:
            return None
        handle, executor = place[0], self._executor
        calls, entry = self._bind(handle), self._entry
        with executor.lock, executor.driver.current():
            # Nodes of a graph have the priority of the captured stream, not of the stream on which it is launched.
            normal = executor.driver.has_normal_priority(handle)
            if normal and self._graph is None:
                self._graph = executor.launch_graph(self._bind(executor.internal))
        if normal and self._graph is not None:
            calls, entry = (self._graph.bind(handle),), self._enter(Counts(kernels=1, graph_launches=1, calls=1))
        notes = (
            (Effect.SET, executor, "kernel_stream", handle),
            *executor.watch.launch_notes(self.program),
            *executor.ledger.notes(entry),
        )
        return Repetition(steps_of(calls), (), notes, executor.failing(calls, self.program))

    def movable(self, place: Place, buffers: Sequence[tuple[int, str]]) -> Repetition | None:
        """See :class:`sidelane.execute.base.Runnable`. It uses a plain launch: a graph has fixed arguments."""
        moved = self.at(locate(self.addresses, buffers)) if self.moves else None
        if moved is None:
            return None
        executor, calls = self._executor, moved._bind(place[0])
        found = movable_steps(calls, self.addresses)
        if found is None:
            return None
        steps, followers = found
        notes = (
            (Effect.SET, executor, "kernel_stream", place[0]),
            *executor.watch.launch_notes(self.program),
            *executor.ledger.notes(self._entry),
        )
        return Repetition(steps, (), notes, executor.failing(calls, self.program), followers=followers)

    def _submit(self, epoch: int, handle: int) -> None:
        executor = self._executor
        if self._launch is not None:
            calls = self._by_stream.get(handle)
            if calls is None:
                calls = self._bind(handle)
            try:
                executor.driver.submit(calls)
            except BaseException as error:
                title = f"{self.program.collective} {self.program.variant}"
                executor.fail_submission(title, error, captured=self._frozen)
                raise
        if not self._frozen:
            executor.kernel_stream = handle
        executor.watch.launched(epoch, self.program, captured=self._frozen)
        executor.ledger.count(self._entry)

    def _enter(self, counts: Counts) -> Entry:
        program = self.program
        submitted = Submitted(str(program.collective), "sm", program.variant, self._frozen, counts)
        return self._executor.ledger.entry(submitted)

    def _place_table(self, values: npt.NDArray[np.int64]) -> int:
        self._table = self._executor.place_table(values, frozen=self._frozen)
        return self._table.address

    def _bind(self, handle: int) -> tuple[Bound, ...]:
        assert self._launch is not None
        if len(self._by_stream) >= _MOST_CALLERS:
            self._by_stream.clear()
        launch, driver = self._launch, self._executor.driver
        bound = driver.bind_kernel(
            launch.kernel, launch.constants, launch.arguments, blocks=launch.blocks, warps=launch.warps, stream=handle
        )
        calls = self._by_stream[handle] = (bound,)
        return calls


def arranger(
    program: KernelProgram, executor: CudaSite, place_table: PlaceTable | None = None
) -> Callable[[Addresses], Launch | None]:
    """Return the function that makes the launch of a program for any addresses. ``place_table``: for that of a list."""

    def at(addresses: Addresses) -> Launch | None:
        shared_bytes = executor.features.shared_bytes
        site = LaunchSite(executor.rank, addresses.arenas, executor.board, program.blocks, shared_bytes)
        return arrange(program, site, addresses, place_table)

    return at


class Places:
    """The arguments of a launch that follow the address of each buffer, found once by moving one buffer at a time.

    Args:
        arrange: makes the launch for addresses.
        addresses: addresses of the first launch.
    """

    def __init__(self, arrange: Callable[[Addresses], Launch | None], addresses: Addresses) -> None:
        self._arrange, self._addresses = arrange, addresses
        self._launch = arrange(addresses)
        self._followers: dict[tuple[int, str], tuple[int, ...] | None] = {}

    def move(self, addresses: Addresses) -> Launch | None:
        """Return the launch at other addresses, moved by multiples of ``UNIT``; None if it must be made anew."""
        launch, before = self._launch, self._addresses.buffers
        if launch is None:
            return None
        arguments = list(launch.arguments)
        for key, address in addresses.buffers.items():
            by, is_located = address - before[key], isinstance(address, Located)
            if not (by or is_located):
                continue
            if key not in self._followers:
                self._followers[key] = self._find(key)
            followers = self._followers[key]
            if followers is None:
                return None
            for index in followers:
                value = arguments[index] + by
                arguments[index] = Located.of(value, key) if is_located else value
        return Launch(launch.kernel, launch.blocks, launch.warps, tuple(arguments), launch.constants)

    def _find(self, key: tuple[int, str]) -> tuple[int, ...] | None:
        """Return the indices of the arguments that follow a buffer; None if more depends on its address."""
        launch, addresses = self._launch, self._addresses
        assert launch is not None
        buffers = {**addresses.buffers, key: addresses.buffers[key] + FAR}
        there = self._arrange(dataclasses.replace(addresses, buffers=buffers))
        if there is None or (there.kernel, there.blocks, there.warps, there.constants) != (
            *(launch.kernel, launch.blocks, launch.warps),
            launch.constants,
        ):
            return None
        distances = [after - before for before, after in zip(launch.arguments, there.arguments, strict=True)]
        return tuple(i for i, by in enumerate(distances) if by) if {*distances} <= {0, FAR} else None
