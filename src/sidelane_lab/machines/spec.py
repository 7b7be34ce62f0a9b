"""Descriptions of machines for the performance model: typed, validated, every number with its source.

Units are in the names: ``_us`` microseconds, ``_gbps`` 10^9 bytes a second, ``_tflops`` 10^12 operations a second,
``_w`` watts. A number is a :class:`Quantity`: a float that knows where it came from and between which values it may
lie.
"""

from __future__ import annotations

import dataclasses
import math
from enum import StrEnum
from typing import Annotated, Any, Self


class NumberSource(StrEnum):
    """Where a number comes from. ``of`` of the quantity says which datasheet, file, claims or argument."""

    DATASHEET = "datasheet"
    PAPER = "paper"
    MEASURED = "measured"
    FITTED = "fitted"
    ASSUMED = "assumed"


class Quantity(float):
    """A number with its source.

    Args:
        value: in the unit that the field's name ends with.
        source: what kind of source.
        of: which one: the datasheet, the result file, the claims that it was fitted to, or the argument for it.
        low: least plausible value; None where the number is certain.
        high: greatest plausible value.
    """

    source: NumberSource
    of: str
    low: float | None
    high: float | None

    def __new__(
        cls, value: float, source: NumberSource, of: str = "", low: float | None = None, high: float | None = None
    ) -> Self:
        self = super().__new__(cls, value)
        self.source, self.of, self.low, self.high = NumberSource(source), of, low, high
        if not math.isfinite(self) or self < 0:
            raise ValueError(f"must be a finite number, not negative (value={value})")
        if (low is None) != (high is None) or (low is not None and high is not None and not low <= self <= high):
            raise ValueError(f"needs low <= value <= high, or neither bound (value={value}, low={low}, high={high})")
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (float(self), self.source, self.of, self.low, self.high))

    @property
    def uncertain(self) -> bool:
        return self.low is not None


class Topology(StrEnum):
    """``mesh``: a link between every two GPUs. ``switch``: one port a GPU that reaches every peer."""

    MESH = "mesh"
    SWITCH = "switch"


class HostThreads(StrEnum):
    """``node``: one thread hands commands to the engines of all GPUs. ``rank``: one a GPU."""

    NODE = "node"
    RANK = "rank"


UNITS = {
    "_us": "microseconds",
    "_gbps": "10^9 bytes a second",
    "_tflops": "10^12 operations a second",
    "_kb": "kilobytes",
    "_mb": "megabytes",
    "_gb": "gigabytes",
    "_w": "watts",
}
"""Units by the end of a number's name."""


@dataclasses.dataclass(frozen=True, slots=True)
class NumberLimit:
    """Least and greatest value. ``zero``: or 0. ``whole``: without a fraction."""

    low: float
    high: float
    zero: bool = False
    whole: bool = False

    def holds(self, value: float) -> bool:
        """True if a number can be that."""
        inside = self.low <= value <= self.high or (self.zero and value == 0)
        return inside and not (self.whole and value != int(value))

    def outside(self, name: str, value: float) -> str:
        """Return why the number of that name cannot be that, in words; empty if it can."""
        unit = next((f" {words}" for end, words in UNITS.items() if name.endswith(end)), "")
        return "" if self.holds(value) else f"(value={value:g}, allowed={self}{unit})"

    def __str__(self) -> str:
        text = f"{self.low:g} to {self.high:g}"
        return ("a whole number from " if self.whole else "") + ("0, or " if self.zero and self.low else "") + text


Time = Annotated[Quantity, NumberLimit(1e-3, 1e4, zero=True)]
Latency = Annotated[Quantity, NumberLimit(0.1, 1e4)]
Speed = Annotated[Quantity, NumberLimit(0.1, 1e4)]
MemorySpeed = Annotated[Quantity, NumberLimit(10, 1e5)]
Share = Annotated[Quantity, NumberLimit(0.01, 1)]
Part = Annotated[Quantity, NumberLimit(0, 1)]
OnOff = Annotated[Quantity, NumberLimit(0, 1, whole=True)]
Count = Annotated[Quantity, NumberLimit(1, 1024, whole=True)]
Watts = Annotated[Quantity, NumberLimit(0, 3000)]


@dataclasses.dataclass(frozen=True, slots=True)
class GpuFigures:
    """Units and memories of one GPU.

    Attributes:
        units: compute units (CUs, SMs).
        peak_tflops: dense 16-bit matrix operations.
        memory_gbps: peak bandwidth of its memory.
        memory_gb: capacity.
        l2_mb: caches that a kernel writes through before DMA engines may read.
        cache_mb: last-level cache.
        shared_kb: memory of a compute unit that its workgroups share.
        blocks_per_unit: workgroups that a unit holds at most.
    """

    # Half of them are enough for the smallest share of a collective, 8.
    units: Annotated[Quantity, NumberLimit(16, 1024, whole=True)]
    peak_tflops: Annotated[Quantity, NumberLimit(1, 1e5)]
    memory_gbps: MemorySpeed
    memory_gb: Annotated[Quantity, NumberLimit(1, 4096)]
    l2_mb: Annotated[Quantity, NumberLimit(0, 4096)]
    cache_mb: Annotated[Quantity, NumberLimit(0, 4096)]
    shared_kb: Annotated[Quantity, NumberLimit(8, 4096)]
    blocks_per_unit: Annotated[Quantity, NumberLimit(1, 128, whole=True)]


@dataclasses.dataclass(frozen=True, slots=True)
class Links:
    """How bytes travel between GPUs.

    Attributes:
        topology: inside a node.
        peak_gbps: one direction, of the link to one peer (mesh) or of the port of a GPU (switch).
        usable_gbps: what large DMA copies reach of it.
        network_gbps: one direction, of a GPU's port to other nodes; 0 where nodes are not connected.
        network_us: latency of that port.
    """

    topology: Topology
    peak_gbps: Speed
    usable_gbps: Speed
    network_gbps: Annotated[Quantity, NumberLimit(0.1, 1e4, zero=True)]
    network_us: Time


@dataclasses.dataclass(frozen=True, slots=True)
class DmaFigures:
    """DMA engines and the host that feeds them (phases of the DMA collectives paper, section 3.2).

    Attributes:
        engines: that serve peers, a GPU.
        engine_gbps: bytes that one engine writes.
        runtime_share: share of ``engine_gbps`` that copies reach through the vendor's runtime instead of bare packets.
        shared_queues: share of ``engine_gbps`` left when several queues use one engine at once (1: no loss), unless
            they serve the same peers in the same order.
        local_gbps: bytes that a copy inside one GPU writes (own chunks, staging), whichever engine runs it.
        host: which threads prepare commands; a thread does one thing after another.
        control_us: host: prepare one command.
        doorbell_us: host: ring the doorbell of a queue.
        fetch_us: engine: from the doorbell to the first command.
        copy_us: latency of a copy alone, without its bytes.
        next_copy_us: what each further copy behind it adds (less than ``copy_us`` where engines overlap copies).
        signal_us: engine: write a flag.
        wait_us: engine: see a flag that has changed.
        trigger_us: host: write a flag that holds a prelaunched queue.
        sync_us: from the last command of a queue until the host knows.
        reduce_us: of a reduction in the middle of a program: its kernel starts, and the next command sees its end.
        reduce_gbps: bytes that the kernel of a reduction reads and writes.
    """

    engines: Annotated[Quantity, NumberLimit(1, 256, whole=True)]
    engine_gbps: Speed
    runtime_share: Share
    shared_queues: Share
    local_gbps: MemorySpeed
    host: HostThreads
    control_us: Time
    doorbell_us: Time
    fetch_us: Time
    copy_us: Time
    next_copy_us: Time
    signal_us: Time
    wait_us: Time
    trigger_us: Time
    sync_us: Time
    reduce_us: Time
    reduce_gbps: MemorySpeed


@dataclasses.dataclass(frozen=True, slots=True)
class LibraryFigures:
    """The vendor's library of collectives, which moves bytes with kernels.

    Attributes:
        all_gather_us, all_to_all_us, all_reduce_us, reduce_scatter_us: time of a collective without its bytes.
        all_gather_gbps, all_to_all_gbps, all_reduce_gbps, reduce_scatter_gbps: bandwidth of a link (mesh) or port
            (switch) with all units.
        bulk_us: what the protocol for large messages takes on top of that time.
        low_latency_share: share of the bandwidth that the protocol for small messages reaches.
        default_units: workgroups it launches, one a compute unit, for all_gather; ``all_to_all_units`` for the other;
            the more of the two for what reduces.
        all_gather_need, all_to_all_need: compute units beyond which it gains nothing.
        traffic: bytes through the memory system for each byte that crosses a link, one direction, for all_gather.
        all_to_all_traffic: the same for all_to_all.
    """

    all_gather_us: Latency
    all_to_all_us: Latency
    all_reduce_us: Latency
    reduce_scatter_us: Latency
    all_gather_gbps: Speed
    all_to_all_gbps: Speed
    all_reduce_gbps: Speed
    reduce_scatter_gbps: Speed
    bulk_us: Time
    low_latency_share: Share
    default_units: Count
    all_to_all_units: Count
    all_gather_need: Count
    all_to_all_need: Count
    traffic: Annotated[Quantity, NumberLimit(1, 20)]
    all_to_all_traffic: Annotated[Quantity, NumberLimit(1, 20)]


@dataclasses.dataclass(frozen=True, slots=True)
class Matmul:
    """GEMM kernels of the vendor's library.

    Attributes:
        launch_us: of the kernel, from its turn until it computes at full speed and from there to its end.
        efficiency: share of ``peak_tflops`` that a GEMM with long sums reaches.
        ramp_k: the begin and the end of a tile take as long as this length of its sums.
        row_step: rows of the result are computed in whole multiples of it.
        blend: 0: operations and bytes hide each other, and the longer of the two counts; 1: the root of the sum of
            their squares does.
        split_us: of adding up what units have computed, where a result with few tiles and long sums is split along k.
        tile_m, tile_n: tile of the result that one workgroup computes, where there are enough of them.
        persistent: 1: one workgroup a unit for the whole GEMM, its tiles dealt out beforehand; beside a kernel that
            holds a unit it can not run.
        memory_efficiency: share of ``memory_gbps`` that a memory-bound GEMM reaches.
        intensity: operations per byte in the memory system while what runs at once fits in the last-level cache.
        bound_intensity: the same where it does not (model/gemm.py).
        cache_gain: share of a memory-bound GEMM's traffic that disappears with fewer workgroups in flight.
        partition_loss: share by which a GEMM that is given nearly all units is slower than in proportion, since the
            library chooses tiles for the whole GPU; with half of the units nothing is left of it.
        partition_gain: a GEMM at the power cap has higher clocks on units of its own that are fewer: its time has the
            share of units to this power as a factor.
    """

    launch_us: Time
    efficiency: Share
    ramp_k: Annotated[Quantity, NumberLimit(0, 4096)]
    row_step: Annotated[Quantity, NumberLimit(1, 4096, whole=True)]
    blend: Part
    split_us: Time
    tile_m: Annotated[Quantity, NumberLimit(8, 4096, whole=True)]
    tile_n: Annotated[Quantity, NumberLimit(8, 4096, whole=True)]
    persistent: OnOff
    memory_efficiency: Share
    intensity: Annotated[Quantity, NumberLimit(1, 1e5)]
    bound_intensity: Annotated[Quantity, NumberLimit(1, 1e5)]
    cache_gain: Annotated[Quantity, NumberLimit(0, 0.5)]
    partition_loss: Annotated[Quantity, NumberLimit(0, 1)]
    partition_gain: Part


@dataclasses.dataclass(frozen=True, slots=True)
class Interference:
    """How concurrent work gets in each other's way beyond sharing what is full.

    Attributes:
        memory: slowdown for each unit of (own memory utilisation x that of the others).
        late_share: share of its workgroups that a kernel gets placed while an earlier one still has workgroups waiting.
        copies: share by which a GEMM slows down next to copy engines for other reasons (power, clocks).
        kernels: the same next to the library's kernels, on the units that are left to it.
        local_waits: 1: a copy inside a GPU waits for the end of a GEMM that fills it.
        either_first: 1: of a GEMM and a collective that are released together either may get the units first, whatever
            the order of their launches.
    """

    memory: Annotated[Quantity, NumberLimit(0, 100)]
    late_share: Part
    copies: Part
    kernels: Part
    local_waits: OnOff
    either_first: OnOff


@dataclasses.dataclass(frozen=True, slots=True)
class Power:
    """Watts of one GPU by component, above idle, at full use.

    Attributes:
        idle_w: of the GPU.
        compute_idle_w: the part of it that compute units take.
        compute_w: all compute units busy.
        memory_w: memory at its peak bandwidth.
        links_on_w: links that carry anything, at whatever rate: transceivers run whether they have something to send.
        links_w: what all links busy in both directions add to that.
        engine_w: one DMA engine busy.
        cap_w: that the GPU holds itself to.
    """

    idle_w: Watts
    compute_idle_w: Watts
    compute_w: Watts
    memory_w: Watts
    links_on_w: Watts
    links_w: Watts
    engine_w: Watts
    cap_w: Watts


@dataclasses.dataclass(frozen=True, slots=True)
class Occupancy:
    """Limits of a compute unit that blocks share, and what the library's collectives take of it.

    Attributes:
        registers: of 4 bytes, of a unit.
        threads: that a unit holds.
        unit_gbps: bytes that a unit reads from the cache that all share.
        cache: slowdown for each unit of (own use of that cache x use by the others).
        drains: 1: while a block waits for room, later kernels get none, so that units drain for it; 0: room that is too
            small for it goes to them.
        step_us: from a block's asking for the next part of its inputs until it has them.
        library_threads: of a block of a collective.
        library_registers: of each of them.
        library_shared_kb: shared memory of such a block.
    """

    registers: Annotated[Quantity, NumberLimit(1024, 1 << 20, whole=True)]
    threads: Annotated[Quantity, NumberLimit(64, 16384, whole=True)]
    unit_gbps: Annotated[Quantity, NumberLimit(1, 1e4)]
    cache: Annotated[Quantity, NumberLimit(0, 100)]
    drains: OnOff
    step_us: Annotated[Quantity, NumberLimit(0.01, 100)]
    library_threads: Annotated[Quantity, NumberLimit(32, 16384, whole=True)]
    library_registers: Annotated[Quantity, NumberLimit(8, 1024, whole=True)]
    library_shared_kb: Annotated[Quantity, NumberLimit(0, 4096)]


@dataclasses.dataclass(frozen=True, slots=True)
class Fused:
    """Workgroups that compute, and send what they have computed (fused operators paper, sections III and IV-C).

    Occupancy is a share of the threads that the GPU's units hold at once.

    Attributes:
        half_share: occupancy at which workgroups read half as fast as any number of them could.
        knee_share: occupancy up to which gathers gain by more workgroups.
        crowding: slowdown of gathers for each unit of occupancy beyond that.
        kept_share: share of its occupancy that is left to a kernel with calls of the network, which take registers.
        generic_share: share of the library's GEMM speed that a generic tiled kernel reaches.
        store_share: share of ``usable_gbps`` that workgroups' stores reach.
        put_us: of a workgroup, to hand a slice to the network.
        flag_us: from a flag's being written until a workgroup of another rank has seen it.
        bag_row_us: of a warp of the framework's embedding bags, for a row: its index, then the row, one after another;
            0: not known, so that they read as fast as gathers of ours.
        bag_us: of the same, for a bag: where it begins and ends, and its result.
    """

    half_share: Annotated[Quantity, NumberLimit(0.001, 10)]
    knee_share: Share
    crowding: Annotated[Quantity, NumberLimit(0, 100)]
    kept_share: Share
    generic_share: Share
    store_share: Share
    put_us: Time
    flag_us: Time
    bag_row_us: Time
    bag_us: Time


@dataclasses.dataclass(frozen=True, slots=True)
class KernelsFigures:
    """Sidelane's own kernels that move and add on compute units.

    Attributes:
        latency_us: of a call, without its bytes.
        gather_gbps: bytes on a link or port, of what gathers and exchanges.
        reduce_scatter_gbps, all_reduce_gbps: the same of what adds.
        need: units beyond which they gain nothing.
        all_reduce_need: the same of an all-reduce.
        traffic: bytes through memory for each that crosses a link.
    """

    latency_us: Time
    gather_gbps: Speed
    reduce_scatter_gbps: Speed
    all_reduce_gbps: Speed
    need: Annotated[Quantity, NumberLimit(1, 4096)]
    all_reduce_need: Annotated[Quantity, NumberLimit(1, 4096)]
    traffic: Annotated[Quantity, NumberLimit(1, 20)]


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """A node of equal GPUs, or several such nodes.

    Attributes:
        name: as the command line takes it (``mi300x8``).
        title: for people.
        gpus: in a node; 1 only where there are several nodes.
        nodes: 1 or more.
    """

    name: str
    title: str
    gpus: int
    nodes: int
    gpu: GpuFigures
    links: Links
    dma: DmaFigures
    library: LibraryFigures
    matmul: Matmul
    interference: Interference
    power: Power | None = None
    occupancy: Occupancy | None = None
    fused: Fused | None = None
    kernels: KernelsFigures | None = None

    @property
    def world_size(self) -> int:
        return self.gpus * self.nodes

    def node_of(self, rank: int) -> int:
        return rank // self.gpus

    def refuse_nodes(self, what: str) -> None:
        """Refuse more than one node where a prediction is about one.

        Args:
            what: is predicted, for the message.

        Raises:
            ValueError: there are several nodes.
        """
        if self.nodes > 1:
            text = "what crosses nodes is modelled for fused operators and programs that the simulator is given"
            raise ValueError(f"{what}: nodes of {self.name} (value={self.nodes}, allowed=1; {text})")

    def quantities(self) -> dict[str, Quantity]:
        """Every number by its path, ``dma.copy_us`` for example."""
        found: dict[str, Quantity] = {}
        for section in dataclasses.fields(self):
            part = getattr(self, section.name)
            if dataclasses.is_dataclass(part):
                for field in dataclasses.fields(part):
                    value = getattr(part, field.name)
                    if isinstance(value, Quantity):
                        found[f"{section.name}.{field.name}"] = value
        return found

    def with_value(self, path: str, value: float) -> Machine:
        """The machine with one number changed (``dma.copy_us``), its source kept.

        Raises:
            ValueError: no such number.
        """
        known = self.quantities()
        if path not in known:
            raise ValueError(f"with_value: no such number (value={path!r}, allowed={', '.join(known)})")
        section, _, field = path.partition(".")
        old = known[path]
        part = dataclasses.replace(getattr(self, section), **{field: Quantity(value, old.source, old.of)})
        return dataclasses.replace(self, **{section: part})
