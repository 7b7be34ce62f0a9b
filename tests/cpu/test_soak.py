"""The campaign of random calls: its plan, what it notices, every way to end, going on and doing again."""

from __future__ import annotations

import dataclasses
import itertools
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from ranks import crew

from sidelane import Communicator, cli
from sidelane.choice import Abilities
from sidelane.choice.candidate import EVERYTHING, everything
from sidelane.program import collective as define
from sidelane.program.collective import Kind, ReduceOp, Reduction
from sidelane_lab.harness.report import tables_of
from sidelane_lab.harness.study import read
from sidelane_lab.soak import endings, study, world
from sidelane_lab.soak.described import Call, Form, Part, Spot
from sidelane_lab.soak.endings import ENDINGS, Told, objections
from sidelane_lab.soak.episode import CALLS, Episode, Setting
from sidelane_lab.soak.judge import Judge, WrongBytesError
from sidelane_lab.soak.mistakes import MISTAKES
from sidelane_lab.soak.performance import perform
from sidelane_lab.soak.plan import Plan
from sidelane_lab.soak.rows import SOAKED, SoakRow
from sidelane_lab.soak.seat import Outcome, Seat
from sidelane_lab.soak.steps import (
    Capture,
    Differ,
    Fire,
    Freeze,
    Once,
    Overlap,
    Refuse,
    Replay,
    Step,
    Stream,
)
from sidelane_lab.soak.study import Campaign, SoakOptions
from sidelane_lab.soak.tally import Tally
from sidelane_lab.soak.turns import Turns
from sidelane_lab.soak.values import Values
from sidelane_lab.soak.world import Verdict, run_episode

CPU = torch.device("cpu")


def episode(world_size: int = 2, ending: str = endings.GOOD, **changes: Any) -> Episode:
    """A small one."""
    drawn = Episode.draw(7, 0, Setting(calls=60))
    plain: dict[str, Any] = {
        "world_size": world_size,
        "ending": ending,
        "culprit": world_size - 1,
        "within_s": None,
        "lanes": 0,
        "groups": (tuple(range(world_size)),),
        "calls": 60,
        "debug": False,
        "verify": True,
        "timeout_s": 2.0 if ENDINGS[ending].times_out else 40.0,
    }
    return dataclasses.replace(drawn, **{**plain, **changes})


def steps_of(one: Episode, abilities: Callable[[], Abilities] = Abilities) -> list[Step]:
    plan = Plan(one, abilities)
    return [*plan.beginning(), *plan.body()]


# --- the plan ---------------------------------------------------------------------------------------------------------


def test_a_plan_is_the_same_wherever_it_is_made():
    drawn = [Episode.draw(3, number, Setting(calls=300)) for number in range(12)]
    assert drawn == [Episode.draw(3, number, Setting(calls=300)) for number in range(12)]
    assert len({(one.world_size, one.ending, one.groups) for one in drawn}) > 6
    assert steps_of(drawn[1]) == steps_of(drawn[1]) != steps_of(drawn[2])
    first, second = (Plan(drawn[1], Abilities) for _ in range(2))
    assert list(first.beginning()) == list(second.beginning())
    assert list(first.body()) == list(second.body())
    for _, a, b in zip(range(100), first.window(), second.window(), strict=False):
        assert a == b


def test_everything_is_drawn():
    steps = [
        step
        for number in range(40)
        for step in steps_of(episode(3, number=number, calls=400, groups=((0, 1, 2), (0, 2), (1,))))
    ]
    calls = [step.call for step in steps if isinstance(step, Once)]
    kinds = {part.kind for call in calls for part in call.parts}
    assert kinds == set(Kind) and {call.form for call in calls} == set(Form)
    for kind in Kind:
        used = {call.variant for call in calls if call.form is Form.ONE and call.parts[0].kind is kind}
        names = {found.variant for found in everything(kind, Abilities())}
        assert names | {"auto", "b2b+prelaunch"} <= used, kind
    ops = {(part.op, part.dtype) for call in calls for part in call.parts if part.op}
    assert ops == set(itertools.product(ReduceOp, define.ELEMENT_BYTES))
    refused = [step for step in steps if isinstance(step, Refuse)]
    assert {step.mistake for step in refused} == set(MISTAKES)
    assert {step.culprit for step in refused} == {None, 0, 1, 2}
    assert {type(step) for step in steps} >= {Differ, Fire, Freeze, Overlap}
    assert not any(isinstance(step, Capture | Replay | Stream) for step in steps), "CPUs have no graphs"
    assert {0, 1} <= {part.count for call in calls for part in call.parts}
    names = {Episode.draw(0, number, Setting()).ending for number in range(1500)}
    assert names == set(ENDINGS)


def test_gpus_have_graphs_and_kernels():
    setting = Setting("cuda", (2,), 4000)
    steps = [
        step
        for number in range(24)
        for step in steps_of(episode(2, setting=setting, calls=4000, number=number), lambda: EVERYTHING)
    ]
    calls = [step.call for step in steps if isinstance(step, Once)]
    assert {"one_shot", "b2b", "two_shot_push", "alternating"} <= {call.variant for call in calls}
    captured = [call for step in steps if isinstance(step, Capture) for call in step.calls]
    assert captured and not any("+" in call.variant for call in captured)
    assert not any(a.overlaps(b) for step in steps if isinstance(step, Capture) for a, b in pairs(step.calls))
    replays = [step for step in steps if isinstance(step, Replay)]
    assert sum(len(step.calls) * len(step.keys) for step in replays) > 400
    assert any(isinstance(step, Stream) for step in steps)
    assert not any(step.other for step in steps if isinstance(step, Fire)), "a new call may wait for the device"
    assert Episode.draw(0, 0, setting).world_size == 2
    endings_of_gpus = {Episode.draw(0, number, setting).ending for number in range(500)}
    assert endings.KILLED in endings_of_gpus and endings.ANOTHER_CALL not in endings_of_gpus


def pairs(calls: Sequence[Call]) -> list[tuple[Call, Call]]:
    return list(itertools.combinations(calls, 2))


def test_tensors_of_calls_under_way_together_lie_apart():
    for step in steps_of(episode(4, calls=1500)):
        if isinstance(step, Once):
            assert not any(a.overlaps(b) for a, b in itertools.combinations(step.call.spots, 2)), step
        elif isinstance(step, Overlap):
            assert not any(a.overlaps(b) for a, b in pairs([call for call, _ in step.calls])), step


COUNTS = ((2, 0, 1), (1, 1, 3), (0, 0, 0))
DEFINED = {
    Part(Kind.ALL_GATHER, "uint8", 5, Spot(), Spot()): define.all_gather([5] * 3),
    Part(Kind.ALL_TO_ALL, "uint8", 5, Spot(), Spot()): define.all_to_all([[5] * 3] * 3),
    Part(Kind.ALL_TO_ALL, "uint8", 4, Spot(), Spot(), splits=COUNTS): define.all_to_all(
        [[4 * rows for rows in row] for row in COUNTS]
    ),
    Part(Kind.BROADCAST, "uint8", 5, Spot(), root=1): define.broadcast(5, 3, 1, in_place=True),
    Part(Kind.SCATTER, "uint8", 5, Spot(), Spot(), root=2): define.scatter([5] * 3, 2),
    Part(Kind.GATHER, "uint8", 5, Spot(), Spot(), root=1): define.gather([5] * 3, 1),
    Part(Kind.REDUCE_SCATTER, "int32", 2, Spot(), Spot(), op="sum"): define.reduce_scatter(
        [8] * 3, Reduction(ReduceOp.SUM, "int32")
    ),
}


@pytest.mark.parametrize("part", DEFINED, ids=lambda part: f"{part.kind}{'-uneven' * bool(part.splits)}")
def test_its_definitions_agree_with_those_of_programs(part: Part):
    """Two descriptions of each collective: one is what the library goes by, the other what it is held against."""
    defined, item = DEFINED[part], getattr(torch, part.dtype).itemsize
    for rank in range(3):
        assert part.output_numel(rank, 3) * item == defined.output_bytes(rank)
        chunks = [chunk for chunk in defined.chunks() if chunk.dst_rank == rank]
        sources = [(source, first * item, numel * item) for source, first, numel in part.sources(rank, 3) if numel]
        assert sources == [(chunk.src_rank, chunk.src_offset, chunk.nbytes) for chunk in chunks]


def test_inputs_depend_on_call_part_and_rank():
    values, part = Values(CPU), Part(Kind.ALL_GATHER, "float32", 40, Spot(), Spot())
    names = list(itertools.product((1, 2), (0, 1), (0, 1, 2)))
    inputs = [values.input(key, number, part, rank, 3) for key, number, rank in names]
    assert all(len(each) == 160 for each in inputs)
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(inputs, 2))
    again = Values(CPU).output(2, 1, part, 0, 3)
    assert torch.equal(torch.cat(again), torch.cat(inputs[-3:]))


# --- what it notices --------------------------------------------------------------------------------------------------


def test_wrong_bytes_are_told_and_many_of_them_stop_it():
    told: list[str] = []
    judge = Judge(CPU, told.append)
    good, bad = torch.arange(9, dtype=torch.uint8), torch.arange(9, dtype=torch.uint8)
    bad[5] = 77
    judge.same(good, good.clone(), "fine")
    judge.same(bad, good, "a call", 3)
    assert told == ["wrong bytes (1, at 5 and on of 9): a call, 3"] and judge.compared_bytes == 18
    with pytest.raises(WrongBytesError):
        for _ in range(9):
            judge.same(bad, good, "again")


@pytest.mark.parametrize(
    ("name", "rank", "told", "text"),
    [
        (endings.GOOD, 0, None, ""),
        (endings.KILLED, 0, Told("PeerError", (1,), "", 12.0), ""),
        (endings.KILLED, 0, None, "no error was raised"),
        (endings.KILLED, 0, Told("PeerError", (0,), "", 12.0), "rank 1 is not the one that is named"),
        (endings.KILLED, 0, Told("PeerError", (1,), "", 40.0), "heard of after 30.0 s"),
        (endings.KILLED, 0, Told("PeerTimeoutError", (1,), "", 12.0), "allowed=PeerError"),
        (endings.STOPPED, 0, Told("PeerTimeoutError", (1,), "", 14.0), ""),
        (endings.STOPPED, 0, Told("PeerError", (1,), "", 14.0), "allowed=PeerTimeoutError"),
        (endings.INTERRUPTED, 1, Told("KeyboardInterrupt", (), "", 12.0), ""),
        (endings.INTERRUPTED, 1, None, "no error was raised"),
        (endings.CONTINUED, 1, Told("PeerError", (1,), "", 300.0), ""),
        (endings.CLOSES, 1, None, ""),
    ],
)
def test_what_ranks_must_see_of_an_end(name: str, rank: int, told: Told | None, text: str):
    found = objections(name, rank, 1, told, 10.0, 5.0)
    assert [text in each for each in found] == ([True] if text else [])


class _Line:
    """A line to nobody."""

    def send(self, word: object) -> None:
        pass


def performed(group: dist.ProcessGroup, one: Episode, planted: str) -> Outcome:
    """An episode in this process, with something wrong on rank 1."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            plant(patch, planted)
        seat = Seat(dist.get_rank(), dist.get_world_size(), CPU, _Line(), 60.0)  # type: ignore[arg-type]
        return perform(one, seat)


def plant(patch: pytest.MonkeyPatch, what: str) -> None:
    right: Callable[..., Any] = Communicator.all_gather

    def wrong(self: Communicator, output: Any, input: Any, **options: Any) -> Any:
        done = right(self, output, input, **options)
        if isinstance(output, torch.Tensor) and output.numel() and not options.get("async_op"):
            everything = torch.empty(0, dtype=torch.uint8).set_(output.untyped_storage())
            begin = output.storage_offset() * output.element_size()
            if what == "output":
                everything[begin + output.nbytes - 1] ^= 1
            elif what == "beside":
                everything[begin + output.nbytes] ^= 1
            elif what == "input" and not 0 <= input.data_ptr() - output.data_ptr() < output.nbytes:
                input.view(-1)[:1].view(torch.uint8)[0] ^= 1
        return done

    if what == "thread":
        patch.setattr(Communicator, "close", leave_a_thread(Communicator.close))
    elif what == "refusal":
        patch.setattr(Communicator, "all_gather", lambda *_, **__: None)
    else:
        patch.setattr(Communicator, "all_gather", wrong)


def leave_a_thread(close: Callable[[Communicator], None]) -> Callable[[Communicator], None]:
    def leaky(self: Communicator) -> None:
        close(self)
        threading.Thread(target=threading.Event().wait, args=(60.0,), name="sidelane-left", daemon=True).start()

    return leaky


def test_what_is_planted_is_found():
    """In the bytes of one rank, beside them, in its input, in a call that should be refused, and behind the end."""
    with crew(2) as ranks:
        for planted in ("", "output", "beside", "input", "refusal", "thread"):
            one = episode(2, calls=120, number=13, timeout_s=3.0)
            good, bad = ranks.run(performed, 2, one, planted)
            found = bad.tally.wrong + bad.tally.errors
            if planted == "":
                assert not found + good.tally.wrong + good.tally.errors, (good.tally.texts, bad.tally.texts)
                assert not good.leftovers + bad.leftovers
                assert good.tally.calls.total() >= 120 and good.tally.refusals and not bad.tally.calls
            elif planted == "thread":
                assert bad.leftovers == ["thread sidelane-left"] and not found
            elif planted == "refusal":
                assert found
            else:
                what = "input" if planted == "input" else "output"
                assert bad.tally.wrong and f", {what}, " in bad.tally.texts[0], bad.tally.texts
                assert "all_gather" in bad.tally.texts[0]


# --- episodes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_end(ending: str):
    ranks = 2 if ENDINGS[ending].times_out else 3
    verdict = run_episode(episode(ranks, ending, calls=30, within_s=0.004 if ENDINGS[ending].within else None))
    assert not verdict.failures, "\n".join(text for _, text in verdict.failures)
    assert verdict.tally.calls.total() >= 30 and not verdict.leftovers


@pytest.mark.parametrize("world_size", [1, 5])
def test_several_communicators(world_size: int):
    groups = (tuple(range(world_size)), (0,), tuple(range(0, world_size, 2)))
    verdict = run_episode(episode(world_size, calls=150, groups=groups, verify=False))
    assert not verdict.failures, "\n".join(text for _, text in verdict.failures)
    assert verdict.tally.calls.total() >= 150 and verdict.tally.refusals


def test_threads_with_a_communicator_each():
    verdict = run_episode(episode(2, calls=200, lanes=3))
    assert not verdict.failures, "\n".join(text for _, text in verdict.failures)
    assert verdict.tally.calls.total() >= 190


def test_threads_take_turns_in_one_order():
    turns, seen = Turns(3), []

    def work(number: int, times: int) -> None:
        for _ in range(times):
            with turns.take(number):
                seen.append(number)
        turns.leave(number)

    threads = [threading.Thread(target=work, args=pair) for pair in ((0, 2), (1, 5), (2, 3))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert seen == [0, 1, 2, 0, 1, 2, 1, 2, 1, 1]


def test_a_rank_that_hangs_shows_where(monkeypatch: pytest.MonkeyPatch):
    """It waits, and nobody lets it go on: the parent gives up, lets it say where it is, and ends it."""
    patience = [60.0]

    def leave_it(_: world._World, silent: set[int]) -> None:
        if silent == {1}:  # the other one has found out
            patience[0] = 0.5

    monkeypatch.setattr(Episode, "patience_s", property(lambda _: patience[0]))  # in this process
    monkeypatch.setattr(world, "END_S", 0.5)
    monkeypatch.setattr(world._World, "_see_to_the_culprit", leave_it)
    verdict = run_episode(episode(2, endings.NEVER_COMES, timeout_s=3.0, calls=10))
    texts = [text for rank, text in verdict.failures if rank == 1]
    assert "no word and no end within" in texts[0] and "wait_for_the_others" in texts[0], verdict.failures


# --- the campaign -----------------------------------------------------------------------------------------------------

QUICK: dict[str, Any] = {"device": "cpu", "ranks": 2, "episode_calls": 60, "quiet": True, "seed": 1}


def counted(rows: Sequence[Any]) -> list[SoakRow]:
    """What does not depend on when a fault hit."""
    return [dataclasses.replace(row, seconds=0.0) for row in rows if row.ending == endings.GOOD]


def kinds(rows: Sequence[Any]) -> list[tuple[str, int, int]]:
    return [(row.ending, row.ranks, row.episodes) for row in rows]


def test_a_campaign_goes_on_where_it_stopped(tmp_path: Path):
    whole, parts = tmp_path / "whole.json", tmp_path / "parts.json"
    assert study.main(SoakOptions(**QUICK, calls=240, json=whole)) == 0
    assert study.main(SoakOptions(**QUICK, calls=100, json=parts)) == 0
    before = read(parts)
    assert sum(row.calls for row in before.rows) < sum(row.calls for row in read(whole).rows)
    assert study.main(SoakOptions(**QUICK, calls=240, json=parts, resume=True)) == 0
    results = read(parts)
    assert counted(results.rows) == counted(read(whole).rows) != []
    assert kinds(results.rows) == kinds(read(whole).rows)
    assert sum(row.episodes for row in results.rows) >= 3 and results.study == "soak"
    titles = [table.title for table in tables_of(results)]
    assert titles == ["By ending", "By number of ranks", "Calls by kind"]
    with pytest.raises(ValueError, match="another campaign"):
        study.main(SoakOptions(**{**QUICK, "seed": 2}, json=parts, resume=True))


def test_an_episode_is_done_again():
    options = SoakOptions(**QUICK, episode=3)
    campaigns = [Campaign(options, study.choose_target(2, "cpu")) for _ in range(2)]
    for campaign in campaigns:
        campaign.run()
    assert counted(campaigns[0].rows()) == counted(campaigns[1].rows()) != []
    assert campaigns[0].episodes == 1


def stand_in(monkeypatch: pytest.MonkeyPatch, outcomes: Sequence[BaseException | list[tuple[int | None, str]]]) -> None:
    """Episodes without ranks: of three calls each, with these failures, or an error of the parent."""
    waiting = iter(outcomes)

    def run(one: Episode, heard: Callable[[int], None]) -> Verdict:
        outcome = next(waiting)
        if isinstance(outcome, BaseException):
            raise outcome
        tally = Tally(errors=len(outcome))
        tally.calls["gather"] = 3
        return Verdict(one, tally, failures=outcome, seconds=0.5)

    monkeypatch.setattr(study, "run_episode", run)


def test_ctrl_c_keeps_what_there_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    path = tmp_path / "soak.json"
    stand_in(monkeypatch, [[], [], KeyboardInterrupt()])
    with pytest.raises(KeyboardInterrupt):
        study.main(SoakOptions(**QUICK, json=path))
    assert sum(row.calls for row in read(path).rows) == 6


def test_failures_are_told_with_their_episode(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    path = tmp_path / "soak.json"
    stand_in(monkeypatch, [[], [(1, "PeerError: odd"), (None, "left behind: x")], []])
    result = CliRunner().invoke(
        cli.main, [*["soak", "--device", "cpu", "--ranks", "2", "--seed", "1", "--calls", "9", "--output"], str(path)]
    )
    assert result.exit_code == 1
    assert "again: sidelane soak --seed 1 --episode 1 --ranks 2" in result.output
    told = [row for row in read(path).rows if row.note]
    assert [(row.episode, row.rank, row.note) for row in told] == [
        (1, 1, "PeerError: odd"),
        (1, None, "left behind: x"),
    ]
    assert sum(row.failed for row in read(path).rows) == 1


def test_a_campaign_that_only_fails_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    path = tmp_path / "soak.json"
    long = "x" * 5000
    stand_in(monkeypatch, [[(0, long)] * 9] * 1000)
    assert study.main(SoakOptions(**{**QUICK, "ranks": None}, json=path)) == 1
    assert sum(row.episodes for row in read(path).rows) == study.MOST_FAILED
    assert path.stat().st_size < 100_000


def test_the_largest_file_is_small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    campaign = Campaign(SoakOptions(device="cpu"), study.choose_target(None, "cpu"))
    for ending, size in itertools.product(ENDINGS, range(1, 9)):
        tally = Tally()
        tally.calls.update(dict.fromkeys(SOAKED, 10_000_000))
        campaign.add(Verdict(episode(size, ending), tally, failures=[(0, "x" * 5000)], seconds=1.0))
    assert len(json.dumps(campaign.results().to_dict(), indent=1)) < 100_000


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--episode 3 --calls 7", "one episode is run alone"),
        ("--resume", "with --json FILE"),
        ("--minutes 0", "--minutes"),
        ("--device gpu", "no accelerator"),
    ],
)
def test_options_that_make_no_sense(arguments: str, reason: str):
    result = CliRunner().invoke(cli.main, ["soak", *arguments.split()])
    assert result.exit_code == 2 and reason in result.output, result.output


def test_defaults(monkeypatch: pytest.MonkeyPatch):
    seen: list[SoakOptions] = []

    def stand(options: SoakOptions) -> int:
        seen.append(options)
        return 0

    monkeypatch.setattr(study, "main", stand)
    assert CliRunner().invoke(cli.main, ["soak"]).exit_code == 0
    assert seen == [SoakOptions(minutes=1.0)] and Setting().calls == CALLS
