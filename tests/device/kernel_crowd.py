"""More ranks than GPUs: threads whose kernels run next to each other on one GPU, each on a stream of its own.

Run as a program: the first argument names a scenario of ``kernel_scenarios``, the second the number of ranks, the third
the thread blocks of a kernel. What crosses no link says nothing of links or of times, but kernels are compiled and run
for every number of ranks.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import traceback
from collections.abc import Callable

os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "32"  # streams that share one wait for each other's kernels

import kernel_scenarios
import kernel_worlds
import numpy as np
import numpy.typing as npt
import torch

from sidelane.device import layout
from sidelane.device.launch import Launch
from sidelane.execute.cuda.driver import Driver

TIMEOUT_S = 90.0
DEVICE = torch.device("cuda", 0)


class World(kernel_worlds.Heap):
    """See ``kernel_worlds.World``.

    Args:
        whole: memory of all ranks.
        driver: of the GPU.
        together: where all ranks meet.
    """

    device = DEVICE

    def __init__(
        self, world_size: int, most_blocks: int, whole: torch.Tensor, driver: Driver, together: threading.Barrier
    ) -> None:
        super().__init__(world_size, most_blocks)
        self.whole, self.base = whole, whole.data_ptr()
        self.driver, self.together = driver, together
        self.stream = torch.cuda.Stream()

    def launch(self, work: Launch) -> None:
        with _LOADING:
            bound = self.driver.bind_kernel(
                work.kernel,
                work.constants,
                work.arguments,
                blocks=work.blocks,
                warps=work.warps,
                stream=self.stream.cuda_stream,
            )
        self.together.wait(TIMEOUT_S)  # to load a kernel may take until all others have ended
        self.driver.submit([bound])
        self.stream.synchronize()

    def store_table(self, values: npt.NDArray[np.int64]) -> int:
        self.table = torch.from_numpy(values).to(DEVICE)
        self.stream.synchronize()
        return self.table.data_ptr()

    def stumble(self, probability: float, longest_s: float) -> Callable[[], None]:
        """Kernels of GPUs are late by themselves."""
        return lambda: None


_LOADING = threading.Lock()


def main(scenario: str, world_size: int, most_blocks: int) -> int:
    driver = Driver(DEVICE)
    worlds: list[World] = []
    together = threading.Barrier(world_size)
    span = kernel_worlds.Heap(world_size, most_blocks).span
    whole = torch.zeros(span * world_size, dtype=torch.uint8, device=DEVICE)
    failed = []

    def run(world: World) -> None:
        name, *arguments = scenario.split(":")
        try:
            torch.cuda.set_device(DEVICE)
            with torch.cuda.stream(world.stream), driver.current():
                getattr(kernel_scenarios, name)(world, *arguments)
        except BaseException:
            failed.append(world.rank)
            traceback.print_exc()
            together.abort()
            with torch.cuda.stream(torch.cuda.Stream()):
                for other in worlds:  # or their kernels would wait for ever
                    other.words()[layout.ABORT] = 1

    for rank in range(world_size):
        world = World(world_size, most_blocks, whole, driver, together)
        world.become(rank)
        worlds.append(world)
    torch.cuda.synchronize()
    threads = [threading.Thread(target=run, args=(world,)) for world in worlds]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 1 if failed else 0


if __name__ == "__main__":
    faulthandler.dump_traceback_later(1.5 * TIMEOUT_S, exit=True)
    sys.exit(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
