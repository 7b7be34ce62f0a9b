"""The CUDA executor: one rank's queues on copy engines and stream memory operations, ordered by the caller's stream.

State after a failure: the streams drain, since every wait is released. So the outputs of all unfinished invocations
hold garbage, on this rank and on its peers, and the executor refuses further work.

Memory: an invocation's side streams fork from the caller's stream and join it. So memory is in use exactly until the
caller's stream has passed the invocation, and the caching allocator needs to know that stream only. Buffers of an
armed program must live until it was started.
"""

from __future__ import annotations

from sidelane.errors import UnavailableError
from sidelane.execute.base import Addresses, Capabilities, Runnable
from sidelane.execute.cuda.driver import DriverError
from sidelane.execute.cuda.loaded import CudaProgram
from sidelane.execute.cuda.site import CudaSite
from sidelane.program.ir import Copy, Program, has_epochs
from sidelane.program.kernel import KernelProgram


class CudaExecutor(CudaSite):
    """Runs one rank's queues of programs on its device.

    Invocations of one executor must be ordered among each other, as the communicator does: they share flags.

    Args:
        rank: rank whose queues it runs.
        device: CUDA device of this rank.
        monitor: state of the peers; a ``ControlBlock``.
        timeout_s: seconds that an invocation may take, from its turn on its stream, before it becomes PeerTimeoutError.
        features: features of the driver (``probe``).
        driver: replaces the driver in tests without a device.

    Raises:
        UnavailableError: no driver, no ``cuda.bindings``, or no stream memory operations.
    """

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(frozenset({Copy}), "cuda")

    def load(self, program: Program, addresses: Addresses, *, captured: bool = False) -> Runnable:
        """Bind this rank's queues of ``program`` (see :class:`sidelane.execute.base.Executor`).

        Works while a stream is being captured. ``addresses`` are used as they are: the caller keeps the memory.
        """
        self.check_open("load")
        if program.engines_add:
            raise UnavailableError(
                f"no GPU's copy engines add (value={program.variant!r}); CPU ranks and the simulator run such programs"
            )
        known: CudaProgram | None = None if captured else self.loaded.find(program, addresses)
        if known is not None:
            return known.at(addresses)
        if len(addresses.flags) != program.world_size:
            counts = f"value={len(addresses.flags)}, allowed={program.world_size}"
            raise ValueError(f"CudaExecutor.load: number of flag memories ({counts})")
        if captured and has_epochs(program):
            raise ValueError(
                f"CudaExecutor.load: a graph captures frozen programs, see transform.freeze, and none with epochs "
                f"(value={program.variant!r})"
            )
        with self.lock, self.driver.current(), self.driver.relaxed_capture():
            loaded = CudaProgram(self, program, addresses, captured=captured)
        if loaded.moves:
            self.loaded.add(loaded)
        return loaded

    def load_kernel(self, program: KernelProgram, addresses: Addresses, *, frozen: bool) -> Runnable:
        """Compile, load and bind the kernel of a collective. ``frozen``: it is for a graph that is being captured.

        Raises:
            UnavailableError: Triton is not installed.
            DriverError: the driver refused a call, for want of memory for instance. The executor is unusable then, and
                the peers are told.
        """
        self.check_open("load_kernel")
        known: CudaKernel | None = None if frozen else self.loaded.find(program, addresses)
        if known is not None:
            return known.at(addresses)
        from sidelane.execute.cuda.kernel_program import CudaKernel  # with all kernels: copy engines do without

        with self.lock, self.driver.current(), self.driver.relaxed_capture():
            try:
                loaded = CudaKernel(self, program, addresses, frozen=frozen)
            except DriverError as error:  # the peers launch their kernels: generations would differ from here on
                self.fail_submission(f"{program.collective} {program.variant}", error, captured=frozen)
                raise
        if loaded.moves:
            self.loaded.add(loaded.at(addresses))  # a copy that never has a graph
        return loaded
