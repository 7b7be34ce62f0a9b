"""Kernels of fused operators as an H200 gets them: compiled here, where no GPU is."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import tempfile
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from marks import long

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget

from sidelane.device.language import COMPILE_OPTIONS, compiling_for
from sidelane.ops import (
    decode_context,
    dispatch_gemm,
    embedding,
    embedding_backward,
    embedding_tables,
    expert_slots,
    experts,
    gemm,
    gemv,
    rms_norm,
    rms_norm_kernels,
    rows,
    token_rows,
)
from sidelane.ops.handle import register_limit
from sidelane.ops.scale_out import embedding as far_embedding
from sidelane_lab.studies.fused import single_rank

H200 = GPUTarget("cuda", 90, 32)
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
OPTIONAL = {"stamps", "scale", "quantized", "own_scales", "terms", "factors"}
"""Arguments that may be None, and are unless a test says that they are there (...)."""

MOST_STACK_BYTES = 128
"""Of a thread: next to nothing is spilled."""

MOST_SHARED_BYTES = 232448
"""Of a block on an H200. A launch that wants more is refused there."""


def made_of(
    kernel: Any,
    kinds: str,
    constants: Mapping[str, object],
    warps: int,
    limit: Mapping[str, int] = MappingProxyType({}),
    *,
    multiples: Sequence[str] = (),
) -> Any:
    """Compile a kernel as Triton does.

    ``kinds``: of the arguments that are no constants, in their order; ``limit``: of registers; ``multiples``: those
    that are multiples of 16, as Triton finds out at a launch.
    """
    if "stamps" in kernel.arg_names:
        constants = {**dict.fromkeys(OPTIONAL & set(kernel.arg_names)), **constants}
        constants = {name: value for name, value in constants.items() if value is not ...}
    names = [name for name in kernel.arg_names if name not in constants]
    signature = dict(zip(names, kinds.split(), strict=True)) | dict.fromkeys(constants, "constexpr")
    ordered = {name: signature[name] for name in kernel.arg_names}
    known = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in multiples}
    source = triton.compiler.ASTSource(kernel, ordered, dict(constants), known)
    with compiling_for("cuda"):
        return triton.compile(source, target=H200, options={**COMPILE_OPTIONS, "num_warps": warps, **limit})


def compiled(
    *arguments: Any, multiples: Sequence[str] = (), most_shared_bytes: int = MOST_SHARED_BYTES
) -> tuple[str, int, int]:
    """PTX, registers and stack of a thread; see :func:`made_of`."""
    made = made_of(*arguments, multiples=multiples)
    assert made.metadata.shared <= most_shared_bytes
    return made.asm["ptx"], *usage(made.asm["cubin"])


def usage(binary: bytes) -> tuple[int, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [CUOBJDUMP, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (registers,), (stack,) = re.findall(r"REG:(\d+)", text), re.findall(r"STACK:(\d+)", text)
    return int(registers), int(stack)


def with_ones(kernel: Any, kinds: str, constants: Mapping[str, object]) -> tuple[str, dict[str, object]]:
    """``kinds`` and ``constants`` where every integer is 1: Triton makes a constant of it, a number without dtype."""
    names = [name for name in kernel.arg_names if name not in constants and name not in OPTIONAL]
    ones = {name: 1 for name, kind in zip(names, kinds.split(), strict=True) if kind == "i32"}
    return " ".join(kind for kind in kinds.split() if kind != "i32"), {**constants, **ones}


CELLS = "*i64 *i64 *i64 *{0} *{1} *{0} i32 i32 i32 i32 i32 i32 i32"


def compiled_cells(
    tiling: gemv.Tiling, kinds: str, *, ranks: int, tokens: int, **given: object
) -> tuple[str, int, int]:
    """Of whole tiles of aligned rows; but for ``rows``, of which nothing is known."""
    options = tiling.constants(ranks=ranks, padded=tokens, wide="*fp32 *fp32 *fp32" in kinds)
    constants = {name: value for name, value in options.items() if name in gemv.KERNEL.arg_names}
    multiples = ("weight", "x", "columns", "weight_stride", "x_stride")
    element = 4 if "fp32 *fp32 *fp32" in kinds else 2
    loaded = element * tiling.columns * (tiling.rows + tokens)
    return compiled(
        gemv.KERNEL,
        kinds,
        {**constants, "EVEN": True, **given},
        tiling.warps,
        multiples=multiples,
        most_shared_bytes=(tiling.stages - 1) * loaded + gemv.SCRATCH_BYTES,
    )


@pytest.mark.parametrize(
    ("kilobytes", "one_token", "dots"), [(228, (4, 4), (5, 5)), (164, (4, 3), (5, 4)), (100, (3, 2), (4, 2))]
)
def test_stages_are_as_many_as_shared_memory_has_room_for(
    monkeypatch: pytest.MonkeyPatch, kilobytes: int, one_token: tuple[int, int], dots: tuple[int, int]
) -> None:
    """Of bfloat16 and float32, on a unit of an H100, of an A100 and of what has less."""
    unit = types.SimpleNamespace(shared_memory_per_multiprocessor=kilobytes << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: unit)
    for tokens, stages in ((1, one_token), (16, dots)):
        tiling = gemv.tiling_of(tokens, 8192)
        room = gemv.shared_bytes_of(torch.device("cuda", 0), tiling.per_unit)
        assert tuple(tiling.stages_in(room, size, size, tokens) for size in (2, 4)) == stages


@pytest.mark.parametrize(
    ("ranks", "tokens", "stages", "dtype"),
    [(2, 1, 0, "bf16"), (2, 1, 1, "bf16"), (8, 1, 0, "fp32"), (2, 16, 0, "bf16"), (3, 16, 0, "fp32")],
)
def test_gemv_all_reduce_in_cells_compiles(ranks: int, tokens: int, stages: int, dtype: str) -> None:
    tiling = gemv.tiling_of(tokens, 8192)
    tiling = dataclasses.replace(tiling, stages=stages or tiling.stages)
    text, registers, stack = compiled_cells(tiling, CELLS.format(dtype, dtype), ranks=ranks, tokens=tokens)
    assert stack <= MOST_STACK_BYTES and registers <= tiling.registers, (registers, stack)
    assert ("cp.async.cg" in text) == (tiling.stages > 1), "weights are on their way while others are added up"
    assert ".sys.release" not in text, "words carry their own readiness"


@pytest.mark.parametrize("tokens", [1, 16])
def test_cells_load_ahead_stamp_as_well(tokens: int) -> None:
    tiling = gemv.tiling_of(tokens, 8192)
    kinds = CELLS.format("bf16", "bf16") + " *i64"
    text, *_ = compiled_cells(tiling, kinds, ranks=2, tokens=tokens, stamps=...)
    assert "globaltimer" in text and "cp.async.cg" in text


@pytest.mark.parametrize(("weight", "tokens"), [("fp8e4nv", 1), ("fp8e5", 1), ("fp8e4nv", 16)])
def test_weights_of_8_bits_compile(weight: str, tokens: int) -> None:
    kinds = CELLS.replace("*{1} *{0}", "*{1} *{0} *fp32").format("bf16", weight)
    tiling = gemv.tiling_of(tokens, 8192)
    text, registers, stack = compiled_cells(tiling, kinds, ranks=2, tokens=tokens, scale=...)
    assert stack <= MOST_STACK_BYTES, (registers, stack)
    assert f"cvt.rn.f16x2.{'e4m3x2' if weight == 'fp8e4nv' else 'e5m2x2'}" in text, "what the GPU has for it"


NORM = "*i64 *i32 i32 *i64 *i64 *i64 *i32 *i32 *i32 *i32 *i32 i32 i32 i32 fp32"
PUSHED = "*i64 *i32 i32 *i64 *{0} *{0} *{0} *{0} *{0} *{0} i32 i32 i32 fp32"


NORM_DTYPES = {"bf16": triton.language.bfloat16, "fp16": triton.language.float16, "fp32": triton.language.float32}


def norm_in_cells(dtype: str, words: int, *, one: bool = True) -> dict[str, object]:
    """Constants of blocks with a slice of a row each, as on GPUs."""
    slice_words = rms_norm_kernels.SLICE_BYTES // 4
    slices = -(-words // slice_words)
    constants: dict[str, object] = {"N": 2, "W": slice_words, "SLICES": slices, "S": 1 << (slices - 1).bit_length()}
    constants |= {"PARTS": 1, "ONE": one, "WHOLE": words == slices * slice_words, "HAS_RESIDUAL": True}
    return constants | {"DTYPE": NORM_DTYPES[dtype], "ELEMENT_BYTES": 4 if dtype == "fp32" else 2}


def norm_pushed(dtype: str, words: int) -> dict[str, object]:
    slices, slice_bytes = -(-4 * words // rms_norm_kernels.SLICE_BYTES), rms_norm_kernels.SLICE_BYTES
    padded = 1 << (slices - 1).bit_length()
    return {"N": 2, "HP": padded * slice_bytes // (4 if dtype == "fp32" else 2), "S": padded, "HAS_RESIDUAL": True}


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize(("words", "one"), [(4096, True), (8192, False), (3000, True), (100, True)])
def test_all_reduce_rms_norm_in_cells_compiles(dtype: str, words: int, one: bool) -> None:
    """Rows of whole slices, of others and of a single one; a row for a block, and several."""
    constants = norm_in_cells(dtype, words, one=one)
    known = ("cells", *(["words"] if constants["WHOLE"] else []), *NORM_TENSORS)
    text, registers, stack = compiled(rms_norm_kernels.CELLS_KERNEL, NORM, constants, 1, multiples=known)
    assert not stack and registers <= 128, (registers, stack)
    assert "release" not in text and "acq_rel" not in text, (
        "words carry their own readiness, and streams order launches"
    )
    assert ".gpu.relaxed.add" in text, "the end of a launch"
    assert "ld.volatile" in text
    if constants["WHOLE"]:
        assert "ld.volatile.global.v2.b64" in text and "st.global.v2.b64" in text, "cells go and come in wide accesses"
        assert "ld.global.v4.b32" in text and "st.global.v4.b32" in text


def test_cells_in_host_memory_are_loaded_once() -> None:
    """No two loads touch the same 32 bytes, which would cross PCIe twice."""
    for warps in (1, rms_norm.HOST_WARPS):
        known = ("cells", "words", *NORM_TENSORS)
        text, *_ = compiled(rms_norm_kernels.CELLS_KERNEL, NORM, norm_in_cells("bf16", 4096), warps, multiples=known)
        polled = re.findall(r"ld\.volatile\.global\.v2\.b64 .*\[ (%rd\d+)", text)
        twice = [address for address in polled if re.search(rf"add\.s64\s+{address}, %rd\d+, 16;", text)]
        assert polled and bool(twice) == (warps == 1), (warps, polled)


@pytest.mark.parametrize("ranks", [1, 8])
def test_all_reduce_rms_norm_in_cells_compiles_for_ranks(ranks: int) -> None:
    constants = norm_in_cells("bf16", 4096) | {"N": ranks, "HAS_RESIDUAL": ranks == 1}
    _, registers, stack = compiled(rms_norm_kernels.CELLS_KERNEL, NORM, constants, 1)
    assert not stack and registers <= 128, (registers, stack)


@pytest.mark.parametrize(("dtype", "hidden", "warps"), [("bf16", 2048, 4), ("bf16", 8192, 8), ("bf16", 16384, 16)])
@pytest.mark.parametrize("ranks", [2, 8])
def test_pushed_all_reduce_rms_norm_compiles(dtype: str, hidden: int, warps: int, ranks: int) -> None:
    constants = norm_pushed(dtype, hidden // 2) | {"N": ranks}
    known = ("staging", "output", "total_output", "x", "residual", "weight", "hidden")
    kernel = rms_norm_kernels.PUSHED_KERNEL
    text, registers, stack = compiled(kernel, PUSHED.format(dtype), constants, warps, multiples=known)
    assert stack <= MOST_STACK_BYTES and registers <= 128, (registers, stack)
    assert re.search(r"st\.global\.v4\.b32", text), "rows go in wide stores"
    assert ".sys.release.exch" in text and "ld.acquire.sys" in text and ".gpu.acq_rel.add" in text


NORM_TENSORS = ("output", "total_output", "x", "residual", "weight")


@pytest.mark.parametrize(
    ("dtype", "words", "warps"),
    [
        *(("bf16", 1024, 4), ("bf16", 8192, 16), ("fp32", 4096, 8), ("fp16", 1100, 8)),
        *(long("bf16", 256, 4), long("bf16", 4096, 8), long("fp32", 256, 4), long("fp32", 8192, 16)),
        *(long("bf16", 130, 4), long("fp32", 3000, 8), long("fp32", 60, 4)),
    ],
)
@pytest.mark.parametrize("other", ["pushed", "cells"])
def test_both_norms_add_a_row_up_in_one_order(dtype: str, words: int, warps: int, other: str) -> None:
    """A row's bits do not depend on its batch: not on the schedule, not on the turns of a block, and not on what Triton
    knows of numbers of tokens, or of addresses. Every variant is compared with the first of pushed rows.
    """
    kinds, of_pushed, of_cells = PUSHED.format(dtype), norm_pushed(dtype, words), norm_in_cells(dtype, words)
    pushed, cells = rms_norm_kernels.PUSHED_KERNEL, rms_norm_kernels.CELLS_KERNEL
    one, wide = {"tokens": 1}, ("tokens", "most_tokens")
    row_in_cells, row_pushed = (("words",), ("hidden",)) if words % 16 == 0 else ((), ())
    first = order_of(pushed, kinds, of_pushed, warps, ("staging", *row_pushed, *NORM_TENSORS))
    found = {
        order_of(pushed, kinds, of_pushed, warps, ("staging", *row_pushed, *wide, *NORM_TENSORS)),
        order_of(pushed, kinds, of_pushed, warps, ()),
    } if other == "pushed" else {
        order_of(cells, NORM, of_cells, 1, ("cells", *row_in_cells, *NORM_TENSORS)),
        order_of(cells, NORM, of_cells, rms_norm.HOST_WARPS, ("cells", *row_in_cells, *NORM_TENSORS)),
        order_of(cells, NORM, of_cells | {"ONE": False}, 1, ("cells", *row_in_cells, *wide, *NORM_TENSORS)),
        order_of(cells, NORM.replace(" i32 i32 i32 fp32", " i32 i32 fp32"), of_cells | one, 1,
                 ("cells", *row_in_cells, *NORM_TENSORS)),
        order_of(cells, NORM, of_cells | {"N": 8, "HAS_RESIDUAL": False}, 1, ("cells", *row_in_cells, *NORM_TENSORS)),
        order_of(cells, NORM, of_cells, 1, ()),
    }  # fmt: skip
    assert found == {first}


def order_of(kernel: Any, kinds: str, constants: Mapping[str, object], warps: int, multiples: Sequence[str]) -> object:
    """How a kernel adds up a row: what it does with how many numbers of a slice, then of a row.

    Neighbours are split, so that no layout has a part in it, until one number is left for each lane, in their order;
    and of squares and sums the compiler makes no other operations than those that the kernel names.
    """
    made = made_of(kernel, kinds, constants, warps, multiples=multiples)
    text, ptx = made.asm["ttgir"], made.asm["ptx"]
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
    (name,) = re.findall(r"\}\) : \(tensor<\d+x32xf32, (#\w+)>\) ->", text)
    sizes = dict(re.findall(r"(\w+) = \[([\d, ]+)\]", layouts[name]))
    across = [sizes[field].split(", ")[1] for field in ("sizePerThread", "threadsPerWarp", "warpsPerCTA")]
    assert across == ["1", "32", "1"], layouts[name]
    squares = re.findall(r"fma\.rn\.f32\s+%\w+, (%\w+), (%\w+), (%\w+);", ptx)
    products = dict(re.findall(r"mul\.f32\s+(%\w+), (%\w+), \2;", ptx))
    assert squares and len(squares) == ptx.count("fma."), "nothing else is contracted"
    assert all(one == other and last in products for one, other, last in squares)
    operations = re.findall(r"= (?:arith|math)\.(\w+f|fma) [^:\n]*: (?:tensor<\d+x(\d+)xf32|f32\b)", text)
    first = next(number for number, (what, _) in enumerate(operations) if what == "mulf")
    last = next(number for number, (what, _) in enumerate(operations) if what == "divf")
    kinds_of_numbers = sorted({*re.findall(r"\b(?:fma|mul|add|div|sqrt)\.[\w.]*f32\b", ptx)})
    return (*operations[first:last], *kinds_of_numbers)


@pytest.mark.parametrize(("dtype", "index", "weighted"), [("fp32", "i32", False), ("bf16", "i64", True)])
@pytest.mark.parametrize("dim", [256, 92])
def test_embedding_all_to_all_compiles(dtype: str, index: str, weighted: bool, dim: int) -> None:
    element = {"fp32": triton.language.float32, "bf16": triton.language.bfloat16}[dtype]
    warps, rows = embedding_tables.threads_of(dim, {"fp32": 4, "bf16": 2}[dtype])
    constants = {"D": dim, "DP": 1 << (dim - 1).bit_length(), "L": rows, "DTYPE": element, "ALIGNED": dim % 8 == 0}
    constants |= {"MEAN": not weighted, "WEIGHTED": weighted}
    kinds = f"*i64 *i64 *i32 *i64 *{index} *{index} *{dtype if weighted else index} i32 i32 i32 i32 i32"
    text, registers, stack = compiled(embedding.KERNEL, kinds, constants, warps)
    assert stack <= MOST_STACK_BYTES, (registers, stack)
    assert registers * 32 * embedding_tables.UNIT_WARPS <= 1 << 16, "all programs of a compute unit have room"
    assert (dim == 92) or re.search(r"ld\.global[a-z0-9_:.]*\.v4\.b32", text), "wide loads of rows"
    assert text.count(".sys.acq_rel.add") == 1, "the last program"


@pytest.mark.parametrize(
    ("dtype", "weighted", "sparse"), [("fp32", False, False), ("bf16", True, False), ("fp16", False, True)]
)
def test_the_backward_of_embeddings_compiles(dtype: str, weighted: bool, sparse: bool) -> None:
    names = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
    warps, rows = embedding_tables.threads_of(256, {"fp32": 4}.get(dtype, 2))
    constants = {"D": 256, "DP": 256, "L": rows, "DTYPE": getattr(triton.language, names[dtype]), "ALIGNED": True}
    constants |= {"MEAN": not weighted, "WEIGHTED": weighted, "SPARSE": sparse}
    some = dtype if weighted else "i64"
    kinds = f"*i64 *i64 *{dtype} *{dtype} *i64 *i64 *{some} *i64 *i32 *i64 *{dtype if sparse else 'fp32'}"
    kinds += f" *{some if weighted else dtype} i32 i32 i32"
    text, registers, stack = compiled(embedding_backward.KERNEL, kinds, constants, warps)
    assert stack <= MOST_STACK_BYTES, (registers, stack)
    assert registers * 32 * embedding_tables.UNIT_WARPS <= 1 << 16, "all fit on a compute unit at the same time"
    assert (re.search(r"(red|atom)[.a-z]*\.add\.[a-z0-9.]*f32", text) is None) == sparse


@pytest.mark.parametrize(("dtype", "experts"), [("bf16", 1), ("fp16", 1), ("fp32", 1), ("bf16", 32)])
def test_gemm_all_to_all_compiles(dtype: str, experts: int) -> None:
    wide, tiles = dtype == "fp32", gemm.TileSizes.of({"fp32": torch.float32}.get(dtype, torch.bfloat16))
    element = {"bf16": triton.language.bfloat16, "fp16": triton.language.float16}.get(dtype, triton.language.float32)
    constants = {"ROWS": tiles.rows, "COLS": tiles.columns, "DEPTH": tiles.depth, "WIDE": wide, "GROUP": tiles.group}
    constants |= {"DTYPE": element, "WHOLE": True, "ALIGNED": True, "EP": experts}
    constants |= {"TERMS": 0, **({"experts": 1} if experts == 1 else {})}
    kinds = f"*i64 *i64 *i32 *{dtype} *{dtype} *i64 i32 i32 i32 i32 i32 i32 i32{'' if experts == 1 else ' i32'}"
    known = ("x", "weight", "depth", "columns", "x_stride", "weight_stride", "expert_stride")
    text, registers, stack = compiled(gemm.KERNEL, kinds, constants, tiles.warps, multiples=known)
    assert stack <= (8 if wide else 0) and registers <= 255, (registers, stack)
    assert ("wgmma" in text) is not wide and "cp.async" in text, "tensor cores, and loads ahead"
    assert text.count(".sys.acq_rel.add") == 1, "the last program"


def test_rows_without_a_product_compile() -> None:
    tiles = gemm.ROW_TILES
    constants = {"ROWS": tiles.rows, "COLS": tiles.columns, "DEPTH": tiles.depth, "WIDE": False, "GROUP": tiles.group}
    constants |= {"DTYPE": triton.language.bfloat16, "WHOLE": True, "ALIGNED": True}
    constants |= {"TERMS": 0, "EP": 1, "experts": 1}
    kinds = "*i64 *i64 *i32 *bf16 *i64 i32 i32 i32 i32 i32 i32 i32"
    known, constants = ("x", "depth", "columns", "x_stride"), {**constants, "weight": None}
    text, registers, stack = compiled(gemm.KERNEL, kinds, constants, tiles.warps, multiples=known)
    assert stack <= 8 and registers * 32 * tiles.warps * tiles.per_unit <= 1 << 16, (registers, stack)
    assert "wgmma" not in text and re.search(r"ld\.global[a-z0-9_:.]*\.v4\.b32", text), "wide loads of rows"


@pytest.mark.parametrize(("beside", "copies"), [(False, True), (True, True), (True, False)])
def test_rows_that_are_copied_on_compile(beside: bool, copies: bool) -> None:
    tiles, twin = gemm.ROW_TILES, "*i16 " * beside
    constants = {"ROWS": tiles.rows, "COLS": tiles.columns, "GROUP": tiles.group, "UNIT": token_rows.WIDE}
    constants |= {"COPIES": copies, **({} if beside else {"beside": None, "beside_into": None})}
    kinds = f"*i64 *i64 *i32 *i16 {twin}*i32 *i32 *i16 {twin}i32 i32 i32 i32 i32 i32"
    limit = register_limit(64, tiles.warps, tiles.per_unit)
    text, registers, stack = compiled(token_rows.KERNEL, kinds, constants, tiles.warps, limit)
    assert stack <= 32 and registers * 32 * tiles.warps * tiles.per_unit <= 1 << 16, (registers, stack)
    assert all(re.search(rf"{way}\.global[a-z0-9_:.]*\.v4\.b32", text) for way in ("ld", "st")), (
        "wide, of what is aligned"
    )


def test_places_of_experts_compile() -> None:
    count, place, leave = experts.ASSIGNING
    for kernel, kinds, constants, warps in (
        (count, "*i32 *i32 i32 i32", {"BLOCK": experts.BLOCK}, 8),
        (place, "*i32 *i32 *i32 *i32 *i32 i32 i32 i32 i32 i32", {"EP": 128, "BLOCK": experts.BLOCK}, 8),
        (
            expert_slots.ASSIGNING,
            "*i32 *i32 *i32 *i32 *i32 *i32 i32 i32 i32 i32 i32",
            {"KP": 8, "TOKENS": 64, "BLOCK": 2048},
            8,
        ),
        (leave, "*i32 *i32 *i32 i32 i32 i32 i32", {"KP": 8, "TOKENS": experts.TOKENS}, 4),
    ):
        for some, given in ((kinds, constants), with_ones(kernel, kinds, constants)):
            _, registers, stack = compiled(kernel, some, given, warps)
            assert stack <= 8 and registers <= 128, (kernel, registers, stack)


@pytest.mark.parametrize("dtype", ["bf16", long("fp32")])
def test_rows_of_float8_compile(dtype: str) -> None:
    constants: dict[str, object] = {"GROUPS": 8, "SCALED": 128, "LARGEST": 448.0, "LEAST": 1e-4}
    known = ("x", "values", "scales", "output", "columns", "x_stride", "width", "first_scale")
    kinds, names = f"*{dtype} *fp8e4nv *fp32 i32 i32 i32 i32", [name for name in known if name != "output"]
    text, _, stack = compiled(rows.QUANTIZE, kinds, constants, 4, multiples=names)
    assert stack <= 8 and "cvt.rn.satfinite.e4m3x2.f32" in text
    assert re.search(r"ld\.global[a-z0-9_:.]*\.v4\.b32", text), "wide loads of rows"
    kinds, names = (
        f"*fp8e4nv *fp32 *{dtype} *i32 i32 i32 i32",
        [name for name in known if name not in ("x", "x_stride")],
    )
    text, _, stack = compiled(rows.DEQUANTIZE, kinds, {"COLS": 1024, "SCALED": 128}, 4, multiples=names)
    assert stack <= 8 and re.search(r"st\.global\.v4\.b32", text), "rows go in wide stores"


@pytest.mark.parametrize(("terms", "has_factors"), [(1, False), (8, True), long(8, False), long(2, False)])
def test_rows_that_are_sums_compile(terms: int, has_factors: bool) -> None:
    tiles = gemm.SUM_TILES if terms > 1 else gemm.ROW_TILES
    constants = {"ROWS": tiles.rows, "COLS": tiles.columns, "DEPTH": tiles.depth, "WIDE": False, "GROUP": tiles.group}
    constants |= {"DTYPE": BF16, "WHOLE": True, "ALIGNED": True, "EP": 1}
    constants |= {
        "TERMS": terms,
        "experts": 1,
        "weight": None,
        "terms": ...,
        **({"factors": ...} if has_factors else {}),
    }
    kinds = f"*i64 *i64 *i32 *bf16 *i32 *i32{' *fp32' if has_factors else ''} i32 i32 i32 i32 i32 i32 i32"
    known = ("x", "depth", "columns", "x_stride")
    text, registers, stack = compiled(gemm.KERNEL, kinds, constants, tiles.warps, multiples=known)
    assert stack <= 8 and registers * 32 * tiles.warps * tiles.per_unit <= 1 << 16, (registers, stack)
    assert re.search(r"ld\.global[a-z0-9_:.]*\.v4\.b32", text), "wide loads of rows"
    constants = {"TERMS": terms, "ROWS": experts.ROWS, "COLS": experts.COLS}
    constants |= {} if has_factors else {"factors": None}
    constants |= {"own": None, "places": None} if has_factors else {}
    kinds = f"*bf16 *bf16 *i32 {'*fp32' if has_factors else '*bf16 *i32'} i32 i32 i32 i32"
    known = ("x", "output", "columns", "x_stride", "own", "own_stride")[: 4 if has_factors else 6]
    text, registers, stack = compiled(experts.KERNEL, kinds, constants, 4, multiples=known)
    assert stack <= 8 and registers <= 128, (registers, stack)
    assert re.search(r"st\.global\.v4\.b32", text), "rows go in wide stores"


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_rows_for_slots_of_experts_compile(dtype: str) -> None:
    kinds = f"*{dtype} *i32 *{dtype} i32 i32 i32 *fp32 *fp32 i32 i32 i32 i32"
    known = ("x", "output", "columns", "x_stride", "expert_stride", "column_stride")
    constants = {"TERMS": 8, "COLS": expert_slots.COLS, "GP": 64}
    text, registers, stack = compiled(expert_slots.KERNEL, kinds, constants, 4, multiples=known)
    assert stack <= 8 and registers <= 128, (registers, stack)
    assert re.search(r"st\.global\.v4\.b32", text), "rows go in wide stores"


DISPATCH_GEMM = "*i64 *i64 *{0} *i32 *{0} *{0} *i64 *{0} i32 i32 i32 i32 i32 i32 i32 i32"


@pytest.mark.parametrize(("experts", "dtype"), [(1, "bf16"), (1, "fp32"), (8, "bf16")])
def test_all_to_all_gemm_compiles(experts: int, dtype: str) -> None:
    wide, tiles = dtype == "fp32", gemm.TileSizes.of({"fp32": torch.float32}.get(dtype, torch.bfloat16))
    element = triton.language.float32 if wide else triton.language.bfloat16
    constants = {"ROWS": tiles.rows, "COLS": tiles.columns, "DEPTH": tiles.depth, "WIDE": wide, "GROUP": tiles.group}
    constants |= {"DTYPE": element, "WHOLE": True, "ALIGNED": True, "EP": experts}
    kinds = DISPATCH_GEMM.format(dtype)
    if experts == 1:  # Triton makes a constant of 1
        constants["experts"], kinds = 1, kinds.removesuffix(" i32")
    known = ("x", "weight", "output", "depth", "columns", "x_stride", "weight_stride", "gathered", "expert_stride")
    text, registers, stack = compiled(dispatch_gemm.KERNEL, kinds, constants, tiles.warps, multiples=known)
    assert stack <= MOST_STACK_BYTES and registers <= 255, (registers, stack)
    assert ("wgmma" in text) is not wide and "cp.async" in text, "tensor cores, and loads ahead"
    assert ".sys.release.exch" in text and "ld.acquire.sys" in text


def test_stamps_are_in_a_kernel_that_is_given_room_for_them_only() -> None:
    without, stamp = (
        compiled(
            rms_norm_kernels.PUSHED_KERNEL,
            PUSHED.format("bf16") + kind,
            {**norm_pushed("bf16", 1024), **given},
            4,
        )[0]
        for kind, given in (("", {}), (" *i64", {"stamps": ...}))
    )
    assert "globaltimer" not in without and without.count(".param .u64") + 1 == stamp.count(".param .u64")
    assert "globaltimer" in stamp


@pytest.mark.parametrize("name", ["norm in cells", "norm pushed", "backward of bags"])
def test_kernels_stamp_compile(name: str) -> None:
    dtype = {"DTYPE": triton.language.bfloat16}
    bags = dtype | {"D": 256, "DP": 256, "L": 4, "ALIGNED": True, "MEAN": False, "WEIGHTED": False, "SPARSE": False}
    kernel, kinds, constants = {
        "norm in cells": (rms_norm_kernels.CELLS_KERNEL, NORM, norm_in_cells("bf16", 1024)),
        "norm pushed": (rms_norm_kernels.PUSHED_KERNEL, PUSHED.format("bf16"), norm_pushed("bf16", 1024)),
        "backward of bags": (embedding_backward.KERNEL, BACKWARD, bags),
    }[name]
    assert "globaltimer" in compiled(kernel, kinds + " *i64", {**constants, "stamps": ...}, 4)[0]


COMBINE = "*i64 *i32 i32 *i64 *i64 *i32 *fp32 *i32 *fp32 i32 i32 i32 i32 i32 fp32"


def combine_of(words: int, ranks: int = 2) -> dict[str, object]:
    lanes, pitch = 1 << words.bit_length(), (words + 2) // 2 * 2
    of_dtype = {"DTYPE": triton.language.bfloat16, "ELEMENT_BYTES": 2}
    return of_dtype | {"N": ranks, "HM": 16, "W": words, "P": lanes, "PITCH": pitch, "ONE": False}


@pytest.mark.parametrize(("words", "ranks"), [(64, 2), long(64, 8), long(256, 2)])
def test_rows_of_heads_go_in_wide_accesses(words: int, ranks: int) -> None:
    known = ("cells_of", "cells", "output", "output_lse", "partial")
    kernel = decode_context.KERNEL
    text, registers, stack = compiled(kernel, COMBINE, combine_of(words, ranks), 1, multiples=known)
    assert stack <= MOST_STACK_BYTES and registers <= 128, (registers, stack)
    for access in (
        r"st\.global\.v2\.b64",
        r"ld\.volatile\.global\.v2\.b64",
        r"ld\.global\.v4\.b32",
        r"st\.global\.v4\.b32",
    ):
        assert re.search(access, text), access
    assert not re.search(r"st\.global\.b64", text), "cells go in pairs"


BACKWARD = "*i64 *i64 *bf16 *bf16 *i64 *i64 *bf16 *i64 *i32 *i64 *fp32 *bf16 i32 i32 i32"
BF16 = triton.language.bfloat16
BAGS = {"D": 1, "DP": 1, "L": 8, "DTYPE": BF16, "ALIGNED": False, "MEAN": True, "WEIGHTED": True}


@pytest.mark.parametrize(
    ("kernel", "kinds", "constants"),
    [
        (
            gemv.KERNEL,
            CELLS.format("bf16", "bf16"),
            {"N": 2, "R": 2, "ROWS": 16, "COLS": 512, "TP": 1, "WIDE": False, "EVEN": False}
            | {"STAGES": 4, "EVICT": "evict_first", "LANES": 256},
        ),
        (
            rms_norm_kernels.CELLS_KERNEL,
            NORM,
            norm_in_cells("bf16", 1),
        ),
        (rms_norm_kernels.PUSHED_KERNEL, PUSHED.format("bf16"), norm_pushed("bf16", 1)),
        (decode_context.KERNEL, COMBINE, {**combine_of(2), "HM": 1}),
        (
            embedding.KERNEL,
            "*i64 *i64 *i32 *i64 *i32 *i32 *bf16 i32 i32 i32 i32 i32",
            BAGS,
        ),
        (
            embedding_backward.KERNEL,
            BACKWARD,
            BAGS | {"SPARSE": False},
        ),
        (
            gemm.KERNEL,
            "*i64 *i64 *i32 *bf16 *bf16 *i64 i32 i32 i32 i32 i32 i32 i32 i32",
            {"ROWS": 64, "COLS": 64, "DEPTH": 32, "WIDE": False, "DTYPE": BF16}
            | {"GROUP": 8, "WHOLE": False, "ALIGNED": False, "EP": 1, "TERMS": 0},
        ),
        (
            dispatch_gemm.KERNEL,
            DISPATCH_GEMM.format("bf16"),
            {"ROWS": 64, "COLS": 64, "DEPTH": 32, "WIDE": False, "DTYPE": BF16}
            | {"GROUP": 8, "WHOLE": False, "ALIGNED": False, "EP": 1},
        ),
    ],
    ids=[
        "gemv",
        "rms_norm",
        "rms_norm_pushed",
        "combine_attention",
        "embedding",
        "embedding_backward",
        "gemm",
        "dispatch_gemm",
    ],
)
def test_sizes_of_one_compile(kernel: Any, kinds: str, constants: dict[str, object]) -> None:
    compiled(kernel, *with_ones(kernel, kinds, constants), 4)


def test_kernels_that_are_compared_compile() -> None:
    """The embedding alone, and one kernel for a residual and a norm (``sidelane fused``)."""
    warps, rows = embedding_tables.threads_of(256, 2)
    constants = {"D": 256, "DP": 256, "L": rows, "DTYPE": triton.language.bfloat16, "ALIGNED": True}
    text, registers, stack = compiled(
        single_rank.KERNELS[0],
        "*i64 *i64 *i64 *bf16 i32 i32 i32",
        constants,
        warps,
        multiples=("indices", "offsets", "out"),
    )
    assert stack <= MOST_STACK_BYTES and registers <= 128, (registers, stack)
    assert re.search(r"ld\.global\.(v4|L1.*v4)", text), "rows come in wide loads"
    known = ("x", "residual", "weight", "total", "out", "hidden")
    kinds = "*bf16 *bf16 *bf16 *bf16 *bf16 i32 fp32"
    text, registers, stack = compiled(single_rank.KERNELS[1], kinds, {"HP": 8192}, 8, multiples=known)
    assert stack <= MOST_STACK_BYTES, (registers, stack)
    assert re.search(r"st\.global\.v4\.b32", text), "rows go in wide stores"


FAR_EMBEDDING = "*i64 *i64 *i64 *bf16 *i32 *i64 *i32 *i32 *bf16 *i32 i32 i32 i32 i32 i32 i32"
FAR_BAGS = {"D": 256, "DP": 256, "L": 4, "DTYPE": BF16, "MEAN": False, "WEIGHTED": True}


@pytest.mark.parametrize("ones", [False, long(True)])
def test_an_operator_among_nodes_compiles(ones: bool) -> None:
    kinds, constants = FAR_EMBEDDING, FAR_BAGS | {"ALIGNED": True, "SLICE": 64, "TABLES": 8}
    if ones:
        kinds, constants = with_ones(far_embedding.KERNEL, kinds, constants)
    text, registers, stack = compiled(far_embedding.KERNEL, kinds, constants, 1)
    assert stack <= MOST_STACK_BYTES and registers <= 255, (registers, stack)
    assert text.count(".sys.release.exch.b32") >= 2 and ".sys.acq_rel.add.u64" in text, "words, and what acquires them"
    assert "ld.volatile" in text, "words in host memory are loaded only"


@pytest.mark.parametrize("own", [False, True], ids=["a scale", "scales of rows"])
def test_norms_in_8_bits_compile(own: bool) -> None:
    there: dict[str, object] = {"quantized": ..., "own_scales" if own else "scale": ...}
    cells, pushed = norm_in_cells("bf16", 4096) | there, norm_pushed("bf16", 4096) | there
    known = ("quantized", "staging", "hidden", *NORM_TENSORS)
    for kernel, kinds, constants, warps, multiples in (
        (rms_norm_kernels.CELLS_KERNEL, f"{NORM} *i16 *fp32", cells, 1, ("quantized", "cells", "words", *NORM_TENSORS)),
        (rms_norm_kernels.PUSHED_KERNEL, f"{PUSHED.format('bf16')} *u8 *fp32", pushed, 8, known),
    ):
        text, registers, stack = compiled(kernel, kinds, constants, warps, multiples=multiples)
        assert stack <= MOST_STACK_BYTES and registers <= 256, (registers, stack)
        assert "cvt.rn.satfinite.e4m3x2.f32" in text, "what the GPU has for it"
        assert not re.search(r"st\.global\.b(8|16)\b", text), "bytes go in wide stores"
