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


class Topology(StrEnum):
    """``mesh``: a link between every two GPUs. ``switch``: one port a GPU that reaches every peer."""

    MESH = "mesh"
    SWITCH = "switch"


class NetworkTopology(StrEnum):
    """Networks between nodes.

    ``fat_tree``: the NICs of ``leaf_nodes`` nodes meet in one leaf switch, leaf switches in spines. ``rails``: a leaf
    switch joins one NIC of each of these nodes, and what changes its rail passes the spines. ``torus``: nodes in rows
    and columns, each with links to four neighbours, which pass on what is for others.
    """

    FAT_TREE = "fat_tree"
    RAILS = "rails"
    TORUS = "torus"


class HostThreads(StrEnum):
    """``node``: one thread hands commands to the engines of all GPUs. ``rank``: one a GPU."""

    NODE = "node"
    RANK = "rank"


class RunStatus(StrEnum):
    """Words for whether Sidelane has run on machines of a kind, and whether it can."""

    MEASURED = "measured on such machines"
    UNRUN = "predicted: never run there"
    UNSUPPORTED = "predicted; Sidelane has never run on AMD GPUs"


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


NO_CLASSES = Quantity(0, NumberSource.DATASHEET, "no GPU's memory tells collectives from computations")
NO_ADDING = Quantity(0, NumberSource.DATASHEET, "no GPU's engines add")
TWO_COPIES = Quantity(2, NumberSource.ASSUMED, "an engine writes what two copies write")
ANY_SOURCE = Quantity(0, NumberSource.ASSUMED, "the next copy's bytes are there, wherever they are read")
ONE_NIC = Quantity(1, NumberSource.ASSUMED, "a NIC a GPU")
ONE_NODE_A_LEAF = Quantity(1, NumberSource.ASSUMED, "spines join all nodes")
FULL_TREE = Quantity(1, NumberSource.ASSUMED, "as much bandwidth to spines as to nodes")
ONE_COLUMN = Quantity(1, NumberSource.ASSUMED, "rows of one node: a ring")
"""Networks of descriptions that do not speak of them: every NIC reaches every other at its full bandwidth."""


@dataclasses.dataclass(frozen=True, slots=True)
class GpuFigures:
    """Units and memories of one GPU."""

    # Half of them are enough for the smallest share of a collective, 8.
    units: Annotated[Quantity, NumberLimit(16, 1024, whole=True)]  # compute units (CUs, SMs).
    peak_tflops: Annotated[Quantity, NumberLimit(1, 1e5)]  # dense 16-bit matrix operations.
    memory_gbps: MemorySpeed  # peak bandwidth of its memory.
    memory_gb: Annotated[Quantity, NumberLimit(1, 4096)]  # capacity.
    l2_mb: Annotated[Quantity, NumberLimit(0, 4096)]  # caches that a kernel writes through before DMA engines may read.
    cache_mb: Annotated[Quantity, NumberLimit(0, 4096)]  # last-level cache.
    shared_kb: Annotated[Quantity, NumberLimit(8, 4096)]  # memory of a compute unit that its workgroups share.
    blocks_per_unit: Annotated[Quantity, NumberLimit(1, 128, whole=True)]  # workgroups that a unit holds at most.


@dataclasses.dataclass(frozen=True, slots=True)
class Links:
    """How bytes travel between GPUs: of one node, and of several over the network (network.py)."""

    topology: Topology  # inside a node.
    peak_gbps: Speed  # one direction, of the link to one peer (mesh) or of the port of a GPU (switch).
    usable_gbps: Speed  # what large DMA copies reach of it.
    # Of a NIC, which sends so much and receives as much at once; 0 where nodes are not connected.
    network_gbps: Annotated[Quantity, NumberLimit(0.1, 1e4, zero=True)]
    network_us: Time  # latency from node to node; on a torus, of a hop.
    network: NetworkTopology = NetworkTopology.FAT_TREE
    # NICs of a GPU, which carry its bytes together; less than 1 where GPUs share one (0.5: two do).
    nics_per_gpu: Annotated[Quantity, NumberLimit(1 / 64, 16)] = ONE_NIC
    # Nodes below one leaf switch. Among them nothing passes the spines.
    leaf_nodes: Annotated[Quantity, NumberLimit(1, 4096, whole=True)] = ONE_NODE_A_LEAF
    # Bandwidth of a leaf switch's ports to nodes, by that of its ports to spines.
    oversubscription: Annotated[Quantity, NumberLimit(1, 64)] = FULL_TREE
    # Nodes of a torus's row.
    torus_row: Annotated[Quantity, NumberLimit(1, 4096, whole=True)] = ONE_COLUMN


@dataclasses.dataclass(frozen=True, slots=True)
class DmaFigures:
    """DMA engines and the host that feeds them (phases of the DMA collectives paper, section 3.2)."""

    engines: Annotated[Quantity, NumberLimit(1, 256, whole=True)]  # that serve peers, a GPU.
    engine_gbps: Speed  # bytes that one engine writes.
    # Share of ``engine_gbps`` that copies reach through the vendor's runtime instead of bare packets.
    runtime_share: Share
    # Share of ``engine_gbps`` left when several queues use one engine at once (1: no loss), unless they serve the
    # same peers in the same order.
    shared_queues: Share
    local_gbps: MemorySpeed  # bytes that a copy inside one GPU writes (own chunks, staging), whichever engine runs it.
    host: HostThreads  # which threads prepare commands; a thread does one thing after another.
    control_us: Time  # host: prepare one command.
    doorbell_us: Time  # host: ring the doorbell of a queue.
    fetch_us: Time  # engine: from the doorbell to the first command.
    copy_us: Time  # latency of a copy alone, without its bytes.
    next_copy_us: Time  # what each further copy behind it adds (less than ``copy_us`` where engines overlap copies).
    signal_us: Time  # engine: write a flag.
    wait_us: Time  # engine: see a flag that has changed.
    trigger_us: Time  # host: write a flag that holds a prelaunched queue.
    sync_us: Time  # from the last command of a queue until the host knows.
    reduce_us: Time  # of a reduction in the middle of a program: its kernel starts, and the next command sees its end.
    reduce_gbps: MemorySpeed  # bytes that the kernel of a reduction reads and writes.
    # Bytes that one engine reads when it adds; 0: engines do not add, as on every GPU that there is.
    add_gbps: Annotated[Quantity, NumberLimit(0.1, 1e5, zero=True)] = NO_ADDING
    # Bytes of ``engine_gbps`` that a swap takes for each byte that it exchanges: 1 where both directions of a link are
    # used at once.
    swap_bytes: Annotated[Quantity, NumberLimit(1, 2)] = TWO_COPIES
    other_source_us: Time = ANY_SOURCE  # what a further copy adds that reads other bytes than the one before.


@dataclasses.dataclass(frozen=True, slots=True)
class LibraryFigures:
    """The vendor's library of collectives, which moves bytes with kernels."""

    # Time of a collective without its bytes.
    all_gather_us: Latency
    all_to_all_us: Latency
    all_reduce_us: Latency
    reduce_scatter_us: Latency
    # Bandwidth of a link (mesh) or port (switch) with all units.
    all_gather_gbps: Speed
    all_to_all_gbps: Speed
    all_reduce_gbps: Speed
    reduce_scatter_gbps: Speed
    bulk_us: Time  # what the protocol for large messages takes on top of that time.
    low_latency_share: Share  # share of the bandwidth that the protocol for small messages reaches.
    # Workgroups it launches, one a compute unit, for all_gather; ``all_to_all_units`` for the other; the more of the
    # two for what reduces.
    default_units: Count
    all_to_all_units: Count
    # Compute units beyond which it gains nothing.
    all_gather_need: Count
    all_to_all_need: Count
    # Bytes through the memory system for each byte that crosses a link, one direction, for all_gather.
    traffic: Annotated[Quantity, NumberLimit(1, 20)]
    all_to_all_traffic: Annotated[Quantity, NumberLimit(1, 20)]  # the same for all_to_all.


@dataclasses.dataclass(frozen=True, slots=True)
class Matmul:
    """GEMM kernels of the vendor's library."""

    launch_us: Time  # of the kernel, from its turn until it computes at full speed and from there to its end.
    efficiency: Share  # share of ``peak_tflops`` that a GEMM with long sums reaches.
    # The begin and the end of a tile take as long as this length of its sums.
    ramp_k: Annotated[Quantity, NumberLimit(0, 4096)]
    # Rows of the result are computed in whole multiples of it.
    row_step: Annotated[Quantity, NumberLimit(1, 4096, whole=True)]
    # 0: operations and bytes hide each other, and the longer of the two counts; 1: the root of the sum of their
    # squares does.
    blend: Part
    # Of adding up what units have computed, where a result with few tiles and long sums is split along k.
    split_us: Time
    # Tile of the result that one workgroup computes, where there are enough of them.
    tile_m: Annotated[Quantity, NumberLimit(8, 4096, whole=True)]
    tile_n: Annotated[Quantity, NumberLimit(8, 4096, whole=True)]
    # 1: one workgroup a unit for the whole GEMM, its tiles dealt out beforehand; beside a kernel that holds a unit it
    # can not run.
    persistent: OnOff
    memory_efficiency: Share  # share of ``memory_gbps`` that a memory-bound GEMM reaches.
    # Operations per byte in the memory system while what runs at once fits in the last-level cache.
    intensity: Annotated[Quantity, NumberLimit(1, 1e5)]
    bound_intensity: Annotated[Quantity, NumberLimit(1, 1e5)]  # the same where it does not (model/gemm.py).
    # Share of a memory-bound GEMM's traffic that disappears with fewer workgroups in flight.
    cache_gain: Annotated[Quantity, NumberLimit(0, 0.5)]
    # Share by which a GEMM that is given nearly all units is slower than in proportion, since the library chooses
    # tiles for the whole GPU; with half of the units nothing is left of it.
    partition_loss: Annotated[Quantity, NumberLimit(0, 1)]
    # A GEMM at the power cap has higher clocks on units of its own that are fewer: its time has the share of units to
    # this power as a factor.
    partition_gain: Part


@dataclasses.dataclass(frozen=True, slots=True)
class Interference:
    """How concurrent work gets in each other's way beyond sharing what is full."""

    # Slowdown for each unit of (own memory utilisation x that of the others).
    memory: Annotated[Quantity, NumberLimit(0, 100)]
    # Share of its workgroups that a kernel gets placed while an earlier one still has workgroups waiting.
    late_share: Part
    copies: Part  # share by which a GEMM slows down next to copy engines for other reasons (power, clocks).
    kernels: Part  # the same next to the library's kernels, on the units that are left to it.
    local_waits: OnOff  # 1: a copy inside a GPU waits for the end of a GEMM that fills it.
    # 1: of a GEMM and a collective that are released together either may get the units first, whatever the order of
    # their launches.
    either_first: OnOff
    # What no GPU has (ConCCL paper, VII-A1): traffic that memory serves first (0: none, 1: that of collectives, 2: that
    # of computations), and the share of memory channels that only collectives use (0: all channels are shared).
    memory_first: Annotated[Quantity, NumberLimit(0, 2, whole=True)] = NO_CLASSES
    collective_channels: Annotated[Quantity, NumberLimit(0, 0.95)] = NO_CLASSES


@dataclasses.dataclass(frozen=True, slots=True)
class Power:
    """Watts of one GPU by component, above idle, at full use."""

    idle_w: Watts  # of the GPU.
    compute_idle_w: Watts  # the part of it that compute units take.
    compute_w: Watts  # all compute units busy, at the clocks that the cap leaves.
    boost_w: (
        Watts  # what operations of all units draw beyond that at full clocks, for as long as the mean is below the cap.
    )
    memory_w: Watts  # memory at its peak bandwidth.
    # Links that carry anything, at whatever rate: transceivers run whether they have something to send.
    links_on_w: Watts
    links_w: Watts  # what all links busy in both directions add to that.
    engine_w: Watts  # one DMA engine busy.
    cap_w: Watts  # that the GPU holds itself to.


@dataclasses.dataclass(frozen=True, slots=True)
class Occupancy:
    """Limits of a compute unit that blocks share, and what the library's collectives take of it."""

    registers: Annotated[Quantity, NumberLimit(1024, 1 << 20, whole=True)]  # of 4 bytes, of a unit.
    threads: Annotated[Quantity, NumberLimit(64, 16384, whole=True)]  # that a unit holds.
    unit_gbps: Annotated[Quantity, NumberLimit(1, 1e4)]  # bytes that a unit reads from the cache that all share.
    # Slowdown for each unit of (own use of that cache x use by the others).
    cache: Annotated[Quantity, NumberLimit(0, 100)]
    # 1: while a block waits for room, later kernels get none, so that units drain for it; 0: room that is too small
    # for it goes to them.
    drains: OnOff
    # From a block's asking for the next part of its inputs until it has them.
    step_us: Annotated[Quantity, NumberLimit(0.01, 100)]
    library_threads: Annotated[Quantity, NumberLimit(32, 16384, whole=True)]  # of a block of a collective.
    library_registers: Annotated[Quantity, NumberLimit(8, 1024, whole=True)]  # of each of them.
    library_shared_kb: Annotated[Quantity, NumberLimit(0, 4096)]  # shared memory of such a block.


@dataclasses.dataclass(frozen=True, slots=True)
class Fused:
    """Workgroups that compute, and send what they have computed (fused operators paper, sections III and IV-C).

    Occupancy is a share of the threads that the GPU's units hold at once.
    """

    # Occupancy at which workgroups read half as fast as any number of them could.
    half_share: Annotated[Quantity, NumberLimit(0.001, 10)]
    knee_share: Share  # occupancy up to which gathers gain by more workgroups.
    crowding: Annotated[Quantity, NumberLimit(0, 100)]  # slowdown of gathers for each unit of occupancy beyond that.
    # Share of its occupancy that is left to a kernel with calls of the network, which take registers.
    kept_share: Share
    generic_share: Share  # share of the library's GEMM speed that a generic tiled kernel reaches.
    store_share: Share  # share of ``usable_gbps`` that workgroups' stores reach.
    put_us: Time  # of a workgroup, to hand a slice to the network.
    flag_us: Time  # from a flag's being written until a workgroup of another rank has seen it.
    # Of a warp of the framework's embedding bags, for a row: its index, then the row, one after another; 0: not
    # known, so that they read as fast as gathers of ours.
    bag_row_us: Time
    bag_us: Time  # of the same, for a bag: where it begins and ends, and its result.


@dataclasses.dataclass(frozen=True, slots=True)
class KernelsFigures:
    """Sidelane's own kernels that move and add on compute units."""

    launch_us: Time  # of an empty kernel in a graph.
    # Of a call in a graph whose words carry their own readiness, without its bytes, which are twice those of the data.
    latency_us: Time
    parcels_us: Time  # that a call takes longer whose bytes travel as they are, each block's with a flag behind them.
    bulk_us: Time  # that a call takes longer whose bytes go into outputs, or come out of inputs, between meetings.
    eager_us: Time  # that a call takes longer on the GPU where the host launches it, and not a graph.
    gather_gbps: Speed  # bytes on a link or port, of what gathers and exchanges.
    # The same of what adds.
    reduce_scatter_gbps: Speed
    all_reduce_gbps: Speed
    need: Annotated[Quantity, NumberLimit(1, 4096)]  # units beyond which they gain nothing.
    all_reduce_need: Annotated[Quantity, NumberLimit(1, 4096)]  # the same of an all-reduce.
    traffic: Annotated[Quantity, NumberLimit(1, 20)]  # bytes through memory for each that crosses a link.


@dataclasses.dataclass(frozen=True, slots=True)
class HostFigures:
    """The way between a GPU and host memory, which programs take that have their staging there."""

    peers: OnOff  # 1: GPUs reach each other's memory, and staging is in host memory only where that is asked for.
    gpu_gbps: Speed  # bytes of a GPU's PCIe link, one direction alone.
    duplex_gbps: Speed  # bytes of both directions together, at once.
    root_gpus: Count  # GPUs of one root complex, or of one socket.
    root_gbps: MemorySpeed  # bytes of a root complex in one direction.
    memory_gbps: MemorySpeed  # bytes that all GPUs write and read in host memory.
    # Of a kernel in a graph whose words have flags, without its bytes; and bytes of words with flags, which are twice
    # those of the data.
    flagged_us: Latency
    flagged_gbps: Speed
    # The same of a kernel for more bytes, each way at once.
    kernel_us: Latency
    kernel_gbps: Speed


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """A node of equal GPUs, or several such nodes.

    Attributes:
        name: as the command line takes it (``mi300x8``).
        title: for people.
        gpus: in a node; 1 only where there are several nodes.
        nodes: 1 or more.
        runs: whether Sidelane has run there.
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
    host: HostFigures | None = None
    runs: RunStatus = RunStatus.UNRUN

    @property
    def world_size(self) -> int:
        return self.gpus * self.nodes

    @property
    def through_host(self) -> bool:
        """True if staging is in host memory, since GPUs do not reach each other's."""
        return self.host is not None and not self.host.peers

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
            text = (
                "what crosses nodes is modelled for collective, explain, plan, pairs of c3, fused operators "
                "and given programs"
            )
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
        """Return the machine with one number changed (``dma.copy_us``), its source kept.

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
