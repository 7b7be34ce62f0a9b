"""Serving a decoder with tensor parallelism: memory of a GPU, a step of decoding, and the prefill of a batch.

A layer is its GEMMs, which read a rank's weights, attention over the cache of keys and values, and short kernels; two
sums over the ranks stand between them, and nothing runs beside them. A step of decoding is in a CUDA graph. Compared
with decoding on two H200s (``tests/sim/test_serving.py``); the cache of latent attention, and experts, with nothing.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from sidelane.choice.store import builtin_for
from sidelane.program.collective import Kind
from sidelane.program.shape import CallShape
from sidelane_lab.cli.model import PlanOptions
from sidelane_lab.harness.table import Line, Table
from sidelane_lab.harness.terminal import progress, say, say_written, tables_console
from sidelane_lab.machines.numbers import write_report
from sidelane_lab.machines.spec import Machine, NumberSource, RunStatus
from sidelane_lab.model.collectives import PCIE_GBPS, key_of, library_us
from sidelane_lab.model.device import run_device
from sidelane_lab.model.gemm import gemm_us
from sidelane_lab.model.layer import COPY_SHARE, ELEMENT, Pass, Step, gemms_of, layer_kernels, reachable
from sidelane_lab.model.split import ours_us
from sidelane_lab.model.transformer import SCALE_BITS, Transformer
from sidelane_lab.pairs.workload import Gemm

SHORT_US = 33.0
"""Microseconds of a layer's norms, rotation, writes into the cache, and gaps between kernels in a graph. From a row
of results/h200x2/e2e.json: decoding with Llama 3.2 1B for one sequence, without communication."""
FEW_ROWS = 128
"""Rows below which a GEMM takes as long as its weights: half with 8 bits. Compared with nothing below 16 bits."""
WEIGHT_BYTES = {"bfloat16": 2.0, "fp8": 1.0, "int4": (4 + SCALE_BITS) / 8}
"""Bytes of a served weight by ``--dtype``; without it they are the model's, as it is published."""
QUANTIZED = ("fp8", "int4")
RUNS = {RunStatus.MEASURED: "predicted; collectives were measured on such machines"}
"""Words for what was compared, where more than the status says was not."""
SURE = (
    "compared were decoding of Llamas in a graph and prefill on two H200s alone: 13% off at worst in 34 rows, and 18 "
    "to 25% too fast in six of 256 sequences"
)
SERVERS = (
    "kernels for sums are not modelled here, {}; between two H200s a step with Sidelane's sums took 0.3 to 4.4% less "
    "time than with vLLM's kernel, and with norms inside 2.5 to 8.4% (docs/guide/serving.md)"
)
KERNEL_US, KERNEL_BYTES = 1.95, 300 << 10
"""Microseconds that a sum by vLLM's kernel (0.26.0, one shot) between two H200s takes longer than one by Sidelane,
which falls to none at so many bytes: rows ``sums`` of results/h200x2/servers.json, to 512 KiB within 0.15 us."""
LARGE_US, LARGE_BYTES = 2.4, 1 << 20
"""Microseconds that it takes less from so many bytes on: 2.4 to 3.1 in those rows."""
KERNEL_MOST = 8 << 20
"""Bytes below which vLLM takes that kernel; larger sums are the vendor's library's."""
BATCH = 8
"""Sequences that are decoded at once, if nothing is said."""
RESERVED_GB = 2.0
"""Memory that a server takes besides: contexts, graphs and work spaces; assumed."""


@dataclasses.dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that is served.

    Attributes:
        model: its sizes.
        batch: sequences that are decoded at once.
        context: tokens of each.
        tensor: ranks that share a layer.
        weight_bytes: of a parameter of layers; embedding and head have 16 bits.
    """

    model: Transformer
    batch: int
    context: int
    tensor: int
    weight_bytes: float = ELEMENT

    @property
    def part(self) -> Transformer:
        """A rank's part."""
        return self.model.divided(self.tensor)

    def memory_gb(self) -> dict[str, float]:
        """Return the gigabytes of a GPU by part."""
        model, part = self.model, self.part
        weights = self.weight_bytes * part.layers * part.parameters + ELEMENT * part.ends
        cache = ELEMENT * self.batch * self.context * model.layers * part.kv_size
        largest = ELEMENT * self.context * (4 * model.hidden + 2 * part.feed) + 4 * self.batch * model.vocabulary
        found = {"weights": weights, "KV cache": cache, "activations": largest}
        return {name: nbytes / 1e9 for name, nbytes in found.items()} | {"reserved": RESERVED_GB}


def decode_us(machine: Machine, served: ServedModel, *, ours: bool) -> float:
    """Return the time of a step that makes a token of each sequence; ``ours``: sums by Sidelane where it is faster."""
    part, batch = served.part, served.batch
    layer = sum(gemm_us(machine, gemm) for gemm in gemms_of(Step(part, batch, 1), backward=False))
    if part.experts:  # of which the GEMMs above read one
        further = part.experts * (1 - (1 - served.model.active / served.model.experts) ** batch) - 1
        weights = sum(outputs * inputs for outputs, inputs in part.gated(part.expert_feed))
        layer += ELEMENT * max(0.0, further) * weights / COPY_SHARE / reachable(machine)
    if batch < FEW_ROWS:  # a GEMM takes as long as its weights
        layer *= served.weight_bytes / ELEMENT
    layer += ELEMENT * batch * served.context * part.kv_size / COPY_SHARE / reachable(machine)
    head = gemm_us(machine, Gemm(batch, part.vocabulary, part.hidden, "bfloat16"))
    return part.layers * (layer + SHORT_US) + head + _sums_us(machine, served, batch, ours=ours)


def server_us(machine: Machine, served: ServedModel) -> float | None:
    """Return the time of such a step by vLLM's own kernel between two GPUs with NVLink; None: it is not modelled."""
    nbytes = ELEMENT * served.batch * served.model.hidden
    is_linked = machine.links.peak_gbps > PCIE_GBPS and machine.runs is not RunStatus.UNSUPPORTED
    if served.tensor != 2 or not is_linked:
        return None
    if nbytes >= KERNEL_MOST:
        return decode_us(machine, served, ours=False)
    ranks = dataclasses.replace(machine, nodes=1, gpus=2)
    theirs, more = library_us(ranks, Kind.ALL_REDUCE, nbytes), KERNEL_US * max(0.0, 1 - nbytes / KERNEL_BYTES)
    own = _own_us(ranks, nbytes) + more - LARGE_US * (nbytes >= LARGE_BYTES)
    return decode_us(machine, served, ours=False) + 2 * served.model.layers * (min(theirs, own) - theirs)


def prefill_us(machine: Machine, served: ServedModel, *, ours: bool) -> float:
    """Return the time until the first token of one sequence."""
    step = Step(served.part, served.context, served.context)
    layer = sum(run_device(machine, [one]).time_us for one in layer_kernels(machine, step, Pass(False, gathered=False)))
    return served.part.layers * layer + _sums_us(machine, served, served.context, ours=ours)


def _sums_us(machine: Machine, served: ServedModel, tokens: int, *, ours: bool) -> float:
    """Return the time of two sums a layer over the ranks that share it."""
    if served.tensor == 1:
        return 0.0
    ranks = dataclasses.replace(machine, nodes=1, gpus=served.tensor)
    nbytes = ELEMENT * tokens * served.model.hidden
    theirs = library_us(ranks, Kind.ALL_REDUCE, nbytes)
    return 2 * served.model.layers * (min(theirs, _own_us(ranks, nbytes)) if ours else theirs)


def _own_us(ranks: Machine, nbytes: int) -> float:
    """Return the time of Sidelane's sum in a graph: measured, as ``sidelane explain`` has it, or else predicted."""
    table = None if ranks.runs is RunStatus.UNSUPPORTED else builtin_for(key_of(ranks), ranks.gpus)
    call = CallShape(Kind.ALL_REDUCE, ranks.gpus, nbytes, captured=True)
    curves = table.profile.comparable(call) if table and table.profile else ()
    return min((curve.at(nbytes) for curve in curves), default=0.0) or ours_us(ranks, Kind.ALL_REDUCE, nbytes)


def verdict(model: Transformer, machine: Machine, left_gb: float, how: str = "") -> str:
    """Return the first line of an answer: does it fit, and by how much."""
    words = f"fits{how}", f"{left_gb:.0f} GB of each GPU are left"
    fits, left = words if left_gb >= 0 else (f"does not fit{how}", f"each GPU lacks {-left_gb:.0f} GB")
    size = (model.whole or model.total) / 1e9
    return (
        f"{model.name} ({size:{'.3g' if size < 999.5 else '.0f'}} B) {fits} on {machine.title}: {left} "
        f"({RUNS.get(machine.runs, machine.runs)})."
    )


def left_out(model: Transformer, *more: str) -> list[str]:
    """Return a line that says what is not modelled."""
    loads = ["uneven loads of experts"] if model.experts else []
    return [f"Not modelled: {', '.join(['pipeline parallelism', *model.left_out, *loads, *more])}."]


def main(machine: Machine, model: Transformer, options: PlanOptions) -> None:
    """Print a plan for serving: by tensor parallelism, or as it is asked for.

    Raises:
        ValueError: ranks that cannot share a layer.
    """
    console = tables_console(options.json)
    usual = [n for n in (1, 2, 4, 8) if n <= machine.gpus and model.heads % n == 0]
    if (options.tensor or 1) > machine.gpus:
        raise ValueError(f"plan: --tp {options.tensor} needs more than the {machine.gpus} GPUs of a node")
    rows = []
    with progress("predicting") as update:
        for n in [options.tensor] if options.tensor else usual:
            update(f"TP {n}")
            sizes = (
                options.batch or BATCH,
                options.length,
                n,
                WEIGHT_BYTES.get(options.dtype, model.bits / 8 or ELEMENT),
            )
            rows.append(_row(machine, ServedModel(model, *sizes)))
    for line in answer(machine, model, rows):
        say(console, line, style="bold")
    console.print()
    lines = [
        Line((*(str(row[name]) for name in ("tensor", "most_sequences")), *(f"{row[name]:.3g}" for name in FIGURES)))
        for row in rows
    ]
    title = (
        f"{model.name}, {options.batch or BATCH} sequences of {options.length} tokens, on {machine.title}: predicted"
    )
    console.print(Table(title, ("TP", "sequences\nthat fit", *FIGURES.values()), tuple(lines), keys=1).to_rich())
    say_written(write_report(options.json, options.report, "plan", machine, rows, f"plan-{model.name}-served"))


FIGURES = {
    "memory_gb": "GB",
    "decode_ms": "decode\nms",
    "decode_library_ms": "by the\nlibrary",
    "prefill_ms": "prefill of\none, ms",
    "tokens_per_s_per_gpu": "tokens/s\nper GPU",
}


def _row(machine: Machine, served: ServedModel) -> dict[str, Any]:
    """Return the object that ``--json`` writes of a degree of tensor parallelism."""
    memory = served.memory_gb()
    others = sum(memory.values()) - memory["KV cache"]
    room = (machine.gpu.memory_gb - others) / (memory["KV cache"] / served.batch)
    kernel = server_us(machine, served)
    decode, theirs = (decode_us(machine, served, ours=ours) / 1e3 for ours in (True, False))
    return {
        "model": served.model.name,
        "tensor": served.tensor,
        "batch": served.batch,
        "weight_bytes": served.weight_bytes,
        "context": served.context,
        "memory": memory,
        "memory_gb": sum(memory.values()),
        "fits": sum(memory.values()) <= machine.gpu.memory_gb,
        "most_sequences": max(0, int(room)),
        "decode_ms": decode,
        "decode_library_ms": theirs,
        "decode_server_ms": kernel and kernel / 1e3,
        "prefill_ms": prefill_us(machine, served, ours=True) / 1e3,
        "tokens_per_s_per_gpu": 1e3 * served.batch / decode / served.tensor,
    }


def answer(machine: Machine, model: Transformer, rows: list[dict[str, Any]]) -> list[str]:
    """Say at which degree a model fits, what it reaches, and what to write."""
    fitting = [row for row in rows if row["fits"]]
    best = max(fitting or rows[-1:], key=lambda row: row["tokens_per_s_per_gpu"])
    tensor, batch, context = best["tensor"], best["batch"], best["context"]
    own = best["decode_server_ms"]
    kernel = f"{own:.2f} with vLLM's own kernel, " if own else ""
    if own and ELEMENT * batch * model.hidden >= KERNEL_MOST:
        kernel = "vLLM leaves sums of so many bytes to the library: "
    parts = ", ".join(f"{name} {part:.3g}" for name, part in best["memory"].items())
    lines = [
        verdict(model, machine, machine.gpu.memory_gb - best["memory_gb"], f" at TP {tensor}"),
        f"Each GPU has {machine.gpu.memory_gb:.0f} GB and needs about {best['memory_gb']:.0f} GB: {parts}; "
        f"{best['most_sequences']} sequences of {context} tokens would fit.",
        f"{'A' if fitting else 'If it did: a'} step of decoding {batch} sequences takes {best['decode_ms']:.2f} ms "
        f"({kernel}{best['decode_library_ms']:.2f} with the vendor's library): {1e3 / best['decode_ms']:.0f} tokens/s "
        f"each, {best['tokens_per_s_per_gpu']:,.0f} per GPU; prefill of {context} tokens {best['prefill_ms']:.0f} ms.",
    ]
    if not fitting and (other := _what_fits(machine, model, best)):
        lines.append(f"It fits {' or '.join(other)}.")
    if fitting and machine.runs is not RunStatus.UNSUPPORTED:
        taken = best["decode_ms"] < min(own or math.inf, best["decode_library_ms"])
        is_open = tensor > 1 and not own and machine.links.peak_gbps <= PCIE_GBPS and not machine.through_host
        why = ", and try it with VLLM_PLUGINS=sidelane: its kernels are not modelled over PCIe" * is_open
        lines.append(f"Write: {'VLLM_PLUGINS=sidelane ' * taken}vllm serve MODEL --tensor-parallel-size {tensor}{why}")
    if tensor == 1 < min(machine.gpus, len(rows)) and fitting:
        each = ", ".join(f"{row['tokens_per_s_per_gpu']:,.0f} at TP {row['tensor']}" for row in fitting)
        lines.append(
            f"That is {machine.gpus} servers, one on each GPU, of which Sidelane does nothing: {each} per GPU."
        )
    whose = "the server's own" if machine.links.peak_gbps > PCIE_GBPS else "neither Sidelane's nor the server's own"
    modelled = "" if own or tensor == 1 or machine.through_host else f"; {SERVERS.format(whose)}"
    known = "; ".join((RUNS.get(machine.runs, machine.runs), *assumed(machine)))
    lines.append(f"How sure: {known}; {SURE}{modelled}.")
    return lines + left_out(model, "requests that come and go", "energy")


def assumed(machine: Machine) -> list[str]:
    """Return words for the numbers that nobody measured; none where all were."""
    sources = [quantity.source for quantity in machine.quantities().values()]
    n = sources.count(NumberSource.ASSUMED)
    return [f"{n} of {len(sources)} numbers of this machine are assumed"] if n else []


def _what_fits(machine: Machine, model: Transformer, row: dict[str, Any]) -> list[str]:
    """Return what makes a model fit that does not: more ranks, weights in 8 bits, fewer sequences."""
    served = ServedModel(model, row["batch"], row["context"], row["tensor"], row["weight_bytes"])
    tried = {
        **{f"at TP {n}": dataclasses.replace(served, tensor=n) for n in (2, 4, 8) if n <= machine.gpus},
        **{f"with --dtype {name}": dataclasses.replace(served, weight_bytes=WEIGHT_BYTES[name]) for name in QUANTIZED},
        "with --batch 1": dataclasses.replace(served, batch=1),
    }
    return [words for words, one in tried.items() if sum(one.memory_gb().values()) <= machine.gpu.memory_gb]
