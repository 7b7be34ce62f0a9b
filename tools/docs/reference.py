"""Reference pages: commands from the command line itself, settings and result files from their docstrings."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any, cast

import click

import sidelane.config
from docs.measured import RESULTS
from docs.source import attributes, to_markdown
from sidelane import cli
from sidelane.cli.help import Commands
from sidelane_lab.harness.study import Results, studies, study_of

WIDTH = 116
MAIN = cast(Commands, cli.main)

OF_COMMANDS = (
    "`sidelane COMMAND --help` prints the options of a command, with examples. The site that `make docs` builds shows "
    "those of every command on this page. [Where to begin](../guide/commands.md). A command that measures compares "
    "outputs with a reference. If one is wrong, it shows and writes all rows, names the wrong ones in its error, and "
    "ends with exit status 1, as it does if nothing could be measured."
)
OF_VARIABLES = """
Variables without a field belong to the process and not to a communicator. A switch is `0` or `1`. An unknown
variable whose name begins with `SIDELANE_` causes a warning. `sidelane tune` writes the profile of a machine
([tuning](../guide/tuning.md))."""
OF_SETTINGS = """
A communicator reads its settings from a `Config`, or from the environment when the first communicator is made.
`with sidelane.config.override(Config(...)):` sets them for communicators that are made inside the block."""
OF_TIMEOUTS = """
**Which time-out holds.** A process group that was made with `timeout=...` (`init_process_group`, `new_group`,
`split_group`) has that one, also for the calls that Gloo and NCCL make for it. A group made without has `timeout_s`,
and so `SIDELANE_TIMEOUT_S`; a wrapped group, too. torch gives groups without a `timeout` its default of 30 minutes,
which therefore counts as none: write 29 or 31 minutes if you want it. `split_group` without a `timeout` takes over that
of the group. Every other communicator has `timeout_s`."""
EXAMPLE = """
```python
from sidelane import Communicator, Config

comm = Communicator(config=Config(timeout_s=60, memory_bytes=1 << 30))
```
"""
OF_ROWS = """
`--json FILE` makes a study write one JSON object. Its rows are flat, and their keys are fixed, since other tools read
them. A row that could not run, or whose result was wrong, has no time and a `note` with the reason. When you compare
rows of `collectives`, compare `tensors` as well. [List of the files](README.md)."""
COMMON = {
    "collective": "name of the collective, as `torch.distributed` has it.",
    "dtype": "dtype of the elements.",
    "implementation": "library or part of Sidelane that ran: `auto` (its choice), `dma` (its copy engines), `sm` "
    "(its kernels), `nccl`, `nccl_ce` (NCCL on copy engines), `symm_mem` (PyTorch's symmetric memory), `gloo`.",
    "variant": "algorithm within the implementation.",
    "in_place": "True if input and output share memory.",
    "launch": "`eager`, or `graph` for a CUDA graph.",
    "prelaunch": "True if the call was submitted ahead of its data.",
    "m, n, k": "rows and columns of a GEMM's result, and its depth.",
    "p10_us, p90_us": "10th and 90th percentile of `time_us` over the rounds; p10_ms and p90_ms likewise of `step_ms`.",
}
"""Keys that have one meaning in all studies."""
OF_FILES = """
There is one folder for each machine, and one file for each study ([their keys](keys.md)). `make results RESULTS=folder`
measures most of them on a node of yours. Text files have several tables; the date and the commit are
those of the first one. Notes on the measurements are [listed with the pages](../docs/README.md#lab)."""


def commands() -> str:
    """Return the page of every command with a line for each."""
    lines = ["# Commands", "", *_filled(OF_COMMANDS)]
    for heading, names in MAIN.headed().items():
        lines += ["", f"**{heading}**", "", "| command | purpose |", "|---|---|"]
        lines += [f"| `{name}` | {_paragraphs(MAIN.find(name))[0]} |" for name in names]
    return "\n".join(lines) + "\n"


def options_of_commands() -> str:
    """Return what the site appends to that page: every command with its options, then those that several share."""
    lines: list[str] = []
    options = {
        name: [one for one in MAIN.find(name).params if isinstance(one, click.Option) and not one.hidden]
        for names in MAIN.headed().values()
        for name in names
    }
    shared = [
        text
        for text, count in sorted(Counter(_option(one) for some in options.values() for one in some).items())
        if count > 2
    ]
    for name, some in options.items():
        lines += ["", f"## {name}", "", *_one_command(name, MAIN.find(name), some, shared)]
    lines += ["", "## Shared options", "", *(line for text in shared for line in _filled(text, "- "))]
    return "\n".join(lines).rstrip() + "\n"


def _one_command(
    name: str, command: click.Command, options: Sequence[click.Option], shared: Sequence[str]
) -> Iterator[str]:
    yield f"    sidelane {name} {_usage(command)}"
    for paragraph in _paragraphs(command):
        yield from ("", *_filled(paragraph))
    own = [option for option in options if _option(option) not in shared]
    for group in dict.fromkeys(getattr(option, "group", "") for option in own):
        yield from ("", f"**{group}**", "") if group else ("",)
        for option in own:
            if getattr(option, "group", "") == group:
                yield from _filled(_option(option), "- ")
    if others := [f"`{option.opts[0]}`" for option in options if option not in own]:
        yield from ("", *_filled(f"[Shared options](#shared-options): {', '.join(others)}."))
    if examples := getattr(command, "examples", ()):
        yield from ("", "**Examples**", "")
        for line, does in examples:
            yield from (*(f"    # {part}" for part in textwrap.wrap(does, WIDTH - 6)), f"    {line}")


def settings() -> str:
    """Variables of the environment, with the attributes of ``Config``."""
    text = inspect.cleandoc(sidelane.config.__doc__ or "")
    rows = re.findall(r"^``(\w+)``\s{2,}(.*?)\s{2,}(\S+)$", text, re.MULTILINE)
    missing = set(sidelane.config.VARIABLES) - {name for name, _, _ in rows}
    assert not missing, f"config.py: its table lacks {missing}, or could not be read"
    notes = dict(re.findall(r"^\((\w)\) (.*?)$", text, re.MULTILINE))
    fields = {field.name for field in dataclasses.fields(sidelane.config.Config)}
    lines = ["# Settings", "", *_filled(OF_SETTINGS), EXAMPLE, "## Environment", ""]
    lines += ["| variable | field of `Config` | meaning | default |", "|---|---|---|---|"]
    for name, meaning, default in rows:
        note = notes.get(default.strip("()"), default) if default.startswith("(") else default
        field = name.removeprefix("SIDELANE_").lower()
        cells = [f"`{name}`", f"`{field}`" if field in fields else "", to_markdown(meaning)]
        default_text = _linked(to_markdown(note)).replace(" ([settings](../reference/settings.md))", "")
        lines.append("| " + " | ".join([*cells, default_text.rstrip(".")]) + " |")
    kept = re.search(r"^What is compiled .*", text, re.MULTILINE)
    lines += ["", *_filled(OF_VARIABLES), "", *_filled(OF_TIMEOUTS), "", *_filled(to_markdown(kept[0]) if kept else "")]
    lines += ["", "## Config", "", *_filled("Fields of `sidelane.Config`:"), ""]
    lines += _described(sidelane.config.Config)
    return "\n".join(lines).rstrip() + "\n"


def result_files() -> str:
    """Return the page of the keys of result files, study by study."""
    lines = [
        "# Result files",
        "",
        *_filled(OF_ROWS),
        "",
        "## The file",
        "",
        *_described(Results),
        "",
        "## Keys of all studies",
        "",
        *_filled("A study lists such a key without a text where it has this meaning:"),
        "",
        *(line for keys, text in COMMON.items() for line in _filled(f"`{keys.replace(', ', '`, `')}`: {text}", "- ")),
        "",
    ]
    for study in studies():
        row = study_of(study).row
        summary = " ".join(inspect.cleandoc(row.__doc__ or "").split("\n\n")[0].split())
        lines += [f"## {study}", "", *_filled(to_markdown(summary)), "", *_described(row), ""]
    return "\n".join(lines).replace("](../", "](../docs/").rstrip() + "\n"


def files() -> str:
    """Return the list of the files in results/."""
    lines = [
        "# Results",
        "",
        *_filled(OF_FILES),
        "",
        "| file | study | GPUs | measured | commit | rows |",
        "|---|---|---|---|---|---|",
    ]
    made: list[str] = []
    for path in sorted(path for path in RESULTS.glob("*/*") if path.parent.name not in ("notes", "scripts")):
        name = path.relative_to(RESULTS).as_posix()
        text = path.read_text(encoding="utf-8")
        content: Any = json.loads(text) if path.suffix == ".json" else _first_lines(text)
        content = content if isinstance(content, dict) else {"rows": content or ()}
        line = [f"[{name}]({name})", content.get("study", path.stem), content.get("device", "")]
        if content.get("gpus"):
            line[-1] = f"{content['gpus']} x {line[-1]}"
        line += [
            str(content.get("date", ""))[:10],
            str(content.get("commit", ""))[:7],
            str(len(content.get("rows", ())) or ""),
        ]
        lines.append("| " + " | ".join(line) + " |")
        if "command" in content:
            made += ["", f"{name}:", ""]
            made += [line for command in content["command"].split("; ") for line in _typed(command)]
    lines += ["", "## Commands", "", *_filled("These commands make each file again, at its commit."), *made]
    return "\n".join(lines).rstrip() + "\n"


def _first_lines(text: str) -> dict[str, str]:
    """Return the machine, the date and the commit that the head of a text file names."""
    patterns = {
        "device": r"^machine:.*?(\d x [^);,\n]*)",
        "date": r"^date: +([\d-]+)",
        "commit": r"^commit: +([0-9a-f]{7})",
    }
    found = {key: re.search(pattern, text, re.MULTILINE) for key, pattern in patterns.items()}
    return {key: match[1] for key, match in found.items() if match}


def _described(of: type) -> list[str]:
    assert dataclasses.is_dataclass(of)
    said, renamed = attributes(of.__doc__ or ""), getattr(of, "renamed", {})
    lines: list[str] = []
    for field in dataclasses.fields(of):
        kind = str(field.type).replace("None", "null") if of is not sidelane.config.Config else str(field.type)
        begin = f"`{renamed.get(field.name, field.name)}` ({kind})"
        lines += _filled(f"{begin}: {said[field.name]}" if field.name in said else begin, "- ")
    return lines


def _paragraphs(command: click.Command) -> list[str]:
    text = inspect.cleandoc(command.help or "").replace("\b", "")
    return [to_markdown(" ".join(one.split())) for one in text.split("\n\n") if one.strip()]


def _usage(command: click.Command) -> str:
    arguments = [one for one in command.params if isinstance(one, click.Argument)]
    words = [(one.metavar or (one.name or "").upper()) + ("..." if one.nargs == -1 else "") for one in arguments]
    return " ".join([*words, "[OPTIONS]"])


def _option(option: click.Option) -> str:
    names = ", ".join([*option.opts, *option.secondary_opts])
    text = f"`{names}{'' if option.is_flag else ' ' + _value(option)}`"
    if option.help:
        text += f": {to_markdown(' '.join(option.help.split()))}"
    if option.metavar and isinstance(option.type, click.Choice):
        text += f" One of: {', '.join(option.type.choices)}."
    default = _default(option)
    return f"{text} Default: {default}." if default else text


def _default(option: click.Option) -> str:
    """Return the default of an option, if its help shows one."""
    shown = True if option.show_default is None else option.show_default  # as ``sidelane.cli.tool`` has it
    if isinstance(shown, str):
        return shown
    if isinstance(option.default, bool):
        names = option.opts if option.default else option.secondary_opts
        return names[0] if shown and names else ""
    return str(option.default) if shown and isinstance(option.default, str | int | float | PurePath) else ""


def _value(option: click.Option) -> str:
    if option.metavar:
        return option.metavar
    if isinstance(option.type, click.Choice):
        return "|".join(str(getattr(choice, "value", choice)) for choice in option.type.choices)
    names = {click.IntRange: "NUMBER", click.FloatRange: "NUMBER", click.Path: "PATH", click.File: "FILE"}
    for kind, name in names.items():
        if isinstance(option.type, kind):
            return name
    return {"integer": "NUMBER", "float": "NUMBER", "text": "TEXT"}.get(option.type.name, option.type.name.upper())


def _filled(text: str, first: str = "") -> list[str]:
    """Break text into lines of at most ``WIDTH`` characters; code stays in one piece."""
    text = _linked(text.strip())
    whole = re.sub(r"`[^`]*`|\[[^\]]*\]\([^)]*\)", lambda match: match[0].replace(" ", "\0"), text)
    lines = textwrap.wrap(
        whole,
        WIDTH,
        initial_indent=first,
        subsequent_indent=" " * len(first),
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\0", " ") for line in lines]


def _typed(command: str) -> list[str]:
    """Return a block of code, whose lines continue behind a backslash."""
    options = re.sub(r" (--[\w-]+) (?=[^-])", " \\1\0", command)
    lines = textwrap.wrap(options, WIDTH - 6, break_long_words=False, break_on_hyphens=False)
    return ["    " + " \\\n        ".join(lines).replace("\0", " ")]


def _linked(text: str) -> str:
    """Make links of pages of docs/, seen from one of its folders."""
    return re.sub(r"(?<!/)\bdocs/([\w/-]*?)([\w-]+)\.md", r"[\2](../\1\2.md)", text)
