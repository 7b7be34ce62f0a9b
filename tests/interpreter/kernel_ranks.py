"""Ranks as forked processes under Triton's interpreter: one shared mapping, at the same address in all of them.

Run as a program with ``TRITON_INTERPRET=1``; the first argument names a scenario (``kernel_scenarios``, or below), the
second the number of ranks.
"""

from __future__ import annotations

import mmap
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from ctypes import addressof, c_uint8

import kernel_scenarios
import kernel_worlds
import numpy as np
import numpy.typing as npt
import torch
from kernel_scenarios import arranged, on_all_ranks
from triton.runtime.interpreter import InterpretedFunction

from sidelane.device import layout
from sidelane.device.language import Kernel
from sidelane.device.launch import Launch
from sidelane.device.triton_interpreter import polls_that_sleep, quick_interpreter
from sidelane.program.collective import Buffer, all_to_all, broadcast
from sidelane.program.kernel import Protocol

TIMEOUT_S = 90


class World(kernel_worlds.Heap):
    """See ``kernel_worlds.World``."""

    device = torch.device("cpu")

    def __init__(self, world_size: int, most_blocks: int = 2) -> None:
        super().__init__(world_size, most_blocks)
        self.map = mmap.mmap(-1, self.span * world_size)
        self.base = addressof(c_uint8.from_buffer(self.map))
        self.whole = torch.frombuffer(self.map, dtype=torch.uint8)

    def launch(self, work: Launch) -> None:
        work.kernel[(work.blocks,)](*work.arguments, **work.constants)

    def store_table(self, values: npt.NDArray[np.int64]) -> int:
        self.table = values  # stays until the kernel has ended
        return int(values.ctypes.data)

    def stumble(self, probability: float, longest_s: float) -> Callable[[], None]:
        """Pause at random loads, so that peers get ahead of this rank in the middle of a kernel."""
        from triton.runtime.interpreter import InterpreterBuilder

        draw = random.Random(1)
        load = InterpreterBuilder.create_masked_load

        def slow_load(*args: object, **kwargs: object) -> object:
            if draw.random() < probability:
                time.sleep(longest_s * draw.random())
            return load(*args, **kwargs)

        InterpreterBuilder.create_masked_load = slow_load
        return lambda: setattr(InterpreterBuilder, "create_masked_load", load)


def dead_peer(world: World) -> None:
    """The last rank never comes. The others say so in their status words, and give up when the host tells them to."""
    n, rank, part = world.world_size, world.rank, 64
    if rank == n - 1:
        return
    words = world.words()
    _, outputs = world.carve(n * part)
    reached = on_all_ranks(Buffer.OUTPUT, outputs)
    exchange = (all_to_all([[part] * n] * n), reached | on_all_ranks(Buffer.INPUT, world.carve(n * part)[1]))
    sent, of_last = (broadcast(part, n, root, in_place=True) for root in (0, n - 1))
    for work in (
        arranged(world, Protocol.LL, [exchange]),
        arranged(world, Protocol.PUSH, [exchange]),
        arranged(world, Protocol.LL, [(sent, reached)]),
        arranged(world, Protocol.RELAY, [(sent, reached)]),  # a peer's part is late
        arranged(world, Protocol.RELAY, [(of_last, reached)]),  # the root's
        arranged(world, Protocol.PUSH, [(sent, reached)]),
        arranged(world, Protocol.PUSH, [(sent, reached)], listed=True),
    ):
        words.zero_()
        child = os.fork()
        if child == 0:
            signal.alarm(100)  # it spins, and whoever should let it go may have failed
            world.launch(work)
            os._exit(0)
        late = [rank]
        while late != [n - 1]:  # others may be slow to come; the last rank never does, and the test has a time-out
            words[layout.WAITING :] = 0
            while not words[layout.WAITING + n - 1]:
                time.sleep(0.01)
            late = [peer for peer in range(layout.MAX_RANKS) if words[layout.WAITING + peer]]
        words[layout.ABORT] = 1
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


# --- processes --------------------------------------------------------------------------------------------------------


def main(scenario: str, world_size: int) -> int:
    name, *arguments = scenario.split(":")
    run: Callable[..., None] = globals().get(name) or getattr(kernel_scenarios, name)

    def of_rank(world: World) -> None:
        if world.rank == 0:
            world.stumble(0.05, 0.004)
        run(world, *arguments)

    return run_ranks(World(world_size), of_rank)


def run_ranks(world: World, run: Callable[[World], None]) -> int:
    """Run each rank in a process of its own, until one fails; not 0 if one does."""
    torch.set_num_threads(1)
    for module in [module for name, module in sys.modules.items() if name.startswith(("sidelane", "triton.language"))]:
        for value in list(vars(module).values()):
            kernel = value.made() if issubclass(type(value), Kernel) else value
            if issubclass(type(kernel), InterpretedFunction):
                kernel.rewrite()  # once, for all ranks
    children = []
    for rank in range(world.world_size):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                world.become(rank)
                with quick_interpreter(), polls_that_sleep():
                    run(world)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        children.append(child)
    deadline = time.monotonic() + TIMEOUT_S
    codes: dict[int, int] = {}
    while len(codes) < len(children) and not any(codes.values()) and time.monotonic() < deadline:
        for child in set(children) - set(codes):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                codes[child] = os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    for child in set(children) - set(codes):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        print(f"rank {children.index(child)} did not end", file=sys.stderr)
    if any(codes.values()):
        print(f"ranks ended with {list(codes.values())}", file=sys.stderr)
    return 0 if list(codes.values()) == [0] * len(children) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
