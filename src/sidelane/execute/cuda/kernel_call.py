"""A kernel of the caller's own on a GPU: launched by Triton, watched like the kernels of collectives."""

from __future__ import annotations

import contextlib

import torch

from sidelane.errors import UnavailableError
from sidelane.execute.base import Place
from sidelane.execute.cuda.site import CudaSite
from sidelane.execute.submitted import Counts, Submitted
from sidelane.program.kernel_call import KernelCall


class CudaKernelCall:
    """See :class:`sidelane.execute.base.Runnable`.

    Args:
        executor: of this rank.
        call: what to launch.
        compiles: now, so that what is wrong with the kernel is found before anything is launched.

    Raises:
        UnavailableError: Triton is not installed, or would interpret this kernel.
        Exception: what Triton raises for a kernel that it cannot compile.
    """

    def __init__(self, executor: CudaSite, call: KernelCall, *, compiles: bool) -> None:
        try:
            from triton.runtime.jit import KernelInterface
        except ImportError as error:
            raise UnavailableError(f"kernels need Triton ({error}): pip install triton") from error
        from sidelane.device.interpreted import is_interpreted

        assert isinstance(call.kernel, KernelInterface)
        if is_interpreted(call.kernel):
            raise UnavailableError(f"kernel {call.name}: GPUs run compiled kernels (allowed=without TRITON_INTERPRET)")
        self.program = call
        self._executor = executor
        if compiles:
            with executor.driver.current(), executor.driver.relaxed_capture():
                call.kernel.warmup(*call.arguments, grid=call.grid, **call.options)

    def repetition(self, place: Place) -> None:
        """None: Triton's launcher is Python."""

    def run(self, epoch: int, place: Place) -> None:
        """Launch it on the stream of ``place``. Raises as :meth:`CudaKernel.run`, and what Triton raises."""
        executor, call = self._executor, self.program
        executor.check_usable("launch")
        handle, capturing = place
        with executor.lock, executor.driver.current(), contextlib.ExitStack() as stack:
            if executor.driver.place()[0] != handle:
                stack.enter_context(torch.cuda.stream(torch.cuda.ExternalStream(handle)))
            if capturing:
                stack.enter_context(executor.driver.relaxed_capture())  # it may have to be loaded
            try:
                call.kernel[call.grid](*call.arguments, **call.options)
            except BaseException as error:  # the peers' kernels would wait
                executor.watch.fail_submission(f"kernel {call.name}", error)
                raise
            if not capturing:
                executor.kernel_stream = handle
            executor.watch.launched(epoch, call, captured=capturing)
            submitted = Submitted(call.collective, "sm", call.variant, capturing, Counts(kernels=1, calls=1))
            executor.ledger.count(executor.ledger.entry(submitted))
