"""Readings of this project's result files, in the quantities that papers publish: ratios, gains, percent of ideal.

Figures and claims are compared with the same readings. A reading is made of the rows of one file, as they are in the
file; rows without a time, or with a wrong result, do not count.
"""

from __future__ import annotations

import functools
import itertools
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Self

from sidelane.program.collective import Kind
from sidelane.sizes import format_bytes
from sidelane_lab.harness.study import AS_GOOD, MODEL, PRELAUNCHED
from sidelane_lab.model.collectives import geomean
from sidelane_lab.model.study import TABLE_II, percent_of_means
from sidelane_lab.pairs.workload import TABLE_I, ideal_speedup, possible_percent
from sidelane_lab.papers.files import ResultFile, Row
from sidelane_lab.studies.fused.shapes import HALF
from sidelane_lab.studies.prelaunch import CALL, KERNEL, STREAM

FIFTH = 64 / 304
"""Share of the units that the ConCCL paper's collectives need at most, of an MI300X's 304."""


class CollectiveReadings:
    """Collectives alone, out of place and in graphs, by the library at its best and by variants of copy engines.

    Prelaunched variants, which the model and the study of these alone have, are called ``b2b+prelaunch``: from the
    trigger on, pulled by the stream or a kernel, whichever is faster.
    """

    def __init__(self, file: ResultFile) -> None:
        self._us: dict[tuple[str, str, str, int], float] = {}
        for row in file.rows:
            trigger, variant = row.get("trigger", CALL), row["variant"]
            place = row["in_place"] and variant != "swap"  # a swap is always in place
            if row["time_us"] is None or place or row.get("tensors", 1) != 1:
                continue
            if trigger in (STREAM, KERNEL) or (row["launch"] == MODEL and row["prelaunch"]):
                variant += PRELAUNCHED
            elif trigger != CALL or row["launch"] not in ("graph", MODEL) or row.get("prelaunch"):
                continue
            key = (row["collective"], row["implementation"], variant, row["bytes"])
            self._us[key] = min(row["time_us"], self._us.get(key, row["time_us"]))

    def sizes(self, kind: Kind, low: int = 0, high: int = 1 << 62, variant: str = "pcpy") -> list[int]:
        """Return the bytes that the library and a variant have times of, from ``low`` to ``high``."""
        library = {n for k, by, _, n in self._us if (k, by) == (kind, "nccl")}
        engines = {n for k, by, name, n in self._us if (k, by, name) == (kind, "dma", variant)}
        return sorted(n for n in library & engines if low <= n <= high)

    def library_us(self, kind: Kind, nbytes: int) -> float:
        """Return the time of the library, with registered memory or without."""
        return min(us for (k, by, _, n), us in self._us.items() if (k, by, n) == (kind, "nccl", nbytes))

    def us(self, kind: Kind, variants: Iterable[str], nbytes: int) -> float:
        """Return the time of the fastest of some variants."""
        times = [self._us.get((kind, "dma", variant, nbytes)) for variant in variants]
        return min(us for us in times if us is not None)

    def behind(self, kind: Kind, variants: Iterable[str], sizes: Iterable[int]) -> float:
        """Return the geometric mean of the time of the fastest of some variants over the library's."""
        names = tuple(variants)
        return geomean(self.us(kind, names, n) / self.library_us(kind, n) for n in sizes)

    def gain(self, kind: Kind, slow: str, fast: str, sizes: Iterable[int]) -> float:
        """Return the geometric mean of a variant's time over another's."""
        return geomean(self.us(kind, (slow,), n) / self.us(kind, (fast,), n) for n in sizes)

    def best(self, kind: Kind, variants: Iterable[str], nbytes: int) -> str:
        """Return the fastest of some variants."""
        return self.as_good(kind, variants, nbytes)[0]

    def to_take(self, kind: Kind, variants: Iterable[str], nbytes: int) -> str:
        """Return the fastest of some variants, without prelaunch where that is as good."""
        best = self.best(kind, variants, nbytes)
        plain = best.removesuffix(PRELAUNCHED)
        return plain if self.us(kind, (plain,), nbytes) <= AS_GOOD * self.us(kind, (best,), nbytes) else best

    def as_good(self, kind: Kind, variants: Iterable[str], nbytes: int) -> list[str]:
        """Return the fastest of some variants, and those that take less than 2% longer."""
        times = {
            name: self._us[kind, "dma", name, nbytes] for name in variants if (kind, "dma", name, nbytes) in self._us
        }
        least = min(times.values())
        return sorted((name for name, us in times.items() if us < AS_GOOD * least), key=times.__getitem__)


Pair = tuple[str, int, str]
"""GEMM, bytes, collective."""


class PairReadings:
    """Pairs of a GEMM and a collective under strategies, as papers define speedups: over the library's collective.

    Args:
        rows: by pair and strategy.
        given: classes of pairs that are not those of the rows.
    """

    def __init__(
        self, rows: Mapping[Pair, Mapping[str, Row]], given: Mapping[Pair, str] = MappingProxyType({})
    ) -> None:
        self.rows = {pair: found for pair, found in rows.items() if "serial" in found}
        self._given = given

    @classmethod
    def of(cls, file: ResultFile) -> Self:
        """Read a file, without rows that are impossible.

        Predicted pairs are grouped as the paper's Table II has them, whatever numbers are varied.
        """
        found: dict[Pair, dict[str, Row]] = {}
        for row in file.rows:
            percent = row.get("percent_of_ideal")
            if row["time_us"] is not None and (percent is None or possible_percent(percent) is not None):
                found.setdefault((row["gemm"], row["bytes"], row["collective"]), {})[row["strategy"]] = row
        names = {pair: pair_name(pair) for pair in found if file.predicted}
        return cls(found, {pair: TABLE_II[name] for pair, name in names.items() if name in TABLE_II})

    def ran_under(self, *strategies: str) -> Self:
        """Return the pairs that ran under all of some strategies."""
        rows = {pair: found for pair, found in self.rows.items() if set(strategies) <= set(found)}
        return type(self)(rows, self._given)

    def part(self, kind: Kind | None = None, c3_class: str | None = None, bound: str | None = None) -> Self:
        """Return the pairs of a collective, of a class, and of a GEMM's bound as the file has it; None: of any."""
        mine = [pair for pair in self.pairs(kind, c3_class) if bound in (None, self.rows[pair]["serial"].get("bound"))]
        return type(self)({pair: self.rows[pair] for pair in mine}, self._given)

    def pairs(self, kind: Kind | None = None, c3_class: str | None = None, strategy: str = "serial") -> list[Pair]:
        """Return the pairs of a collective and a class that ran under a strategy; None: of any."""
        return [
            pair
            for pair, found in self.rows.items()
            if kind in (None, pair[2]) and c3_class in (None, self.c3_class(pair)) and strategy in found
        ]

    def c3_class(self, pair: Pair) -> str:
        """Return the class that a pair is grouped by."""
        return str(self._given.get(pair, self.own_class(pair)))

    def ideal(self, pair: Pair) -> float:
        """Return the ideal speedup of a pair."""
        serial = self.rows[pair]["serial"]
        return ideal_speedup(serial["gemm_us"], serial["comm_us"])

    def speedup(self, pair: Pair, strategy: str) -> float:
        """Return the speedup over one after the other."""
        serial = self.rows[pair]["serial"]
        return float((serial["gemm_us"] + serial["comm_us"]) / self.rows[pair][strategy]["time_us"])

    def mean_speedup(self, strategy: str, kind: Kind | None = None, c3_class: str | None = None) -> float:
        """Return the mean speedup over pairs."""
        return statistics.fmean(self.speedup(pair, strategy) for pair in self.pairs(kind, c3_class, strategy))

    def percent(self, strategy: str, kind: Kind | None = None, c3_class: str | None = None) -> float:
        """Return the percent of the papers' ideal of a group, by mean speedups: the paper's 21% are of 1.13 and 1.6."""
        pairs = self.pairs(kind, c3_class, strategy)
        gained = percent_of_means(self.speedup(pair, strategy) for pair in pairs)
        return 100 * gained / percent_of_means(map(self.ideal, pairs))

    def own_class(self, pair: Pair) -> str:
        """Return the class that a pair has by its own times."""
        return str(self.rows[pair]["serial"]["class"])

    def class_words(self) -> dict[str, str]:
        """Return the own class of the pairs of each name, in words where it differs by collective."""
        found: dict[str, dict[str, str]] = {}
        for pair in self.rows:
            found.setdefault(pair_name(pair), {})[pair[2]] = self.own_class(pair)
        words = {name: ", ".join(f"{kind}: {own}" for kind, own in by.items()) for name, by in found.items()}
        return {n: next(iter(by.values())) if len({*by.values()}) == 1 else words[n] for n, by in found.items()}

    def classes(self, kind: Kind | None = None) -> list[str]:
        """Return the classes that have pairs."""
        return list(dict.fromkeys(map(self.c3_class, self.pairs(kind))))

    def class_range(self, strategy: str, kind: Kind) -> list[float]:
        """Return the least and the greatest percent of ideal of a class."""
        found = [self.percent(strategy, kind, c3_class) for c3_class in self.classes(kind)]
        return [min(found), max(found)]

    def best_percent(self, strategies: Sequence[str]) -> float:
        """Return the same with the best of some strategies for each pair."""
        best = [max(self.speedup(pair, one) for one in strategies if one in found) for pair, found in self.rows.items()]
        return 100 * percent_of_means(best) / percent_of_means(map(self.ideal, self.rows))


def pair_name(pair: Pair) -> str:
    """Return the name of a pair as the ConCCL paper writes it: ``cb1_896M``.

    >>> pair_name(("cb5", 1750212608, "all_gather"))
    'cb5_1.63G'
    """
    gemm, nbytes, _ = pair
    whole = nbytes % (1 << 30) == 0 or nbytes < 1 << 30
    return f"{gemm}_{format_bytes(nbytes)}" if whole else f"{gemm}_{nbytes / 2**30:.3g}G"


class UnitReadings:
    """GEMMs that lose compute units and collectives that have only some, in partitions of the GPU."""

    def __init__(self, file: ResultFile) -> None:
        rows = [row for row in file.rows if row["time_us"] is not None]
        self.units = next((row["device_units"] for row in rows), 0)
        self.gemms: dict[str, dict[int, float]] = {}
        self.collectives: dict[str, dict[int, float]] = {}
        for row in rows:
            if row["what"] == "gemm" and row["means"] == "split" and row["gemm"] in TABLE_I:
                self.gemms.setdefault(row["gemm"], {})[row["units"]] = row["time_us"]
        largest = max((row["bytes"] for row in rows if row["what"] == "collective"), default=0)
        for kind in ("all_gather", "all_to_all"):
            curves: dict[str, dict[int, float]] = {}
            for row in rows:
                what = (row["what"], row["implementation"], row["collective"], row["bytes"])
                if what == ("collective", "nccl", kind, largest):
                    curves.setdefault(row["variant"], {})[row["units"]] = row["time_us"]
            # One way to call the library was given units: the one that is fastest with all of them.
            if curve := max(curves.values(), key=len, default=None):
                self.collectives[kind] = curve
        self.nbytes = largest

    @staticmethod
    def slowdown(curve: Mapping[int, float]) -> dict[int, float]:
        """Return times over that with all units, by units."""
        return {units: us / curve[0] for units, us in sorted(curve.items()) if units and 0 in curve}

    def at_share(self, gemm: str, share: float) -> float:
        """Return by how many percent a GEMM is slower without the number of units nearest to a share of all."""
        slower = self.slowdown(self.gemms[gemm])
        nearest = min(slower, key=lambda units: abs(units / self.units - share))
        return 100 * (slower[nearest] - 1)

    def most_slower(self, gemms: Iterable[str], share: float) -> float:
        """Return the same of the GEMM, among some, that is slowed down most."""
        return max(self.at_share(tag, share) for tag in gemms if tag in self.gemms)

    def needed(self, kind: str) -> int:
        """Return the fewest units with which a collective is as fast as with all, within 5%."""
        return min(units for units, ratio in self.slowdown(self.collectives[kind]).items() if ratio <= 1.05)


class PhaseReadings:
    """Phases of one copy between two GPUs, in percent of its time; a call from the host, as the paper has it.

    Attributes:
        shares: by phase, from the bottom up as figure 6 has them, and bytes.
    """

    def __init__(self, file: ResultFile) -> None:
        self.shares: dict[str, dict[int, float]] = {phase: {} for phase in ("control", "schedule", "sync", "copy")}
        for row in file.rows:
            kind = (row["operation"], row["variant"])
            if kind == ("copy", "b2b") and row["launch"] in ("eager", MODEL) and row["total_us"]:
                for phase, shares in self.shares.items():
                    shares[row["bytes"]] = 100 * row[f"{phase}_us"] / row["total_us"]

    def together(self, *phases: str) -> dict[int, float]:
        """Return the percent of some phases together, by bytes."""
        parts = [self.shares[phase] for phase in phases]
        return {n: sum(part[n] for part in parts) for n in self.shares["copy"]}

    def not_copy(self) -> dict[int, float]:
        """Return the percent that is no copy, by bytes."""
        return {n: 100 - share for n, share in self.shares["copy"].items()}

    def in_order(self) -> bool:
        """True if copy > schedule ~ sync >> control, at every size."""
        return all(
            copy > schedule > 5 * control and 0.75 <= schedule / sync <= 1.33
            for control, schedule, sync, copy in zip(*map(dict.values, self.shares.values()), strict=True)
        )


_FUSED_IN_PARTS = re.compile(r"parts|programs a unit")
PROGRAMS = re.compile(r"\w+, (\d+) programs a unit")
# Shapes of our files that the paper has nothing like, by operator: it pools 70 rows on average, has GEMVs of one token
# from 8,192 rows on, and routes as much to each expert.
NOT_THE_PAPERS = {
    "embedding_all_to_all": re.compile("pooling [18],"),
    "gemv_all_reduce": re.compile("^4096x|, 16 tokens$"),
    "gemm_all_to_all": re.compile(f"experts by top-k$|{re.escape(HALF)}$"),
}


class FusedReadings:
    """Fused operators in graphs beside the same with the process group's collective, each as fast as it can be."""

    def __init__(self, file: ResultFile) -> None:
        launch = min((row["launch"] for row in file.rows), key=("graph", "eager", MODEL).index, default=MODEL)
        self.rows = [row for row in file.rows if row["launch"] == launch and row["time_us"] is not None]

    def _shapes(self, op: str) -> list[str]:
        found = dict.fromkeys(row["shape"] for row in self.rows if row["op"] == op)
        return [shape for shape in found if op not in NOT_THE_PAPERS or not NOT_THE_PAPERS[op].search(shape)]

    def normalised(self, op: str) -> dict[str, float]:
        """Return the time of the fused kernel over that of the computation and the library's collective, by shape."""
        found = {}
        for shape in self._shapes(op):
            mine = [row for row in self.rows if (row["op"], row["shape"]) == (op, shape)]
            unfused = [row["time_us"] for row in mine if row["implementation"] == "unfused_nccl"]
            kernel = [
                row["time_us"]
                for row in mine
                if row["implementation"] == "fused" and not _FUSED_IN_PARTS.search(row["schedule"])
            ]
            if unfused and kernel:
                found[shape] = min(kernel) / min(unfused)
        return found

    def lower(self, op: str) -> list[float]:
        """Return the percent by which the fused kernel's time is lower, by shape."""
        return [100 * (1 - ratio) for ratio in self.normalised(op).values()]

    def bound_shares(self, op: str, shape: str) -> list[float]:
        """Return the fused times over that of the longer of computation and collective alone, by shape and schedule."""
        mine = [row for row in self.rows if row["op"] == op and row["shape"].startswith(shape)]
        kernel = [row for row in mine if row["implementation"] == "fused" and "programs" not in row["schedule"]]
        return [row["time_us"] / row["bound_us"] for row in kernel]

    def by_programs(self, op: str = "embedding_all_to_all") -> dict[int, float]:
        """Return an operator's time by the number of programs on a compute unit, at the last shape that has these."""
        mine = ((PROGRAMS.fullmatch(row["schedule"]), row["time_us"]) for row in self.rows if row["op"] == op)
        return dict(sorted((int(hit[1]), time_us) for hit, time_us in mine if hit))

    def skew_percent(self, order: str, op: str = "embedding_all_to_all") -> list[float]:
        """Return by how much the ends of ranks lie apart, percent of the time, by shape."""
        rows = [row for row in self.rows if (row["op"], row["schedule"]) == (op, order)]
        return [100 * row["skew_us"] / row["time_us"] for row in rows if row.get("skew_us") is not None]


def normalised_between_nodes(file: ResultFile) -> dict[str, float]:
    """Return fused over unfused times of two GPUs as two nodes, by shape, both over the process group."""
    by_shape: dict[str, dict[str, list[float]]] = {}
    for row in file.rows:
        if row["transport"] == "group":
            ways = by_shape.setdefault(f"{row['batch']}, {row['tables']}, {row['pooling']}", {})
            word = row["way"].partition(",")[0]
            ways.setdefault("fused" if word == "fused" else "unfused" if "copy" in row["way"] else "", []).append(
                row["us"]
            )
    return {
        shape: min(ways["fused"]) / min(ways["unfused"])
        for shape, ways in by_shape.items()
        if ways.get("fused") and ways.get("unfused")
    }


class ChainReadings:
    """A GEMM, an all-gather and a GEMM in graphs: the library at its best over copy engines at their best."""

    def __init__(self, file: ResultFile) -> None:
        self.ratios: dict[int, float] = {}
        rows = [row for row in file.rows if row["launch"] == "graph" and not row["in_place"] and row["time_us"]]
        for nbytes in sorted({row["bytes"] for row in rows}):
            times = {
                by: [row["time_us"] for row in rows if (row["bytes"], row["implementation"]) == (nbytes, by)]
                for by in ("nccl", "dma")
            }
            if all(times.values()):
                self.ratios[nbytes] = min(times["nccl"]) / min(times["dma"])


class PowerReadings:
    """Watts of a GPU during an all-gather out of place, by bytes, in the fastest way of each of both."""

    def __init__(self, file: ResultFile) -> None:
        self.watts: dict[str, dict[int, float]] = {"library": {}, "best DMA": {}}
        names = {"nccl": "library", "dma": "best DMA"}
        for row in sorted(file.rows, key=lambda row: -(row["time_us"] or 0.0)):
            usual = row["collective"] == "all_gather" and not row["in_place"] and row["watts"] is not None
            if usual and row["implementation"] in names:  # the last one is the fastest
                self.watts[names[row["implementation"]]][row["bytes"]] = row["watts"]
        self.watts = {name: dict(sorted(points.items())) for name, points in self.watts.items()}


class PipelineReadings:
    """Iterations of a GEMM and the library's collective that overlap, by thread blocks."""

    PAIRS: Mapping[str, tuple[str, str]] = {
        "cb-ar": ("cb1", "all_reduce"),
        "mb-ar": ("mb1", "all_reduce"),
        "cb-a2a": ("cb1", "all_to_all"),
        "mb-a2a": ("mb1", "all_to_all"),
    }

    def __init__(self, file: ResultFile) -> None:
        self._rows: dict[tuple[str, str, bool], dict[int, Row]] = {}
        for row in sorted(file.rows, key=lambda row: (row["blocks"], row["resident"])):
            usual = row["implementation"] == "nccl" and row["time_us"] is not None
            pair = next((n for n, one in self.PAIRS.items() if one == (row["gemm"], row["collective"])), "")
            if usual and pair:  # the last of a number of blocks asks for no more memory than it needs
                self._rows.setdefault((pair, row["shape"], row["priority"]), {})[row["blocks"]] = row

    def curve(self, key: str, pair: str, shape: str = "opt1") -> dict[int, float]:
        """Return a figure of the paper by blocks: ``base``, ``reduction``, ``overlap`` or ``tiles``."""
        read = functools.partial(self._read, pair)
        if key == "base":
            return {n: row["normalised"] for n, row in read(shape, False).items()}
        if key == "overlap":
            return {n: row["overlap_rate"] for n, row in read(shape, True).items()}
        first, second = {
            "reduction": (read(shape, True), read(shape, False)),
            "tiles": (read("opt2", True), read("opt1", True)),
        }[key]
        ratios = {n: first[n]["time_us"] / second[n]["time_us"] for n in first if n in second}
        return ratios if key == "tiles" else {n: 100 * (1 - ratio) for n, ratio in ratios.items()}

    def _read(self, pair: str, shape: str, priority: bool) -> dict[int, Row]:
        return self._rows.get((pair, shape, priority), {})

    def curves(self, key: str) -> dict[str, dict[int, float]]:
        """Return a figure by pair, without pairs that have none of it."""
        found = {pair: self.curve(key, pair) for pair in self.PAIRS}
        return {pair: curve for pair, curve in found.items() if curve}

    def rises(self) -> bool:
        """True if with more blocks overlapped time comes closer to sequential time, in every pair."""
        curves = [list(curve.values()) for curve in self.curves("base").values()]
        if not curves:
            raise ValueError("no such row")
        return all(a <= b for curve in curves for a, b in itertools.pairwise(curve))


def table_i_times(file: ResultFile) -> dict[str, tuple[float, float]]:
    """Return microseconds of each GEMM of Table I alone, and the percent that it loses with a fifth of the units."""
    readings = UnitReadings(file)
    return {tag: (curve[0], readings.at_share(tag, FIFTH)) for tag, curve in readings.gemms.items() if 0 in curve}
