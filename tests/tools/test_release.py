"""What a release says of itself in several places is the same in all of them."""

from __future__ import annotations

import importlib
import json
import re
import sys
import tomllib
from pathlib import Path

import pytest

from sidelane.errors import Page
from sidelane.version import VERSION

ROOT = Path(__file__).resolve().parents[2]


def test_the_citation_is_of_this_version() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.*)$", citation, re.MULTILINE) == [VERSION]


def test_python_versions_are_named_that_passed() -> None:
    """On CPU ranks, or where the published results were measured."""
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["classifiers"]
    named = {line.rpartition(" ")[2] for line in classifiers if line.startswith("Programming Language :: Python :: 3.")}
    rows = json.loads((ROOT / "results/cpu/versions.json").read_text(encoding="utf-8"))["rows"]
    assert named == {row["python"] for row in rows if row.get("passed") and not row["failed"]}


def test_what_is_not_tried_is_not_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    versions = importlib.import_module("versions")
    monkeypatch.delitem(sys.modules, "versions")
    software = {"python": "3.12.1", "torch": "2.14.0"}
    rows = [
        {"python": "3.11", "torch": "2.14", "not_tried": "as the machine has no Python 3.11"},
        {"python": "3.12", "torch": "2.14", "passed": 7, "failed": ["test_x::test_y"], "skipped": 2}
        | {"software": software, "date": "2026-11-27"},
    ]
    groups = {f"tests/integrations/{path.name}" for path in ROOT.glob("tests/integrations/test_process_group*.py")}
    assert groups - {"tests/integrations/test_process_group_hip.py"} <= set(versions.TESTS), "they are torch's callers"
    text = versions.page({"torch_versions": ["2.14", "2.15"], "rows": rows})
    assert "| 2.14 | not tried | 7 passed, **1 failed**, 2 skipped | not tried | not tried |" in text
    assert "| 2.15 | not tried | not tried | not tried | not tried |" in text
    assert "- Not tried, as the machine has no Python 3.11: Python 3.11 with torch 2.14." in text
    assert "- Python 3.12 with torch 2.14: `test_x::test_y` failed." in text


def test_a_result_is_not_lost_where_it_cannot_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    versions = importlib.import_module("versions")
    monkeypatch.delitem(sys.modules, "versions")
    here = {"python": "3.12", "torch": "2.14"}
    passed, missing = here | {"passed": 7, "failed": [], "skipped": 0}, here | {"not_tried": "as there is no Python"}
    rows: dict[tuple[str, str], dict[str, object]] = {}
    for given, kept in ((missing, missing), (passed, passed), (missing, passed)):
        versions.keep_row(rows, given)
        assert rows == {("3.12", "2.14"): kept}


def test_every_file_of_the_packages_is_in_the_wheel() -> None:
    """`make wheel` looks into the wheel; this is what a new kind of file would be missing from."""
    projects = [tomllib.loads((ROOT / path).read_text("utf-8")) for path in ("pyproject.toml", "lab/pyproject.toml")]
    assert f"sidelane=={VERSION}" in projects[1]["project"]["dependencies"]
    data = {name: of for each in projects for name, of in each["tool"]["setuptools"]["package-data"].items()}
    assert data.keys() == {path.name for path in (ROOT / "src").iterdir() if (path / "__init__.py").exists()}
    for package, patterns in data.items():
        folder = ROOT / "src" / package
        kinds = {Path(pattern).suffix or pattern for pattern in patterns} | {".py"}
        files = [path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
        assert files and [path for path in files if not {path.suffix, path.name} & kinds] == []


def test_the_pages_that_errors_name_are_in_the_wheel() -> None:
    """`make wheel` installs it, and looks whether they are there."""
    copied = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["data-files"]
    found = {
        f"{folder.removeprefix('share/doc/sidelane/')}/{path.name}"
        for folder, patterns in copied.items()
        for pattern in patterns
        for path in ROOT.glob(pattern)
    }
    assert set(Page) <= found


@pytest.mark.parametrize(
    ("found", "words"), [({"a", "b"}, "not wanted: b"), (set(), "missing: a")], ids=["too much", "too little"]
)
def test_an_archive_that_holds_something_else_is_refused(
    monkeypatch: pytest.MonkeyPatch, found: set[str], words: str
) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")
    release = importlib.import_module("release")
    release.compare(Path("x.whl"), {"a"}, {"a"})
    with pytest.raises(SystemExit, match=f"x.whl does not hold what it should:\n  {words}"):
        release.compare(Path("x.whl"), found, {"a"})


def test_every_folder_is_in_the_sdist(monkeypatch: pytest.MonkeyPatch) -> None:
    """`make wheel` compares all files with git; this is what a new folder would be missing from."""
    monkeypatch.syspath_prepend(ROOT / "tools")
    release = importlib.import_module("release")
    folders = {path.split("/")[0] for path in release.tracked_files() if "/" in path} - {"src"}
    grafted = set(re.findall(r"^graft ([\w-]+)$", (ROOT / "MANIFEST.in").read_text("utf-8"), re.MULTILINE))
    assert folders - set(release.NOT_IN_THE_SDIST) == grafted
