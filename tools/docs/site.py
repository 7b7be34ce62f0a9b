"""Changes to pages of docs/ and to docstrings for the site."""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import Any

from docutils import nodes

from docs import reference
from docs.interface import INTERNAL, TASKS
from docs.source import definition_of
from docs.source import signature as written_signature
from sidelane import errors

ROOT = Path(__file__).resolve().parent.parent.parent
ELSEWHERE = {
    "index": ROOT / "README.md",
    "changes": ROOT / "CHANGELOG.md",
    "lab/files": ROOT / "results" / "README.md",
    "reference/results": ROOT / "results" / "keys.md",
}
"""Pages of the site, and the files outside docs/ that they show."""

PAGES = {source: ROOT / "docs" / f"{page}.md" for page, source in ELSEWHERE.items()}
LINK = re.compile(r"(\]\()([^)\s#:]+)(#[\w-]+)?\)")

SUBPAGES = {"decisions/README": ("[0-9]*",), "reference/api": tuple(f"api/{name}" for name in TASKS)}
"""Pages with a menu of their own, and the pages in it."""

RAISED = re.compile(r"^:raises ([^:]*(?::\w+:`[^`]*`[^:]*)*):")
METHODS = re.compile(r"^### \w+\n\n\| name \| meaning \|\n(?:\|.*\n)+\n", re.MULTILINE)
ATTRIBUTE = re.compile(r"^:ivar ([\w, *]+):")
TYPE = re.compile(r"^:vartype (\w+): (.*)$")
MENTIONED = re.compile(r"\bdocs/([\w/-]+)\.md\b")


def as_shown(page: str, text: str) -> str:
    """Return the source of a page, by its name without ``.md``.

    The front page is the README. Links to folders and to pages beside code and results, which a site does not have,
    become links to the list of result files, and tables of the interface are followed by the docstrings.
    """
    if source := ELSEWHERE.get(page):
        place = (ROOT / "docs" / page).parent
        shown = LINK.sub(
            lambda match: f"]({os.path.relpath(source.parent / match[2], place)}{match[3] or ''})",
            source.read_text(encoding="utf-8"),
        )
        text = shown + "\n" + "".join(text.partition("```{toctree}")[1:])
    if page == "reference/commands":
        text += reference.options_of_commands()
    if page in SUBPAGES:
        text += "\n```{toctree}\n:hidden:\n:glob:\n\n" + "\n".join(SUBPAGES[page]) + "\n```\n"
    if page.startswith("reference/api/"):
        text = METHODS.sub("", text)  # their docstrings follow
        text = re.sub(r"Import from `(\S+)`:\n\n\| name \| meaning \|\n(?:\|.*\n)+", _linked_names, text)
    return LINK.sub(lambda match: _link(page, match), text)


def found(app: Any, env: Any, reference: Any, shown: Any) -> Any:
    """Resolve a reference of a docstring that names less than the whole path of its target.

    Types in signatures are plain text where they have no page. What a role names must have one: None is a warning.
    """
    if not isinstance(shown, nodes.literal):
        return shown
    if reference.get("refdomain") != "py":
        return None
    reference["refspecific"] = True
    page, kind, target = reference["refdoc"], reference["reftype"], reference["reftarget"]
    # `sidelane.pool` is known by the module that has it.
    for name in (target, target.rpartition(".")[2]):
        to = env.get_domain("py").resolve_xref(env, page, app.builder, kind, name, reference, shown)
        if to is not None:
            return to
    return None


def docstring_as_shown(app: Any, what: str, name: str, it: Any, options: Any, lines: list[str]) -> None:
    """Rewrite the lines of a docstring, behind napoleon: errors and attributes become lists, and documents links.

    Napoleon takes each entry of ``Raises:`` for one type, and types of a field for one name. Sidelane's docstrings name
    several (``MismatchError, PeerError: ...``), or refer to another method (``As :meth:`all_gather`.``). Attributes
    would be called variables.
    """
    shown: list[str] = []
    heading = ""
    for line in lines:
        line = MENTIONED.sub(r":doc:`/\1`", line)
        entry = RAISED.match(line) or ATTRIBUTE.match(line)
        if typed := TYPE.match(line):
            at = max(index for index, one in enumerate(shown) if one.startswith(f"    * **{typed[1]}**"))
            shown[at] = shown[at].replace("**:", f"** (``{typed[2]}``):", 1)
            continue
        if entry:
            first, begin = (
                (":Raises:", _raised(entry[1])) if entry.re is RAISED else (":Attributes:", f"**{entry[1]}**:")
            )
            shown += [] if heading == first else [first]
            heading = first
            line = f"    * {begin}{line[entry.end() :]}"
        elif heading and line.startswith(" "):
            line = f"      {line.strip()}"
        elif line:
            heading = ""
        shown.append(line)
    lines[:] = shown


def signature_as_shown(
    app: Any, what: str, name: str, it: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str, str] | None:
    """Return the signature of a Triton function as it is written, which its decorator hides."""
    module, _, function = name.rpartition(".")
    if what != "function" or signature is None or "*arguments" not in signature:
        return None
    definition = definition_of(module, function)
    assert isinstance(definition, ast.FunctionDef)
    return f"({written_signature(definition)})", ""


def _raised(names: str) -> str:
    """Return what stands before the explanation of an error: linked names, or a sentence of its own."""
    names = names.removeprefix("Exception: as").strip()
    if not re.fullmatch(r"[\w.]+(, [\w.]+)*", names):
        return names
    each = names.split(", ")
    return ", ".join(f":exc:`{one}`" if hasattr(errors, one) else f"``{one}``" for one in each) + ":"


def _link(page: str, match: re.Match[str]) -> str:
    place = (ROOT / "docs" / page).parent
    target = Path(os.path.normpath(place / match[2]))
    target = PAGES.get(target, target)
    if target.is_dir() or (target.suffix == ".md" and ROOT / "docs" not in target.parents):
        return f"]({os.path.relpath(ROOT / 'docs' / 'lab' / 'files.md', place)})"
    return f"]({os.path.relpath(target, place)}{match[3] or ''})"


def _linked_names(match: re.Match[str]) -> str:
    """Return a table of the interface whose names lead to their docstrings, which follow."""
    names = re.compile(r"^\| `(\w+)(?:\(.*?\))?` \|", re.MULTILINE)
    table = names.sub(rf"| {{py:obj}}`\1 <{match[1]}.\1>` |", match[0])
    return table + "".join(_docstring(f"{match[1]}.{name}") for name in names.findall(match[0]))


def _docstring(name: str) -> str:
    """Return the directive for a name as users import it."""
    members = f"\n   :members:\n   :exclude-members: {', '.join(INTERNAL)}"
    is_class = name.rpartition(".")[2][0].isupper()
    directive = f".. autoclass:: {name}{members}" if is_class else f".. autofunction:: {name}"
    return f"\n```{{eval-rst}}\n{directive}\n```\n"
