"""Probe of the features of this machine's driver."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

import torch

from sidelane.config import HOST, name_of
from sidelane.errors import UnavailableError
from sidelane.execute.cuda.driver import Driver, DriverError
from sidelane.memory.exchange import Exchange
from sidelane.memory.heap import SymmetricBlock, SymmetricMemory

_WORD_BYTES = 4
_PATIENCE_S = 5.0


@dataclasses.dataclass(frozen=True, slots=True)
class DriverFeatures:
    """The features of a driver that the probe found.

    Attributes:
        cuda_version: newest CUDA that the driver supports, ``13.0``; on AMD GPUs the version of ROCm.
        copy_engines: number of asynchronous engines that the driver reports. Behind NVSwitch all peers share one.
        stream_memory_ops: a stream can write and wait for words of its own device.
        peer_writes: a stream can write a word of a peer's memory, on all ranks; None if it was not tried. Without it a
            signal is a 4-byte copy.
        copy_batches: several copies can be submitted in one call.
        note: reason why a feature does not work; "" if all do.
        shared_bytes: largest shared memory of a thread block in bytes.
        graphs: stream memory operations can be captured into graphs.
        rows_by_engines: copies of rows are made by copy engines, as contiguous ones are.
        host_addresses: host memory that is registered has the address of the host on the device, too.
    """

    cuda_version: str
    copy_engines: int
    stream_memory_ops: bool
    peer_writes: bool | None
    copy_batches: bool = False
    note: str = ""
    shared_bytes: int = 0
    graphs: bool = True
    rows_by_engines: bool = True
    host_addresses: bool = True

    def require(self) -> None:
        """Raise UnavailableError unless programs can run."""
        if not self.stream_memory_ops:
            raise UnavailableError(f"this CUDA driver has no stream memory operations: {self.note}")

    def require_host_addresses(self) -> None:
        """Raise UnavailableError unless programs can run through host memory."""
        if not self.host_addresses:
            raise UnavailableError(
                f"host memory has another address on this GPU: {name_of('peers', HOST)} (allowed=gpu)"
            )

    def lines(self) -> list[str]:
        """Return a line for each feature, with its effect on Sidelane."""
        signals = {
            True: "stream writes to peers: yes (signals are one write each)",
            False: "stream writes to peers: no (signals are 4-byte copies)",
            None: "stream writes to peers: not tried (needs two ranks)",
        }
        return [
            f"driver: {'CUDA' if torch.version.hip is None else 'ROCm'} {self.cuda_version}",
            f"copy engines: {self.copy_engines}",
            f"stream memory operations: {'yes' if self.stream_memory_ops else 'no (collectives cannot run here)'}",
            signals[self.peer_writes],
            f"several copies in one call: {'yes' if self.copy_batches else 'no (one call each)'}",
            *([f"note: {self.note}"] if self.note else []),
        ]


def probe_device(device: torch.device, make_driver: Callable[[torch.device], Driver] = Driver) -> DriverFeatures:
    """Probe the features that need no peers. ``make_driver``: makes the driver of the device.

    Raises:
        UnavailableError: no driver or no ``cuda.bindings``.
    """
    driver = make_driver(device)
    with driver.current():
        address, owner = driver.device_words(1)
        problem = _write(driver, [(address, 1)], wait_for=address)
        copy_batches = _copies_in_one_call(driver)
        del owner
        version = driver.version()
        return DriverFeatures(
            cuda_version=f"{version // 1000}.{version % 1000 // 10}",
            copy_engines=driver.attribute("ASYNC_ENGINE_COUNT"),
            stream_memory_ops=not problem,
            peer_writes=None,
            copy_batches=copy_batches,
            note=problem,
            shared_bytes=driver.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
            host_addresses=_has_host_addresses(driver),
        )


def probe(
    exchange: Exchange,
    device: torch.device,
    memory: SymmetricMemory,
    make_driver: Callable[[torch.device], Driver] = Driver,
) -> DriverFeatures:
    """Probe the features between the ranks. Collective; every rank gets the same ``peer_writes``.

    Args:
        exchange: connection of the ranks.
        device: device of this rank.
        memory: allocates a word for each rank.
        make_driver: makes the driver of the device.

    Raises:
        UnavailableError: no driver, no ``cuda.bindings`` or no symmetric memory.
        PeerError, PeerTimeoutError: a rank did not take part.
    """
    features = probe_device(device, make_driver)
    rank, world_size = exchange.rank, exchange.world_size
    if world_size == 1:
        return dataclasses.replace(features, peer_writes=True)
    block = memory.allocate(_WORD_BYTES * world_size)
    driver = make_driver(device)
    with driver.current():
        problem = features.note or _write_to_peers(driver, block, rank)
        problems = exchange("probe of writes to peers", lambda: problem)
        # The host reads the words back: a value that a peer's stream sees may not be visible to this one's.
        words = block.tensor.view(torch.int32).cpu().tolist()
    missing = [peer for peer in range(world_size) if peer != rank and words[peer] != peer + 1]
    if missing and not any(problems):
        problem = f"writes of ranks {missing} did not arrive at rank {rank}"
    problems = exchange("probe of what has arrived", lambda: problem)
    first = next((text for text in problems if text), "")
    return dataclasses.replace(features, peer_writes=not first, note=features.note or first)


def stream_becomes_idle(driver: Driver, stream: int) -> bool:
    """Wait until all work of a stream has ended. Return False if that takes longer than 5 s."""
    deadline = time.monotonic() + _PATIENCE_S
    while not driver.is_idle(stream):
        if time.monotonic() > deadline:
            return False
        time.sleep(1e-4)
    return True


def _has_host_addresses(driver: Driver) -> bool:
    """Return True if registered host memory has one address; where the driver cannot say, writes to peers tell."""
    try:
        return bool(driver.attribute("CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM"))
    except (AttributeError, UnavailableError):
        return True


def _copies_in_one_call(driver: Driver) -> bool:
    """Return True if the driver accepts a batch of copies, and the bytes arrive."""
    address, words = driver.device_words(4)
    assert isinstance(words, torch.Tensor)
    words.copy_(torch.tensor([1, 2, 0, 0]))
    torch.cuda.current_stream(driver.index).synchronize()
    stream = driver.create_stream()
    try:
        copies = [(address + 8, address, _WORD_BYTES), (address + 12, address + 4, _WORD_BYTES)]
        driver.submit([driver.bind_copies(copies, stream)])
        return stream_becomes_idle(driver, stream) and bool(words.tolist() == [1, 2, 1, 2])
    except (AttributeError, DriverError, UnavailableError):  # bindings or a driver from before CUDA 13
        return False
    finally:
        driver.destroy_stream(stream)


def _write_to_peers(driver: Driver, block: SymmetricBlock, rank: int) -> str:
    """Write ``rank + 1`` into word ``rank`` of every peer. Return the problem, or ""."""
    writes = [(address + _WORD_BYTES * rank, rank + 1) for peer, address in enumerate(block.addresses) if peer != rank]
    return _write(driver, writes, wait_for=None)


def _write(driver: Driver, writes: list[tuple[int, int]], *, wait_for: int | None) -> str:
    stream = driver.create_stream()
    try:
        ops = driver.memory_ops()
        for address, value in writes:
            ops.write(address, value)
        if wait_for is not None:
            ops.wait(wait_for, 1, equal=True)
        driver.submit([driver.bind_memory_ops(ops, stream)])
        if stream_becomes_idle(driver, stream):
            return ""
        return f"stream memory operations did not finish within {_PATIENCE_S:g} s"
    except DriverError as error:
        return str(error)
    finally:
        driver.destroy_stream(stream)
