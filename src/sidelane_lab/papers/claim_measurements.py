"""``sidelane claims --measured``: what the papers claim, beside what our result files say of the same quantity.

Each claim has a reading of a result file, or the reason why no file of ours speaks to it. Nothing here is judged: our
machines have fewer GPUs, another library and faster links than the papers', so that a ratio far from 1 is a finding.

Over 400 lines, since it is a table: each claim of the papers has its entry.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import rich.console
import rich.padding
import rich.text

from sidelane.cli.output import write_json
from sidelane.program.collective import Kind
from sidelane_lab.harness.study import AS_GOOD
from sidelane_lab.harness.terminal import say_written, tables_console
from sidelane_lab.model.collectives import geomean
from sidelane_lab.pairs.workload import Bound
from sidelane_lab.papers import conccl, dma
from sidelane_lab.papers.claims import numbers, published, value_text
from sidelane_lab.papers.conccl import ALL_CLASSES, CB, MB
from sidelane_lab.papers.dma import NAMES, claimed_range
from sidelane_lab.papers.measurements import (
    BETWEEN_NODES,
    CLASSES,
    FIFTH,
    ChainReadings,
    CollectiveReadings,
    FusedReadings,
    PairReadings,
    PipelineReadings,
    PowerReadings,
    ResultFile,
    UnitReadings,
    find_results,
    normalised_between_nodes,
)
from sidelane_lab.papers.rows import ClaimReading

MB_BYTES = 1 << 20
AG, AA = Kind.ALL_GATHER, Kind.ALL_TO_ALL
TENTH = 32 / 304
"""Share of an MI300X's units that the ConCCL paper's collectives need at least."""
FILES = {
    "collectives": "collectives.json",
    "prelaunch": "prelaunch.json",
    "c3": "c3.json",
    CLASSES: "c3-classes.json",
    "heuristics": "heuristics.json",
    "isolated": "isolated.json",
    "phases": "phases.json",
    "power": "power.json",
    "chain": "chain.json",
    "fused": "fused.json",
    "occupancy": "occupancy.json",
    BETWEEN_NODES: "nodes.json",
}
"""The usual name of each study's file in a folder of results."""


@dataclasses.dataclass(frozen=True, slots=True)
class MeasuredClaim:
    """A claim beside one of our files.

    Attributes:
        value: in the claim's form; None where the file has not all of it.
        ratio: of the value to the published one, where each is one number.
    """

    claim_id: str
    machine: str
    where: str
    path: str
    value: Any
    ratio: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return the object of ``--json``, inside that of its claim."""
        return {"machine": self.machine, "file": self.path, "measured": self.value, "ratio": self.ratio}


def measure_claim(claim_id: str, sources: Sequence[Path]) -> list[MeasuredClaim]:
    """Return what each machine's file says of a claim; nothing where none speaks to it."""
    reading = READINGS.get(claim_id)
    if reading is None:
        return []
    found = []
    fuller = files_of(reading.fuller, sources) if reading.fuller else []
    machines = {file.machine for file in fuller}
    for file in [*fuller, *(file for file in files_of(reading.study, sources) if file.machine not in machines)]:
        value = read_value(reading, file)
        if value is not None:
            ratio = ratio_of(published()[claim_id]["value"], value)
            found.append(MeasuredClaim(claim_id, file.machine, file.where, str(file.path), value, ratio))
    return found


def files_of(key: str, sources: Sequence[Path]) -> list[ResultFile]:
    """Return the result files of a key of ``FILES``, the one with the most rows first."""
    if key != CLASSES:
        return find_results(sources, key, FILES[key])
    return [file for file in find_results(sources, "c3", FILES[key]) if file.path.name == FILES[key]]


def read_value(reading: ClaimReading, file: ResultFile) -> Any:
    """Return a claim's value from a file; None where the file has not all that it needs.

    Raises:
        ValueError: the file lacks a key.
    """
    try:
        return _rounded(reading.read(file))
    except (ValueError, ZeroDivisionError, StopIteration, statistics.StatisticsError):
        return None  # a mean, or the least, of nothing: sizes or pairs that were not measured
    except KeyError as problem:
        if isinstance(problem.args[0], str) and problem.args[0] in LACKING:
            raise ValueError(f"results: {file.path} is no file of {file.study} (missing={problem})") from problem
        return None


LACKING = ("time_us", "bytes", "collective", "implementation", "operation", "op", "strategy", "launch")
"""Keys without which a file is not what it says."""


def ratio_of(claimed: Any, measured: Any) -> float | None:
    """Return a measured number over the published one; None where one of them is no single number other than 0.

    >>> ratio_of(1.6, 1.2), ratio_of(True, True), ratio_of([1, 2], [1, 2])
    (0.75, None, None)
    """
    wanted, found = numbers(claimed), numbers(measured)
    if list(wanted) != [""] or list(found) != [""] or not wanted[""]:
        return None
    return float(f"{found[''] / wanted['']:.3g}")


def reason(claim_id: str) -> str:
    """Return why no file of ours can speak to a claim."""
    for pattern, words in REASONS.items():
        if re.fullmatch(pattern, claim_id):
            return words
    raise KeyError(claim_id)


def show_measured(
    sources: Sequence[Path], json: Path | None = None, console: rich.console.Console | None = None
) -> None:
    """Print every claim with what our files say of it, or the reason why they say nothing."""
    console = console or tables_console(json)
    rows: list[dict[str, Any]] = []
    counts: Counter[str] = Counter()
    for claim_id, claim in published().items():
        reading, found = READINGS.get(claim_id), measure_claim(claim_id, sources)
        why = "" if found else reason(claim_id) if reading is None else f"no {FILES[reading.study]} has it"
        counts["measured" if found else "missing" if reading else "not comparable"] += 1
        rows.append(
            {
                "id": claim_id,
                "claim": claim["claim"],
                "claimed": claim["value"],
                "unit": claim["unit"],
                "measured": [one.to_dict() for one in found],
                "differs": "" if reading is None else reading.differs,
                "why": why,
            }
        )
        console.print(rich.text.Text(f"{claim_id}  {claim['claim']}", "bold"))
        lines = [f"published {value_text(claim['value'])} ({claim['unit']})" + (f"; {why}" if why else "")]
        for one in found:
            ratio = "" if one.ratio is None else f", {one.ratio:g} of the published"
            file = Path(one.path).name
            other = f" ({file})" if reading is not None and file != FILES[reading.study] else ""
            lines.append(f"measured {value_text(one.value)} on {one.where}{other}{ratio}")
        if found and reading is not None and reading.differs:
            lines.append(f"but {reading.differs}")
        for line in lines:
            console.print(rich.padding.Padding(rich.text.Text(line), (0, 0, 0, 4), expand=False))
    console.print(
        f"measured: {counts['measured']} of {len(rows)}; in no file that was given: {counts['missing']}; "
        f"not comparable: {counts['not comparable']}"
    )
    if json is not None:
        say_written([write_json(json, rows)])


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {name: _rounded(part) for name, part in value.items()}
    return [_rounded(part) for part in value] if isinstance(value, list) else value


def _both(measure: Callable[[Kind], Any]) -> dict[str, Any]:
    return {name: measure(kind) for name, kind in NAMES.items()}


def _classes(read: Callable[[PairReadings], Any], differs: str) -> ClaimReading:
    return dataclasses.replace(conccl.pairs(read, differs), study=CLASSES)


def _units(read: Callable[[UnitReadings], Any], differs: str = "") -> ClaimReading:
    return ClaimReading("isolated", lambda file: read(UnitReadings(file)), differs)


def _fused(read: Callable[[FusedReadings], Any], differs: str = "") -> ClaimReading:
    return ClaimReading("fused", lambda file: read(FusedReadings(file)), differs)


def _pipelines(read: Callable[[PipelineReadings], Any], differs: str = "") -> ClaimReading:
    return ClaimReading("occupancy", lambda file: read(PipelineReadings(file)), differs)


def _nothing() -> NoReturn:
    raise ValueError("no such row")


def _needed_share(units: UnitReadings) -> list[float]:
    found = [100 * units.needed(kind) / units.units for kind in ("all_gather", "all_to_all")]
    return [min(found), max(found)]


def _units_to_gain(pairs: PairReadings) -> int:
    """Return the units without which memory-bound computations gain most beside copy engines; 0 where none gains."""
    mine = pairs.part(bound=Bound.MEMORY).ran_under("conccl", "conccl_rp").rows.values()
    swept = [dict(map(_units_and_us, found["conccl_rp"]["sweep"].split(", "))) for found in mine]
    whole = [found["conccl"]["time_us"] for found in mine]
    slower = {
        units: geomean(times[units] / us for times, us in zip(swept, whole, strict=True))
        for units in set.intersection(*map(set, swept))
    }
    best = min(slower, key=slower.__getitem__)
    return best if slower[best] < 1 else 0


def _units_and_us(part: str) -> tuple[int, float]:
    units, time_us = part.split()
    return int(units), float(time_us)


def _right(heuristic: str) -> Callable[[ResultFile], dict[str, int]]:
    def read(file: ResultFile) -> dict[str, int]:
        rows = [row for row in file.rows if row["heuristic"] == heuristic and row["right"] is not None]
        return {"right": sum(row["right"] for row in rows), "of": len(rows) or _nothing()}

    return read


def _worst_loss(file: ResultFile) -> float:
    return max(
        float(row["lost_percent"]) for row in file.rows if row["heuristic"] == "partition" and row["right"] is False
    )


def _launched_units(kind: Kind) -> Callable[[ResultFile], int]:
    """Read how many blocks the library launches, from the note of the order of launches."""

    def read(file: ResultFile) -> int:
        notes = (row["note"] for row in file.rows if row["heuristic"] == "launch_order" and row["collective"] == kind)
        return next(int(hit[1]) for note in notes if (hit := re.search(rf"{kind} \((\d+)\)", note)))

    return read


def _table_line(claim_id: str) -> Callable[[CollectiveReadings], str]:
    claim = published()[claim_id]["claim"]
    kind = NAMES[claim.split()[1]]
    low, high = claimed_range(claim)

    def read(readings: CollectiveReadings) -> str:
        sizes = readings.sizes(kind, low, (high or 1 << 62) - 1)
        found = Counter(readings.best(kind, dma.all_variants(kind), n) for n in sizes)
        words = ", ".join(f"{name} at {count} of {len(sizes)} sizes" for name, count in found.most_common())
        return words or _nothing()

    return read


def _power_saved(file: ResultFile) -> float:
    watts = PowerReadings(file).watts
    sizes = [n for n in watts["library"] if n in watts["best DMA"] and n >= 64 * MB_BYTES]
    return 100 * (1 - geomean(watts["best DMA"][n] / watts["library"][n] for n in sizes))


def _chain_from(file: ResultFile) -> float:
    ratios = ChainReadings(file).ratios
    good = [n for n in ratios if all(ratios[m] >= 1 / AS_GOOD for m in ratios if m >= n)]
    return min(good) / MB_BYTES


EMBEDDING, GEMV, GEMM = "embedding_all_to_all", "gemv_all_reduce", "gemm_all_to_all"


def _mean_lower(op: str) -> Callable[[FusedReadings], float]:
    return lambda fused: statistics.fmean(fused.lower(op))


def _extremes(fused: FusedReadings) -> list[float]:
    found = [statistics.fmean(fused.lower(op)) for op in (EMBEDDING, GEMV, GEMM)]
    return [min(found), max(found)]


def _least_gemv(fused: FusedReadings) -> dict[str, int]:
    ratios = fused.normalised(GEMV)
    return {"M": int(max(ratios, key=ratios.__getitem__).partition("x")[0])}


def _between_nodes(choose: Callable[[list[float]], float]) -> Callable[[ResultFile], float]:
    return lambda file: choose([100 * (1 - ratio) for ratio in normalised_between_nodes(file).values()])


def _by_programs(before: int, after: int) -> Callable[[FusedReadings], float]:
    def read(fused: FusedReadings) -> float:
        times = fused.by_programs()
        return 100 * (times[after] / times[before] - 1)

    return read


def _tiles_in_order(pipelines: PipelineReadings) -> bool:
    curves = pipelines.curves("tiles")
    ratios = [ratio for curve in curves.values() for ratio in curve.values()]
    same = [abs(curve[max(curve)] - 1) < 0.1 for curve in curves.values()]
    return statistics.fmean(ratio <= 1.01 for ratio in ratios) > 0.5 and statistics.fmean(same) > 0.5


def _values(pipelines: PipelineReadings, key: str, choose: Callable[[Sequence[int]], int] | None = None) -> list[float]:
    curves = pipelines.curves(key).values()
    if choose is None:
        return [value for curve in curves for value in curve.values()]
    return [curve[choose(list(curve))] for curve in curves]


def _saved(pipelines: PipelineReadings) -> tuple[float, float]:
    """Return what priority saves with many thread blocks and with few, means over pairs."""
    curves = pipelines.curves("reduction").values()
    ordered = [[curve[n] for n in sorted(curve)] for curve in curves]
    few, many = ([value for curve in ordered for value in part(curve)] for part in (_first_two, _last_two))
    return statistics.fmean(many), statistics.fmean(few)


def _first_two(curve: list[float]) -> list[float]:
    return curve[:2]


def _last_two(curve: list[float]) -> list[float]:
    return curve[-2:]


COMPUTE_BOUND = "Table I's memory-bound GEMMs are compute-bound on these GPUs"
STRONGER = "the unfused baseline is the fastest kernel with the library's collective, in a graph"
SHARE = "the same share of the units is taken: 16 and 32 of 132"
ONE_MACHINE = "two GPUs of one machine stand in for nodes, over sockets; the copies of the unfused way count"
PROGRAMS_WORDS = "programs on a unit, of 16, stand in for the occupancy"

READINGS: dict[str, ClaimReading] = {
    **{
        check.claim_id: check.predict
        for paper in (conccl.PAPER, dma.PAPER)
        for check in paper.checks
        if isinstance(check.predict, ClaimReading)
    },
    "C3-CU-01": _units(_needed_share, "within 5% of the time with all units; only powers of two from 8 were tried"),
    "C3-CU-02": ClaimReading("heuristics", _launched_units(AG), "NCCL's blocks, one on a unit"),
    "C3-CU-03": ClaimReading("heuristics", _launched_units(AA), "NCCL's blocks, one on a unit"),
    "C3-CU-04": _units(lambda u: u.needed("all_gather"), "of 132 units; only powers of two from 8 were tried"),
    "C3-CU-05": _units(lambda u: u.needed("all_to_all"), "of 132 units; only powers of two from 8 were tried"),
    "C3-CU-07": _units(
        lambda u: [max(u.at_share(tag, share) for tag in CB if tag in u.gemms) for share in (TENTH, FIFTH)], SHARE
    ),
    "C3-CU-08": _units(
        lambda u: max(u.at_share(tag, share) for tag in MB if tag in u.gemms for share in (TENTH, FIFTH)),
        COMPUTE_BOUND,
    ),
    "C3-CU-09": _classes(_units_to_gain, f"{ALL_CLASSES}; 0: no number of units makes them faster on average"),
    "C3-HEU-01": ClaimReading("heuristics", _right("partition")),
    "C3-HEU-02": ClaimReading("heuristics", _worst_loss, "the greatest loss of those that are wrong"),
    "C3-HEU-05": ClaimReading("heuristics", _right("launch_order"), "how often the rule gives the faster order"),
    "CC-01": dma.collectives(lambda c: dma.worst_gap(c, (AG,)), "pcpy in a graph"),
    "CC-02": dma.collectives(lambda c: 1 / c.behind(AG, ("pcpy",), c.sizes(AG, 32 * MB_BYTES)), "pcpy in a graph"),
    "CC-05": _classes(
        lambda p: {strategy: p.percent(strategy) for strategy in ("conccl_rp", "conccl")},
        f"{ALL_CLASSES}; conccl of the same pairs stands beside it",
    ),
    "FU-SUM-01": _fused(_extremes, STRONGER),
    "FU-EMB-01": _fused(_mean_lower(EMBEDDING), STRONGER),
    "FU-EMB-02": _fused(lambda f: max(f.lower(EMBEDDING)), STRONGER),
    "FU-EMB-03": ClaimReading(BETWEEN_NODES, _between_nodes(statistics.fmean), ONE_MACHINE),
    "FU-EMB-04": ClaimReading(BETWEEN_NODES, _between_nodes(max), ONE_MACHINE),
    "FU-EMB-05": _fused(lambda f: f.bound_share(EMBEDDING, "batch 256") < 1, "inside a node, not between nodes"),
    "FU-GEMV-01": _fused(_mean_lower(GEMV), STRONGER),
    "FU-GEMV-02": _fused(lambda f: max(f.lower(GEMV)), STRONGER),
    "FU-GEMV-03": _fused(_least_gemv, "rows of the matrix that gains least"),
    "FU-GEMM-01": _fused(_mean_lower(GEMM), STRONGER),
    "FU-GEMM-02": _fused(lambda f: max(f.lower(GEMM)), STRONGER),
    "FU-OCC-02": _fused(_by_programs(4, 12), PROGRAMS_WORDS),
    "FU-OCC-03": _fused(_by_programs(12, 14), PROGRAMS_WORDS),
    "FU-SKEW-01": _fused(lambda f: statistics.fmean(f.skew_percent("oblivious")), "inside a node, not between nodes"),
    "FU-SKEW-02": _fused(lambda f: statistics.fmean(f.skew_percent("remote_first")), "inside a node"),
    **{
        claim_id: dma.final(_table_line(claim_id)) for claim_id in published() if re.fullmatch(r"DM-T[12]-\d", claim_id)
    },
    "DM-PW-01": ClaimReading("power", _power_saved, "watts of the whole GPU, by the fastest way of each"),
    "DM-SY-01": ClaimReading("chain", _chain_from, "a GEMM follows, and all three run in one graph"),
    "RA-01": _pipelines(lambda p: max(p.curve("reduction", "cb-ar").values())),
    "RA-02": _pipelines(lambda p: max(_values(p, "overlap"))),
    "RA-03": _pipelines(lambda p: min(_values(p, "base"))),
    "RA-04": _pipelines(lambda p: statistics.fmean(_values(p, "base", max))),
    "RA-07": _pipelines(_tiles_in_order),
    "RA-11": _pipelines(lambda p: p.rises()),
    "RA-13": _pipelines(lambda p: _saved(p)[0] > 0),
    "RA-14": _pipelines(lambda p: _saved(p)[0] > _saved(p)[1]),
}
"""Readings of the claims that our files speak to."""


OF_THE_MACHINE = "describes the paper's own machine"
BY_CONSTRUCTION = "a count that programs have by construction; tests check it"
METHOD = "says how the paper measured"
DEFINITION = "a definition, which our studies share"
AMD_ONLY = "about an AMD GPU, on which nothing of ours has been measured"
REASONS: dict[str, str] = {
    r"(C3|DM|FU|RA)-HW-\d+": OF_THE_MACHINE,
    r"C3-TAX-01|C3-DEF-01": DEFINITION,
    r"C3-TAX-03": "a property of the models' layers",
    r"C3-T1-.*|RA-WL-.*|DM-RG-01|C3-HEU-0[34]": "a size or a number that our studies take over",
    r"C3-MET-.*|DM-PW-06|RA-10|FU-SIM-04": METHOD,
    r"C3-CU-06": "the smallest partition is a property of the GPU; green contexts have 8 units, too",
    r"C3-BW-0[12]": "needs counters of memory traffic, which no study reads",
    r"C3-PRI-.*|FU-PRI-.*|RA-09": "prior work on another machine",
    r"CC-08|DM-ENG-0[1-46]|DM-RG-02|FU-GRAN-.*": BY_CONSTRUCTION,
    r"DM-ENG-05": "the paper has one process for the node, we have one for each GPU: no host time is shared",
    r"FU-OCC-01": "registers of an AMD kernel; Triton decides ours",
    r"FU-SIM-0[123]": "128 nodes: simulated only, see `sidelane plan --model dlrm --nodes 128`",
    r"DM-PW-02": "watts of a part of the GPU, which NVIDIA GPUs do not report",
    r"DM-PW-03": "the sizes that it holds for are not stated",
    r"DM-PW-0[45]": "watts of prelaunched variants, which no study measures",
    r"RA-0[56]|RA-12": AMD_ONLY,
    r"RA-08": "an A40 with all-to-all and mb; the measured run of that pair reached its time-out",
    r"CO-0\d": "the text at hand does not say which model, batch and precision it is; our steps are in fsdp.json",
}
"""Why no file speaks to the other claims, by a pattern of their ids."""
