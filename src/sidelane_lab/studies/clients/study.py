"""Programs that nobody here wrote, by who makes their collectives.

Each way has a model of its own from the same seed, and all ways take turns round by round in one process. Where the
memory does not hold all of them they are built one by one, in two passes (A B C D, A B C D), which a note says. A loss
is that after the same number of steps for every way, so that it would also show wrong gradients.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from sidelane.integrations import ledger
from sidelane.machine.local import installed_version
from sidelane_lab.baselines.roster import make_meter
from sidelane_lab.cli.clients import PROGRAMS, ClientOptions
from sidelane_lab.harness.launch import LaunchTarget, Rank
from sidelane_lab.harness.measure import Meter
from sidelane_lab.harness.options import require_all
from sidelane_lab.harness.report import Cell, tables_by
from sidelane_lab.harness.running import RESUMES, Sender
from sidelane_lab.harness.study import FlatRow, Results, Study
from sidelane_lab.harness.table import MISSING, verdict
from sidelane_lab.harness.ways import Job, Problem, Rounds
from sidelane_lab.studies.clients.cases import DDP, FSDP, MEGATRON, MODELS, TENSOR, TINY, TITAN, ClientCase, fitted
from sidelane_lab.studies.clients.programs import COMPILED, ENABLE, BuiltClient
from sidelane_lab.studies.clients.trainers import BESIDE, PACKAGES, POOL, lacking
from sidelane_lab.studies.steps import (
    EAGER,
    FEWEST_ROUNDS,
    GRAPH,
    GROUP,
    NONE,
    difference,
    loaded_nccl,
    makers_of,
    over_percent,
    run_resumed,
    spread_ms,
    step_columns,
)
from sidelane_lab.studies.torch_groups import StudyGroups, library_of

WAYS = {
    DDP: (GROUP, NONE),
    **dict.fromkeys((FSDP, TITAN), (GROUP, ENABLE, NONE)),
    MEGATRON[0]: (GROUP, POOL, BESIDE),
    MEGATRON[3]: (GROUP, BESIDE),
}
"""Ways beside the library's, by program; of the others the group alone."""

LENGTHS = {"cpu": 16}
LENGTH, SEQUENCES = 2048, 8
"""Tokens of a sequence in training, unless ``LENGTHS`` has the device; sequences of one token in decoding."""

DECODED = 5
"""Tokens that are decoded in a step of the options: one takes a few ms."""

PASSES = 2
TOLERANCES = {TENSOR: 1e-1}
"""Largest norm of a difference from the library's output, next to that output's norm, by program: layers in bfloat16
amplify another rounding to some percent of the logits, and a sum that is missing changes all of them."""
LOSS_TOLERANCE = 2e-2
"""The same of the loss, for the programs that train."""

NOTHING_EXPOSED_PERCENT = 1.0
"""Percent of a step below which communication that is exposed is nothing that anyone could win."""


@dataclasses.dataclass(frozen=True, slots=True)
class ClientRow(FlatRow):
    """A step of a program, by who makes its collectives.

    Attributes:
        program: ``ddp``: DistributedDataParallel in bfloat16; ``fsdp``: FSDP2 in mixed precision with bfloat16;
            ``tensor``: decoding, tensor parallel with DTensor; ``torchtitan``: its Llama, with its own FSDP2 function,
            and clipping; ``megatron``: Megatron-core's GPT in bfloat16 with its distributed optimizer, data parallel,
            with overlap of gradients and parameters; ``megatron-tensor``: with layers divided among all ranks;
            ``megatron-sequence``: with activations between them divided, too; ``megatron-experts``: data parallel, with
            four experts in the place of each feed-forward layer, divided among all ranks.
        model: public configuration, followed by the number of its layers where not all fit.
        parameters: number of parameters.
        batch: sequences of a rank.
        length: tokens of a sequence.
        optimizer: ``AdamW``, ``SGD``, or empty where nothing is trained.
        launch: ``eager``; ``graph``: in a CUDA graph; ``compiled``: by torch.compile, in a CUDA graph.
        way: ``nccl``, on CPUs ``gloo``; ``group``: on ``dist.new_group(backend="sidelane")``; ``enable``:
            ``sidelane.fsdp.enable`` on the library's group (of ``ddp``: a hook that files until 28 November 2026
            have); ``pool``: as ``group``, with Megatron's ``nccl_ub=True``, which registers its buffers with the group;
            ``beside``: as ``pool``, with ``SIDELANE_BESIDE=compute``; ``none``: no communication (``no_sync``; FSDP2's
            collectives move nothing).
        nccl: version that is loaded, which may be another than torch's own (``software``); empty on CPUs.
        package: package that the program needs, with its version.
        step_ms: time of a step, median over the rounds of the slowest rank.
        fastest_ms: time of the fastest of these rounds.
        slowest_ms: time of the slowest of these rounds.
        rounds: number of rounds.
        over_percent: percent by which a step takes longer than the library's in the same round, median.
        host_ms: time until the host has queued a backward (decoding: a step), median of the slowest rank; null on CPUs.
            Where it is nearly the step, the host is the limit.
        exposed_ms: time by which a step takes longer than ``none`` in the same round, median.
        recovered_percent: share of the library's exposed time that comes back.
        loss: mean over ranks after the last step; null where nothing is trained, or nothing communicated.
        made_by: makers of the calls, with Sidelane's variant or the reason against it, as ``sidelane.report()`` says on
            the first rank.
        correct: True if loss (decoding: logits) is the library's but for rounding; null where nothing is communicated.
        note: reason why there is no time, or a remark.
    """

    allowed = (("program", PROGRAMS), ("launch", (EAGER, GRAPH, COMPILED)))
    figures = ("step_ms",)

    program: str
    model: str
    parameters: int
    batch: int
    length: int
    optimizer: str
    launch: str
    way: str
    nccl: str
    package: str
    step_ms: float | None
    fastest_ms: float | None
    slowest_ms: float | None
    rounds: int
    over_percent: float | None
    host_ms: float | None
    exposed_ms: float | None
    recovered_percent: float | None
    loss: float | None
    made_by: str
    correct: bool | None
    note: str = ""


Key = tuple[str, str, int, int, str, str]


def case_of(row: ClientRow) -> Key:
    """Return what the rows of one case have in common."""
    return row.program, row.model, row.batch, row.length, row.optimizer, row.nccl


def main(options: ClientOptions) -> Results | None:
    """Measure what the file does not have."""
    return run_resumed(STUDY, options, lambda row: (case_of(row), row.launch))


def _check(options: ClientOptions, place: LaunchTarget) -> None:
    """Refuse what cannot run here."""
    require_all("clients", "models", options.models, (TINY,) if place.on_cpu else tuple(MODELS))
    reasons = [lacking(program, "cpu" if place.on_cpu else "cuda") for program in options.programs]
    if all(reasons):
        raise ValueError(f"clients: {'; '.join(dict.fromkeys(reasons))}")


def _measure(rank: Rank, options: ClientOptions, sender: Sender) -> Iterator[ClientRow]:
    """Make the rows. Collective."""
    study = _Study(rank, options)
    models = options.models or ((TINY,) if study.on_cpu else tuple(name for name in MODELS if name != TINY))
    every = [study.case(program, name) for name in models for program in options.programs]
    cases = [case for case in every if not study.is_done(case)]
    for case in sender.steps_within(study.meter, cases, options.budget_s, more=RESUMES):
        with study.meter.on_stream():
            rows = study.rows(case)
        yield from rows  # all or none: a file that has one of them has all
    study.close()


@dataclasses.dataclass(slots=True)
class ClientTimes:
    """Findings about a way and a launch.

    Attributes:
        times_us: microseconds of a step, by round.
        host_ms: time of the host for a backward, or to decode.
        output: loss as a mean over ranks, or logits, of the last step.
        made_by: makers of the calls.
    """

    times_us: tuple[float, ...]
    host_ms: float
    output: torch.Tensor
    made_by: str


class _Study:
    """The parts that cases share on one rank: what measures, the library's group, and the memory there is."""

    def __init__(self, rank: Rank, options: ClientOptions) -> None:
        self._rank, self._options = rank, options
        self.on_cpu = rank.device.type == "cpu"
        self.meter, self._library = make_meter(rank, options.step_s), library_of(rank.device.type)
        self._group = StudyGroups(rank).make(self._library)
        self._nccl = "" if self.on_cpu else loaded_nccl()
        total = float("inf") if self.on_cpu else float(torch.cuda.mem_get_info(rank.device)[1])
        # The rest is for contexts, NCCL's and Sidelane's buffers, and what the allocator cannot use.
        self._room = min(0.93 * theirs - 2e9 for (theirs,) in self.meter.of_all_ranks([total]))

    def close(self) -> None:
        """Let go of the library's group. Collective."""
        dist.destroy_process_group(self._group)

    def case(self, program: str, name: str) -> ClientCase:
        """Return the case of a program and a model that fits here."""
        length = LENGTHS.get(self._rank.device.type, LENGTH)
        batch, length = (SEQUENCES, 1) if program == TENSOR else (self._options.batch or MODELS[name].batch, length)
        return fitted(ClientCase(program, MODELS[name], batch, length), self._rank.world_size, self._room)

    def is_done(self, case: ClientCase) -> bool:
        """Return True if the file has the case, compiled if that is asked for."""
        launch = COMPILED if case.program == TENSOR and self._options.compiled else EAGER
        key = case.program, case.model.name, case.batch, case.length, case.optimizer, self._nccl
        return (key, launch) in self._options.done

    def rows(self, case: ClientCase) -> list[ClientRow]:
        """Measure all ways of a case. Collective."""
        ways, ranks = [self._library, *WAYS.get(case.program, (GROUP,))], self._rank.world_size
        trial = ClientTrial(case, self._rank, self.meter, self._group, self._options)
        problem = lacking(case.program, self._rank.device.type)
        if case.program in (TENSOR, *MEGATRON[1:3]) and case.model.kv_heads % ranks:
            problem = problem or f"{case.model.kv_heads} key-value heads are not shared evenly by {ranks} ranks"
        if problem:
            trial.problems = dict.fromkeys(ways, Problem(problem))
        elif len(ways) * case.state_bytes(ranks) + case.step_bytes() <= self._room:
            trial.take_turns([ways])
        else:
            trial.take_turns([[way] for _ in range(PASSES) for way in ways])
            note = f"built one by one in {PASSES} passes"
            case = dataclasses.replace(case, note="; ".join(filter(None, (case.note, note))))
        launches = dict.fromkeys(launch for _, launch in trial.found) or (EAGER,)
        return [
            self._row(case, way, launch, trial)
            for launch in launches
            for way in ways
            if (way, launch) in trial.found or way in trial.problems
        ]

    def _row(self, case: ClientCase, way: str, launch: str, trial: ClientTrial) -> ClientRow:
        mine, library, floor = (trial.found.get((name, launch)) for name in (way, self._library, NONE))
        times, theirs, least = (None if one is None else Rounds(one.times_us) for one in (mine, library, floor))
        problem, correct = trial.problems.get(way), None
        if problem is None and way != NONE and mine is not None and library is not None:
            apart = difference(mine.output, library.output)
            correct = apart <= TOLERANCES.get(case.program, LOSS_TOLERANCE)
            if not correct:
                problem = Problem(f"the output is {100 * apart:.3g}% from that of {self._library}")
        said = [case.note]
        if way in (GROUP, ENABLE) and theirs is not None and least is not None:
            percent = over_percent(theirs, least)
            if percent < NOTHING_EXPOSED_PERCENT:
                said = [f"{self._library} exposes {max(0.0, percent):.1f}% of a step: there is nothing to win", *said]
        times = None if problem is not None else times
        has_loss = times is not None and way != NONE and case.optimizer
        return ClientRow(
            program=case.program,
            model=case.model.name,
            parameters=case.parameters,
            batch=case.batch,
            length=case.length,
            optimizer=case.optimizer,
            launch=launch,
            way=way,
            nccl=self._nccl,
            package=" ".join(filter(None, (PACKAGES[case.program], installed_version(PACKAGES[case.program])))),
            **step_columns(times, theirs, least),
            host_ms=None if mine is None or self.on_cpu else mine.host_ms,
            loss=float(mine.output) if mine is not None and has_loss else None,
            made_by="" if mine is None else mine.made_by,
            correct=correct,
            note="; ".join(filter(None, said)) if problem is None else problem.text,
        )


class ClientTrial:
    """The ways of one case on one rank.

    Args:
        case: program and model.
        rank: rank of this process.
        meter: meter of all ranks.
        group: group of the library.
        options: options of the study.

    Attributes:
        found: findings, by way and launch.
        problems: reasons why ways have no time.
    """

    def __init__(
        self, case: ClientCase, rank: Rank, meter: Meter, group: dist.ProcessGroup, options: ClientOptions
    ) -> None:
        self._case, self._rank, self._meter, self._group, self._options = case, rank, meter, group, options
        self._rounds: int | None = None
        self.found: dict[tuple[str, str], ClientTimes] = {}
        self.problems: dict[str, Problem] = {}

    def take_turns(self, turns: Sequence[Sequence[str]]) -> None:
        """Build the ways of each turn, time them round by round, and let go of them. Collective."""
        for ways in turns:
            ledger.reset()
            built: dict[str, BuiltClient] = {}
            for way in ways:
                problem = self.problems.get(way) or self._meter.run(
                    f"{self._case} by {way}", functools.partial(self._build, way, built)
                )
                if problem is not None:
                    self.problems[way] = problem
                    built.pop(way, None)
            self._time(built, len(turns))
            for client in built.values():
                client.close()
            built.clear()
            if self._rank.device.type != "cpu":
                torch.cuda.empty_cache()

    def _build(self, way: str, built: dict[str, BuiltClient]) -> None:
        built[way] = client = BuiltClient(self._case, way, self._rank, self._group)
        for _ in range(self._options.warmup):
            client.steps[EAGER]()
        client.capture(self._options.compiled)

    def _time(self, built: Mapping[str, BuiltClient], turns: int) -> None:
        repeats = self._options.steps * (DECODED if self._case.program == TENSOR else 1)
        jobs = {
            (way, launch): Job(step, repeats=repeats, calls=repeats)
            for way, client in built.items()
            for launch, step in client.steps.items()
        }
        if not jobs:
            return
        began = time.monotonic()
        self._meter.rounds(jobs, warmup=0, repeats=1)
        if self._rounds is None:  # all ways of a case have as many
            ((round_s,), *_) = sorted(self._meter.of_all_ranks([time.monotonic() - began]), reverse=True)
            passes = 1 if turns == 1 else PASSES
            in_time = int(self._options.pair_s * passes / turns / round_s)
            self._rounds = max(1, min(self._options.rounds, max(in_time, FEWEST_ROUNDS)) // passes)
        for client in built.values():
            for times in client.host_s.values():
                times.clear()
        measured = self._meter.rounds(jobs, warmup=0, repeats=self._rounds)
        for (way, launch), rounds in measured.items():
            client, before = built[way], self.found.get((way, launch))
            output = client.outputs[launch].float().cpu()
            if self._case.optimizer:
                losses = self._meter.of_all_ranks([float(output)])
                output = torch.tensor(statistics.mean(loss for (loss,) in losses))
            host = max(self._meter.of_all_ranks([1e3 * statistics.median(client.host_s[launch])]))[0]
            self.found[way, launch] = ClientTimes(
                (*(before.times_us if before is not None else ()), *rounds.times_us), host, output, client.made_by()
            )


COLUMNS: Mapping[str, Cell] = {
    "<launch": "launch",
    "<way": "way",
    "step\nms": "step_ms:.2f",
    "fastest-\nslowest": spread_ms,
    "over the\nlibrary %": "over_percent:+.1f",
    "recovered\n%": "recovered_percent:.0f",
    "host\nms": "host_ms:.2f",
    "loss": "loss:.5f",
    "<calls by": makers_of,
    "<correct": lambda row, _: MISSING if row.correct is None and row.step_ms else verdict(row.correct),
}


def _title(row: ClientRow) -> str:
    optimizer = f", {row.optimizer}" if row.optimizer else ""
    nccl = f", NCCL {row.nccl}" if row.nccl else ""
    size = f"{row.parameters / 1e9:.2f} G parameters, {row.batch}x{row.length} tokens a rank"
    return f"{row.program}, {row.model}: {size}{optimizer}{nccl}"


STUDY = Study(
    name="clients",
    title="Programs of others, by who makes their collectives",
    legend=(
        "A training step with DDP or FSDP2, or decoding with tensor parallelism by DTensor, of Hugging Face's Llama at "
        "the sizes of public models; a training step of torchtitan's Llama, or of a GPT by Megatron-core. group: the "
        "process group is Sidelane's; enable: sidelane.fsdp.enable; pool: with Megatron's nccl_ub; beside: as pool, "
        "with SIDELANE_BESIDE=compute; none: no communication. Medians over rounds of the slowest rank, in which the "
        "ways take turns; the least of each launch is bold. over the library: than NCCL (Gloo on CPUs) in the same "
        "round; recovered: of the time that its communication is exposed; host: for a backward, or to decode."
    ),
    row=ClientRow,
    tables=lambda rows: tables_by(
        rows,
        case_of,
        _title,
        COLUMNS,
        keys=2,
        groups=lambda row: row.launch,
        least=lambda row: None if row.way == NONE else row.step_ms,
    ),
    measure=_measure,
    check=_check,
    main=main,
    progress="programs of others",
    key=lambda row: (case_of(row), row.launch, row.way),
)
