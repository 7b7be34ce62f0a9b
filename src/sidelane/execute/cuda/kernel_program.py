"""Collectives on compute units: one kernel launch per call.

Kernels count generations in device memory (``device/layout.py``), so that every launch is the same, eager or in a
graph. A kernel reports to the host only if it waits for long (``watch``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from sidelane.device.launch import Launch, LaunchSite
from sidelane.execute.base import Addresses, Place, Repetition
from sidelane.execute.cuda.kernel_plan import arrange
from sidelane.execute.cuda.native import Bound, Located, locate
from sidelane.execute.cuda.site import CudaSite, ExecutableGraph
from sidelane.execute.cuda.tables import DeviceTable
from sidelane.execute.submitted import Counts, Entry, Submitted
from sidelane.program.kernel import KernelProgram

_MOST_CALLERS = 64  # streams for which launches are remembered


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
        shared_bytes = executor.features.shared_bytes
        site = LaunchSite(executor.rank, addresses.arenas, executor.board, program.blocks, shared_bytes)
        made = arrange(program, site, locate(addresses, addresses.buffers), self._place_table)
        self._made = None if made is None else (made, addresses)
        self._launch = None if made is None else _moved(made, addresses, addresses)
        self._by_stream: dict[int, tuple[Bound, ...]] = {}
        self._graph: ExecutableGraph | None = None
        if self._launch is not None:
            self._bind(executor.internal)  # compiles and loads it; inside a capture it would be too late
        self._entry = self._enter(Counts() if self._launch is None else Counts(kernels=1, calls=1))

    @property
    def moves(self) -> bool:
        """True if :meth:`at` works: only arguments of the kernel depend on the addresses."""
        return not self.program.listed and self._launch is not None and not self._frozen

    def at(self, addresses: Addresses) -> CudaKernel:
        """Return the same kernel at other addresses of its buffers, moved by multiples of ``UNIT``.

        It makes no calls to the driver.
        """
        assert self._made is not None, "something moves"
        moved = CudaKernel.__new__(CudaKernel)
        moved.__dict__.update(self.__dict__)
        moved.addresses, moved._launch = addresses, _moved(*self._made, addresses)
        moved._by_stream, moved._graph = {}, None
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
        return executor.repetition(calls, self.program, executor.kernel_notes(handle, self.program, entry))

    def movable(self, place: Place, buffers: Sequence[tuple[int, str]]) -> Repetition | None:
        """See :class:`sidelane.execute.base.Runnable`. It uses a plain launch: a graph has fixed arguments."""
        if not self.moves:
            return None
        executor, calls = self._executor, self.at(locate(self.addresses, buffers))._bind(place[0])
        notes = executor.kernel_notes(place[0], self.program, self._entry)
        return executor.repetition(calls, self.program, notes, moving=self.addresses)

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


def _moved(launch: Launch, before: Addresses, after: Addresses) -> Launch:
    """Return a launch whose arguments know their buffers (``native.Located``) at other addresses of these."""
    arguments = tuple(
        after.buffers[value.buffer] + (int(value) - before.buffers[value.buffer]) if type(value) is Located else value
        for value in launch.arguments
    )
    return Launch(launch.kernel, launch.blocks, launch.warps, arguments, launch.constants)
