"""Triton kernels without Triton's launcher: compiled once, loaded by the driver API, launched as a prepared call.

``cuLaunchKernel`` with packed arguments took 3.8 us of host time on an H200 machine, 5.0 with all that a collective
adds, and a launch can be prepared like any other driver call. To keep packing simple, every argument of such a kernel
is a 64-bit integer (an address or a count) and everything else is a constant at compile time::

    @triton.jit
    def fill(target, count, VALUE: tl.constexpr, BLOCK: tl.constexpr): ...

    call = driver.bind_kernel(fill, {"VALUE": 3, "BLOCK": 256}, [address, 256], blocks=1, warps=4, stream=stream)
    driver.submit([call])

Import it late: it needs Triton.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import triton
from triton.backends.compiler import GPUTarget

from sidelane import forks
from sidelane.errors import UnavailableError
from sidelane.execute.cuda.native import Bound

WARP_THREADS = 32
_WORD_BYTES = 8
_MOST_HIDDEN = 4
_MOST_CONSTANTS = 1024  # dictionaries of constants for which the kernel is cached by their identity


class Loader(Protocol):
    """The driver functions that kernels need."""

    def attribute(self, name: str) -> int: ...

    def load_function(self, image: bytes, name: str, shared_bytes: int) -> int: ...

    def count_parameters(self, function: int) -> int: ...

    def bind_launch(
        self,
        function: int,
        arguments: int,
        *,
        blocks: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        stream: int,
    ) -> Bound: ...


class LoadedKernels:
    """The kernels that one context has loaded; they are never unloaded. Threads may share it.

    Kernels can be loaded while a stream is captured, in ``driver.relaxed_capture``.

    Args:
        driver: driver of the device, which must be current in every method.
    """

    def __init__(self, driver: Loader) -> None:
        self._driver = driver
        major, minor = (driver.attribute(f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
        self._target = GPUTarget("cuda", 10 * major + minor, WARP_THREADS)
        self._loaded: dict[object, LoadedKernel] = {}
        self._by_identity: dict[tuple[int, int, int | None], tuple[Any, Mapping[str, Any], LoadedKernel]] = {}

    def load(
        self, function: Any, constants: Mapping[str, Any], warps: int, *, stages: int | None = None
    ) -> LoadedKernel:
        """Compile and load a kernel, unless it is loaded already.

        Args:
            function: function that ``triton.jit`` made.
            constants: a value for each ``tl.constexpr`` argument. The mapping must not change afterwards.
            warps: number of warps of a thread block.
            stages: number of pipeline stages of its loops; None: Triton's default.

        Raises:
            UnavailableError: this version of Triton compiles it to a kernel that needs Triton's launcher.
        """
        known = self._by_identity.get((id(constants), warps, stages))
        if known is not None and known[0] is function:
            return known[2]
        key = (function, warps, stages, *sorted((name, str(value)) for name, value in constants.items()))
        kernel = self._loaded.get(key)
        if kernel is None:  # no lock is held: loading may wait for all running work, and so for another thread's call
            made = LoadedKernel(self._driver, compile_for(self._target, function, constants, warps, stages))
            kernel = self._loaded.setdefault(key, made)
        with _lock:
            if len(self._by_identity) >= _MOST_CONSTANTS:
                del self._by_identity[next(iter(self._by_identity))]
            self._by_identity[id(constants), warps, stages] = function, constants, kernel
        return kernel


def kernels_of(context: int, driver: Loader) -> LoadedKernels:
    """Return the loaded kernels of a context, shared by all executors: each kernel takes device memory permanently.

    Args:
        context: handle of the context.
        driver: driver of the context's device.
    """
    with _lock:
        found = _kernels.get(context)
        if found is None:
            found = _kernels[context] = LoadedKernels(driver)
        return found


class LoadedKernel:
    """A kernel in the memory of a device.

    Args:
        driver: driver of the device.
        compiled: kernel that Triton has compiled.

    Attributes:
        function: the driver's handle.
        threads: number of threads of a block.
        shared_bytes: shared memory that a block needs, in bytes.
    """

    def __init__(self, driver: Loader, compiled: Any) -> None:
        metadata = compiled.metadata
        scratch = [getattr(metadata, f"{kind}_scratch_size", 0) for kind in ("global", "profile")]
        if any(scratch) or getattr(metadata, "num_ctas", 1) != 1:
            raise UnavailableError(f"kernel {metadata.name}: it needs Triton's launcher (scratch bytes={scratch})")
        self._driver = driver
        self.threads: int = WARP_THREADS * metadata.num_warps
        self.shared_bytes: int = metadata.shared
        self.function = driver.load_function(compiled.asm["cubin"], metadata.name, metadata.shared)
        self._parameters = driver.count_parameters(self.function)
        self._name = metadata.name

    def bind(self, arguments: Sequence[int], *, blocks: int, stream: int, shared_bytes: int = 0) -> Bound:
        """Prepare a launch of ``blocks`` thread blocks; the arguments, in the order of the source, are fixed.

        ``shared_bytes``: shared memory of a block, if it is to be more than the kernel needs.
        """
        packed = packed_for(self._parameters, arguments, self._name)
        return self._driver.bind_launch(
            *(self.function, packed),
            blocks=(blocks, 1, 1),
            threads=self.threads,
            shared_bytes=max(self.shared_bytes, shared_bytes),
            stream=stream,
        )


def packed_for(parameters: int, arguments: Sequence[int], name: str) -> PackedArguments:
    """Pack arguments for a function with a number of parameters: 64-bit words, of which it reads the bits it needs.

    Raises:
        ValueError: the number of arguments does not fit.
    """
    # Triton appends pointers to scratch memory that this kernel does not use; how many depends on its version.
    hidden = parameters - len(arguments)
    if not 0 <= hidden <= _MOST_HIDDEN:
        raise ValueError(f"bind: arguments of {name} (value={len(arguments)}, allowed={parameters})")
    return PackedArguments.of([*arguments, *[0] * hidden])


class PackedArguments(int):
    """Packed arguments of a launch: the address of an array of the arguments' addresses. It keeps both arrays alive.

    The driver copies the arguments at the launch, so that ``values`` may change between launches. ``keeps``: another
    object that a launch needs.
    """

    keeps: object = None
    values: ctypes.Array[ctypes.c_int64]
    _places: ctypes.Array[ctypes.c_uint64]

    @classmethod
    def of(cls, arguments: Sequence[int]) -> PackedArguments:
        count = len(arguments)
        values = (ctypes.c_int64 * count)(*arguments)
        first = ctypes.addressof(values)
        places = (ctypes.c_uint64 * count)(*range(first, first + _WORD_BYTES * count, _WORD_BYTES))
        packed = cls(ctypes.addressof(places))
        packed.values, packed._places = values, places
        return packed


def compile_for(target: Any, function: Any, constants: Mapping[str, Any], warps: int, stages: int | None = None) -> Any:
    """Compile a kernel whose arguments are 64-bit integers and ``constants``. Needs no device.

    Raises:
        ValueError: a constant is missing or unknown.
    """
    names = [parameter.name for parameter in function.params if parameter.is_constexpr]
    if sorted(names) != sorted(constants):
        raise ValueError(f"compile: constants (value={sorted(constants)}, allowed={sorted(names)})")
    signature = {name: "constexpr" if name in constants else "i64" for name in function.arg_names}
    source = triton.compiler.ASTSource(function, signature, dict(constants))
    options = {"num_warps": warps} | ({} if stages is None else {"num_stages": stages})
    return triton.compile(source, target=target, options=options)


_kernels: dict[int, LoadedKernels] = {}
_lock = forks.lock()
