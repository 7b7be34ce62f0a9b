"""The process that a tool looks into: runs cases, one after the other, and says in a file how far it has come.

``apart``: as the project does it, a launch for each rank; ranks are threads with a stream each, and share a GPU.
``together``: one launch for all (``together``).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from triton.backends.compiler import GPUTarget

from sanitizer import planted
from sanitizer.cases import Case, cases
from sanitizer.places import Imagined, Setup, draw, set_up, wanted
from sanitizer.together import join
from sidelane.device import layout
from sidelane.device.launch import Launch
from sidelane.execute.cuda import native
from sidelane.execute.cuda.driver import Driver, DriverError
from sidelane.execute.cuda.kernel_launch import PackedArguments, compile_for
from sidelane.execute.cuda.tables import DeviceTable

APART, TOGETHER = "apart", "together"
WAYS = (APART, TOGETHER)
TURNS = 2
"""Calls of a case, one for each parity of generations."""

DEVICE = torch.device("cuda", 0)
MEETING_S = 20.0
_MOST_HIDDEN = 4


class DeviceMemory:
    """See ``places.Memory``: each piece is an allocation of its own, as long as it is and no longer.

    Args:
        driver: of the GPU.
        missing: bytes that each piece of data is too short, for a planted mistake.
    """

    def __init__(self, driver: Driver, missing: int = 0) -> None:
        self._driver, self._missing = driver, missing
        self._held: list[int] = []
        self._words: list[object] = []
        self.shared_bytes = driver.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")

    def data(self, nbytes: int, misalignment: int) -> int:
        self._held.append(self._driver.allocate(nbytes + misalignment - self._missing))
        return self._held[-1] + misalignment

    def arena(self, world_size: int) -> int:
        self._held.append(self._driver.allocate(layout.arena_bytes(world_size)))
        # Slots of block flags lie at the end: they begin as they are.
        zeroed = layout.LL_OFFSET + 2 * world_size * layout.LL_SLOT_BYTES
        self._driver.call("cuMemsetD8", self._held[-1], 0, zeroed)
        return self._held[-1]

    def words(self) -> tuple[int, int]:
        words = self._driver.host_words(layout.STATUS_WORDS + layout.MAX_BLOCKS)
        self._words.append(words)
        return words.address, words.address + 4 * layout.STATUS_WORDS

    def store_table(self, values: npt.NDArray[np.int64]) -> DeviceTable:
        self._held.append(self._driver.allocate(values.nbytes))
        self._driver.call("cuMemcpyHtoD", self._held[-1], values.ctypes.data, values.nbytes)
        return DeviceTable(self._held[-1])

    def release(self) -> None:
        for address in self._held:
            self._driver.free(address)
        self._held.clear()
        self._words.clear()


class Runner:
    """Runs cases on the GPU.

    Args:
        way: one of ``WAYS``.
        folder: for sources of kernels.
    """

    def __init__(self, way: str, folder: Path) -> None:
        torch.cuda.set_device(DEVICE)
        self.driver = Driver(DEVICE)
        self._context = self.driver.call("cuCtxGetCurrent")
        self._way, self._folder = way, folder
        self._streams = [self.driver.create_stream() for _ in range(layout.MAX_RANKS)]
        major, minor = (self.driver.attribute(f"COMPUTE_CAPABILITY_{part}") for part in ("MAJOR", "MINOR"))
        self._target = GPUTarget("cuda", 10 * major + minor, 32)

    def run(self, case: Case, *, missing: int = 0, unwritten: int = 0) -> str:
        """Run a case; what is wrong with its results, or nothing.

        Args:
            case: what.
            missing: bytes that its memory is too short.
            unwritten: bytes of inputs that are not filled.
        """
        memory = DeviceMemory(self.driver, missing)
        setup = set_up(case, memory)
        problem = ""
        for turn in range(TURNS):
            drawn = [draw(case, number, turn) for number in range(len(case.counts))]
            for (rank, number), room in setup.inputs.items():
                values = drawn[number][rank]
                assert values.nbytes == room.nbytes, case
                self.driver.call("cuMemcpyHtoD", room.address, values.data_ptr(), room.nbytes - unwritten)
            self.driver.call("cuCtxSynchronize")
            self._launch(setup, memory)
            problem = problem or self._compare(case, setup, drawn, turn)
        memory.release()
        return problem

    def start(self, launch: Launch, rows: int = 1, stream: int = 0) -> None:
        """Launch a kernel on a grid of (blocks, rows)."""
        compiled = compile_for(self._target, launch.kernel, launch.constants, launch.warps)
        metadata = compiled.metadata
        function = self.driver.load_function(compiled.asm["cubin"], metadata.name, metadata.shared)
        parameters = self.driver.count_parameters(function)
        assert parameters is not None
        hidden = parameters - len(launch.arguments)
        assert 0 <= hidden <= _MOST_HIDDEN
        packed = PackedArguments.of([*launch.arguments, *[0] * hidden])
        grid, threads = (launch.blocks, rows, 1), (32 * metadata.num_warps, 1, 1)
        config = native.LaunchConfig(grid, threads, metadata.shared, stream)
        self.driver.submit([native.bind_launch(function, packed, config)])

    def _launch(self, setup: Setup, memory: DeviceMemory) -> None:
        if self._way == APART or len(setup.launches) == 1:
            self._launch_apart(setup.launches)
        else:
            joined, table = join(setup.launches, self._folder)
            address = memory.store_table(table).address
            self.driver.call("cuCtxSynchronize")
            self.start(Launch(joined.kernel, joined.blocks, joined.warps, (address,), joined.constants), len(table))
        self.driver.call("cuCtxSynchronize")

    def _launch_apart(self, launches: Sequence[Launch]) -> None:
        bound = [
            self.driver.bind_kernel(
                it.kernel, it.constants, it.arguments, blocks=it.blocks, warps=it.warps, stream=self._streams[rank]
            )
            for rank, it in enumerate(launches)
        ]
        ready = threading.Barrier(len(launches))
        failed: list[BaseException] = []

        def launch(rank: int) -> None:
            try:
                self.driver.call("cuCtxSetCurrent", self._context)
                ready.wait(MEETING_S)
                self.driver.submit([bound[rank]])
                self.driver.call("cuStreamSynchronize", self._streams[rank])
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=launch, args=(rank,), daemon=True) for rank in range(len(launches))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]

    def _compare(self, case: Case, setup: Setup, drawn: Sequence[list[torch.Tensor]], turn: int) -> str:
        for (rank, number), room in setup.outputs.items():
            expected = wanted(case, drawn[number], rank)
            found = torch.empty_like(expected)
            assert found.nbytes == room.nbytes, case
            self.driver.call("cuMemcpyDtoH", found.data_ptr(), room.address, room.nbytes)
            if not torch.equal(found, expected):
                return f"wrong result: rank {rank}, tensor {number}, call {turn}"
        return ""


def run_cases(numbers: Sequence[int], way: str, progress: Path, folder: Path) -> None:
    """Run cases by their numbers; one that fails ends it."""
    every = cases()
    with progress.open("a", encoding="utf-8") as file:

        def say(**what: object) -> None:
            file.write(json.dumps(what) + "\n")
            file.flush()

        runner = Runner(way, folder)
        for number in numbers:
            say(case=number, state="begun")
            began = time.monotonic()
            try:
                problem = runner.run(every[number])
            except (DriverError, threading.BrokenBarrierError) as error:
                say(case=number, state="ended", seconds=time.monotonic() - began, problem=str(error))
                return
            say(case=number, state="ended", seconds=time.monotonic() - began, problem=problem)


def run_planted(name: str, folder: Path) -> None:
    """Run a planted mistake; that it ends badly is no surprise."""
    try:
        planted.PLANTED[name].run(Runner(TOGETHER, folder))
    except DriverError as error:
        print(f"{name}: {error}", flush=True)


def compile_cases(numbers: Sequence[int], way: str, capability: int, folder: Path) -> None:
    """Compile the kernels of cases, for all processes that come after: it needs no GPU."""
    target = GPUTarget("cuda", capability, 32)
    every = cases()
    for number in numbers:
        launches = set_up(every[number], Imagined()).launches
        if way == TOGETHER and len(launches) > 1:
            launches = (join(launches, folder)[0],)
        for launch in {str(it.constants): it for it in launches}.values():
            compile_for(target, launch.kernel, launch.constants, launch.warps)
