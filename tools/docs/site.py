"""What a page of docs/ is on the site, where it differs from what the repository shows of it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from docutils import nodes

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = {ROOT / "README.md": ROOT / "docs" / "index.md", ROOT / "CHANGELOG.md": ROOT / "docs" / "changes.md"}
LINK = re.compile(r"(\]\()([^)\s#:]+)(#[\w-]+)?\)")

DECISIONS = """
```{toctree}
:hidden:
:glob:

[0-9]*
```
"""


def as_shown(page: str, text: str) -> str:
    """The source of a page, by its name without ``.md``.

    The front page is the README. Folders, which a site has no page of, become the list of result files, and comments
    for docstrings the docstrings.
    """
    if page == "index":
        text = _from_the_root("README.md") + "\n" + text[text.index("```{toctree}") :]
    if page == "changes":
        text = _from_the_root("CHANGELOG.md")
    if page == "decisions/README":
        text += DECISIONS
    if page == "reference/api":
        text = re.sub(r"<!-- docstrings: (\S+)((?: \w+)*) -->", _docstrings, text)
    return LINK.sub(lambda match: _link(page, match), text)


def found(app: Any, env: Any, reference: Any, shown: Any) -> Any:
    """What a reference of a docstring leads to that names less than the whole path of its target.

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


def _from_the_root(name: str) -> str:
    """Return a page of the root, with its links as pages of docs/ have them."""
    text = LINK.sub(lambda match: f"](../{match[2]}{match[3] or ''})", (ROOT / name).read_text("utf-8"))
    return text.replace("](../docs/", "](")


def _link(page: str, match: re.Match[str]) -> str:
    place = (ROOT / "docs" / page).parent
    target = Path(os.path.normpath(place / match[2]))
    target = PAGES.get(target, target)
    if target.is_dir():
        target = ROOT / "docs" / "lab" / "files.md"
    return f"]({os.path.relpath(target, place)}{match[3] or ''})"


def _docstrings(match: re.Match[str]) -> str:
    module, names = match[1], match[2].split()
    kinds = {name: "class" if name[0].isupper() else "function" for name in names}
    directives = [f".. auto{kind}:: {module}.{name}" for name, kind in kinds.items()] or [f".. automodule:: {module}"]
    body = "\n\n".join(
        directive + ("" if "autofunction" in directive else "\n   :members:") for directive in directives
    )
    return f"```{{eval-rst}}\n{body}\n```"
