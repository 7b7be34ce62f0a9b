"""The tool of a library that is installed without its laboratory."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from sidelane.cli import help, tool
from sidelane.cli.recorder import recorder


def test_the_tool_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(help, "added", dict)
    main = help.Commands(commands=[tool.info, recorder], help=tool.HELP)
    shown = CliRunner().invoke(main, ["--help"])
    assert shown.exit_code == 0 and "pip install ./lab" in shown.output and "info" in shown.output
    assert "sidelane demo" not in shown.output and "sidelane plan" not in shown.output
    refused = CliRunner().invoke(main, ["demo"])
    assert refused.exit_code == 2 and "allowed=info, recorder" in refused.output and "./lab" in refused.output
