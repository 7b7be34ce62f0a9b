"""``sidelane explain``: what ``auto`` would take for a call, why, and what would be submitted. Needs no GPU."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import rich.console
import torch

from sidelane import config as settings
from sidelane.choice import Abilities, Candidate, Choice, Curve, Profile, candidates, choose, illegal_reason
from sidelane.choice.candidate import EVERYTHING, SM, everything
from sidelane.choice.key import CPU, MachineKey, key_here
from sidelane.choice.store import InForce, builtin, builtin_for, builtin_names, in_force, read_profile
from sidelane.cli.output import write_json
from sidelane.collectives.agreement import Agreement, CallPart
from sidelane.collectives.arguments import SHARD_ALIGNMENT, aligned_shards
from sidelane.collectives.plan import AUTO, make_program
from sidelane.config import NOTHING
from sidelane.machine import local
from sidelane.machine.peers import SHARED, PeerMemory, decide, forced
from sidelane.program import collective as define
from sidelane.program.collective import MAX_NODE_RANKS, REDUCING, Collective, Kind, ReduceOp, Reduction
from sidelane.program.ir import MOVES, Copy, Move, Program, describe
from sidelane.program.kernel import KernelProgram
from sidelane.program.shape import Beside, Computation
from sidelane.session.beside import hidden_shares
from sidelane.sizes import format_bytes
from sidelane_lab.cli.explain import ExplainOptions
from sidelane_lab.explain.nodes import explain_on, times_as_fast
from sidelane_lab.explain.submitted import (
    CALLERS,
    GFX942,
    MADE_UP,
    call_lines,
    launch_lines,
    packet_lines,
    packet_queues,
    takes_packets,
)
from sidelane_lab.harness.launch import choose_target
from sidelane_lab.harness.table import Line, Table, grouped
from sidelane_lab.harness.terminal import say, tables_console
from sidelane_lab.machines.load import find
from sidelane_lab.machines.spec import Machine, RunStatus
from sidelane_lab.model.collectives import key_of, library_us
from sidelane_lab.model.kernels import host_kernel_us
from sidelane_lab.sdma import PacketQueue, fit
from sidelane_lab.sim import simulate

RANK = 0
"""Rank whose part is shown; every rank's is alike."""

LIBRARY_KINDS = (Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.ALL_REDUCE, Kind.REDUCE_SCATTER)
"""Collectives of which machines' descriptions say what the vendor's library takes."""
Submitted = tuple[tuple[str, tuple[str, ...]], ...]
"""Lines of what a rank hands over, grouped by where it goes."""
UNMODELLED = "Sidelane's kernels are not modelled between peers over PCIe"
"""Reason for which a machine of NVIDIA GPUs that no table covers has no kernels."""
SIMULATOR = "the simulator"
"""Words for what simulated times come from."""

UNSHARED = (Kind.BROADCAST, Kind.ALL_REDUCE)
"""Collectives that take any number of elements: of the others every rank gets as many."""


@dataclasses.dataclass(frozen=True)
class Explanation:
    """An explained call.

    Attributes:
        agreement: the call as all ranks see it.
        choice: what would run.
        by: what it was chosen by.
        where: on what ranks, in words.
        excluded: candidates that are not legal, with the reason.
        submitted: what rank 0 would hand over, one line each, grouped by where it goes.
        summary: the same in numbers.
        notes: what is not as it was asked.
        status: whether Sidelane has run on such a machine, where the machine is a description; else empty.
        simulated: predicted microseconds there, by candidate, the fastest first.
        library_us: predicted microseconds of the vendor's library there; None where there is no prediction.
        packets: packets of rank 0, if they were asked for.
        unmodelled: reason for which kernels of Sidelane have no prediction there, though it has them.
    """

    agreement: Agreement
    choice: Choice
    by: InForce
    where: str
    excluded: tuple[tuple[Candidate, str], ...]
    submitted: Submitted
    summary: str
    notes: tuple[str, ...] = ()
    status: str = ""
    simulated: tuple[tuple[Candidate, float], ...] = ()
    library_us: float | None = None
    packets: tuple[PacketQueue, ...] = ()
    unmodelled: str = ""

    def to_dict(self) -> dict[str, Any]:
        """One JSON object."""
        table = self.choice.table
        return {
            "call": dataclasses.asdict(self.agreement.call),
            "on": self.where,
            "by": self.by.where,
            "takes": _named(self.choice.candidate),
            "reason": self.choice.reason,
            "unmodelled": self.unmodelled,
            "status": self.status,
            "simulated": [{**_named(candidate), "expected_us": us} for candidate, us in self.simulated],
            "library_us": self.library_us,
            "candidates": [{**_named(candidate), "expected_us": us} for candidate, us in table],
            "not_legal": [{**_named(candidate), "reason": reason} for candidate, reason in self.excluded],
            "submitted": [{"to": place, "what": list(lines)} for place, lines in self.submitted],
            "summary": self.summary,
            "notes": [*self.notes, *self.by.notes],
            "packets": [{"engine": str(queue.engine), "bytes": queue.to_bytes().hex()} for queue in self.packets],
        }


def main(options: ExplainOptions) -> None:
    """Explain, print, and write what the options ask for."""
    if options.packets and (options.machine is None or options.machine in builtin_names()):
        raise ValueError("explain: --packets needs --machine mi300x8, or a file that describes such GPUs")
    if options.machine is not None and options.machine not in builtin_names():
        machine = find(options.machine)
        if options.packets and (machine.nodes > 1 or not takes_packets(machine)):
            raise ValueError(f"explain: --packets of {machine.name} (allowed=one node of {' or '.join(GFX942)})")
        if machine.nodes > 1:
            explain_on(machine, options)
            return
    found = explain(options)
    if options.json is not None:
        write_json(options.json, found.to_dict())
    show(found, tables_console(options.json), commands=options.commands or options.packets)


def explain(options: ExplainOptions) -> Explanation:
    """Find out what a call would do.

    Raises:
        ValueError: no such machine or profile, or a call that does not exist.
    """
    by, where, device_type, world_size, abilities = _where(options)
    if world_size > MAX_NODE_RANKS:
        allowed = f"1..{MAX_NODE_RANKS}; more with --machine h100x8x2"
        raise ValueError(f"explain: world_size (value={world_size}, allowed={allowed})")
    options = dataclasses.replace(options, ordinary=options.ordinary or abilities.through_host)
    agreement = _agreement(options, world_size, where)
    call = agreement.call
    is_described = options.machine is not None and options.machine not in builtin_names()
    described = find(str(options.machine)) if is_described else None
    predicted = None if described is None else _simulated(described, agreement)
    unmodelled = UNMODELLED if by is None and described and described.runs is not RunStatus.UNSUPPORTED else ""
    has_driver = by is not None and device_type != CPU
    by = by or predicted
    assert by is not None
    choice = choose(by.profile, call, abilities)
    reasons = [
        (found, unmodelled if unmodelled and found.launches_kernels else illegal_reason(call, found, abilities))
        for found in everything(options.kind)
    ]
    moves = frozenset[type[Move]]({Copy} if has_driver else MOVES)
    program = make_program(agreement, choice.candidate, moves, through_host=abilities.through_host)
    submitted, summary, packets = _submitted(program, agreement.frozen, has_driver=has_driver, packed=options.packets)
    return Explanation(
        agreement,
        choice,
        by,
        where,
        excluded=tuple((found, reason) for found, reason in reasons if reason),
        submitted=submitted,
        summary=summary,
        notes=(*_rounding(options, agreement), *(MADE_UP if packets else ())),
        status="" if described is None else str(described.runs),
        simulated=() if predicted is None else _times(predicted, call.nbytes),
        library_us=None if described is None else _library_us(described, agreement),
        packets=packets,
        unmodelled=unmodelled,
    )


def _submitted(
    program: Program | KernelProgram, captured: bool, *, has_driver: bool, packed: bool
) -> tuple[Submitted, str, tuple[PacketQueue, ...]]:
    """Return what the rank hands over, the same in numbers (empty: commands in queues), and packets if asked for."""
    if isinstance(program, KernelProgram):
        return ((CALLERS, launch_lines(program)),), "1 kernel, 1 call", ()
    if has_driver:
        return (*call_lines(program, RANK, captured), ())
    if packed:
        program, packets = packet_queues(program, RANK)
        return packet_lines(program, RANK, packets), "", packets
    queues = program.queues_of(RANK)
    return tuple((f"engine {queue.engine}", tuple(map(describe, queue.commands))) for queue in queues), "", ()


def show(found: Explanation, console: rich.console.Console, *, commands: bool = False) -> None:
    """Print for people: the answer, then its reasons; ``commands``: also what would be submitted."""
    call = found.agreement.call
    words = [
        f"{call.kind} of {format_bytes(call.nbytes)} among {_ranks(call.world_size)}, {call.dtype}",
        *([f"{len(found.agreement.parts)} tensors"] if found.agreement.is_listed else []),
        "in place" if call.in_place else "out of place",
        "in a graph" if call.captured else "eager",
        *([] if call.symmetric else ["ordinary memory"]),
        *([f"beside {call.computation or call.beside}"] if call.beside != NOTHING else []),
    ]
    taken = found.choice.candidate
    expected = dict(found.choice.table).get(taken)
    library = ""
    if expected is None and (expected := dict(found.simulated).get(taken)) is not None:
        library = f"; predicted: {expected:.4g} us"
    library += f"; the vendor's library {found.library_us:.4g} us" if found.library_us is not None else ""
    status = f" ({found.status})" if found.status else ""
    mover = "a kernel" if taken.launches_kernels else "copy engines"
    verdict = (
        f"No verdict: {found.unmodelled}, nor in a plan; `sidelane tune` measures them. The best of"
        if found.unmodelled
        else "auto takes"
    )
    say(console, f"{verdict} {mover} ({taken}): {found.choice.reason}{library}{status}", style="bold")
    if not found.unmodelled and (times := times_as_fast(expected, found.library_us)):
        say(console, f"Keep the vendor's library for this call: {times} times as fast, as predicted.", style="bold")
    say(console, ", ".join(words))
    say(console, f"on {found.where}")
    say(console, f"by {found.by.where}")
    for note in (*found.notes, *found.by.notes):
        say(console, f"note: {note}")
    if found.simulated and not found.by.where.startswith(SIMULATOR):
        times = ", ".join(f"{candidate} {us:.4g} us" for candidate, us in found.simulated)
        say(console, f"simulated there: {times}")
    console.print()
    console.print(choice_table(found).to_rich())
    count = sum(len(lines) for _, lines in found.submitted)
    summary = found.summary or f"{count} commands in {len(found.submitted)} queues"
    say(console, f"Submitted by rank {RANK}: {summary}" + ("" if commands else " (--commands lists them)"))
    for place, lines in found.submitted if commands else ():
        say(console, place, indent=2)
        for line in lines:
            say(console, line, indent=4)


def _named(candidate: Candidate) -> dict[str, str]:
    return {"implementation": candidate.implementation, "variant": candidate.variant}


def choice_table(found: Explanation) -> Table:
    """Return the candidates with their times, and why others are not possible."""
    lines = [
        Line(
            (candidate.implementation, candidate.variant, "-" if us is None else f"{us:.4g}"),
            best=candidate == found.choice.candidate,
        )
        for candidate, us in found.choice.table
    ]
    reasons = grouped(found.excluded, lambda entry: entry[1], ordered=False)
    unmeasured = any(us is None for _, us in found.choice.table)
    notes: tuple[str, ...] = ("dma: on copy engines; sm: by a kernel on SMs; variants: docs/guide/tuning.md",)
    notes += ("-: not measured, and taken only where nothing was",) if unmeasured else ()
    notes += tuple(
        f"not possible here: {', '.join(str(candidate) for candidate, _ in alike)}: {reason}"
        for reason, alike in reasons
    )
    return Table("Candidates", ("<implementation", "<variant", "expected\nus"), tuple(lines), notes, keys=2)


def _where(options: ExplainOptions) -> tuple[InForce | None, str, str, int, Abilities]:
    """Find what to choose by (None: the simulator's times), on what in words, type of the devices, ranks, abilities."""
    name = options.machine
    peers = forced(settings.current().peers)
    if options.profile is not None or name in builtin_names():
        profile = builtin(name) if name is not None else read_profile(Path(str(options.profile)))
        if profile is None:
            raise ValueError(
                f"explain: no such profile (value={str(options.profile)!r}, allowed=a file of sidelane tune)"
            )
        ranks = options.world_size or max(
            (curve.world_size for curve in profile.curves), default=max(profile.key.count, 2)
        )
        tables = builtin_for(profile.key) if name is not None else None
        chosen_by = tables or InForce(profile, str(options.profile))
        if name is not None and peers.through_host:
            chosen_by = InForce.through_host(peers)
        return _placed(chosen_by, _devices(profile.key, ranks), profile.key, ranks, peers)
    if name is not None:
        machine = find(name)
        machine.refuse_nodes("explain")
        ranks = options.world_size or machine.gpus
        devices = machine.title if ranks == machine.gpus else f"{_ranks(ranks)} of {machine.title}"
        key = key_of(machine)
        # What a communicator would choose by there, until somebody has measured.
        if machine.through_host:
            peers = decide([(str(gpu), {str(peer): False for peer in range(2)}) for gpu in range(2)])
            return _placed(InForce.through_host(peers), devices, key, ranks, peers)
        tables = None if machine.runs is RunStatus.UNSUPPORTED else builtin_for(key, ranks)
        return (None, devices, "", ranks, Abilities()) if tables is None else _placed(tables, devices, key, ranks)
    place = choose_target()
    ranks = options.world_size or place.world_size
    key = key_here(place.device_type, place.world_size)
    devices = f"{_devices(key, ranks)} of this machine"
    if place.on_cpu:
        devices += ", which has fewer than two GPUs (--machine h200x4 explains some)"
    peers = local.peers_here(place.device_type)
    return _placed(in_force(settings.current().profile, key, peers), devices, key, ranks, peers)


def _placed(
    by: InForce, where: str, key: MachineKey, world_size: int, peers: PeerMemory = SHARED
) -> tuple[InForce, str, str, int, Abilities]:
    if key.device_type == CPU:
        return by, where, key.device_type, world_size, Abilities()
    where += f", through {peers}" if peers.through_host else ""
    return by, where, key.device_type, world_size, dataclasses.replace(EVERYTHING, through_host=peers.through_host)


def _devices(key: MachineKey, ranks: int) -> str:
    return f"{ranks} CPU process{'es' * (ranks > 1)}" if key.device_type == CPU else f"{ranks} x {key.device}"


def _ranks(count: int) -> str:
    return f"{count} rank{'s' * (count > 1)}"


def _rounding(options: ExplainOptions, agreement: Agreement) -> tuple[str, ...]:
    """Say what is rounded where the size that was asked for does not exist."""
    of_all = agreement.call.nbytes // (options.tensors or 1)
    if of_all == options.nbytes:
        return ()
    shared = "" if options.kind in UNSHARED else f" for each of {_ranks(agreement.call.world_size)}"
    number = "a whole number" if options.kind in UNSHARED else "one whole number"
    return (f"{options.nbytes} bytes are not {number} of {options.dtype} elements{shared}: explained for {of_all}",)


def _agreement(options: ExplainOptions, world_size: int, where: str) -> Agreement:
    collective, beside = _collective(options, world_size), _beside(options, where)
    place = None if options.ordinary else (0, 0)
    reads, scatters = options.kind in REDUCING, options.kind is Kind.REDUCE_SCATTER
    places = (place if reads else None, None if scatters else place)
    if options.tensors is not None:
        parts = (CallPart(collective, options.dtype, *places),) * options.tensors
        return Agreement.of_list(options.kind, world_size, parts, AUTO, options.captured, beside)
    return Agreement((CallPart(collective, options.dtype, *places),), AUTO, options.captured, beside)


def _beside(options: ExplainOptions, where: str) -> Beside:
    """Find what runs next to the call; of a computation of known time also what hides there, by the device."""
    if options.beside_us is None:
        return options.beside
    return Computation(options.beside_us, None, *hidden_shares(where))


def _collective(options: ExplainOptions, world_size: int) -> Collective:
    kind, in_place = options.kind, options.in_place
    item = getattr(torch, options.dtype).itemsize
    part = -(-options.nbytes // (world_size * item)) * item
    whole = -(-options.nbytes // item) * item
    match kind:
        case Kind.ALL_GATHER:
            return define.all_gather([part] * world_size, in_place=in_place)
        case Kind.ALL_TO_ALL:
            return define.all_to_all([[part] * world_size] * world_size, in_place=in_place)
        case Kind.BROADCAST:
            return define.broadcast(whole, world_size, 0, in_place=True)
        case Kind.SCATTER:
            return define.scatter([part] * world_size, 0)
        case Kind.GATHER:
            return define.gather([part] * world_size, 0)
    assert kind in REDUCING
    reduction = Reduction(ReduceOp.SUM, options.dtype)
    if kind is Kind.REDUCE_SCATTER:
        return define.reduce_scatter([part] * world_size, reduction, in_place=in_place)
    return define.all_reduce(aligned_shards(whole, world_size, SHARD_ALIGNMENT), reduction, in_place=in_place)


def _simulated(machine: Machine, agreement: Agreement) -> InForce:
    """Predict a profile of one size: for machines of the catalogue that nobody has measured."""
    call = agreement.call
    times = {}
    for candidate in candidates(call, Abilities(through_host=machine.through_host)):
        program = make_program(agreement, candidate, frozenset[type[Move]](MOVES), through_host=machine.through_host)
        assert isinstance(program, Program)
        times[candidate] = simulate(fit(program) if takes_packets(machine) else program, machine).time_us
    if machine.through_host:
        times[Candidate(SM, "one_shot")] = host_kernel_us(machine, call.kind, call.nbytes, call.world_size)
    curves = (
        Curve(call.kind, call.world_size, call.dtype, call.in_place, call.captured, candidate, ((call.nbytes, us),))
        for candidate, us in times.items()
    )
    profile = Profile(machine.name, MachineKey("", machine.title, machine.gpus), "", "", tuple(curves))
    only = "" if machine.through_host else ", and copy engines only"
    return InForce(profile, f"{SIMULATOR}: predicted, nothing was measured there{only}")


def _times(predicted: InForce, nbytes: int) -> tuple[tuple[Candidate, float], ...]:
    """Return the simulated times of copy engines, the fastest first."""
    assert predicted.profile is not None
    times = [(one.candidate, one.at(nbytes)) for one in predicted.profile.curves]
    return tuple(sorted(times, key=lambda entry: entry[1]))


def _library_us(machine: Machine, agreement: Agreement) -> float | None:
    """Return what a kernel of the vendor's library is predicted to take for such a call, of one tensor and alone."""
    call = agreement.call
    is_alone = call.beside == NOTHING and not agreement.is_listed
    if call.kind not in LIBRARY_KINDS or call.world_size != machine.gpus or not is_alone:
        return None
    return library_us(machine, call.kind, call.nbytes)
