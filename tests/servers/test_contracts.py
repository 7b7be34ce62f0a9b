"""The reader of servers' code, on a made-up server: it finds each thing that changed."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "clients"))
import server_contracts as contracts

FILE = "made/up.py"
TEXT = """
from there import borrowed

class Base:
    plain = 1
    def __init__(self, group, device=None):
        self.kept = None
    def all_reduce(self, input_): ...

if True:
    def call(tensor, *, out): ...
"""


@pytest.fixture
def wheel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    wanted = """
        Base.all_reduce(self, input_)
        Base.__init__(self, group)
        Base.kept
        Base.plain
        borrowed
        call(tensor, out)"""
    monkeypatch.setattr(contracts, "CONTRACTS", {"made": {FILE: wanted}})
    monkeypatch.setattr(contracts, "OVERRIDES", {"made": ("plugin.py", "Ours", {FILE: "Base"})})
    monkeypatch.setattr(contracts, "PLUGINS", tmp_path)
    methods = "        def all_reduce(self, input_): ...\n        def own(self): ...\n"
    (tmp_path / "plugin.py").write_text(f"def make(base):\n    class Ours(base):\n{methods}")
    return tmp_path / "made-1.0.whl"


def said(wheel: Path, text: str | None, capsys: pytest.CaptureFixture[str]) -> tuple[str | None, str]:
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("made/other.py" if text is None else FILE, text or "")
    failed = contracts.main([str(wheel)])
    return failed, capsys.readouterr().out


def test_what_has_changed_is_named(wheel: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(wheel, TEXT, capsys) == (None, "made-1.0.whl: fits\n")
    for old, new, wrong in (
        ("(self, input_)", "(self, tensor)", "Base.all_reduce(self, input_) has the parameters ['self', 'tensor']"),
        (
            "(self, input_)",
            "(self, input_, op)",
            "has the parameters ['self', 'input_', 'op'], ours ['self', 'input_']",
        ),
        ("kept", "other", "Base.kept is not there"),
        ("plain = 1", "plain_ = 1", "Base.plain is not there"),
        ("borrowed", "lent", "borrowed is not there"),
        ("def call(tensor, *, out): ...", "call = 1", "call(tensor, out) has the parameters None"),
    ):
        failed, out = said(wheel, TEXT.replace(old, new), capsys)
        assert failed == "1 versions do not fit" and wrong in out, (new, out)
    failed, out = said(wheel, None, capsys)
    assert failed and "made/up.py: there is no such file" in out


def test_the_contracts_are_for_files_of_the_server() -> None:
    for server, files in contracts.CONTRACTS.items():
        assert all(file.startswith(f"{server}/") and lines.split() for file, lines in files.items())
