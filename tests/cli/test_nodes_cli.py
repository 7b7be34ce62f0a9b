"""``sidelane explain --nodes`` and ``sidelane verify``: what they accept, what they print, how they refuse."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner, Result

from sidelane import cli
from sidelane.integrations.nodes import verify
from sidelane.integrations.nodes.verify import PlanError


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.main, arguments, prog_name="sidelane", terminal_width=200)


def test_explain_says_which_part_runs_where_in_which_pieces_and_why() -> None:
    shown = run("explain", "all_reduce", "8M", "--nodes", "2,3", "--dtype", "float32")
    assert shown.exit_code == 0, shown.output
    assert "takes hierarchical: 2 nodes of 2, 3 ranks, 2 rails, pieces: 2" in shown.output
    words = [" ".join(line.split()) for line in shown.output.splitlines()]
    for line in (
        *("node 0 reduce_scatter of ranks 0, 1 4M", "rail 0 begin all_reduce 1 of ranks 0, 2 2M"),
        *("rail 0 wait for 1 -", "node 0 broadcast 2 parts of ranks 0, 1 4M"),
    ):
        assert line in words, line
    begun, joined = words.index("rail 0 begin all_reduce 1 of ranks 0, 2 2M"), words.index("rail 0 wait for 0 -")
    assert begun < joined, "the second piece is under way before the first has ended"
    assert "scratch: 8M of symmetric memory, which stays; 4M more" in shown.output


def test_explain_says_why_a_call_goes_flat() -> None:
    for words, why in (
        ("scatter 1M --nodes 2,3", "no steps for scatter: all of it passes the root's network"),
        ("all_to_all 1M --nodes 1,3", "a node of more than 2 times the ranks of another"),
        ("all_gather 8K --nodes 2,2", "less than 64K: one call is sooner there than three"),
    ):
        shown = run("explain", *words.split())
        sizes = words.split()[-1].replace(",", ", ")
        assert shown.exit_code == 0 and f"takes flat: 2 nodes of {sizes} ranks; {why}\n" in shown.output, shown.output
        assert "Steps" not in shown.output
    listed = run("explain", "all_gather", "1M", "--nodes", "2,2", "--tensors", "9", "--json", "-")
    assert json.loads(listed.stdout)["steps"]


def test_options_that_do_not_go_with_nodes_are_refused() -> None:
    for words, problem in (
        ("explain all_gather 1M --nodes 2,2 --in-place", "--in-place does not go with --nodes"),
        ("explain all_gather 1M --nodes 2,x", "ranks of each node, such as 2,3"),
        ("verify --nodes 2,0", "1 rank and more on each node"),
    ):
        shown = run(*words.split())
        assert shown.exit_code == 2 and problem in shown.output, shown.output


def test_verify_proves_or_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = run("verify", "--nodes", "1,3", "--elements", "3", "--pieces", "2")
    assert shown.exit_code == 0, shown.output
    assert "all_gather 4" in " ".join(shown.output.split()) and "more than 2 times the ranks" in shown.output

    def wrong(*_: object) -> int:
        raise PlanError("rank 1 step 3: touched")

    monkeypatch.setattr(verify, "verify_plans", wrong)
    shown = run("verify", "--nodes", "2,2", "--collective", "broadcast")
    assert shown.exit_code != 0 and "rank 1 step 3: touched" in shown.output
