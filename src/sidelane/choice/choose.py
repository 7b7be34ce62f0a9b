"""Choice among the legal candidates by the least expected time, with a reason."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType

from sidelane.choice.candidate import (
    DMA,
    EVERYTHING,
    FIRST,
    SM,
    Abilities,
    Candidate,
    candidates,
)
from sidelane.choice.profile import Curve, Profile
from sidelane.choice.selection import Selection, select
from sidelane.config import COMPUTE
from sidelane.program.collective import REDUCING, Kind
from sidelane.program.kernel import MOST_BLOCK_FLAG_BYTES, may_be_direct
from sidelane.program.shape import CallShape, Variant

SMALL_BYTES = 1 << 20
"""Bytes below which, without any measurement, kernels are taken if they are legal: on H200s a DMA collective spends
more on its two handshakes than a kernel on everything up to about here (``results/h200x4/collectives.json``)."""

BROADCAST_BYTES = 128 << 20
"""Bytes below which kernels are taken for broadcasts among two ranks: on two H200s they take 52 us for 16 MB and copy
engines 65, for 64 MB 187 and 193, for 256 MB 732 and 699 (``results/h200x2/broadcasts.json``). Among more ranks kernels
are taken at any size: 1 GiB among four in 3.09 ms, by copy engines relayed in 3.29
(``results/h200x4/broadcasts.json``)."""

STAGING_BYTES_PER_US = 1.6e6
STAGED_US = {"one_shot": 2.0, "two_shot": 5.0}
"""Extra time in microseconds of larger reductions by kernels on ordinary tensors, which they copy to staging first,
while times are measured on symmetric ones: 2 or 5 us, and on four H200s 40 for 64 MiB, 650 for 1 GiB
(results/notes/kernels.md). All other costs of ordinary tensors are much the same for all candidates."""


MB = 1 << 20
LISTED_KERNEL_BYTES: Mapping[Kind, tuple[int, float, float]] = MappingProxyType(
    {
        Kind.ALL_GATHER: (64 * MB, 256 * MB, 512 * MB),
        Kind.ALL_TO_ALL: (64 * MB, 256 * MB, 512 * MB),
        Kind.BROADCAST: (64 * MB, BROADCAST_BYTES, BROADCAST_BYTES),
        Kind.REDUCE_SCATTER: (128 * MB, math.inf, math.inf),
        Kind.ALL_REDUCE: (128 * MB, math.inf, math.inf),
    }
)
"""Bytes below which one kernel runs a list: through staging; with tensors that peers reach, eager; the same, in graphs.
With eight tensors, copy engines are within 4% from there on, and take no compute units; in graphs of 256 MB, where
every copy is a node, they are 3 to 5% behind on two H200s and 6 to 9% on four. Reductions hide nothing with them, so
kernels that read the tensors in place stay ahead (``lists.json`` in ``results/h200x2`` and ``h200x4``). Staged lists:
probes, in results/notes/performance.md. Broadcasts among more than two ranks: see ``BROADCAST_BYTES``."""

HOST_KERNEL_BYTES: Mapping[Kind, int] = MappingProxyType(
    {
        Kind.ALL_GATHER: 48 * MB,
        Kind.ALL_TO_ALL: 33 * MB,
        Kind.BROADCAST: 80 * MB,
        Kind.REDUCE_SCATTER: 128 * MB,
        Kind.ALL_REDUCE: 48 * MB,
    }
)
"""Bytes below which a kernel runs a call, or a list, through host memory, between two ranks. Between two H200s, in
graphs, a kernel and copy engines in pieces take 264 and 344 us for an all_gather of 16 MiB, 1,029 and 985 for 64 MiB;
264 and 307, 1,074 and 998 for an all_to_all; 1,020 and 1,165 for an all_reduce of 32 MiB, 4,874 and 4,018 for 128 MiB
(results/h200x2/no-peers.json, results/notes/kernels.md): the limits are where lines through these points meet. For 64
MiB, the most that was timed, they take 1,011 and 1,129 for a reduce_scatter, 1,377 and 1,427 for a broadcast. More
ranks are predicted: a kernel's all_reduce loads the inputs of all other ranks, so that its bytes are divided by the
square of their number."""

HOST_BESIDE_BYTES = 512 * MB
"""The same of a reduce_scatter beside a computation. In pieces, its sums wait for compute units after each piece, while
a narrow kernel goes on: 64 MiB and a GEMM of 1.39 ms take 2.16 and 1.48 ms (results/h200x2/no-peers-c3.json). More
bytes, all of which a kernel stages in host memory, are predicted."""

EQUALS = 1.005
"""Ratio of expected times below which they count as equal: medians of a few rounds repeat no better."""

Choice = Selection[Candidate]
"""Type of the choice for a call."""

Table = tuple[tuple[Candidate, float | None], ...]


def choose(profile: Profile | None, call: CallShape, abilities: Abilities = EVERYTHING) -> Choice:
    """Choose for a call. Deterministic: the same arguments give the same choice on every rank.

    Args:
        profile: profile of the machine; None without measurements, which leaves a heuristic.
        call: shape of the call.
        abilities: abilities of this machine.
    """
    if call.computation is not None and not _is_timed(profile, call, abilities):
        call = dataclasses.replace(call, computation=None)  # without times it cannot be weighed
    legal = candidates(call, abilities)
    assert legal, "copy engines without a kernel run every collective"
    if call.world_size == 1:
        alone = next(found for found in legal if found.implementation == DMA)
        return Choice(alone, "a single rank has nothing to send", tuple((found, None) for found in legal))
    if call.listed and abilities.captures and not abilities.through_host:
        return _of_list(call, legal)
    if abilities.through_host:
        call = dataclasses.replace(call, symmetric=True)  # times are of ordinary tensors there, since all tensors are
    curves = () if profile is None else profile.comparable(call)
    measured_us = {curve.candidate: curve.at(call.nbytes) + _staging_us(call, curve.candidate) for curve in curves}
    # A wide kernel's times stand in for those of a narrow one: equal up to a MiB, some percent less above.
    wide = {found: dataclasses.replace(found, variant=Variant.of(found.variant).wide) for found in legal}
    times = [(found, measured_us.get(found, measured_us.get(wide[found]))) for found in legal]
    beside = call.computation
    if beside is not None:
        times = [
            # Narrow kernels leave the computation nearly all units, as copies do.
            (
                found,
                us
                if us is None
                else beside.together_us(us, by_kernels=found.launches_kernels and found == wide[found]),
            )
            for found, us in times
        ]
    if all(us is None for _, us in times):
        return _by_heuristic(call, legal, tuple(times), abilities.through_host, measured=profile is not None)
    what = f" with {beside}" if beside is not None else ""
    return select(times, equal=EQUALS, beside=what, basis=_differences(call, curves[0]))


def _differences(call: CallShape, curve: Curve) -> str:
    """Describe how a measurement differs from the call; empty if it does not."""
    differs = [
        text
        for text, different in (
            (f"with {curve.world_size} ranks", curve.world_size != call.world_size),
            ("in place" if curve.in_place else "out of place", curve.in_place != call.in_place),
            ("in a graph" if curve.captured else "eager", curve.captured != call.captured),
            (f"with {curve.dtype}", curve.dtype != call.dtype and call.kind in REDUCING),
            ("on symmetric memory", not call.symmetric),
        )
        if different
    ]
    return f"measured {', '.join(differs)}" if differs else ""


def _is_timed(profile: Profile | None, call: CallShape, abilities: Abilities) -> bool:
    """Return True if the choice goes by times, of copy engines and of kernels if both are legal."""
    if profile is None or (call.listed and abilities.captures):
        return False
    known = {curve.candidate.implementation for curve in profile.comparable(call)}
    return known >= {found.implementation for found in candidates(call, abilities)}


def _most_listed_bytes(call: CallShape) -> float:
    """Return the bytes from which on a list of tensors goes by copy engines."""
    if _is_relayed(call):
        return math.inf
    staged, reached, reached_in_graphs = LISTED_KERNEL_BYTES.get(call.kind, (0, 0, 0))
    # An all_to_all in place cannot be written into while it is read.
    if not call.symmetric or (call.kind is Kind.ALL_TO_ALL and call.in_place):
        return staged
    return reached_in_graphs if call.captured else reached


def _of_list(call: CallShape, legal: tuple[Candidate, ...]) -> Choice:
    """Choose for a list by measurements of lists: by times of single tensors, ``striped`` seems better than it is."""
    # Among two ranks both shots move the same bytes, but the second takes a handshake through staging.
    twice = call.nbytes > MOST_BLOCK_FLAG_BYTES and (call.symmetric or call.world_size > 2)
    shots = ("two_shot", "one_shot") if twice else ("one_shot",)
    kernels = {found.variant: found for found in legal if found.implementation == SM}
    kernel = next((kernels[variant] for variant in shots if variant in kernels), None)
    most = _most_listed_bytes(call)
    if kernel is not None and call.nbytes < most:
        pick, how = kernel, "one kernel for all" + (f" below {int(most) >> 20} MiB" if most < math.inf else "")
    else:
        pick, how = next(found for found in legal if found.variant == FIRST), "one copy engine a rank"
    others = tuple((found, None) for found in legal if found is not pick)
    return Choice(pick, f"a list of tensors: {how}", ((pick, None), *others))


def _staging_us(call: CallShape, candidate: Candidate) -> float:
    if call.symmetric or candidate.implementation != SM:
        return 0.0
    part = call.nbytes // call.world_size if call.kind is Kind.REDUCE_SCATTER else call.nbytes
    if not may_be_direct(call.kind, candidate.variant, part, in_place=call.in_place):
        return 0.0
    return STAGED_US[Variant.of(candidate.variant).algorithm] + call.nbytes / STAGING_BYTES_PER_US


def _by_heuristic(
    call: CallShape, legal: tuple[Candidate, ...], table: Table, through_host: bool, *, measured: bool
) -> Choice:
    kernel = next((found for found in legal if found.implementation == SM), None)
    lacking = f"{call.kind} was not measured" if measured else "nothing was measured"
    most = math.inf if _is_relayed(call) else BROADCAST_BYTES if call.kind is Kind.BROADCAST else SMALL_BYTES
    most = _most_through_host(call) if through_host else most
    if kernel is not None and call.nbytes < most:
        below = f" below {int(most) >> 20} MiB" if most < math.inf else ""
        return Choice(kernel, f"{lacking}; rule of thumb: a kernel{below}", table)
    for found in legal:
        algorithm = found.algorithm(call.kind)
        if algorithm is not None and (why := algorithm.default_rule(call)):
            return Choice(found, f"{lacking}; rule of thumb: {why}", table)
    engines = next((found for found in legal if found.variant == FIRST), legal[0])
    return Choice(engines, f"{lacking}; rule of thumb: one copy engine a rank", table)


def _most_through_host(call: CallShape) -> int:
    """Return the bytes below which a kernel without measurements is taken through host memory."""
    if call.beside == COMPUTE and call.kind is Kind.REDUCE_SCATTER:
        return HOST_BESIDE_BYTES
    most = HOST_KERNEL_BYTES.get(call.kind, 0)
    return most // (call.world_size - 1) ** 2 if call.kind is Kind.ALL_REDUCE else most


def _is_relayed(call: CallShape) -> bool:
    """Return True for a broadcast that leaves the root once: see ``BROADCAST_BYTES``."""
    return call.kind is Kind.BROADCAST and call.world_size > 2
