"""A walk through everything that a communicator submits on GPUs, with a driver that checks every address and handle.

Run by ``test_addresses`` in a process whose ``libcuda.so.1`` is ``checking_driver.c``. This is rank 0 of four whose
peers are addresses only: nothing moves, and what is posted here stands for what all post.

    address_walk.py SEED STEPS SABOTAGE

Prints a JSON object of what was checked.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import random
import sys
import tempfile
import weakref
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from loads import handover

from sidelane.collectives import backend_cuda
from sidelane.collectives.prepare import FLAGS
from sidelane.config import Config
from sidelane.execute.base import Questions
from sidelane.execute.cuda import driver
from sidelane.execute.cuda.probe import DriverFeatures
from sidelane.memory.control import ControlBlock
from sidelane.memory.exchange import Exchange
from sidelane.native import load_replays
from sidelane.program.ir import Program
from sidelane.session import communicator, making

WORLD = 4
SIZES = (1, 16, 250, 1000, 4096, 30_000, 65_536, 100_001)
ARENA_BYTES = 1 << 21
VARIANTS = {
    "all_gather": (
        "b2b",
        "striped",
        "pcpy",
        "bcst",
        "one_shot",
        "auto",
    ),
    "all_to_all": ("b2b", "striped", "pcpy", "swap", "one_shot", "auto"),
    "broadcast": ("b2b", "striped", "bcst", "auto"),
    "reduce_scatter": ("b2b", "one_shot", "one_shot_narrow", "auto"),
    "all_reduce": ("b2b", "one_shot", "two_shot", "two_shot_push", "two_shot_narrow", "auto"),
}

checker = ctypes.CDLL("libcuda.so.1")
checker.checker_allow.argtypes = (ctypes.c_uint64, ctypes.c_uint64)
checker.checker_forbid.argtypes = (ctypes.c_uint64,)
checker.checker_checks.restype = checker.checker_violations.restype = ctypes.c_uint64
checker.checker_renew.argtypes = (ctypes.c_uint64,)
checker.cuGraphLaunch.argtypes = (ctypes.c_uint64, ctypes.c_void_p)
checker.cuGraphExecDestroy.argtypes = (ctypes.c_uint64,)


def bytes_that_may_be_touched(nbytes: int) -> torch.Tensor:
    """Memory that is allowed until this tensor goes; views of it do not count."""
    made = torch.zeros(max(1, nbytes), dtype=torch.uint8)
    checker.checker_allow(made.data_ptr(), made.nbytes)
    weakref.finalize(made, checker.checker_forbid, made.data_ptr())
    return made


class Words:
    """As ``driver.HostWords``."""

    def __init__(self, count: int, device: object = None) -> None:
        self.memory = bytes_that_may_be_touched(4 * count)
        self.array = self.memory.numpy().view(np.uint32)
        self.address = self.memory.data_ptr()


class Block:
    """A symmetric block, the parts of the ranks one behind the other."""

    def __init__(self, nbytes: int) -> None:
        part = -(-nbytes // 256) * 256
        self.memory = bytes_that_may_be_touched(WORLD * part)
        self.tensor = self.memory[:part]
        self.addresses = tuple(self.memory.data_ptr() + rank * part for rank in range(WORLD))


class Memory:
    """As ``TorchSymmetricMemory``."""

    blocks: ClassVar[list[Block]] = []

    def allocate(self, nbytes: int) -> Block:
        self.blocks.append(made := Block(nbytes))
        return made

    def close(self) -> None:
        pass


class Control(ControlBlock):
    """What this rank posts, all ranks have posted."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange)
        self.world_size = WORLD
        self._parts = self._parts * WORLD


class AloneExchange:
    """As ``Exchange``: what this rank says, all ranks say."""

    rank, world_size = 0, WORLD

    def __call__(self, what: str, make: Any) -> list[Any]:
        return [make()] * WORLD


class Stream:
    """As ``torch.cuda.Stream``."""

    def __init__(self, *_: Any, handle: int = 0x500, **__: Any) -> None:
        self.cuda_stream = handle

    def synchronize(self) -> None:
        pass


class StubKernel:
    """As ``kernel_launch.LoadedKernel``, without a compiler behind it."""

    def __init__(self, owner: driver.Driver) -> None:
        self._driver = owner

    def bind(self, arguments: Any, *, blocks: int, stream: int) -> driver.Bound:
        from sidelane.execute.cuda.kernel_launch import PackedArguments

        packed = PackedArguments.of(list(arguments))
        # The driver that checks learns from the bytes of shared memory how many arguments there are.
        count = len(packed.values)
        return self._driver.bind_launch(
            0x600, packed, blocks=(blocks, 1, 1), threads=128, shared_bytes=count, stream=stream
        )


caller = SimpleNamespace(stream=0x500, capturing=False)
events: set[int] = set()
real_create, real_destroy = driver.Driver.create_event, driver.Driver.destroy_event


def create_event(self: driver.Driver, *, timing: bool = False) -> int:
    events.add(made := real_create(self, timing=timing))
    return made


def destroy_event(self: driver.Driver, event: int) -> None:
    events.discard(event)
    real_destroy(self, event)


def take_over() -> None:
    """Put all this in the places of what needs GPUs and other processes."""
    driver.HostWords = Words
    driver.Driver.device_words = lambda self, count: ((words := Words(count)).address, words)
    questions = Questions(lambda index: caller.stream, lambda: caller.capturing, lambda: 0, 0)
    driver.Driver.questions = lambda self: questions
    driver.Driver.caller_stream = lambda self: (caller.stream, caller.capturing)
    driver.Driver.is_current = lambda self: True
    driver.Driver.create_event, driver.Driver.destroy_event = create_event, destroy_event
    torch.cuda.Stream = Stream
    torch.cuda.current_stream = lambda device=None: Stream(handle=caller.stream)
    torch.cuda.current_device = lambda: 0
    torch.cuda.device = lambda index: contextlib.nullcontext()
    backend_cuda.TorchSymmetricMemory = lambda *_: Memory()
    features = DriverFeatures("13.0", 3, stream_memory_ops=True, peer_writes=True, copy_batches=True)
    backend_cuda.probe = lambda *_: features
    control = Control(Exchange(dist.group.WORLD, 60.0))
    communicator.ControlBlock = lambda exchange: control
    dist.ProcessGroup.size = lambda group: WORLD
    communicator.Exchange = lambda group, timeout_s, warn_s: AloneExchange()
    communicator.make_backend = backend_cuda.CudaBackend
    making.choose_device = lambda device: torch.device("cpu")
    with contextlib.suppress(ImportError):
        from sidelane.execute.cuda import kernel_launch

        kernel_launch.LoadedKernels.load = lambda self, *_: StubKernel(self._driver)


class Walk:
    """Calls of every kind on tensors that come and go, from streams that change, captured, and all again."""

    def __init__(self, comm: communicator.Communicator, seed: int) -> None:
        self.comm, self.rng = comm, random.Random(seed)
        self.captures = seed % 2 == 0  # which keep staging for good
        self.symmetric = [comm.empty(ARENA_BYTES // 2, dtype=torch.uint8) for _ in range(4)]
        self.ordinary = [bytes_that_may_be_touched(ARENA_BYTES) for _ in range(4)]
        self.own = [self.load(handover(WORLD, nbytes)) for nbytes in (4000, 33)]
        self.recent: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.graphs: list[tuple[int, object]] = []
        self.refused = self.made = self.growths = self.moved = 0

    def load(self, program: Program) -> Any:
        """A program of the caller's own, on tensors that it keeps."""
        sizes = {name: program.buffer_bytes(0, name) for name in program.collective.names}
        cache = bytes_that_may_be_touched(sizes["cache"])
        return self.comm.load(program, {"cache": cache, "inbox": self.comm.empty(sizes["inbox"], dtype=torch.uint8)})

    def step(self) -> None:
        rng = self.rng
        if rng.random() < 0.02:
            caller.stream = rng.choice((0x500, 0x500, 0x500, 0x600, 0))
        self.change(rng.random())
        again = self.recent and rng.random() < 0.85
        asked = call = rng.choice(self.recent) if again else self.new_call()
        if rng.random() < 0.3 and not isinstance(call[1][0], list):
            call = self.elsewhere(call)
        repeated = self.comm.repeated_calls()
        captured = self.captures and rng.random() < 0.02
        checker.checker_doing(f"{call[0]} {call[2]['variant']}, captured {captured}".encode())
        stream = caller.stream
        if captured:
            caller.stream, caller.capturing = stream or 0x500, True
            checker.cuStreamBeginCapture_v2(None, 0)
        try:
            if rng.random() < 0.1:
                rng.choice(self.own)()
            for _ in range(1 if captured else rng.choice((1, 1, 2, 5))):
                getattr(self.comm, call[0])(*call[1], **call[2])
                self.made += 1
            self.moved += call is not asked and self.comm.repeated_calls() > repeated
        except ValueError:  # tensors that overlap, or a variant that these cannot have
            self.refused += 1
            self.recent = [other for other in self.recent if other is not call]
        finally:
            if captured:
                self.keep_graph((call, list(self.ordinary)))
                caller.stream, caller.capturing = stream, False

    def change(self, chance: float) -> None:
        """Now and then, what else happens to a communicator."""
        if chance < 0.002:
            self.ordinary[self.rng.randrange(4)] = bytes_that_may_be_touched(ARENA_BYTES)
            self.recent.clear()
        elif chance < 0.003:
            self.comm.empty(self.rng.choice((10, 5000)))
        elif chance < 0.004:
            gc.collect()
        elif chance < 0.008 and self.graphs:
            checker.checker_doing(b"a replay of the caller's graph")
            checker.cuGraphLaunch(self.rng.choice(self.graphs)[0], None)
        elif chance < 0.010 and self.growths < 6:  # as if a larger call had come
            self.growths += 1
            larger = bytes_that_may_be_touched(WORLD * 2**20 * 2**self.growths)
            for variant in ("b2b", "one_shot"):
                self.comm.all_gather(larger, larger[: len(larger) // WORLD], variant=variant)
        elif chance < 0.016 and not self.graphs:  # the caller's need their memory
            checker.checker_renew(self.rng.choice(self.ordinary).data_ptr())
        elif chance < 0.0165 and not self.graphs:  # a program goes, and another one comes
            self.own.pop(0).close()
            self.own.append(self.load(handover(WORLD, self.rng.randrange(1, 9000))))
        elif chance < 0.0175:  # as if thousands of other calls had come
            for kind in VARIANTS:
                self.comm.preparer.cache.forget_calls_of(kind)
            gc.collect()

    def keep_graph(self, needs: object) -> None:
        graph, executable = ctypes.c_uint64(), ctypes.c_uint64()
        checker.cuStreamEndCapture(None, ctypes.byref(graph))
        checker.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, ctypes.c_uint64(0))
        self.graphs.append((executable.value, needs))
        if len(self.graphs) > 30:
            checker.cuGraphExecDestroy(self.graphs.pop(0)[0])

    def new_call(self) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
        rng = self.rng
        kind = rng.choice(list(VARIANTS))
        dtype = rng.choice((torch.bfloat16, torch.float32))
        symmetric, in_place, first = rng.random() < 0.6, rng.random() < 0.3, rng.randrange(4)
        listed = rng.random() < 0.2
        places = [16 * number for number in range(rng.randrange(1, 4))] if listed else [rng.randrange(4)]
        further = rng.choice((0, 0, 16 * rng.randrange(200), rng.randrange(0, 64, 4)))
        rows = [
            self.tensors(kind, rng.choice(SIZES), dtype, symmetric, in_place, first, 4096 * place + further)
            for place in places
        ]
        columns = [list(column) if listed else column[0] for column in zip(*rows, strict=True)]
        details: dict[str, Any] = {"variant": rng.choice(VARIANTS[kind])}
        if kind == "broadcast":
            details["root"] = rng.randrange(2)
        if kind == "all_reduce":
            details["output"] = None if in_place else columns.pop()
        call = (kind, tuple(columns), details)
        self.recent = [*self.recent[-40:], call]
        return call

    def elsewhere(
        self, call: tuple[str, tuple[Any, ...], dict[str, Any]]
    ) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
        """The same call on new tensors, which lie to each other as those of the other do."""
        kind, tensors, details = call
        memory = self.ordinary[self.rng.randrange(4)]
        shift = 16 * self.rng.randrange(64)
        first = min(tensor.data_ptr() for tensor in tensors)
        last = max(tensor.data_ptr() + tensor.nbytes for tensor in tensors)
        if last - first + shift + 16 > memory.nbytes:  # apart, or none of the ordinary memory
            return call
        start = (first - memory.data_ptr()) % 16 + shift
        moved = []
        for tensor in tensors:
            at = start + tensor.data_ptr() - first
            moved.append(memory[at : at + tensor.nbytes].view(tensor.dtype))
        return kind, tuple(moved), details

    def tensors(
        self, kind: str, size: int, dtype: torch.dtype, symmetric: bool, in_place: bool, first: int, start: int
    ) -> tuple[torch.Tensor, ...]:
        def pick(number: int, elements: int) -> torch.Tensor:
            memory = (self.symmetric if symmetric else self.ordinary)[(first + number) % 4]
            return memory[start : start + elements * dtype.itemsize].view(dtype)

        whole, other = pick(0, WORLD * size), pick(1, WORLD * size)
        match kind:
            case "all_gather":
                return whole, whole[:size] if in_place else other[:size]
            case "all_to_all":
                return whole, whole if in_place else other
            case "broadcast":
                return (whole,)
            case "reduce_scatter":
                return (whole[:size], whole) if in_place else (other[:size], whole)
            case _:
                return (whole,) if in_place else (whole, other)


def main() -> None:
    seed, steps, sabotage = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        take_over()
        comm = communicator.Communicator(config=Config(profile="builtin"))  # there are no peers
    assert comm.path.repeats is not None, load_replays().words
    walk = Walk(comm, seed)
    for number in range(steps):
        if number == steps // 2 and sabotage == "flags":
            flags = next(block for block in Memory.blocks if block.tensor.nbytes == 2 * FLAGS * 4)
            checker.checker_forbid(flags.memory.data_ptr())
        if number == steps // 2 and sabotage == "events":
            for event in events:
                checker.cuEventDestroy_v2(ctypes.c_uint64(event))
        walk.step()
        if checker.checker_violations():
            break
    comm.synchronize()
    found = {"made": walk.made, "refused": walk.refused, "native": comm.repeated_calls(), "moved": walk.moved}
    found |= {"checks": checker.checker_checks(), "violations": checker.checker_violations()}
    print(json.dumps(found), flush=True)
    os._exit(0)  # the pool of words is gone before what would be tidied up


if __name__ == "__main__":
    main()
