"""The caller's own kernels on a GPU: launched by Triton once, then as a prepared call; watched like all kernels.

Triton's launcher inspects all arguments at each launch. A complete call took the host 105 us with it, and takes 18 to
27 us with arguments that are packed once (five of them, H100, Triton 3.6). Compiled code makes it again after that, at
other addresses, too (``following``).
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import inspect
import struct
from collections.abc import Sequence
from typing import Any

import torch

from sidelane.device.language import COMPILE_OPTIONS
from sidelane.errors import UnavailableError
from sidelane.execute.base import CallerStream, Repetition
from sidelane.execute.cuda.native import Bound
from sidelane.execute.cuda.site import CudaSite
from sidelane.execute.submitted import Counts, Submitted
from sidelane.program.kernel import KernelCall

_INTEGERS = ("i32", "u32", "i64", "u64")
_NO_ADDRESS = -1
_MOST_CALLERS = 64  # streams for which launches are remembered


class CudaKernelCall:
    """A launch of the caller's own kernel (see :class:`sidelane.execute.base.Runnable`).

    Args:
        executor: executor of this rank.
        call: kernel and arguments.
        compiles: compile the kernel now, so that its errors are found before a launch.

    Attributes:
        program: kernel and arguments; without the arguments once these are packed.

    Raises:
        UnavailableError: Triton is not installed, or would interpret this kernel.
        Exception: Triton cannot compile the kernel, or the device has no room for a block of it.
    """

    def __init__(self, executor: CudaSite, call: KernelCall, *, compiles: bool) -> None:
        from sidelane.device.triton_interpreter import is_interpreted

        if is_interpreted(call.kernel):
            raise UnavailableError(f"kernel {call.name}: GPUs run compiled kernels: unset TRITON_INTERPRET")
        self.program = call = dataclasses.replace(call, options={**COMPILE_OPTIONS, **call.options})
        self._executor = executor
        self._packed: _Packed | None = None
        self._by_stream: dict[int, tuple[Bound, ...]] = {}
        self._entries = [
            executor.ledger.entry(Submitted(call.collective, "sm", call.variant, captured, Counts(kernels=1, calls=1)))
            for captured in (False, True)
        ]
        if compiles:
            with executor.driver.current(), executor.driver.relaxed_capture():
                made = call.kernel.warmup(*call.arguments, grid=call.grid, **call.options)
                self._require_room(made)

    def _require_room(self, made: Any) -> None:
        """Raise what Triton raises at the launch, when peers wait already."""
        needed = getattr(getattr(made, "metadata", None), "shared", 0)
        most = self._executor.driver.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN") if needed else 0
        if needed > most:
            from triton.runtime.errors import OutOfResources

            raise OutOfResources(needed, most, "shared memory")

    def repetition(self, caller: CallerStream, moving: Sequence[tuple[int, str]] | None = None) -> None:
        """Return None: the first launch is Triton's, and any argument may change."""

    def following(self, caller: CallerStream, arguments: Sequence[int]) -> tuple[Repetition, tuple[int, ...]] | None:
        """See :class:`sidelane.collectives.backend.KernelRunnable`."""
        executor, packed, (handle, capturing) = self._executor, self._packed, caller
        # On AMD GPUs, Triton compiles by the sizes of storages, too.
        if packed is None or capturing or executor.driver.kernel_target().backend != "cuda":
            return None
        words = [packed.word_indices[argument] for argument in arguments]
        if any(word == _NO_ADDRESS for word in words):
            return None
        bound, values = packed.bind(executor, handle)
        first, distance = ctypes.addressof(values), ctypes.sizeof(values) // len(values)
        notes = executor.kernel_notes(handle, self.program, self._entries[False])
        repetition = executor.repetition([bound], self.program, notes)
        assert repetition is not None, "its addresses are fixed"
        return repetition, tuple(0 if word is None else first + distance * word for word in words)

    def run(self, epoch: int, caller: CallerStream) -> None:
        """Launch it on the stream of ``caller``. Raises as :meth:`CudaKernel.run`, and errors of Triton."""
        executor = self._executor
        executor.check_usable("launch")
        handle, capturing = caller
        with executor.lock, executor.driver.current():
            try:
                if self._packed is None:
                    self._launch_by_triton(handle, capturing)
                else:
                    executor.driver.submit(self._by_stream.get(handle) or self._bind(handle))
            except BaseException as error:  # tell the peers, whose kernels would wait
                executor.fail_submission(f"kernel {self.program.name}", error, captured=capturing)
                raise
            if not capturing:
                executor.kernel_stream = handle
            executor.watch.launched(epoch, self.program, captured=capturing)
            executor.ledger.count(self._entries[capturing])

    def _launch_by_triton(self, handle: int, capturing: bool) -> None:
        executor, call = self._executor, self.program
        with contextlib.ExitStack() as stack:
            if executor.driver.caller_stream()[0] != handle:
                stack.enter_context(torch.cuda.stream(torch.cuda.ExternalStream(handle)))
            if capturing:
                stack.enter_context(executor.driver.relaxed_capture())  # it may have to be loaded
            compiled = call.kernel[call.grid](*call.arguments, **call.options)
        self._packed = _Packed.of(call, compiled)
        if self._packed is not None:
            self.program = dataclasses.replace(call, arguments=())  # keep no tensors of the caller

    def _bind(self, handle: int) -> tuple[Bound, ...]:
        assert self._packed is not None
        if len(self._by_stream) >= _MOST_CALLERS:
            self._by_stream.clear()
        calls = self._by_stream[handle] = (self._packed.bind(self._executor, handle)[0],)
        return calls

    @property
    def is_prepared(self) -> bool:
        """True if it can be launched again with the same arguments, without Triton's launcher."""
        return self._packed is not None


@dataclasses.dataclass(frozen=True, slots=True)
class _Packed:
    """A compiled kernel with packed arguments.

    Attributes:
        compiled: kernel that Triton has compiled.
        grid: number of programs in each dimension.
        values: a 64-bit word for each argument that is no compile-time constant.
        word_indices: index of each argument's word, for addresses; None for compile-time constants, -1 for numbers.
    """

    compiled: Any
    grid: tuple[int, int, int]
    values: tuple[int, ...]
    word_indices: tuple[int | None, ...]

    @staticmethod
    def of(call: KernelCall, compiled: Any) -> _Packed | None:
        """Pack a launch that Triton has just made; None if only Triton's launcher can launch the kernel."""
        from triton.runtime.jit import JITFunction

        if not isinstance(call.kernel, JITFunction) or getattr(compiled, "function", None) is None:
            return None
        metadata, signature = compiled.metadata, compiled.src.signature
        special = ("num_ctas", "launch_cooperative_grid", "launch_pdl", "global_scratch_size", "profile_scratch_size")
        if any(getattr(metadata, name, 0) not in (0, False, int(name == "num_ctas")) for name in special):
            return None
        named = {name: value for name, value in call.options.items() if name in call.kernel.arg_names}
        bound = inspect.signature(call.kernel.fn).bind(*call.arguments, **named)
        bound.apply_defaults()
        values: list[int] = []
        word_indices: list[int | None] = []
        for name, value in bound.arguments.items():
            kind = signature.get(name)
            if kind == "constexpr":
                word_indices.append(None)
                continue
            word = _word_of(kind, value)
            if word is None:
                return None
            word_indices.append(len(values) if kind.startswith("*") else _NO_ADDRESS)
            values.append(word)
        x, y, z = (*call.grid, 1, 1)[:3]
        return _Packed(compiled, (x, y, z), tuple(values), tuple(word_indices))

    def bind(self, executor: CudaSite, stream: int) -> tuple[Bound, ctypes.Array[ctypes.c_int64]]:
        """Prepare the launch on a stream; return its words, too, which may change between launches."""
        from sidelane.execute.cuda.kernel_launch import packed_for

        driver, metadata = executor.driver, self.compiled.metadata
        function = int(self.compiled.function)
        arguments = packed_for(driver.count_parameters(function), self.values, metadata.name)
        arguments.keeps = self.compiled
        bound = driver.bind_launch(
            function,
            arguments,
            blocks=self.grid,
            threads=driver.kernel_target().warp_threads * metadata.num_warps,
            shared_bytes=metadata.shared,
            stream=stream,
        )
        return bound, arguments.values


def _word_of(kind: Any, value: Any) -> int | None:
    """Return the bits of an argument as a signed integer; None for a type that only Triton packs.

    >>> _word_of("i32", -1), _word_of("u64", 2**64 - 1), _word_of("fp32", 1.0), _word_of("fp16", 1.0)
    (-1, -1, 1065353216, None)
    """
    if not isinstance(kind, str):
        return None
    if kind.startswith("*"):
        return int(value if isinstance(value, int) else value.data_ptr())
    if kind in _INTEGERS:
        return (int(value) + (1 << 63)) % (1 << 64) - (1 << 63)
    return int(struct.unpack("<i", struct.pack("<f", value))[0]) if kind == "fp32" else None
