"""The command ``sidelane layouts``: all-to-alls that change the layout."""

from __future__ import annotations

import dataclasses

import click

from sidelane_lab.harness.options import StudyOptions, count, launches, option, study_command, words

ALONE, BESIDE = PARTS = ("alone", "beside")

Shape = tuple[int, int, int, int]
"""Batch, positions and heads of all ranks, and the size of a head."""


def parse_shape(text: str) -> Shape:
    """Read a shape such as ``1x32760x40x128``.

    Raises:
        ValueError: it is not four whole numbers above 0.
    """
    parts = text.split("x")
    if len(parts) != 4 or not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"layouts: shape (value={text!r}, allowed=BATCHxPOSITIONSxHEADSxSIZE, as 1x32760x40x128)")
    batch, positions, heads, size = map(int, parts)
    return batch, positions, heads, size


def read_shapes(context: click.Context, option: click.Parameter, value: tuple[str, ...]) -> tuple[Shape, ...]:
    """Read shapes, each once."""
    return tuple(dict.fromkeys(map(parse_shape, value)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayoutOptions(StudyOptions):
    """Time the all-to-all of sequence parallelism, from positions to heads and back.

    Sidelane's all-to-all with a layout, on symmetric and on ordinary tensors, next to permute + NCCL (on CPUs Gloo) +
    permute, and to contiguous all-to-alls of as many bytes: alone, eager and in graphs, and next to a GEMM.
    """

    study = "layouts"
    examples = (
        ("sidelane layouts --json layouts.json", "all of it, as JSON too"),
        ("sidelane layouts --part alone --shape 1x32760x40x128", "one shape of q, k and v by itself"),
        ("sidelane layouts --part beside --launch eager", "next to a GEMM only"),
    )

    parts: tuple[str, ...] = words(
        "--part", PARTS, PARTS, "Alone, or next to a GEMM. May be repeated.", some=True, show_default="both"
    )
    shapes: tuple[Shape, ...] = option(
        "--shape",
        (),
        "BATCHxPOSITIONSxHEADSxSIZE of all ranks. May be repeated.",
        multiple=True,
        metavar="SHAPE",
        show_default="Wan's, Llama's, and rows of 128 B to 64 KiB; on CPUs a small one",
        callback=read_shapes,
    )
    tensors: int = count("--tensors", 3, "Tensors in an exchange, as q, k and v are.")
    launches: tuple[str, ...] = launches()
    warmup: int = count("--warmup", 2, "Rounds before the measured.", 0)
    repeats: int = count("--repeats", 9, "Measured rounds.")


layouts = study_command("layouts", LayoutOptions)
