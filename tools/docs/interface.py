"""The page of everything that can be imported: names with the first lines of their docstrings."""

from __future__ import annotations

import ast
import dataclasses

from docs.source import Definition, definitions, first_line, module_of, signature


@dataclasses.dataclass(frozen=True)
class Part:
    """Some names of one module, as a section of the page.

    Attributes:
        title: the module from which they are imported.
        text: what they are for.
        names: where each group of names is defined; without names: all that are public.
    """

    title: str
    text: str
    names: tuple[tuple[str, tuple[str, ...]], ...]


PARTS = (
    Part(
        "sidelane",
        "Collectives, sessions, what calls return, pools, overlap, and a process group ([guide](../guide/pytorch.md)). "
        "`OwnKernel` alone is not imported from here.",
        (
            ("sidelane.session.communicator", ("Communicator",)),
            ("sidelane.session.session", ("Session", "Lane")),
            ("sidelane.collectives.work", ("Work",)),
            ("sidelane.session.lists", ("Batched",)),
            ("sidelane.session.prelaunch", ("Prelaunched",)),
            ("sidelane.session.bound_program", ("BoundProgram",)),
            ("sidelane.session.own_kernel", ("OwnKernel",)),
            ("sidelane.session.pools", ("pool", "SymmetricPool")),
            ("sidelane.c3.overlap", ("overlap", "Overlap")),
            ("sidelane.c3.auto", ("choose_overlap",)),
            ("sidelane.c3.nano_batches", ("nano_batches", "begin_collective")),
            ("sidelane.c3.shaped_matmul", ("ShapedMatmul",)),
            ("sidelane.c3.shaping", ("choose_shaping",)),
            ("sidelane.integrations.registration", ("register",)),
            ("sidelane.integrations.wrap", ("wrap",)),
            ("sidelane.integrations.ledger", ("report", "Report")),
        ),
    ),
    Part(
        "sidelane.config",
        "Settings. `Config` can be imported from `sidelane`, too; [settings](settings.md) lists them.",
        (("sidelane.config", ()),),
    ),
    Part(
        "sidelane.errors",
        "Errors; all can be imported from `sidelane`, too. Wrong arguments are `ValueError` or `TypeError`.",
        (("sidelane.errors", ()),),
    ),
    Part(
        "sidelane.device.context",
        "What a kernel of your own does with its peers ([guide](../guide/own-kernels.md)).",
        (("sidelane.device.context", ()),),
    ),
    Part(
        "sidelane.ops",
        "Fused operators ([guide](../guide/fused.md)). They need Triton.",
        (
            ("sidelane.ops.embedding", ("embedding_all_to_all", "EmbeddingAllToAll")),
            ("sidelane.ops.embedding_backward", ("embedding_all_to_all_backward",)),
            ("sidelane.ops.gemm", ("gemm_all_to_all", "GemmAllToAll")),
            ("sidelane.ops.gemm_reduce", ("gemm_reduce_scatter", "gemm_all_reduce")),
            ("sidelane.ops.gather_gemm", ("all_gather_gemm",)),
            ("sidelane.ops.dispatch_gemm", ("all_to_all_gemm", "AllToAllGemm")),
            ("sidelane.ops.rows", ("all_to_all_rows",)),
            ("sidelane.ops.split_gemm", ("split_gemm_all_to_all",)),
            ("sidelane.ops.gemm_reduce", ("split_gemm_reduce_scatter", "split_gemm_all_reduce")),
            ("sidelane.ops.gather_gemm", ("split_all_gather_gemm",)),
            ("sidelane.ops.split_gemm", ("split_all_to_all_gemm",)),
            ("sidelane.ops.gemv", ("gemv_all_reduce", "GemvAllReduce")),
            ("sidelane.ops.rms_norm", ("all_reduce_rms_norm", "AllReduceRmsNorm")),
            ("sidelane.ops.modules", ("EmbeddingBagAllToAll", "ExpertCombine", "ExpertDispatch", "RowParallelLinear")),
        ),
    ),
    Part(
        "sidelane.program.ir",
        "Programs: commands, engines, queues ([how they work](../internals/programs.md)).",
        (("sidelane.program.ir", ()),),
    ),
    Part(
        "sidelane.program.collective",
        "What a collective is: which bytes of whose input belong where in whose output.",
        (("sidelane.program.collective", ()),),
    ),
    Part(
        "sidelane.program.contract",
        "What a program of your own claims to do.",
        (("sidelane.program.contract", ()),),
    ),
    Part(
        "sidelane.program.builders",
        "From a collective to a program, and [how to add an algorithm](../internals/adding-an-algorithm.md).",
        (
            ("sidelane.program.builders.registry", ("Algorithm", "register", "algorithms", "variants", "build")),
            ("sidelane.program.builders.batch", ("build_batch",)),
            ("sidelane.program.builders.transport", ("Transport",)),
        ),
    ),
    Part(
        "sidelane.program.transform",
        "From a program to another one that does the same.",
        (
            ("sidelane.program.transform.lower", ("lower",)),
            ("sidelane.program.transform.freeze", ("freeze",)),
            ("sidelane.program.transform.prelaunch", ("prelaunch",)),
            ("sidelane.program.transform.stamp", ("stamp",)),
        ),
    ),
    Part(
        "sidelane.program.verify",
        "Proofs.",
        (("sidelane.program.verify.check", ("verify", "verify_sequence", "Verification")),),
    ),
)


def page() -> str:
    """The page, in Markdown. Comments tell the site where whole docstrings belong."""
    lines = [
        "# Interface",
        "",
        "What can be imported, with a line each. The site (`make docs`) has the whole docstrings;",
    ]
    lines += [
        "in Python, `help(sidelane.Communicator)` has them. What is not listed here may change without notice.",
        "",
    ]
    for part in PARTS:
        lines += [f"## {part.title}", "", part.text, ""]
        tables = [one for module, names in part.names for one in _found(module, names)]
        lines += ["| | |", "|---|---|"]
        lines += [f"| `{_shown(one)}` | {first_line(one)} |" for one in tables]
        for one in tables:
            if isinstance(one, ast.ClassDef) and (methods := list(_methods(one))):
                lines += ["", f"### {one.name}", "", "| | |", "|---|---|"]
                lines += [f"| `{_shown(method)}` | {first_line(method)} |" for method in methods]
        for module, names in part.names:
            lines += ["", f"<!-- docstrings: {' '.join((module, *names))} -->"]
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def _found(module: str, names: tuple[str, ...]) -> list[Definition]:
    known = {one.name: one for one in definitions(module_of(module))}
    return [known[name] for name in names or known]


def _shown(definition: Definition) -> str:
    is_value = any(isinstance(one, ast.Name) and "property" in one.id for one in definition.decorator_list)
    if isinstance(definition, ast.ClassDef) or is_value:
        return definition.name
    return f"{definition.name}({signature(definition)})"


def _methods(of: ast.ClassDef) -> list[ast.FunctionDef]:
    return [one for one in definitions(of) if isinstance(one, ast.FunctionDef) and ast.get_docstring(one)]
