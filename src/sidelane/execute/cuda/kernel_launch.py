"""Triton kernels without Triton's launcher: compiled once, loaded by the driver API, launched as a prepared call.

``cuLaunchKernel`` with packed arguments took 3.8 us of host time on an H200 machine, 5.0 with all that a collective
adds, and a launch can be prepared like any other driver call. To keep packing simple, every argument of such a kernel
is a 64-bit integer (an address or a count) and everything else is a constant at compile time::

    @triton.jit
    def fill(target, count, VALUE: tl.constexpr, BLOCK: tl.constexpr): ...

    call = driver.bind_kernel(fill, {"VALUE": 3, "BLOCK": 256}, [address, 256], blocks=1, warps=4, stream=stream)
    driver.submit([call])

Sidelane's own kernels (``device/language``) are kept in the user's cache folder. A process that finds what it needs
there loads it without Triton, whose import alone takes half a second.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from sidelane import forks
from sidelane.device.language import COMPILE_OPTIONS, AtCompileTime, Constant, Kernel, compiling_for, real_constants
from sidelane.errors import UnavailableError, missing
from sidelane.execute.cuda.native import Bound, note_located
from sidelane.native.build import open_private, private_cache
from sidelane.user_files import write_whole

WARP_THREADS = 32
_WORD_BYTES = 8
_MOST_HIDDEN = 4
_OF_COMPILERS = ("ALLOW_", "DISABLE_", "LLVM_", "MLIR_", "NVPTX_", "TRITON_", "USE_IR_")  # begins of variables' names
_DEPENDENT = "DEPENDENT"  # constant that only this module sets: a kernel waits for the end of the one before it
DEPENDENT_ON: tuple[int, ...] = (90,)
"""Compute capabilities on which such a kernel is launched ahead of that end (programmatic dependent launch), since its
gain was measured there and the device tests have passed (results/notes/e2e.md, "Launched ahead")."""

MOST_CONSTANTS = 1024  # dictionaries of constants for which the kernel is cached by their identity


@dataclasses.dataclass(frozen=True, slots=True)
class KernelTarget:
    """A kind of GPU, in the terms in which Triton compiles for it.

    Attributes:
        backend: Triton's backend, ``cuda`` or ``hip``.
        architecture: compute capability, 90 for 9.0, or AMD's name, ``gfx942``.
        warp_threads: number of threads of a warp or wavefront.
    """

    backend: str
    architecture: int | str
    warp_threads: int


class Loader(Protocol):
    """The driver functions that kernels need."""

    def kernel_target(self) -> KernelTarget: ...

    def load_function(self, image: bytes, name: str, shared_bytes: int) -> int: ...

    def count_parameters(self, function: int) -> int | None: ...

    def bind_launch(
        self,
        function: int,
        arguments: int,
        *,
        blocks: tuple[int, int, int],
        threads: int,
        shared_bytes: int,
        stream: int,
        dependent: bool = False,
    ) -> Bound: ...


class LoadedKernels:
    """The kernels that one context has loaded; they are never unloaded. Threads may share it.

    Kernels can be loaded while a stream is captured, in ``driver.relaxed_capture``.

    Args:
        driver: driver of the device, which must be current in every method.
    """

    def __init__(self, driver: Loader) -> None:
        self._driver = driver
        self._target = driver.kernel_target()
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
            UnavailableError: this version of Triton compiles it to a kernel that needs Triton's launcher, or Triton is
                not installed.
        """
        known = self._by_identity.get((id(constants), warps, stages))
        if known is not None and known[0] is function:
            return known[2]
        key = (function, warps, stages, *sorted((name, str(value)) for name, value in constants.items()))
        kernel = self._loaded.get(key)
        if kernel is None:  # no lock is held: loading may wait for all running work, and so for another thread's call
            made = LoadedKernel(self._driver, compiled(self._target, function, constants, warps, stages))
            kernel = self._loaded.setdefault(key, made)
        with _lock:
            if len(self._by_identity) >= MOST_CONSTANTS:
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
        binary: the compiled kernel.

    Attributes:
        function: the driver's handle.
        threads: number of threads of a block.
        shared_bytes: shared memory that a block needs, in bytes.
    """

    def __init__(self, driver: Loader, binary: KernelBinary) -> None:
        self._driver = driver
        self.threads = driver.kernel_target().warp_threads * binary.warps
        self.shared_bytes = binary.shared_bytes
        self.function = driver.load_function(binary.image, binary.name, binary.shared_bytes)
        self._parameters = driver.count_parameters(self.function)
        self._name, self._dependent = binary.name, binary.dependent

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
            dependent=self._dependent,
        )


def packed_for(parameters: int | None, arguments: Sequence[int], name: str) -> PackedArguments:
    """Pack arguments for a function with a number of parameters: 64-bit words, of which it reads the bits it needs.

    If the number is not known (None), there are as many more as Triton may have appended, and the function reads some.

    Raises:
        ValueError: the number of arguments does not fit.
    """
    # Triton appends pointers to scratch memory that this kernel does not use; how many depends on its version.
    hidden = _MOST_HIDDEN if parameters is None else parameters - len(arguments)
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
    _pointers: ctypes.Array[ctypes.c_uint64]

    @classmethod
    def of(cls, arguments: Sequence[int]) -> PackedArguments:
        count = len(arguments)
        values = (ctypes.c_int64 * count)(*arguments)
        first = ctypes.addressof(values)
        pointers = (ctypes.c_uint64 * count)(*range(first, first + _WORD_BYTES * count, _WORD_BYTES))
        packed = cls(ctypes.addressof(pointers))
        packed.values, packed._pointers = values, pointers
        note_located(packed, arguments, pointers)
        return packed


@dataclasses.dataclass(frozen=True, slots=True)
class KernelBinary:
    """A compiled kernel in the form in which drivers load it.

    Attributes:
        name: name of its function.
        warps: number of warps of a block.
        shared_bytes: shared memory that a block needs, in bytes.
        dependent: it waits for the end of the kernel before it, so that its blocks may start ahead of that.
        image: binary for one kind of GPU.
    """

    name: str
    warps: int
    shared_bytes: int
    dependent: bool
    image: bytes

    @staticmethod
    def of(made: Any) -> KernelBinary:
        """Take it from what ``triton.compile`` returned.

        Raises:
            UnavailableError: the kernel needs Triton's launcher.
        """
        metadata = made.metadata
        scratch = [getattr(metadata, f"{kind}_scratch_size", 0) for kind in ("global", "profile")]
        if any(scratch) or getattr(metadata, "num_ctas", 1) != 1:
            raise UnavailableError(f"kernel {metadata.name}: it needs Triton's launcher (scratch bytes={scratch})")
        image = made.asm["cubin"] if "cubin" in made.asm else made.asm["hsaco"]
        dependent = "griddepcontrol.wait" in made.asm.get("ptx", "")
        return KernelBinary(metadata.name, metadata.num_warps, metadata.shared, dependent, image)

    def to_bytes(self) -> bytes:
        """Return the content of a file: a digest of the rest, a line of JSON, the binary."""
        content = json.dumps([self.name, self.warps, self.shared_bytes, self.dependent]).encode() + b"\n" + self.image
        return _digest(content).encode() + b"\n" + content

    @staticmethod
    def of_bytes(stored: bytes) -> KernelBinary | None:
        """Read the result of :meth:`to_bytes`; None for anything else."""
        digest, _, content = stored.partition(b"\n")
        if digest != _digest(content).encode():
            return None
        head, _, image = content.partition(b"\n")
        name, warps, shared_bytes, dependent = json.loads(head)
        return KernelBinary(name, warps, shared_bytes, dependent, image)


def compiled(
    target: KernelTarget, function: Any, constants: Mapping[str, Any], warps: int, stages: int | None
) -> KernelBinary:
    """Return a compiled kernel: the one that an earlier process of this user has kept, or a new one.

    Args:
        target: the kind of GPU.
        function: kernel of ``device/language``, or what ``triton.jit`` made; the latter is not kept.
        constants: see :meth:`LoadedKernels.load`, as the following.
        warps: number of warps of a thread block.
        stages: number of pipeline stages of its loops.

    Raises:
        UnavailableError: see :meth:`LoadedKernels.load`.
    """
    path = _file_of(target, function, constants, warps, stages)
    found = None if path is None else _read_cached(path)
    if found is None:
        try:
            from triton.backends.compiler import GPUTarget
        except ImportError as error:
            raise missing("kernels need Triton", "triton", error) from error
        triton_target = GPUTarget(target.backend, target.architecture, target.warp_threads)
        found = KernelBinary.of(compile_for(triton_target, function, constants, warps, stages))
        if path is not None:
            _write_cached(path, found)
    return found


def _file_of(
    target: KernelTarget, function: Any, constants: Mapping[str, Any], warps: int, stages: int | None
) -> Path | None:
    """Return the file of a kernel, named after all that it is compiled from; None if it is not to be kept."""
    folder, compiler = private_cache(), compiler_digest()
    if type(function) is not Kernel or folder is None or compiler is None:
        return None
    named = sorted((name, str(value)) for name, value in constants.items())
    options = sorted(COMPILE_OPTIONS.items())
    given = (
        *(function.__module__, function.__name__, named, warps, stages, options, target, compiler, _variables()),
        *(KernelBinary.__slots__, DEPENDENT_ON),  # the form of the file, and how its kernel is launched
    )
    return folder / f"{function.__name__.strip('_')}-{_digest(repr((given, _source_of(function))).encode())}.cubin"


def _read_cached(path: Path) -> KernelBinary | None:
    """Read the kernel in a file; None if there is none, or not a whole one that this user alone may write."""
    with contextlib.suppress(OSError), open(open_private(path), "rb") as file:
        return KernelBinary.of_bytes(file.read())
    return None


def _write_cached(path: Path, binary: KernelBinary) -> None:
    """Write a file atomically, for processes to come; without room for it they compile for themselves."""
    with contextlib.suppress(OSError):
        write_whole(path, binary.to_bytes(), 0o600)


def _source_of(kernel: Kernel) -> list[str]:
    """Return all that a kernel is made of: the files of its functions, and the constants that these import.

    A kernel may have been compiled before or not: then Triton has made something else of what a file imports.
    """
    found: list[str] = []
    waiting, seen = [kernel], set[str]()
    while waiting:
        one = waiting.pop()
        if one.__module__ in seen:
            continue
        seen.add(one.__module__)
        names = one.function.__globals__
        found.append(file_digest(names["__file__"]))
        for name, value in names.items():
            if type(value) is Kernel:
                waiting.append(value)
            elif type(value) is Constant or type(value).__name__ == "constexpr":  # which Triton has made of it
                found.append(f"{name}={value.value}")
            elif type(value) is AtCompileTime:
                found.append(file_digest(value.function.__globals__["__file__"]))
            elif type(value).__name__ == "ConstexprFunction":
                found.append(file_digest(value.fn.__globals__["__file__"]))
    return found


@functools.cache
def file_digest(path: str) -> str:
    """Return a digest of a file."""
    return _digest(Path(path).read_bytes())


@functools.cache
def compiler_digest() -> str | None:
    """Return a digest of the file that has Triton's version; None without Triton."""
    spec = importlib.util.find_spec("triton")
    return None if spec is None or not spec.origin else file_digest(spec.origin)


def _variables() -> list[tuple[str, str]]:
    """Return the environment's variables that change what Triton compiles, as far as names tell."""
    names = (name for name in os.environ if name.startswith(_OF_COMPILERS) and not name.endswith(("_DIR", "_HOME")))
    return [(name, os.environ[name]) for name in sorted(names)]


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def compile_for(target: Any, function: Any, constants: Mapping[str, Any], warps: int, stages: int | None = None) -> Any:
    """Compile a kernel whose arguments are 64-bit integers and ``constants``. Needs no device.

    Raises:
        ValueError: a constant is missing or unknown.
    """
    import triton

    names = [parameter.name for parameter in function.params if parameter.is_constexpr]
    if _DEPENDENT in constants:
        constants = {**constants, _DEPENDENT: target.backend == "cuda" and target.arch in DEPENDENT_ON}
    if sorted(names) != sorted(constants):
        raise ValueError(f"compile: constants (value={sorted(constants)}, allowed={sorted(names)})")
    signature = {name: "constexpr" if name in constants else "i64" for name in function.arg_names}
    source = triton.compiler.ASTSource(function, signature, real_constants(constants))
    options = {**COMPILE_OPTIONS, "num_warps": warps} | ({} if stages is None else {"num_stages": stages})
    with compiling_for(target.backend):
        return triton.compile(source, target=target, options=options)


_kernels: dict[int, LoadedKernels] = {}
_lock = forks.lock()
