"""Public names of a module and sections of docstrings, read without running the code."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent.parent / "src"

Definition = ast.ClassDef | ast.FunctionDef


def module_of(name: str) -> ast.Module:
    """Return the syntax tree of a module of Sidelane."""
    path = SOURCE / Path(*name.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def definitions(node: ast.Module | ast.ClassDef) -> Iterator[Definition]:
    """Public classes and functions, or methods, in their order."""
    for one in node.body:
        if isinstance(one, ast.ClassDef | ast.FunctionDef) and not one.name.startswith("_"):
            yield one


def definition_of(module: str, name: str) -> Definition:
    """Return the definition of a name that a module defines or imports from another one.

    Raises:
        ValueError: the module does neither.
    """
    tree = module_of(module)
    for one in definitions(tree):
        if one.name == name:
            return one
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and name in [alias.name for alias in node.names]:
            return definition_of(node.module, name)
    raise ValueError(f"definition_of: name (value={name!r}, allowed=a public name of {module})")


def signature(function: ast.FunctionDef) -> str:
    """Return the names of the arguments, with defaults, without types."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    shown = [_argument(one, default) for one, default in zip(positional, defaults, strict=True)]
    if arguments.posonlyargs:
        shown.insert(len(arguments.posonlyargs), "/")
    if arguments.vararg:
        shown.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        shown.append("*")
    shown += [_argument(one, value) for one, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    if arguments.kwarg:
        shown.append(f"**{arguments.kwarg.arg}")
    return ", ".join(one for one in shown if one != "self")


def first_line(definition: ast.Module | Definition) -> str:
    """Return the first paragraph of a docstring, in Markdown."""
    return to_markdown(" ".join((ast.get_docstring(definition) or "").split("\n\n")[0].split()))


def attributes(docstring: str) -> dict[str, str]:
    """Return the texts of the section ``Attributes`` of a docstring, by name.

    >>> attributes("A row.\\n\\nAttributes:\\n    a: this,\\n        and that.\\n    d, e: those.\\n")
    {'a': 'this, and that.', 'd': 'those.', 'e': 'those.'}
    """
    match = re.search(r"^Attributes:\n(.*?)(?=^\S|\Z)", inspect.cleandoc(docstring), re.MULTILINE | re.DOTALL)
    found: dict[str, str] = {}
    names: list[str] = []
    for line in match[1].splitlines() if match else ():
        begin = re.match(r"    ([\w, ]+): (.*)", line)
        if begin:
            names = begin[1].split(", ")
            found |= dict.fromkeys(names, begin[2])
        else:
            found |= {name: f"{found[name]} {line.strip()}".strip() for name in names}
    return {name: to_markdown(text) for name, text in found.items()}


def to_markdown(text: str) -> str:
    r"""Rewrite literals and roles of reStructuredText in Markdown.

    >>> print(to_markdown("``a<b>`` as in :class:`Row`, see :func:`sidelane.config.override`, or <c>"))
    `a<b>` as in `Row`, see `override`, or \<c>
    """
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", text).replace("``", "`")
    return re.sub(r"`[^`]*`|<", lambda match: match[0] if match[0] != "<" else r"\<", text)


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    return argument.arg if default is None else f"{argument.arg}={ast.unparse(default)}"
