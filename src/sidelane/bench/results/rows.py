"""Rows of result files, a type a study. They are flat and their names are fixed, since other tools read them.

A time that does not exist is null and ``note`` says why: a variant that is wrong or could not run
is a row that says so.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar, Self

IMPLEMENTATIONS = ("nccl", "nccl_ctas", "nccl_ce", "symm_mem", "gloo", "dma", "sm", "auto")
LAUNCHES = ("eager", "graph")
PRELAUNCHED = "prelaunched"
SEPARATE = "separate"
MODEL = "model"
LIBRARY = "library"
PREDICTED = "predicted"
SOURCES = ("measured", PREDICTED)
FUSED_OPS = (
    *("gemv_all_reduce", "all_reduce_rms_norm", "embedding_all_to_all", "gemm_all_to_all"),
    *("gemm_reduce_scatter", "gemm_all_reduce", "all_gather_gemm"),
)
FUSED_IMPLEMENTATIONS = ("fused", "unfused_nccl", "unfused_sidelane", "symm_mem", "unfused_best")
HOST_OPERATIONS = ("all_gather", "trigger", "trigger_from_host")
OF_LIBRARY = ("nccl", "nccl_ce", "gloo")
ISOLATED = ("gemm", "collective", "memory", "beside", "pair")
SYMMETRIC, LEARNED, MAPPED, STAGED = "symmetric", "learned", "mapped", "staged"
REACHES = (SYMMETRIC, LEARNED, MAPPED, STAGED, "")
REPEATED, ROTATING, MISSED, NEW_ADDRESS, NEW_SEGMENT = "repeated", "rotating", "missed", "new_address", "new_segment"
CHANGES = (REPEATED, ROTATING, MISSED, NEW_ADDRESS, NEW_SEGMENT)
TRAINED_BY = (
    *("nccl", "gloo", "nccl_ce", "sidelane_ag", "sidelane", "sidelane_copies"),
    *("compute_only", "compute_only_straight"),
)
CLASSES = ("G-long", "C-long", "GC-equal", "")


@dataclasses.dataclass(frozen=True, slots=True)
class _Row:
    """Flat row: its fields are the keys of the file, in their order."""

    renamed: ClassVar[dict[str, str]] = {}

    def to_dict(self) -> dict[str, Any]:
        names = [field.name for field in dataclasses.fields(self)]
        return {self.renamed.get(name, name): _plain(getattr(self, name)) for name in names}

    @classmethod
    def from_dict(cls, row: dict[str, Any]) -> Self:
        """Make a row from the object of a file.

        Raises:
            ValueError: keys are missing or unknown, or a value is not allowed.
        """
        fields = {cls.renamed.get(field.name, field.name): field for field in dataclasses.fields(cls)}
        required = {key for key, field in fields.items() if field.default is dataclasses.MISSING}
        missing, unknown = sorted(required - set(row)), sorted(set(row) - set(fields))
        if missing or unknown:
            raise ValueError(f"{cls.__name__}: wrong keys (missing={missing}, unknown={unknown})")
        return cls(**{fields[key].name: value for key, value in row.items()})


@dataclasses.dataclass(frozen=True, slots=True)
class CollectiveRow(_Row):
    """One line of a table like that of nccl-tests.

    Attributes:
        bytes: gathered size for an all_gather, the whole local buffer for the others.
        variant: algorithm within the implementation (``pcpy``, ``b2b``, ...; empty where there is one only). With
            ``separate`` or ``+separate``: a call for each tensor of the list, one behind the other, instead of one call
            (NCCL: one group of calls) with all of them.
        time_us: of all calls for the bytes, median over the rounds of the slowest rank's time; p10_us and p90_us
            likewise.
        bus_gbps: see :func:`bus_gbps`.
        energy_mj: of all GPUs for one call; None when it was not measured.
        correct: outputs were compared with a reference in this run; None when it could not run.
        note: why there is no time, or what to know about this one.
        tensors: that share the bytes: 1 where a call takes one tensor, as in files without this key; otherwise the
            length of a list.
    """

    collective: str
    bytes: int
    dtype: str
    in_place: bool
    launch: str
    implementation: str
    variant: str
    prelaunch: bool
    time_us: float | None
    p10_us: float | None
    p90_us: float | None
    bus_gbps: float | None
    energy_mj: float | None
    correct: bool | None
    note: str = ""
    tensors: int = 1

    def __post_init__(self) -> None:
        require("CollectiveRow", "launch", self.launch, LAUNCHES)
        require("CollectiveRow", "implementation", self.implementation, IMPLEMENTATIONS)
        _require_times("CollectiveRow", self.note, self.correct, time_us=self.time_us, bus_gbps=self.bus_gbps)
        if self.bytes < 0:
            raise ValueError(f"CollectiveRow: bytes must not be negative (value={self.bytes})")
        if self.tensors < 1:
            raise ValueError(f"CollectiveRow: tensors (value={self.tensors}, allowed=1 and more)")

    @property
    def separate(self) -> bool:
        """A list, in a call for each tensor."""
        return self.variant.rpartition("+")[2] == SEPARATE


@dataclasses.dataclass(frozen=True, slots=True)
class OrdinaryRow(CollectiveRow):
    """A collective on tensors in some kind of memory: alone, next to a GEMM, or on tensors that change from call to
    call. A row next to a GEMM names one, and one of tensors that change says how they do as its ``variant``.

    Attributes:
        implementation: ``auto`` is Sidelane's; ``nccl`` and ``gloo`` have ordinary tensors.
        variant: what ``auto`` chose. Of tensors that change, how: ``repeated``: not at all; ``rotating``: eight pairs
            of tensors in turn; ``missed``: in one call, behind such that went ahead with others; ``new_address``: at an
            address that is new in every call, in one segment; ``new_segment``: in a segment that is new in every call.
        time_us: next to a GEMM: of both together. Median over the rounds of the slowest rank; p10_us and p90_us
            likewise.
        bus_gbps: null next to a GEMM.
        note: why Sidelane ran its last call as it did (``Communicator.last_choice``), or why there is no time.
        reach: how peers get at the tensors: ``symmetric``, ``mapped`` or ``staged``; empty for a library.
        gemm, m, n, k: next to which it ran; empty and null if it ran alone.
        gemm_us: isolated time of the GEMM, in the same rounds.
        comm_us: isolated time of the same call, which says that a computation runs next to it, in the same rounds.
        best_comm_us: the fastest of these, of all implementations and kinds of memory.
        speedup, ideal, percent_of_ideal: as in :class:`C3Row`.
        host_us: of tensors that change: from the begin of a call until it returns, with an idle device and all hosts at
            once; the median over the calls of the slowest rank.
    """

    reach: str = ""
    gemm: str = ""
    m: int | None = None
    n: int | None = None
    k: int | None = None
    gemm_us: float | None = None
    comm_us: float | None = None
    best_comm_us: float | None = None
    speedup: float | None = None
    ideal: float | None = None
    percent_of_ideal: float | None = None
    host_us: float | None = None

    def __post_init__(self) -> None:
        require("OrdinaryRow", "launch", self.launch, LAUNCHES)
        require("OrdinaryRow", "implementation", self.implementation, IMPLEMENTATIONS)
        require("OrdinaryRow", "reach", self.reach, REACHES)
        _require_times("OrdinaryRow", self.note, self.correct, time_us=self.time_us)
        if self.gemm and self.time_us is not None and self.speedup is None:
            raise ValueError("OrdinaryRow: next to a GEMM, time_us goes with a speedup (value=None)")


@dataclasses.dataclass(frozen=True, slots=True)
class C3Row(_Row):
    """A GEMM and a collective under one strategy. The figures are defined as in the papers.

    Attributes:
        gemm: tag of the ConCCL paper's Table I, or ``m,n,k``.
        bytes: as in :class:`CollectiveRow`.
        c3_class: ``class`` in the file: G-long, C-long or GC-equal; empty when no collective could run.
        strategy: what was run; ``chosen`` is what the strategy ``auto`` picked, else empty.
        gemm_us: isolated time of the GEMM.
        comm_us: isolated time of this strategy's own collective.
        best_comm_us: fastest isolated time of this collective over every implementation measured.
        time_us: both, side by side.
        speedup: (gemm + best_comm) / time.
        ideal: (gemm + best_comm) / max(gemm, best_comm).
        percent_of_ideal: 100 (speedup - 1) / (ideal - 1).
        percent_of_ideal_nccl: the same with the library's isolated time (NCCL's, Gloo's on CPUs) as best_comm.
        correct: outputs of both were compared with a reference in this run.
        note: why there is no time, or what to know about this one.
        units: compute units that the GEMM did without; 0 also in files without this key.
        sweep: times of a sweep over units, as ``8 1234.5, 16 1300.2``; empty also in files without this key.
    """

    renamed: ClassVar[dict[str, str]] = {"c3_class": "class"}

    gemm: str
    m: int
    n: int
    k: int
    dtype: str
    collective: str
    bytes: int
    c3_class: str
    strategy: str
    chosen: str
    gemm_us: float | None
    comm_us: float | None
    best_comm_us: float | None
    time_us: float | None
    speedup: float | None
    ideal: float | None
    percent_of_ideal: float | None
    percent_of_ideal_nccl: float | None
    correct: bool | None = None
    note: str = ""
    units: int = 0
    sweep: str = ""

    def __post_init__(self) -> None:
        require("C3Row", "class", self.c3_class, CLASSES)
        _require_times("C3Row", self.note, self.correct, time_us=self.time_us, speedup=self.speedup)


@dataclasses.dataclass(frozen=True, slots=True)
class HeuristicRow(_Row):
    """What a heuristic chose for a pair, against the best of a sweep.

    Attributes:
        heuristic: ``launch_order``: who is first, by workgroups; ``launch_order_3``: of three kernels; ``partition``:
            units for the collective, by look-up tables; ``spared``: units that a GEMM beside copy engines does
            without; ``auto``: the strategy.
        gemm, bytes: as in :class:`C3Row`.
        seen: the GEMM is one that was profiled.
        chosen: by the heuristic, in words.
        best: of the sweep.
        time_us: under what was chosen.
        best_us: under what was best.
        lost_percent: by the choice.
        right: nothing is lost, but for half a percent.
        note: the reason that the heuristic gave, or why nothing could be judged.
    """

    heuristic: str
    gemm: str
    m: int
    n: int
    k: int
    dtype: str
    collective: str
    bytes: int
    seen: bool
    chosen: str
    best: str
    time_us: float | None
    best_us: float | None
    lost_percent: float | None
    right: bool | None
    note: str

    def __post_init__(self) -> None:
        if self.time_us is None and not self.note:
            raise ValueError("HeuristicRow: a row without time_us needs a note that says why (value=None)")


@dataclasses.dataclass(frozen=True, slots=True)
class OccupancyRow(_Row):
    """Pipelined iterations of a GEMM in one shape and a collective (overlap paper).

    Attributes:
        bytes: as in :class:`CollectiveRow`.
        shape: of the GEMM's kernel: ``opt1``, ``opt2``, ``tuned``; on CPUs ``rows``.
        grid: ``persistent``: fewer blocks than tiles; or ``data-parallel``.
        blocks: of the grid.
        resident: blocks that a compute unit holds at once; 0 where nobody knows.
        shared_bytes: shared memory that a block asks for.
        priority: the collectives' stream goes before the GEMMs'.
        in_order: a GEMM waits for the one of the iteration before.
        iterations: of a pipeline.
        gemm_us, comm_us: of one, alone.
        sequential_us: of the iterations, one operation after another.
        time_us: of the iterations, overlapped.
        normalised: time over sequential, median over rounds.
        overlap_rate: percent of the collectives' time during which a GEMM ran.
        correct: the results of both were compared with a reference in this run.
        note: why there is no time.
    """

    gemm: str
    m: int
    n: int
    k: int
    dtype: str
    collective: str
    bytes: int
    implementation: str
    shape: str
    grid: str
    blocks: int
    resident: int
    shared_bytes: int
    priority: bool
    in_order: bool
    iterations: int
    gemm_us: float | None
    comm_us: float | None
    sequential_us: float | None
    time_us: float | None
    normalised: float | None
    overlap_rate: float | None
    correct: bool | None
    note: str = ""

    def __post_init__(self) -> None:
        require("OccupancyRow", "implementation", self.implementation, IMPLEMENTATIONS)
        _require_times("OccupancyRow", self.note, self.correct, time_us=self.time_us, normalised=self.normalised)


@dataclasses.dataclass(frozen=True, slots=True)
class IsolatedRow(_Row):
    """A GEMM, a collective or the memory alone, with all compute units or some; and a GEMM beside DMA traffic.

    Attributes:
        what: ``gemm``; ``collective``; ``memory``; ``beside``: a GEMM and traffic at once; ``pair``: a GEMM and a
            collective under a strategy.
        gemm: tag of the ConCCL paper's Table I, or ``m,n,k``; empty without a GEMM, as m, n and k are 0 then.
        collective: which, or empty.
        bytes: of the collective as in :class:`CollectiveRow`; of the traffic; of the memory that is read.
        implementation: who runs the collective or the traffic; ``host``: copies between device and host.
        variant: of it.
        means: how units are taken from a GEMM or given to a collective: ``split``, ``target``, ``carve_out``, ``grid``,
            ``threads``. Beside: whose time it is, ``gemm`` or ``traffic``. Pair: the strategy.
        units: taken from the GEMM, or given to the collective; 0: it has all.
        device_units: that there are.
        time_us: median over rounds of the slowest rank.
        alone_us: beside: the same without the other. Pair: the collective.
        gbps: of memory, read and written; of a collective, sent by each rank.
        note: why there is no time.
    """

    what: str
    gemm: str
    m: int
    n: int
    k: int
    dtype: str
    collective: str
    bytes: int
    implementation: str
    variant: str
    means: str
    units: int
    device_units: int
    time_us: float | None
    alone_us: float | None
    gbps: float | None
    note: str = ""

    def __post_init__(self) -> None:
        require("IsolatedRow", "what", self.what, ISOLATED)
        if self.time_us is None and not self.note:
            raise ValueError("IsolatedRow: a row without time_us needs a note that says why (value=None)")


@dataclasses.dataclass(frozen=True, slots=True)
class PhaseRow(_Row):
    """Where one transfer or one collective spends its time, in microseconds (definitions: docs/lab/phases.md).

    Attributes:
        operation: ``copy``, ``copies``, ``all_gather``, ``all_gather_in_place`` or ``all_to_all``.
        bytes: of each copy of a transfer; of a collective as in :class:`CollectiveRow`.
        launch: eager or graph; ``model`` where a description of a machine does not tell them apart.
        source: ``measured`` or ``predicted``.
        control_us, schedule_us, copy_us, sync_us: the phases; they add up to ``total_us``.
        total_us: from the call until the host knows, with the stamps that the phases need.
        total_unstamped_us: the same without any stamp.
        host_us: of the call without stamps: until it returns.
        entry_us, exit_us: the handshakes, parts of ``schedule_us`` and ``sync_us``.
        correct: outputs were compared with a reference in this run; None when nothing ran.
        note: why there is no time, or what to know about this one.
        stage_us: of ``copy_us``: the copy into the rank's own slot (``alternating``); 0 where there is none.
    """

    operation: str
    variant: str
    bytes: int
    launch: str
    source: str
    control_us: float | None
    schedule_us: float | None
    copy_us: float | None
    sync_us: float | None
    total_us: float | None
    total_unstamped_us: float | None
    host_us: float | None
    entry_us: float | None
    exit_us: float | None
    correct: bool | None = None
    note: str = ""
    stage_us: float | None = None

    def __post_init__(self) -> None:
        require("PhaseRow", "launch", self.launch, (*LAUNCHES, MODEL))
        require("PhaseRow", "source", self.source, SOURCES)
        times = {name: getattr(self, name) for name in _PHASE_TIMES}
        _require_times("PhaseRow", self.note, self.correct, **times)


_PHASE_TIMES = ("control_us", "schedule_us", "copy_us", "sync_us", "total_us", "total_unstamped_us")


@dataclasses.dataclass(frozen=True, slots=True)
class PowerRow(_Row):
    """What a collective draws, run back to back (method: docs/lab/power.md).

    Attributes:
        bytes: as in :class:`CollectiveRow`.
        implementation: as there; ``library`` in predictions.
        launch: eager or graph; ``model`` in predictions.
        time_us: of one call, the slowest rank's.
        watts: mean over the GPUs, by their energy counters.
        watts_sampled: the same by their power readings.
        idle_watts: before the study, with everything set up and nothing running.
        energy_mj: of all GPUs for one call: watts x GPUs x time.
        energy_above_idle_mj: what is left of it above ``idle_watts``.
        counters_agree_percent: 100 x watts_sampled / watts.
        correct: outputs were compared with a reference in this run; None when nothing ran.
        note: why there are no figures, or what to know about these.
    """

    collective: str
    bytes: int
    implementation: str
    variant: str
    in_place: bool
    launch: str
    time_us: float | None
    watts: float | None
    watts_sampled: float | None
    idle_watts: float | None
    energy_mj: float | None
    energy_above_idle_mj: float | None
    counters_agree_percent: float | None
    correct: bool | None = None
    note: str = ""

    def __post_init__(self) -> None:
        require("PowerRow", "launch", self.launch, (*LAUNCHES, MODEL))
        require("PowerRow", "implementation", self.implementation, (*IMPLEMENTATIONS, LIBRARY))
        _require_times(
            "PowerRow", self.note, self.correct, time_us=self.time_us, watts=self.watts, energy_mj=self.energy_mj
        )


@dataclasses.dataclass(frozen=True, slots=True)
class ChainRow(_Row):
    """A GEMM, an all-gather of what it made and a GEMM that reads what was gathered, one behind the other.

    Attributes:
        bytes: gathered size.
        launch: eager or graph; ``prelaunched`` where the all-gather was submitted ahead of the producer, and fired
            behind it by one write (docs/internals/prelaunch.md).
        gemms_us: both GEMMs with nothing between them, launched as the chain is (``prelaunched``: eager).
        time_us: of the chain, median over the rounds of the slowest rank's time; p10_us and p90_us likewise.
        correct: the consumer's output was compared with a reference in this run; None when it could not run.
        note: why there is no time, or what to know about this one.
    """

    bytes: int
    dtype: str
    in_place: bool
    launch: str
    implementation: str
    variant: str
    gemms_us: float
    time_us: float | None
    p10_us: float | None
    p90_us: float | None
    correct: bool | None
    note: str = ""

    def __post_init__(self) -> None:
        require("ChainRow", "launch", self.launch, (*LAUNCHES, PRELAUNCHED))
        require("ChainRow", "implementation", self.implementation, IMPLEMENTATIONS)
        _require_times("ChainRow", self.note, self.correct, time_us=self.time_us)


@dataclasses.dataclass(frozen=True, slots=True)
class HostRow(_Row):
    """What a call takes the host: from its begin until it returns, while the device is busy with something else.

    Attributes:
        operation: ``all_gather``, or what fires a prelaunched one: ``trigger``, ``trigger_from_host``.
        bytes: gathered size.
        symmetric: the tensors lie in symmetric memory (of NCCL: in its symmetric windows).
        driver_calls: to the driver in one call, of Sidelane's own; null for others.
        host_us: median over the batches of the slowest rank; p10_us and p90_us likewise.
        best_us: fastest batch of any rank.
        correct: outputs were compared with a reference in this run; None when it could not run.
        note: why there is no time, or what to know about this one.
    """

    operation: str
    bytes: int
    implementation: str
    variant: str
    symmetric: bool
    driver_calls: int | None
    host_us: float | None
    p10_us: float | None
    p90_us: float | None
    best_us: float | None
    correct: bool | None
    note: str = ""

    def __post_init__(self) -> None:
        require("HostRow", "operation", self.operation, HOST_OPERATIONS)
        require("HostRow", "implementation", self.implementation, IMPLEMENTATIONS)
        _require_times("HostRow", self.note, self.correct, host_us=self.host_us)


@dataclasses.dataclass(frozen=True, slots=True)
class FusedRow(_Row):
    """A fused operator, or the same unfused, at one shape.

    Attributes:
        op: the operator.
        shape: in words.
        implementation: ``fused``; ``unfused_nccl`` with the process group's collective (on CPUs Gloo's),
            ``unfused_sidelane`` with ours; ``unfused_best`` repeats the fastest of these.
        schedule: of a fused one; what an unfused one is made of.
        launch: ``eager`` or ``graph``.
        time_us: median over the rounds of the slowest rank; p10_us and p90_us likewise.
        compute_us: the computation alone, the fastest there is.
        comm_us: the collective alone, likewise.
        bound_us: the larger of the two.
        max_rel_err: the largest difference from the result in float64, next to the largest element.
        correct: None when it could not run.
        note: why there is no time.
    """

    op: str
    shape: str
    implementation: str
    schedule: str
    launch: str
    time_us: float | None
    p10_us: float | None
    p90_us: float | None
    compute_us: float | None
    comm_us: float | None
    bound_us: float | None
    max_rel_err: float | None
    correct: bool | None
    note: str = ""

    def __post_init__(self) -> None:
        require("FusedRow", "op", self.op, FUSED_OPS)
        require("FusedRow", "implementation", self.implementation, FUSED_IMPLEMENTATIONS)
        require("FusedRow", "launch", self.launch, LAUNCHES)
        _require_times("FusedRow", self.note, self.correct, time_us=self.time_us)


@dataclasses.dataclass(frozen=True, slots=True)
class GemmRow(_Row):
    """A linear layer of a model, alone: ``result[m, n] = input[m, k] @ weight[n, k].T``.

    Attributes:
        model: name, behind a slash the GPUs that share a layer.
        layer: which one.
        m: tokens; n: outputs; k: inputs.
        time_us: of one call, median over the samples; p10_us and p90_us likewise.
        tflops: operations over the time.
        gbps: fewest bytes that can move (each input read once, the result written once) over the time.
        correct: rows of the result were compared with float64, before and after; None when it could not run.
        note: why there is no time.
    """

    model: str
    layer: str
    m: int
    n: int
    k: int
    dtype: str
    time_us: float | None
    p10_us: float | None
    p90_us: float | None
    tflops: float | None
    gbps: float | None
    correct: bool | None
    note: str = ""

    def __post_init__(self) -> None:
        _require_times("GemmRow", self.note, self.correct, time_us=self.time_us)


@dataclasses.dataclass(frozen=True, slots=True)
class FsdpRow(_Row):
    """A training step of layers that FSDP2 shards, by who communicates.

    Attributes:
        model: whose layers they are like; on CPU ranks of smaller sizes.
        seq, batch: tokens of a sequence, and sequences of a rank.
        reduce_dtype: in which gradients are added; parameters are gathered in bfloat16.
        optimizer: the step has one (AdamW).
        implementation: ``nccl``, on CPUs ``gloo``; ``nccl_ce``: gathers by NCCL on copy engines; ``sidelane_ag``:
            gathers by Sidelane; ``sidelane``: gathers and scatters; ``sidelane_copies``: the same with parameters that
            are copied out of a buffer; ``compute_only``: collectives that move nothing; ``compute_only_straight``: and
            no copy-out.
        step_ms: median over rounds of the slowest rank; p10_ms and p90_ms likewise.
        exposed_ms: more than ``compute_only`` in the same round, median.
        recovered_percent: of the library's exposed time, in the same round, median.
        loss: mean over ranks; grad_norm: of the whole gradient. Of the step that was compared.
        peak_mb: most memory of a rank in a step: parameters, what the step allocates, and what this implementation
            keeps; null on CPUs, and where nothing is moved.
        correct: loss, gradient norm and gradients are the library's but for rounding; null where nothing is moved.
        note: why there is no time, or what to know about this one.
        gemm_ms, attention_ms, collective_ms, copy_in_ms, copy_out_ms, peer_copy_ms, other_ms: kernels of one step on
            all streams of the first rank, under a profiler; null without. Copies in are casts of shards and gradients
            that are packed; peer copies those of copy engines.
        first_gather_ms: of that step, until its first GEMM begins; last_scatter_ms: after its last one has ended.
    """

    model: str
    layers: int
    seq: int
    batch: int
    reduce_dtype: str
    optimizer: bool
    implementation: str
    step_ms: float | None
    p10_ms: float | None
    p90_ms: float | None
    exposed_ms: float | None
    recovered_percent: float | None
    loss: float | None
    grad_norm: float | None
    peak_mb: float | None
    correct: bool | None
    note: str = ""
    gemm_ms: float | None = None
    attention_ms: float | None = None
    collective_ms: float | None = None
    copy_in_ms: float | None = None
    copy_out_ms: float | None = None
    peer_copy_ms: float | None = None
    other_ms: float | None = None
    first_gather_ms: float | None = None
    last_scatter_ms: float | None = None

    def __post_init__(self) -> None:
        require("FsdpRow", "implementation", self.implementation, TRAINED_BY)
        _require_times("FsdpRow", self.note, self.correct, step_ms=self.step_ms)


@dataclasses.dataclass(frozen=True, slots=True)
class SoakRow(_Row):
    """Episodes of one ending and one number of ranks; or, with a ``note``, one thing that was not as it must be.

    Attributes:
        ending: how the episodes ended: ``good``, ``killed``, ``never comes``, ...
        ranks: of each episode's world.
        seed: of the campaign.
        episode_calls: of an episode of two ranks; part of what the seed means.
        episodes: of this kind; 0 of what was not as it must be, which counts in the row of its kind.
        failed: those of them in which anything was wrong.
        seconds: that they took.
        calls: that all ranks made and checked, the sum of the columns by kind.
        uneven: all_to_all with split sizes. ``lists`` and ``batches`` count whole calls, ``replayed`` the calls in each
            replay of a graph.
        refusals: wrong calls, and calls that differed between ranks, which all ranks refused as they must.
        allocations: of symmetric memory.
        compared_bytes: by all ranks.
        wrong: comparisons that found wrong bytes.
        errors: what else was not as it must be.
        leftovers: threads, memory, processes and files that were left behind.
        episode, rank: where it was; ``rank`` is null if it was nobody's.
        note: what it was.
    """

    ending: str
    ranks: int
    seed: int
    episode_calls: int
    episodes: int
    failed: int
    seconds: float
    calls: int
    all_gather: int
    all_to_all: int
    uneven: int
    reduce_scatter: int
    all_reduce: int
    broadcast: int
    scatter: int
    gather: int
    barrier: int
    lists: int
    batches: int
    prelaunched: int
    replayed: int
    refusals: int
    allocations: int
    compared_bytes: int
    wrong: int
    errors: int
    leftovers: int
    episode: int | None = None
    rank: int | None = None
    note: str = ""

    def __post_init__(self) -> None:
        by_kind = sum(getattr(self, name) for name in SOAKED)
        if by_kind != self.calls:
            raise ValueError(f"SoakRow: calls must be the sum of those by kind (value={self.calls}, allowed={by_kind})")
        if (self.episode is None) != (not self.note):
            raise ValueError(f"SoakRow: a note belongs to an episode (value={self.note!r}, episode={self.episode})")


SOAKED = (
    *("all_gather", "all_to_all", "uneven", "reduce_scatter", "all_reduce", "broadcast", "scatter", "gather"),
    *("barrier", "lists", "batches", "prelaunched", "replayed"),
)
"""The columns of a ``SoakRow`` that count calls by kind."""

Row = (
    CollectiveRow
    | C3Row
    | HeuristicRow
    | OccupancyRow
    | IsolatedRow
    | PhaseRow
    | PowerRow
    | ChainRow
    | HostRow
    | FusedRow
    | GemmRow
    | FsdpRow
    | SoakRow
    | OrdinaryRow
)
ROWS: dict[str, type[Row]] = {
    "collectives": CollectiveRow,
    "c3": C3Row,
    "heuristics": HeuristicRow,
    "occupancy": OccupancyRow,
    "isolated": IsolatedRow,
    "phases": PhaseRow,
    "power": PowerRow,
    "chain": ChainRow,
    "host": HostRow,
    "fused": FusedRow,
    "gemms": GemmRow,
    "fsdp": FsdpRow,
    "soak": SoakRow,
    "ordinary": OrdinaryRow,
}


def bus_gbps(collective: str, nbytes: int, ranks: int, time_us: float) -> float:
    """Bus bandwidth as nccl-tests defines it (its PERFORMANCE.md): comparable over collectives and numbers of ranks.

    >>> bus_gbps("all_gather", 4_000_000_000, 4, 10_000.0)
    300.0
    """
    shares = {"all_reduce": 2 * (ranks - 1) / ranks, "broadcast": 1.0}
    return nbytes / (time_us * 1e3) * shares.get(collective, (ranks - 1) / ranks)


def _plain(value: Any) -> Any:
    # Five significant digits are more than any clock here gives, and keep the files readable.
    return float(f"{value:.5g}") if isinstance(value, float) else value


def require(where: str, name: str, value: str, allowed: Sequence[str]) -> None:
    """Refuse a value that is not one of ``allowed``, saying where and which."""
    if value not in allowed:
        raise ValueError(f"{where}: {name} (value={value!r}, allowed={', '.join(allowed)})")


def _require_times(where: str, note: str, correct: bool | None, **figures: float | None) -> None:
    for name, value in figures.items():
        if value is None and not note:
            raise ValueError(f"{where}: a row without {name} needs a note that says why (value=None)")
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{where}: {name} must be finite and not negative (value={value})")
        if value is not None and correct is False:
            raise ValueError(f"{where}: {name} of a wrong result must not be given (value={value}, allowed=None)")
