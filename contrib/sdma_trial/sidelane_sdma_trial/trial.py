"""Try the packets of AMD's copy engines on this machine, step by step: single packets first, whole collectives last.

Needs GPUs that take the packets of gfx942 (MI300X), a build of torch for ROCm, and a ROCr with hsa_amd_queue_create.
Nothing of this was ever run on AMD hardware. A wrong packet can stop an engine until the driver resets the GPU: try it
where nobody else works. The report says how far it got, what was wrong and how long collectives took; send it with an
issue.

    PYTHONPATH=contrib/sdma_trial python -m sidelane_sdma_trial.trial --report report.json
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from sidelane.errors import SidelaneError, UnavailableError
from sidelane.execute.base import Addresses
from sidelane.program.builders import build
from sidelane.program.collective import Buffer, Collective, Kind, Span, all_gather, all_to_all
from sidelane.program.ir import EngineKind, Flag, Program, Signal
from sidelane_lab.sdma import Packet, QueueWords, disassemble, encode, fit
from sidelane_lab.sdma import packets as layout
from sidelane_lab.sim.prelaunch import prelaunch
from sidelane_sdma_trial.queues import GpuAgent, SdmaQueue, SdmaRuntime

SIZES = (64 << 10, 4 << 20)
"""Bytes from rank to rank in the collectives."""

VARIANTS = {Kind.ALL_GATHER: ("b2b", "pcpy", "bcst"), Kind.ALL_TO_ALL: ("b2b", "pcpy", "swap")}
CALLS = 5
PIECE = 4096
FENCED = 7
WORDS_BYTES, ENDED_AT, TRIGGERS_AT = 4096, 1024, 2048
"""Size of a rank's own words in host memory; places of the counter of ended queues and of the triggers in them."""


@dataclasses.dataclass(frozen=True)
class TriggeredAddresses(Addresses):
    """Addresses of a program whose triggers lie in host memory, apart from its other flags.

    Attributes:
        triggers: address of each trigger.
    """

    triggers: Mapping[Flag, int] = dataclasses.field(default_factory=dict)

    def flag(self, flag: Flag) -> int:
        return self.triggers.get(flag) or super().flag(flag)


class TrialMemory(Protocol):
    """Bytes that engines and the host address alike."""

    @property
    def address(self) -> int: ...

    def write(self, data: bytes, offset: int = 0) -> None: ...

    def read(self) -> bytes: ...


class TrialMachine(Protocol):
    """GPUs of a machine that reach each other's memory."""

    @property
    def runtime(self) -> SdmaRuntime: ...

    @property
    def agents(self) -> tuple[GpuAgent, ...]: ...

    def on_gpu(self, gpu: int, nbytes: int) -> TrialMemory:
        """Allocate zeroed memory of a GPU."""
        ...

    def on_host(self, nbytes: int) -> TrialMemory:
        """Allocate zeroed pinned memory of the host."""
        ...


class Trial:
    """The steps on one machine, each with a row of the report."""

    def __init__(self, machine: TrialMachine, timeout_s: float = 10.0, sizes: tuple[int, ...] = SIZES) -> None:
        self.machine, self.timeout_s, self.sizes = machine, timeout_s, sizes
        self.rows: list[dict[str, Any]] = []

    def run(self) -> bool:
        """Take the steps in order until one goes wrong; return True if none did."""
        for name, step in self.steps():
            row: dict[str, Any] = {"step": name, "ok": True}
            try:
                row |= step() or {}
            except (AssertionError, TimeoutError, ValueError, SidelaneError) as problem:
                row |= {"ok": False, "problem": str(problem)}
            self.rows.append(row)
            print(json.dumps(row), flush=True)
            if not row["ok"]:
                return False
        return True

    def steps(self) -> Iterator[tuple[str, Callable[[], dict[str, Any] | None]]]:
        yield "a fence to the host", lambda: self.execute([])
        yield "a copy inside a GPU", functools.partial(self.copy, 0, 0)
        yield "polls that the host satisfies", self.polls
        yield "an atomic and a timestamp", self.atomic
        if len(self.machine.agents) == 1:
            return
        yield "a copy to a peer", functools.partial(self.copy, 0, 1)
        yield "a copy from a peer", functools.partial(self.copy, 1, 0)
        yield "a broadcast", self.broadcast
        yield "a swap with a peer", self.swap
        for nbytes in self.sizes:
            for kind, variants in VARIANTS.items():
                for variant in variants:
                    for ahead in (False, True):
                        name = f"{kind} {variant}{'+prelaunch' * ahead} of {nbytes} bytes from rank to rank"
                        yield name, functools.partial(self.collective, kind, variant, ahead, nbytes)

    def copy(self, source: int, target: int) -> None:
        a, b = self.filled(source), self.filled(target)
        wanted = a.read()
        self.execute([Packet.of(layout.COPY, nbytes=PIECE, src=a.address, dst=b.address)])
        assert a.read() == wanted == b.read(), "wrong bytes"

    def broadcast(self) -> None:
        a, b, c = self.filled(0), self.filled(1), self.filled(len(self.machine.agents) - 1)
        wanted = a.read()
        self.execute([Packet.of(layout.BROADCAST, nbytes=PIECE, src=a.address, dst=b.address, dst2=c.address)])
        assert a.read() == wanted == b.read() == c.read(), "wrong bytes"

    def swap(self) -> None:
        a, b = self.filled(0), self.filled(1)
        first, second = a.read(), b.read()
        self.execute([Packet.of(layout.SWAP, nbytes=PIECE, a=a.address, b=b.address)])
        assert (a.read(), b.read()) == (second, first), "wrong bytes"

    def polls(self) -> None:
        word = self.machine.on_host(64)
        for comparison, before, value, after in ((layout.EQUAL, 1, 2, 2), (layout.AT_LEAST, 4, 7, 9)):
            word.write(before.to_bytes(4, "little"))
            looks = Packet.of(
                layout.POLL,
                address=word.address,
                comparison=comparison,
                value=value,
                mask=0xFFFFFFFF,
                interval=4,
                retries=layout.FOREVER,
            )
            self.execute([looks], held_until=functools.partial(word.write, after.to_bytes(4, "little")))

    def atomic(self) -> None:
        words = self.machine.on_host(64)
        words.write((2**32 - 1).to_bytes(8, "little"))
        add = Packet.of(layout.ATOMIC, operation=layout.ADD_64, address=words.address, value=2)
        self.execute([add, Packet.of(layout.TIMESTAMP, address=words.address + 32)])
        assert words.read()[:8] == (2**32 + 1).to_bytes(8, "little"), f"the counter holds {words.read()[:8].hex()}"
        assert any(words.read()[32:40]), "the timestamp is 0"

    def execute(self, packets: list[Packet], held_until: Callable[[], None] | None = None) -> None:
        """Let an engine of GPU 0 execute packets and a fence; ``held_until`` is what must happen before its end."""
        word = self.machine.on_host(64)
        queue = self.machine.runtime.open(self.machine.agents[0])
        fence = Packet.of(layout.FENCE, address=word.address, value=FENCED)
        data = b"".join(packet.to_bytes() for packet in (*packets, fence))

        def has_ended() -> bool:
            return queue.pending >= 0 and word.read()[:4] == FENCED.to_bytes(4, "little")

        queue.submit(data)
        if held_until is not None:
            early = time.monotonic() + 0.02
            while time.monotonic() < early:
                assert not has_ended(), f"did not wait:\n{disassemble(data)}"
            held_until()
        self.wait(has_ended, data)
        queue.close()

    def collective(self, kind: Kind, variant: str, ahead: bool, nbytes: int) -> dict[str, Any]:
        """Make calls of one variant from this one process, as the DMA collectives paper did."""
        n = len(self.machine.agents)
        collective = _collective(kind, variant, nbytes, n)
        program = fit(prelaunch(build(collective, variant)) if ahead else build(collective, variant))
        memory = {
            (rank, str(buffer)): self.machine.on_gpu(rank, program.buffer_bytes(rank, buffer))
            for rank in range(n)
            for buffer in Buffer
            if program.buffer_bytes(rank, buffer)
        }
        flags = [self.machine.on_gpu(rank, 4 * program.flag_count) for rank in range(n)]
        words = [self.machine.on_host(WORDS_BYTES) for _ in range(n)]
        triggers = {flag: (flag.rank, TRIGGERS_AT + 4 * place) for place, flag in enumerate(_triggers(program))}
        addresses = TriggeredAddresses(
            {place: found.address for place, found in memory.items()},
            tuple(found.address for found in flags),
            triggers={flag: words[rank].address + offset for flag, (rank, offset) in triggers.items()},
        )
        opened: dict[tuple[int, str], SdmaQueue] = {}
        took: list[float] = []
        for epoch in range(1, CALLS + 1):
            wanted = _fill(program, collective, memory)
            queues = [
                queue
                for rank, own in enumerate(words)
                for queue in encode(program, rank, addresses, QueueWords(own.address, own.address + ENDED_AT), epoch)
            ]
            for queue in queues:
                place = queue.rank, str(queue.engine)
                if place not in opened:
                    opened[place] = self.machine.runtime.open(self.machine.agents[queue.rank])
            start = time.perf_counter()
            for queue in queues:
                opened[queue.rank, str(queue.engine)].submit(queue.to_bytes())
            if triggers:
                start = time.perf_counter()
            for rank, offset in triggers.values():
                words[rank].write(epoch.to_bytes(4, "little"), offset)
            ended = [epoch * sum(queue.rank == rank for queue in queues) for rank in range(n)]

            def has_ended(ended: list[int] = ended) -> bool:
                counts = [int.from_bytes(own.read()[ENDED_AT : ENDED_AT + 8], "little") for own in words]
                return all(queue.pending >= 0 for queue in opened.values()) and counts == ended

            self.wait(has_ended, queues[0].to_bytes())
            took.append(time.perf_counter() - start)
            wrong = [
                f"{buffer} of rank {rank}"
                for (rank, buffer), data in wanted.items()
                if memory[rank, buffer].read() != data
            ]
            assert not wrong, f"wrong bytes in call {epoch}: {', '.join(wrong)}"
        for opened_queue in opened.values():
            opened_queue.close()
        return {"engines": len(opened), "us": [round(1e6 * seconds, 1) for seconds in took]}

    def wait(self, has_ended: Callable[[], bool], data: bytes) -> None:
        deadline = time.monotonic() + self.timeout_s
        while not has_ended():
            if time.monotonic() > deadline:
                raise TimeoutError(f"not done after {self.timeout_s} s:\n{disassemble(data)}")

    def filled(self, gpu: int) -> TrialMemory:
        memory = self.machine.on_gpu(gpu, PIECE)
        memory.write(os.urandom(PIECE))
        return memory


def _collective(kind: Kind, variant: str, nbytes: int, ranks: int) -> Collective:
    gathers, swaps, parts = kind is Kind.ALL_GATHER, variant == "swap", [nbytes] * ranks
    return (
        all_gather(parts, in_place=True) if gathers else all_to_all([parts] * ranks, in_place=swaps, copies_own=swaps)
    )


def _triggers(program: Program) -> list[Any]:
    callers = (queue for queue in program.queues if queue.engine.kind is EngineKind.CALLER)
    return [command.flag for queue in callers for command in queue.commands if isinstance(command, Signal)]


def _fill(
    program: Program, collective: Collective, memory: dict[tuple[int, str], TrialMemory]
) -> dict[tuple[int, str], bytes]:
    """Write random bytes to every buffer; return what the outputs must hold in the end."""
    held = {place: os.urandom(program.buffer_bytes(*place)) for place in memory}
    for place, data in held.items():
        memory[place].write(data)
    outputs = {place: bytearray(data) for place, data in held.items() if place[1] == Buffer.OUTPUT}

    def bytes_of(span: Span) -> bytes:
        return held[span.rank, str(span.buffer)][span.offset : span.end]

    for chunk in collective.chunks():
        source = collective.input_span(chunk.src_rank, chunk.src_offset, chunk.nbytes)
        target = collective.output_span(chunk.dst_rank, chunk.dst_offset, chunk.nbytes)
        outputs[target.rank, str(target.buffer)][target.offset : target.end] = bytes_of(source)
    return {place: bytes(data) for place, data in outputs.items()}


class TorchMemory:
    """A tensor of GPU memory, or of pinned host memory."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.address: int = tensor.data_ptr()

    def write(self, data: bytes, offset: int = 0) -> None:
        import torch

        self.tensor[offset : offset + len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if self.tensor.is_cuda:
            torch.cuda.synchronize(self.tensor.device)

    def read(self) -> bytes:
        return bytes(self.tensor.cpu().numpy().tobytes())


class TorchMachine:
    """All GPUs of this machine, through torch."""

    def __init__(self) -> None:
        import torch

        if torch.version.hip is None or not torch.cuda.is_available():
            raise UnavailableError("sidelane_sdma_trial: needs AMD GPUs and a build of torch for ROCm")
        self.torch = torch
        self.runtime = SdmaRuntime()
        found = {(agent.domain, agent.bus, agent.device): agent for agent in self.runtime.agents}
        every: list[Any] = [torch.cuda.get_device_properties(gpu) for gpu in range(torch.cuda.device_count())]
        self.agents = tuple(found[each.pci_domain_id, each.pci_bus_id, each.pci_device_id] for each in every)
        self.name = f"{len(every)} x {every[0].name}, ROCm {torch.version.hip}"
        for gpu in range(len(every)):  # which lets each reach the memory of all others
            for peer in range(len(every)):
                torch.ones(1, device=f"cuda:{gpu}").to(f"cuda:{peer}")

    def on_gpu(self, gpu: int, nbytes: int) -> TorchMemory:
        memory = TorchMemory(self.torch.zeros(nbytes, dtype=self.torch.uint8, device=f"cuda:{gpu}"))
        self.torch.cuda.synchronize(gpu)
        return memory

    def on_host(self, nbytes: int) -> TorchMemory:
        return TorchMemory(self.torch.zeros(nbytes, dtype=self.torch.uint8, pin_memory=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, help="write the rows here, as JSON")
    arguments = parser.parse_args()
    try:
        machine = TorchMachine()
    except UnavailableError as problem:
        print(problem, file=sys.stderr)
        return 2
    trial = Trial(machine)
    print(machine.name)
    good = trial.run()
    if arguments.report is not None:
        arguments.report.write_text(json.dumps({"machine": machine.name, "rows": trial.rows}, indent=1) + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
