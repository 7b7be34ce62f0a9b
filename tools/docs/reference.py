"""Reference pages: commands from the command line itself, settings and result files from their docstrings."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import PurePath
from typing import Any

import click

import sidelane.config
from docs.measured import RESULTS
from docs.source import attributes, to_markdown
from sidelane import cli
from sidelane.bench.results.files import Results
from sidelane.bench.results.rows import ROWS

WIDTH = 116

OF_SETTINGS = """
Settings come from the environment, which is read once, when the first communicator is made. In a program,
`Communicator(config=Config(...))` comes before it, and so does `with sidelane.config.override(Config(...)):`."""
OF_ROWS = """
A study writes one JSON object with `--json FILE`. Rows are flat, and their keys are fixed, since other tools read them.
A row that could not run or was wrong has no time, and a `note` that says why. Who compares rows of `collectives` must
compare `tensors`, too. [Which files there are](../lab/files.md)."""
OF_FILES = """
One folder a machine, one file a study ([their keys](../reference/results.md)). `make results RESULTS=folder` measures
most of them on a node of yours."""


def commands() -> str:
    """Every command with every option."""
    lines = ["# Commands", "", *_filled("`sidelane COMMAND --help` shows the same on the terminal."), ""]
    main = cli.main
    assert isinstance(main, click.Group)
    lines += ["| command | |", "|---|---|"]
    lines += [f"| [`{name}`](#{name}) | {_paragraphs(one)[0]} |" for name, one in main.commands.items()]
    for name, command in main.commands.items():
        lines += ["", f"## {name}", "", f"    sidelane {name} {_usage(command)}".rstrip(), ""]
        for paragraph in _paragraphs(command):
            lines += [*_filled(paragraph), ""]
        lines += [line for option in _options(command) for line in _filled(_option(option), "- ")]
    return "\n".join(lines).rstrip() + "\n"


def settings() -> str:
    """Variables of the environment, and the attributes of ``Config``."""
    text = inspect.cleandoc(sidelane.config.__doc__ or "")
    rows = re.findall(r"^``(\w+)``\s{2,}(.*?)\s{2,}(\S+)$", text, re.MULTILINE)
    assert len(rows) == len(sidelane.config.VARIABLES) - 1, "config.py: a line of its table could not be read"
    notes = dict(re.findall(r"^\((\w)\) (.*?)$", text, re.MULTILINE))
    lines = [
        "# Settings",
        "",
        *_filled(OF_SETTINGS),
    ]
    lines += ["", "## Environment", "", "| variable | meaning | default |", "|---|---|---|"]
    for name, meaning, default in rows:
        note = notes.get(default.strip("()"), default) if default.startswith("(") else default
        lines.append(f"| `{name}` | {to_markdown(meaning)} | {_linked(to_markdown(note)).rstrip('.')} |")
    kept = re.search(r"^What is compiled .*", text, re.MULTILINE)
    lines += ["", *_filled(to_markdown(kept[0]) if kept else ""), ""]
    lines += _filled("`SIDELANE_COMMIT` says which code ran, in result files of machines without a checkout.")
    lines += ["", "## Config", "", *_filled("Attributes of `sidelane.Config`:"), ""]
    lines += _described(sidelane.config.Config)
    return "\n".join(lines).rstrip() + "\n"


def result_files() -> str:
    """The keys of result files, study by study."""
    lines = [
        "# Result files",
        "",
        *_filled(OF_ROWS),
        "",
        "## The file",
        "",
        *_described(Results),
        "",
    ]
    for study, row in ROWS.items():
        summary = " ".join(inspect.cleandoc(row.__doc__ or "").split("\n\n")[0].split())
        lines += [f"## {study}", "", *_filled(to_markdown(summary)), "", *_described(row), ""]
    return "\n".join(lines).rstrip() + "\n"


def files() -> str:
    """What lies in results/."""
    lines = [
        "# Files in results/",
        "",
        *_filled(OF_FILES),
        "",
        "| file | study | GPUs | measured | commit | rows |",
        "|---|---|---|---|---|---|",
    ]
    made: list[str] = []
    for path in sorted(RESULTS.glob("*/*")):
        name = path.relative_to(RESULTS).as_posix()
        content: Any = json.loads(path.read_text(encoding="utf-8")) if path.suffix == ".json" else None
        content = content if isinstance(content, dict) else {"rows": content or ()}
        line = [f"[{name}](../../results/{name})", content.get("study", path.stem), content.get("device", "")]
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
    lines += ["", "## Commands", "", *_filled("What to type to make each file again."), *made]
    return "\n".join(lines).rstrip() + "\n"


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


def _options(command: click.Command) -> Iterator[click.Option]:
    return (one for one in command.params if isinstance(one, click.Option) and not one.hidden)


def _option(option: click.Option) -> str:
    names = ", ".join([*option.opts, *option.secondary_opts])
    text = f"`{names}{'' if option.is_flag else ' ' + _value(option)}`"
    if option.help:
        text += f": {to_markdown(' '.join(option.help.split()))}"
    if option.show_default and isinstance(option.default, str | int | float | PurePath):
        default = option.default
        if isinstance(default, bool):
            default = (option.opts if default else option.secondary_opts or ("off",))[0]
        text += f" Default: {default}."
    return text


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
    """Lines of at most ``WIDTH`` characters; code stays in one piece."""
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
    """A block of code, whose lines go on behind a backslash."""
    options = re.sub(r" (--[\w-]+) (?=[^-])", " \\1\0", command)
    lines = textwrap.wrap(options, WIDTH - 6, break_long_words=False, break_on_hyphens=False)
    return ["    " + " \\\n        ".join(lines).replace("\0", " ")]


def _linked(text: str) -> str:
    """Pages of docs/ as links, seen from one of its folders."""
    return re.sub(r"\bdocs/([\w/-]*?)([\w-]+)\.md", r"[\2](../\1\2.md)", text)
