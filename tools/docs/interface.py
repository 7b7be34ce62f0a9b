"""Pages of the interface, one for each task: names as users import them, with the first lines of their docstrings."""

from __future__ import annotations

import ast
import dataclasses
import textwrap
from collections.abc import Iterator

from docs.source import Definition, definition_of, definitions, first_line, module_of, signature

INTERNAL = ("disown", "leave", "refuse", "repeat_call", "profile_of", "range_name", "renew", "run", "uuid")
"""Methods that the library calls across its own modules. They are no part of the interface."""


@dataclasses.dataclass(frozen=True)
class Section:
    """Some names that are imported from one module.

    Attributes:
        module: module or name from which users import them.
        title: heading, unique on its page.
        names: names in the order of the page; empty for all that are public.
    """

    module: str
    title: str
    names: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class TaskPage:
    """A page of the interface.

    Attributes:
        title: heading, which says what the reader wants to do.
        text: introduction, with the page of the guide.
        sections: names on the page.
    """

    title: str
    text: str
    sections: tuple[Section, ...]


TASKS = {
    "calls": TaskPage(
        "Make calls",
        "Communicators, sessions, and the objects that calls return. The guide shows how to "
        "[make calls](../../guide/collectives.md) and how to [order them by lanes](../../guide/lanes.md).",
        (
            Section(
                "sidelane",
                "Communicators and sessions",
                ("Communicator", "Work", "Batched", "pool", "SymmetricPool"),
            ),
        ),
    ),
    "errors": TaskPage(
        "Set limits and handle errors",
        "Settings and errors. Wrong arguments are `ValueError` or `TypeError`. [Settings](../settings.md) lists the "
        "variables of the environment, and the guide says [how to react to an error](../../guide/errors.md).",
        (
            Section("sidelane", "Settings", ("Config",)),
            Section("sidelane.config", "Settings for a block of code", ("override", "current", "from_environment")),
            Section(
                "sidelane",
                "Errors",
                (
                    "SidelaneError",
                    "UnavailableError",
                    "ProgramError",
                    "PeerError",
                    "PeerTimeoutError",
                    "MismatchError",
                    "CommunicatorClosedError",
                ),
            ),
        ),
    ),
    "overlap": TaskPage(
        "Overlap a collective with computation",
        "Runners that execute a computation and collectives at the same time, and calls that are submitted ahead of "
        "their data. The guide shows [how to overlap](../../guide/overlap.md).",
        (
            Section(
                "sidelane",
                "Runners and calls submitted ahead",
                ("overlap", "Overlap", "choose_overlap", "nano_batches", "begin_collective", "Prelaunched"),
            ),
        ),
    ),
    "training": TaskPage(
        "Train with the process group and FSDP2",
        "Entry points for programs that use `torch.distributed`. The guide shows "
        "[which line to change](../../guide/one-line.md), [the process group](../../guide/pytorch.md) and "
        "[FSDP2](../../guide/fsdp.md).",
        (
            Section(
                "sidelane",
                "Process group",
                ("register", "SidelaneGroup", "wrap", "report", "Report"),
            ),
            Section("sidelane.fsdp", "FSDP2", ("enable", "EnabledFsdp")),
        ),
    ),
    "operators": TaskPage(
        "Use fused operators",
        "Operators that compute and communicate in one kernel or in a pipeline. They need Triton. The guide shows "
        "[how to use them](../../guide/fused.md).",
        (
            Section(
                "sidelane.ops",
                "Products",
                (
                    "gemm_all_to_all",
                    "gemm_reduce_scatter",
                    "gemm_all_reduce",
                    "all_gather_gemm",
                    "all_to_all_gemm",
                    "gemv_all_reduce",
                ),
            ),
            Section("sidelane.ops", "Norms", ("all_reduce_rms_norm",)),
            Section(
                "sidelane.ops",
                "Embeddings",
                (
                    "embedding_all_to_all",
                    "embedding_all_to_all_backward",
                ),
            ),
            Section("sidelane.ops", "Time stamps of a kernel", ("Timeline",)),
        ),
    ),
    "models": TaskPage(
        "Distribute experts and long sequences",
        "Operators and modules for parts of a model. They need Triton. The guide shows "
        "[experts and embeddings](../../guide/fused.md) and [long sequences](../../guide/sequence.md).",
        (
            Section(
                "sidelane.ops",
                "Experts",
                ("route_experts", "ExpertRoutes", "dispatch_tokens", "combine_tokens", "all_to_all_rows"),
            ),
            Section("sidelane.deep_ep.buffer", "DeepEP's interface: deep_ep.Buffer", ("DeepEpBuffer",)),
            Section(
                "sidelane.deep_ep.settings",
                "DeepEP's interface: deep_ep.Config, EventOverlap and install",
                ("DeepEpConfig", "EventOverlap", "install_deep_ep"),
            ),
            Section("sidelane.deep_ep.tokens", "DeepEP's interface: handles", ("DispatchHandle", "LowLatencyHandle")),
            Section(
                "sidelane.ops",
                "Long sequences",
                (
                    "reshard",
                    "sequence_parallel_attention",
                    "sequence_positions",
                    "register_attention",
                    "combine_attention",
                ),
            ),
            Section(
                "sidelane.ops",
                "Modules",
                ("EmbeddingBagAllToAll", "RowParallelLinear"),
            ),
        ),
    ),
    "nodes": TaskPage(
        "Use fused operators among several nodes",
        "Operators whose slices leave for other nodes while the kernel computes the next ones. "
        "[How they work](../../internals/scale-out.md).",
        (
            Section("sidelane", "Entry", ("scale_out",)),
            Section(
                "sidelane.ops.scale_out",
                "Operators",
                (
                    "ScaleOut",
                    "embedding_all_to_all",
                    "embedding_all_to_all_backward",
                ),
            ),
            Section("sidelane.ops.scale_out", "Transport", ("GroupTransport",)),
        ),
    ),
    "kernels": TaskPage(
        "Write kernels of your own",
        "Functions for Triton kernels that write to peers, signal them and wait for them. The guide shows "
        "[how to write such a kernel](../../guide/own-kernels.md).",
        (
            Section("sidelane.device.context", "Functions to call in a kernel"),
            Section("sidelane.session.own_kernel", "Loaded kernel", ("OwnKernel",)),
        ),
    ),
    "programs": TaskPage(
        "Run programs and algorithms of your own",
        "Programs are frozen data: which engine of which rank executes which commands in which order. The guide shows "
        "[how to run one](../../guide/own.md), and the internals explain "
        "[how programs work](../../internals/programs.md) and "
        "[how to add an algorithm](../../internals/adding-an-algorithm.md).",
        (
            Section("sidelane", "Loaded program", ("BoundProgram",)),
            Section("sidelane.program.ir", "Commands, engines and queues"),
            Section("sidelane.program.collective", "Collectives"),
            Section("sidelane.program.contract", "Contracts"),
            Section(
                "sidelane.program.builders",
                "Builders",
                ("Algorithm", "register", "algorithms", "variants", "build", "build_batch", "Transport"),
            ),
            Section(
                "sidelane.program.transform",
                "Transforms",
                ("lower", "freeze", "hold"),
            ),
            Section("sidelane.program.verify", "Proofs", ("verify", "verify_sequence", "Verification")),
        ),
    ),
    "visibility": TaskPage(
        "See what runs",
        "Traces, metrics and the last calls before a failure ([guide](../../guide/observability.md)).",
        (
            Section("sidelane", "Traces", ("trace",)),
            Section("sidelane.metrics", "Metrics", ("start", "stop", "flush", "text", "subscribe", "CallMetrics")),
            Section("sidelane.flight_recorder", "Flight recorder", ("start", "stop", "dump")),
        ),
    ),
    "choice": TaskPage(
        "See and tune what is chosen",
        "`Communicator.last_choice` returns a `Selection` of a `Candidate`; `Communicator.last_submitted` counts the "
        "commands that ran. "
        "`choose_overlap` is with [overlap](overlap.md). The guide shows "
        "[how to measure a machine](../../guide/tuning.md), and the internals explain "
        "[how variants are chosen](../../internals/choice.md).",
        (
            Section("sidelane.choice.selection", "Result of a choice", ("Selection",)),
            Section("sidelane.choice", "Candidates and measured times", ("Candidate", "Profile", "Curve")),
            Section("sidelane.ops", "Choice of a fused operator", ("explain",)),
        ),
    ),
    "laboratory": TaskPage(
        "Use the laboratory",
        "The package `sidelane_lab` simulates programs on described machines, and reads and writes result files. It is "
        "a distribution of its own ([installation](../../guide/installation.md#install-it-into-your-own-environment)). "
        "[Its structure](../../internals/laboratory.md).",
        (
            Section("sidelane_lab.machines.load", "Catalogue of machines", ("machine_names", "named", "find")),
            Section("sidelane_lab.machines.spec", "Description of a machine", ("Machine",)),
            Section("sidelane_lab.sim.simulate", "Simulator", ("simulate", "SimulatedRun", "DeadlockError")),
            Section("sidelane_lab.harness.study", "Result files", ("Results", "collect", "read", "write")),
        ),
    ),
}
"""Pages by file name, in the order of the index."""


def index() -> str:
    """Return the list of the pages, in Markdown."""
    lines = [
        "# Interface",
        "",
        "This is everything that can be imported, by task. Each page here has a line for each name; the same page of",
        "the site (`make docs`) has the whole docstrings, and so has `help(sidelane.Communicator)` in Python. A name",
        "that is not listed may change without notice.",
    ]
    for name, page in TASKS.items():
        lines += ["", f"## [{page.title}](api/{name}.md)", ""]
        for section in page.sections:
            names = ", ".join(f"`{one}`" for one in section.names) or "all that the page lists"
            lines += textwrap.wrap(f"`{section.module}`: {names}", 116, initial_indent="- ", subsequent_indent="  ")
    return "\n".join(lines) + "\n"


def task_page(name: str) -> str:
    """Return one page, in Markdown. The site adds whole docstrings after each first table of a section."""
    page = TASKS[name]
    lines = [f"# {page.title}", "", *textwrap.wrap(page.text, 116, break_on_hyphens=False), ""]
    for section in page.sections:
        found = [*_found(section)]
        lines += [f"## {section.title}", "", f"Import from `{section.module}`:", ""]
        lines += ["| name | meaning |", "|---|---|", *(f"| `{_shown(one)}` | {first_line(one)} |" for one in found)]
        for one in found:
            if isinstance(one, ast.ClassDef) and (methods := [*_methods(one)]):
                lines += ["", f"### {one.name}", "", "| name | meaning |", "|---|---|"]
                lines += [f"| `{_shown(method)}` | {first_line(method)} |" for method in methods]
        lines += [""]
    return "\n".join(lines).rstrip() + "\n"


def _found(section: Section) -> Iterator[Definition]:
    if section.names:
        yield from (definition_of(section.module, name) for name in section.names)
    else:
        yield from definitions(module_of(section.module))


def _shown(definition: Definition) -> str:
    is_value = any(isinstance(one, ast.Name) and "property" in one.id for one in definition.decorator_list)
    if isinstance(definition, ast.ClassDef) or is_value:
        return definition.name
    return f"{definition.name}({signature(definition)})"


def _methods(of: ast.ClassDef) -> list[ast.FunctionDef]:
    methods = (one for one in definitions(of) if isinstance(one, ast.FunctionDef) and ast.get_docstring(one))
    return [one for one in methods if one.name not in INTERNAL]
