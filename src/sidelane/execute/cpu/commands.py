"""Commands on host memory: each command of a program is compiled to a function at load.

A step runs on the thread of its engine. It calls ``run.stop_if_requested()`` at least once in 8 MiB, so that a failed
invocation stops using memory within milliseconds. ``ctypes.memmove`` copies bytes and releases the GIL: engines of one
process run concurrently, like those of several processes.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from numpy.lib.stride_tricks import as_strided

from sidelane.execute.base import Addresses
from sidelane.execute.boxes import Box, boxes
from sidelane.memory.record import full_fence
from sidelane.program.collective import ReduceOp, Reduction, Span
from sidelane.program.ir import (
    Broadcast,
    Command,
    Comparison,
    Copy,
    Flag,
    Program,
    Queue,
    Reduce,
    Signal,
    SignalOp,
    Stamp,
    Swap,
    Value,
    Wait,
    describe,
    spans,
)
from sidelane.program.wraparound import WORD_MASK

_COPY_BYTES = 8 << 20
_MEMORY = ctypes.c_uint8 * sys.maxsize  # of any size: ctypes never forgets a type of arrays of another length
_SWAP_BYTES = 256 << 10  # through scratch that stays in the second-level cache
# torch hands work to its thread pool beyond 32768 elements; up to there it runs right here, and temporaries stay small.
_REDUCE_ELEMENTS = 32768


class InvocationState(Protocol):
    """The invocation that a step belongs to."""

    @property
    def epoch(self) -> int: ...

    def stop_if_requested(self) -> None:
        """Raise if the invocation has failed or was cancelled."""
        ...

    def hold(self, is_satisfied: Callable[[], bool], queue: Queue, index: int) -> None:
        """Return once ``is_satisfied()``; raise if that can no longer happen or took too long."""
        ...

    def stamp(self, slot: int, time_ns: int) -> None: ...


Action = Callable[[InvocationState], None]


class _Scratch(threading.local):
    """The scratch memory of one engine, for all programs: its thread runs one step after the other."""

    def __init__(self) -> None:
        self.swapped = ctypes.create_string_buffer(_SWAP_BYTES)
        self._totals: dict[torch.dtype, torch.Tensor] = {}

    def totals(self, dtype: torch.dtype) -> torch.Tensor:
        """Return ``_REDUCE_ELEMENTS`` elements."""
        found = self._totals.get(dtype)
        if found is None:
            found = self._totals[dtype] = torch.empty(_REDUCE_ELEMENTS, dtype=dtype, device="cpu")
        return found


_scratch = _Scratch()


def compile_queue(queue: Queue, program: Program, addresses: Addresses) -> tuple[Action, ...]:
    """Compile ``queue`` to one step for each command.

    Raises:
        ValueError: the CPU executor does not run a command, or an address is missing.
    """
    steps = []
    for index, command in enumerate(queue.commands):
        try:
            steps.append(_compile(command, queue, index, program, addresses))
        except ValueError as error:
            where = f"rank {queue.rank} {queue.engine} command {index} ({describe(command)})"
            raise ValueError(f"CpuExecutor.load: {where}: {error}") from None
    return tuple(steps)


def _compile(command: Command, queue: Queue, index: int, program: Program, addresses: Addresses) -> Action:
    for span in spans(command):
        _check_rank(span.rank, program)
        size = program.buffer_bytes(span.rank, span.buffer)
        if not 0 <= span.offset <= span.end <= size:
            raise ValueError(f"span out of bounds (value={span}, allowed=0..{size})")
    if addresses.has_rows and isinstance(command, Broadcast | Swap | Reduce):
        raise ValueError("bytes that lie in rows (allowed=copy)")
    match command:
        case Copy(dst, src) if addresses.has_rows:
            _same_size(src, dst)
            return _copy_boxes(list(boxes(dst, src, addresses)))
        case Copy(dst, src):
            return _copy([_address(dst, addresses)], _address(src, addresses), _same_size(src, dst))
        case Broadcast(dsts, src):
            return _copy([_address(dst, addresses) for dst in dsts], _address(src, addresses), _same_size(src, *dsts))
        case Swap(a, b):
            return _swap(_address(a, addresses), _address(b, addresses), _same_size(a, b))
        case Reduce(dst, srcs, reduction):
            sources = [_address(src, addresses) for src in srcs]
            return _reduce(_address(dst, addresses), sources, _same_size(dst, *srcs), reduction)
        case Signal(flag, value, op):
            if op is not SignalOp.SET:
                # Python has no atomic add on memory that other processes write.
                raise ValueError(f"cannot add to a flag atomically (value={op}, allowed=set)")
            return _signal(_flag(flag, program, addresses), value)
        case Wait(flag, value, comparison):
            if flag.rank != queue.rank:
                raise ValueError(f"waits on a flag of another rank (value={flag.rank}, allowed={queue.rank})")
            return _wait(_flag(flag, program, addresses), value, comparison, queue, index)
        case Stamp(slot):
            return lambda run: run.stamp(slot, time.perf_counter_ns())
        case _:
            raise ValueError("no such command (allowed=copy, broadcast, swap, reduce, signal, wait, stamp)")


def _check_rank(rank: int, program: Program) -> None:
    if not 0 <= rank < program.world_size:
        raise ValueError(f"no such rank (value={rank}, allowed=0..{program.world_size - 1})")


def _address(span: Span, addresses: Addresses) -> int:
    address = addresses.find(span.rank, span.buffer, span.offset)
    if address is None:
        if span.nbytes:
            raise ValueError(f"no address for the {span.buffer} of rank {span.rank}")
        return 0
    return address


def _same_size(*operands: Span) -> int:
    sizes = {span.nbytes for span in operands}
    if len(sizes) != 1:
        raise ValueError(f"operands differ in size (value={sorted(sizes)} bytes)")
    return sizes.pop()


def _flag(flag: Flag, program: Program, addresses: Addresses) -> int:
    _check_rank(flag.rank, program)
    if not 0 <= flag.index < program.flag_count:
        raise ValueError(f"no such flag (value={flag.index}, allowed=0..{program.flag_count - 1})")
    return addresses.flag(flag)


def _copy(dsts: list[int], src: int, nbytes: int) -> Action:
    def step(run: InvocationState) -> None:
        for offset in range(0, nbytes, _COPY_BYTES):
            run.stop_if_requested()
            length = min(_COPY_BYTES, nbytes - offset)
            for dst in dsts:
                ctypes.memmove(dst + offset, src + offset, length)

    return step


def _copy_boxes(copied: list[Box]) -> Action:
    pairs = [pair for box in copied for pair in _parts(*_arrays(box))]

    def step(run: InvocationState) -> None:
        for dst, src in pairs:
            run.stop_if_requested()
            np.copyto(dst, src)

    return step


Bytes = npt.NDArray[np.uint8]


def _arrays(box: Box) -> tuple[Bytes, Bytes]:
    """Return destination and source of a box as arrays over memory that the caller keeps alive."""
    shape = (box.planes, box.rows, box.width)
    found: list[Bytes] = []
    for address, pitch, distance in zip((box.dst, box.src), box.pitches, box.distances, strict=True):
        extent = (box.planes - 1) * distance + (box.rows - 1) * pitch + box.width
        memory = _view(address, extent, torch.uint8).numpy()
        found.append(as_strided(memory, shape, (distance, pitch, 1)))
    return found[0], found[1]


def _parts(dst: Bytes, src: Bytes) -> Iterator[tuple[Bytes, Bytes]]:
    """Yield two arrays in parts of 8 MiB at most."""
    if dst.nbytes <= _COPY_BYTES:
        yield dst, src
    elif len(dst) == 1:
        yield from _parts(dst[0], src[0])
    else:
        step = max(1, _COPY_BYTES // dst[0].nbytes)
        for begin in range(0, len(dst), step):
            part = slice(begin, begin + step)
            yield from _parts(dst[part], src[part])


def _swap(a: int, b: int, nbytes: int) -> Action:
    def step(run: InvocationState) -> None:
        held = ctypes.addressof(_scratch.swapped)
        for offset in range(0, nbytes, _SWAP_BYTES):
            run.stop_if_requested()
            length = min(_SWAP_BYTES, nbytes - offset)
            ctypes.memmove(held, a + offset, length)
            ctypes.memmove(a + offset, b + offset, length)
            ctypes.memmove(b + offset, held, length)

    return step


def _signal(address: int, value: Value) -> Action:
    word = ctypes.c_uint32.from_address(address)

    def step(run: InvocationState) -> None:
        # Everything that the queue has read and written so far comes before the flag, for every observer.
        full_fence()
        word.value = value.at(run.epoch) & WORD_MASK

    return step


def _wait(address: int, value: Value, comparison: Comparison, queue: Queue, index: int) -> Action:
    word = ctypes.c_uint32.from_address(address)

    def step(run: InvocationState) -> None:
        wanted = value.at(run.epoch) & WORD_MASK
        run.hold(lambda: comparison.holds(word.value, wanted), queue, index)
        full_fence()  # the flag was read before the bytes that it announces

    return step


def _reduce(dst: int, srcs: list[int], nbytes: int, reduction: Reduction) -> Action:
    """Compile a reduction. Floats accumulate in float32 in the order of ``srcs`` and round once; integers wrap."""
    if not srcs:
        raise ValueError("nothing to reduce (value=0 sources)")
    dtype: torch.dtype = getattr(torch, reduction.dtype)
    if nbytes % reduction.element_bytes:
        raise ValueError(f"not whole elements (value={nbytes} bytes, allowed=multiples of {reduction.element_bytes})")
    if nbytes == 0:
        return lambda run: None
    count = nbytes // reduction.element_bytes
    accumulate = torch.float32 if dtype.is_floating_point else dtype
    combine = _combining(reduction.op)
    # Kept from the second run on: between tensors that are freed, what was allocated meanwhile would leave holes.
    is_known, known = False, tuple[torch.Tensor, ...]()

    def step(run: InvocationState) -> None:
        nonlocal is_known, known
        target, *sources = views = known or tuple(_view(address, nbytes, dtype) for address in (dst, *srcs))
        is_known, known = True, views if is_known else ()
        scratch = _scratch.totals(accumulate)
        for begin in range(0, count, _REDUCE_ELEMENTS):
            run.stop_if_requested()
            part = slice(begin, min(begin + _REDUCE_ELEMENTS, count))
            total = scratch[: part.stop - part.start]
            total.copy_(sources[0][part])
            for source in sources[1:]:
                combine(total, source[part])
            if reduction.op is ReduceOp.AVG:
                rounding = None if dtype.is_floating_point else "trunc"
                torch.div(total, len(sources), rounding_mode=rounding, out=total)
            target[part].copy_(total)  # the destination may be a source: it is written last

    return step


def _combining(op: ReduceOp) -> Callable[[torch.Tensor, torch.Tensor], object]:
    """Return the function that puts an operand into a total; an average is divided behind the last."""
    match op:
        case ReduceOp.SUM | ReduceOp.AVG:
            return torch.Tensor.add_
        case ReduceOp.MIN:
            return lambda total, operand: torch.minimum(total, operand, out=total)
        case ReduceOp.MAX:
            return lambda total, operand: torch.maximum(total, operand, out=total)
        case _:
            raise ValueError(f"reduction (value={op!r}, allowed={', '.join(ReduceOp)})")


def _view(address: int, nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor over memory that the caller keeps alive."""
    return torch.frombuffer(_MEMORY.from_address(address), dtype=dtype, count=nbytes // dtype.itemsize)
