"""Predictions for eight H200s, before anybody has run them, and their comparison with what was measured later.

    python results/scripts/predict_eight.py results/simulator/h200x8-predicted.json            (predicts: half a minute)
    python results/scripts/predict_eight.py results/simulator/h200x8-predicted.json FOLDER     (compares FOLDER/*.json)

A row names the study whose result files have such rows, the values by which a measured row is found (``row``), and the
number that is predicted, in the unit of the measured column (``figure``). ``source`` says where it is from: ``model``
is the description of the machine and the simulator; ``table`` extends the measured table of four H200s as ``auto`` does
on eight, and is a lower bound; ``hand`` is arithmetic in docs/lab/anchors.md. Where a queue may share an engine or not,
``other`` is the second of two times, and the nearer one counts.
"""

import dataclasses
import json
import statistics
import sys
from pathlib import Path

from sidelane.program.builders import variants
from sidelane.program.collective import Kind
from sidelane_lab.cli.c3 import C3Options
from sidelane_lab.cli.e2e import WORKLOADS
from sidelane_lab.cli.explain import ExplainOptions
from sidelane_lab.cli.fused import FusedOptions
from sidelane_lab.explain.call import explain
from sidelane_lab.machines.load import find
from sidelane_lab.machines.numbers import write_numbers
from sidelane_lab.studies.c3.prediction import predicted_rows as predict_pairs
from sidelane_lab.studies.collectives import CollectiveRow
from sidelane_lab.studies.collectives import predict_row as predict_collective
from sidelane_lab.studies.e2e.prediction import predicted_ms, sizes_of, workloads
from sidelane_lab.studies.fsdp.cases import FLOORS, STRATEGIES, parse_case
from sidelane_lab.studies.fsdp.cases import predict_row as predict_step
from sidelane_lab.studies.fsdp.rows import FsdpRow
from sidelane_lab.studies.fused.predict import predict as predict_operators

MACHINE = find("h200x8")
KINDS = (Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)
SIZES = [512 << n for n in range(22)]  # 512 B to 1 GiB
PAIRS = ("cb1_512M", "cb1_896M", "cb2_896M", "mb1_896M", "cb4_1G", "cb3_512M", "mb1_4G", "cb5_1.63G", "mb2_3.25G")
PAIRED = ("serial", "c3_base", "c3_sp", "priority", "c3_rp", "conccl", "conccl_rp", "nccl_ce")
CASES = ("8b:2x4096", "8b:1x4096", "8b:1x8192", "70b:1x2048", "70b:1x4096")
BY_HAND = [
    ("combine_attention", "1x32x128", "fused", 4.5, ""),
    ("combine_attention", "64x128x128", "fused", 14, ""),
    ("combine_attention", "1x32x128", "nccl", 35, "NCCL's two collectives and the merge; 60 for 64x128x128"),
    ("combine_attention", "64x128x128", "nccl", 60, ""),
]


def empty(kind, **values):
    """Return a row of a study without what is measured."""
    missing = {f.name: None for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING}
    return kind(**(missing | values), note="not measured")


def row(study, figure, predicted, source, other=None, note="", **names):
    """Return a prediction of a measured row with these values."""
    found = {"study": study, "row": names, "figure": figure, "predicted": round(predicted, 4), "source": source}
    return found | ({"other": round(other, 4)} if other else {}) | ({"note": note} if note else {})


def collectives():
    """Predict collectives in graphs: NCCL's, every variant of copy engines, and the choice of ``auto``."""
    for kind in KINDS:
        named = {"dtype": "bfloat16", "launch": "graph", "tensors": 1}
        for nbytes in SIZES:
            for in_place in (True, False):
                where = named | {"collective": str(kind), "bytes": nbytes, "in_place": in_place}
                ways = [("nccl", ""), ("nccl_ce", ""), *(("dma", name) for name in variants(kind))]
                for implementation, variant in ways:
                    one = {**where, "implementation": implementation, "variant": variant, "prelaunch": False}
                    if implementation == "dma" and in_place and kind is Kind.ALL_TO_ALL and variant != "swap":
                        continue  # the others need a second buffer
                    found = predict_collective(MACHINE, empty(CollectiveRow, **one))
                    if found:
                        yield row("collectives", "time_us", found[0], "model", *found[1:], **one)
                asked = ExplainOptions(kind=kind, nbytes=nbytes, machine="h200x8", captured=True, in_place=in_place)
                choice = explain(asked).choice
                for candidate, expected in choice.table:
                    if candidate == choice.candidate:
                        taken = f"{candidate.implementation} {candidate.variant}"
                        yield row(
                            "collectives", "time_us", expected, "table", note=taken, **where, implementation="auto"
                        )


def pairs():
    """Predict pairs of a GEMM and a collective, from the description alone."""
    for kind in KINDS[:2] + KINDS[3:]:
        options = C3Options(workloads=PAIRS, collectives=(kind,), strategies=PAIRED)
        for found in predict_pairs(MACHINE, options):
            named = {n: getattr(found, n) for n in ("gemm", "m", "n", "k", "dtype", "bytes", "strategy")}
            if found.time_us is not None:
                named |= {"collective": str(found.collective)}
                yield row("c3", "time_us", found.time_us, "model", note=found.note, **named)


def steps():
    """Predict training steps with FSDP2."""
    for text in CASES:
        case = parse_case(text)
        named = {"model": case.model.name, "layers": case.model.layers, "batch": case.batch, "seq": case.seq}
        for name in (*STRATEGIES, *FLOORS):
            one = {**named, "reduce_dtype": "bfloat16", "optimizer": False, "implementation": name}
            (time_us,) = predict_step(MACHINE, empty(FsdpRow, **one))
            yield row("fsdp", "step_ms", time_us / 1e3, "model", **one)


def whole():
    """Predict attention, decoding, experts, recommendation and MLPs: what a step exposes, or takes without ``none``."""
    for workload in workloads(WORKLOADS):
        for size in sizes_of(workload, (), on_cpu=False):
            for way, time_ms in predicted_ms(workload.name, size, MACHINE).items():
                named = {"workload": workload.name, "size": size, "way": way, "launch": "graph"}
                yield row("e2e", "exposed_ms or step_ms", time_ms, "model", **named)


def operators():
    """Predict fused operators and their unfused ways; a kernel's row is its fastest schedule's."""
    shapes = ((6, 6144), (138, 6144), (1, 8192), (64, 8192), (128, 8192))
    fastest = {}
    for options in (FusedOptions(), FusedOptions(ops=("all_reduce_rms_norm",), shapes=shapes)):
        for found in predict_operators(MACHINE, options):
            if found.implementation in ("fused", "unfused_nccl"):
                key = (str(found.op), found.shape, found.implementation)
                fastest[key] = min(found.time_us, fastest.get(key, found.time_us))
    for (op, shape, implementation), time_us in fastest.items():
        named = {"op": op, "shape": shape, "implementation": implementation, "launch": "graph"}
        yield row("fused", "time_us", time_us, "model", **named)


def by_hand():
    """Repeat what docs/lab/anchors.md predicts by hand."""
    for op, shape, implementation, time_us, note in BY_HAND:
        named = {"op": op, "shape": shape, "implementation": implementation, "launch": "graph"}
        yield row("anchors", "time_us", time_us, "hand", note=note, **named)


def compare(file, folder):
    """Print each measured row beside its prediction, and the median and worst distance by study and source."""
    predicted = json.loads(file.read_text())["rows"]
    off = {}
    for path in sorted(folder.glob("*.json")):
        content = json.loads(path.read_text())
        study = "anchors" if isinstance(content, list) else content.get("study")
        rows = content if isinstance(content, list) else content.get("rows", [])
        if not isinstance(content, list) and content.get("ranks") != 8:
            continue
        for one in predicted:
            if one["study"] != study:
                continue
            mine = [r for r in rows if all(r.get(name) == value for name, value in one["row"].items())]
            found = [us for r in mine for name in one["figure"].split(" or ") if (us := r.get(name)) is not None]
            if not found:
                continue
            measured = min(found[:1] if "exposed" in one["figure"] else found)
            told = min((one["predicted"], one.get("other") or one["predicted"]), key=lambda t: abs(t - measured))
            ratio = told / measured
            off.setdefault((study, one["source"]), []).append(abs(ratio - 1))
            words = " ".join(str(v) for v in one["row"].values() if v not in (False, "", 1))
            print(f"{study:12} {words:90} measured {measured:10.4g} predicted {told:10.4g} ratio {ratio:.2f}")
    for (study, source), values in off.items():
        middle, worst = statistics.median(values), max(values)
        print(
            f"{study} ({source}): {len(values)} rows, {100 * middle:.1f}% off in the median, {100 * worst:.1f} at worst"
        )
    return 0 if off else 1


def main(file, folder=None):
    """Predict into a file, or compare it with a folder of measured files."""
    if folder is not None:
        return compare(Path(file), Path(folder))
    rows = [*collectives(), *pairs(), *steps(), *whole(), *operators(), *by_hand()]
    write_numbers(Path(file), "h200x8_predicted", MACHINE, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
