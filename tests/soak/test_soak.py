"""The campaign of random calls: its plan, what it notices, every way to end, going on and doing again."""

from __future__ import annotations

import dataclasses
import doctest
import itertools
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import long
from ranks import crew

from sidelane import Communicator
from sidelane.choice import Abilities
from sidelane.choice.candidate import EVERYTHING
from sidelane.program import collective as define
from sidelane.program.collective import Kind, ReduceOp, Reduction
from sidelane_lab.baselines.roster import applicable
from soak import calls, campaign, endings, judge, world
from soak.calls import Call, Form, Part, Spot
from soak.drawing import Drawing
from soak.endings import CLOSES, ENDINGS, Seen, objections
from soak.episode import JOINT, KINDS, PLAIN, SIZED, Episode, Setting
from soak.judge import Judge, Tally, WrongBytesError
from soak.memory import Values
from soak.mistakes import MISTAKES
from soak.plan import GROUPED, Plan, Step
from soak.rank import perform
from soak.seat import Outcome, Seat
from soak.world import Verdict, run_episode

CPU = torch.device("cpu")


def episode(world_size: int = 2, ending: str = endings.GOOD, **changes: Any) -> Episode:
    """A small one."""
    drawn = Episode.draw(7, 0, Setting(calls=60))
    plain: dict[str, Any] = {
        "world_size": world_size,
        "ending": ending,
        "culprit": world_size - 1,
        "within_s": None,
        "groups": (tuple(range(world_size)),),
        "calls": 60,
        "debug": False,
        "timeout_s": 2.0 if ENDINGS[ending].times_out else 40.0,
        "kind": ENDINGS[ending].kind or PLAIN,
        "worlds": (),
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
        for number in range(80)
        for step in steps_of(episode(3, number=number, calls=400, groups=((0, 1, 2), (0, 2), (1,))))
    ]
    calls = [step.given["call"] for step in steps if step.name == "once"]
    kinds = {part.kind for call in calls for part in call.parts}
    assert kinds == set(Kind) and {call.form for call in calls} == set(Form)
    for kind in Kind:
        used = {call.variant for call in calls if call.form is Form.ONE and call.parts[0].kind is kind}
        legal = {found.variant for found in applicable(kind, 3, Abilities())}
        assert legal | {"auto"} <= used, kind
    ops = {(part.op, part.dtype) for call in calls for part in call.parts if part.op}
    assert ops == set(itertools.product(ReduceOp, define.ELEMENT_BYTES))
    refused = [step.given for step in steps if step.name == "refuse"]
    assert {given["mistake"] for given in refused} == set(MISTAKES)
    assert {given["culprit"] for given in refused} == {None, 0, 1, 2}
    names = {step.name for step in steps}
    assert names >= {"differ", "fire", "freeze", "overlap", "finish", "shut", "late"}
    assert {step.given["name"] for step in steps if step.name == "grouped"} == set(GROUPED)
    assert any(step.given["late"] for step in steps if step.name == "open")
    assert not names & {"capture", "replay", "stream"}, "CPUs have no graphs"
    assert {0, 1} <= {part.count for call in calls for part in call.parts}
    drawn = [Episode.draw(0, number, Setting()) for number in range(1500)]
    assert {one.ending for one in drawn} == set(ENDINGS) and {one.kind for one in drawn} == set(KINDS)
    assert any(rank != world.index(rank) for one in drawn for world in one.worlds for rank in world)


def test_sizes_that_never_come_again():
    drawing = Drawing(random.Random(1), itertools.count(), 3, Abilities, 192 << 10, 1 << 20)
    drawn = [drawing.never_again() for _ in range(300)]
    sizes = [part.count for call in drawn for part in call.parts]
    assert len(set(sizes)) == len(sizes) > 300 and {call.form for call in drawn} == set(Form)
    assert all(spot == Spot() for call in drawn for spot in call.spots), "in memory of their own"


def test_gpus_have_graphs_and_kernels():
    setting = Setting("cuda", (2,), 4000)
    steps = [
        step
        for number in range(24)
        for step in steps_of(episode(2, setting=setting, calls=4000, number=number), lambda: EVERYTHING)
    ]
    calls = [step.given["call"] for step in steps if step.name == "once"]
    assert {"one_shot", "b2b", "two_shot_push", "striped"} <= {call.variant for call in calls}
    captures = [step.given["calls"] for step in steps if step.name == "capture"]
    captured = [call for each in captures for call in each]
    assert captured and not any("+" in call.variant for call in captured)
    assert not any(a.overlaps(b) for each in captures for a, b in pairs(each))
    assert sum(step.calls for step in steps if step.name == "replay") > 400
    assert any(step.name == "stream" for step in steps)
    others = [step.given["other"] for step in steps if step.name == "fire"]
    assert not any(others), "a new call may wait for the device"
    assert Episode.draw(0, 0, setting).world_size == 2
    endings_of_gpus = {Episode.draw(0, number, setting).ending for number in range(500)}
    assert endings.KILLED in endings_of_gpus


def pairs(calls: Sequence[Call]) -> list[tuple[Call, Call]]:
    return list(itertools.combinations(calls, 2))


def test_tensors_of_calls_under_way_together_lie_apart():
    for step in steps_of(episode(4, calls=1500)):
        if step.name == "once":
            assert not any(a.overlaps(b) for a, b in itertools.combinations(step.given["call"].spots, 2)), step
        elif step.name == "overlap":
            assert not any(a.overlaps(b) for a, b in pairs([call for call, _ in step.given["calls"]])), step


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
        (endings.KILLED, 0, Seen("PeerError", (1,), "", 12.0), ""),
        (endings.KILLED, 0, None, "no error was raised"),
        (endings.KILLED, 0, Seen("PeerError", (0,), "", 12.0), "rank 1 is not the one that is named"),
        (endings.KILLED, 0, Seen("PeerError", (1,), "", 40.0), "heard of after 30.0 s"),
        (endings.KILLED, 0, Seen("PeerTimeoutError", (1,), "", 12.0), "allowed=PeerError"),
        (endings.STOPPED, 0, Seen("PeerTimeoutError", (1,), "", 14.0), ""),
        (endings.STOPPED, 0, Seen("PeerError", (1,), "", 14.0), "allowed=PeerTimeoutError"),
        (endings.INTERRUPTED, 1, Seen("KeyboardInterrupt", (), "", 12.0), ""),
        (endings.INTERRUPTED, 1, None, "no error was raised"),
        (endings.CONTINUED, 1, Seen("PeerError", (1,), "", 300.0), ""),
        (endings.CLOSES, 1, None, ""),
    ],
)
def test_what_ranks_must_see_of_an_end(name: str, rank: int, told: Seen | None, text: str):
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

    if what == "leak":
        kept: list[bytes] = []

        def leaky(self: Communicator, *given: Any, **options: Any) -> Any:
            kept.append(b"x" * (4 << 20))
            return right(self, *given, **options)

        patch.setattr(Communicator, "all_gather", leaky)
    elif what == "thread":
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
            one = episode(2, calls=120, number=15, timeout_s=3.0)
            good, bad = ranks.run(performed, 2, one, planted)
            found = bad.tally.wrong + bad.tally.errors
            if planted == "":
                assert not found + good.tally.wrong + good.tally.errors, (good.tally.texts, bad.tally.texts)
                assert not good.leftovers + bad.leftovers
                assert good.tally.calls.total() >= 120 and good.tally.refusals and not bad.tally.calls
            elif planted == "thread":
                assert set(bad.leftovers) == {"thread sidelane-left"} and not found
            elif planted == "refusal":
                assert found
            else:
                what = "input" if planted == "input" else "output"
                assert bad.tally.wrong and f", {what}, " in bad.tally.texts[0], bad.tally.texts
                assert "all_gather" in bad.tally.texts[0]


@pytest.mark.long
def test_memory_that_grows_is_found():
    with crew(2) as ranks:
        good, bad = ranks.run(performed, 2, episode(2, calls=240, kind=SIZED), "leak")
    assert not good.tally.errors and bad.tally.errors == 1 and "memory grew by" in bad.tally.texts[0], bad.tally.texts


# --- episodes ---------------------------------------------------------------------------------------------------------


LONG_ENDINGS = (
    CLOSES,
    "continued",
    "stopped",
    "exits",
    "uncaught",
    "raises",
    "interrupted",
    "never comes",
    "driver refuses",
)
"""A good end and ranks that are killed are there in any case; `make soak` ends in all of these ways each night."""


@pytest.mark.parametrize("ending", [long(name) if name in LONG_ENDINGS else name for name in ENDINGS])
def test_every_end(ending: str):
    ranks = 2 if ENDINGS[ending].times_out else 3
    verdict = run_episode(episode(ranks, ending, calls=30, within_s=0.004 if ENDINGS[ending].within else None))
    assert not verdict.failures, "\n".join(text for _, text in verdict.failures)
    assert verdict.tally.calls.total() >= 30 and not verdict.leftovers


@pytest.mark.parametrize("world_size", [1, long(5)])
def test_several_communicators(world_size: int):
    groups = (tuple(range(world_size)), (0,), tuple(range(0, world_size, 2)))
    verdict = run_episode(episode(world_size, calls=150, groups=groups))
    assert not verdict.failures, "\n".join(text for _, text in verdict.failures)
    assert verdict.tally.calls.total() >= 150 and verdict.tally.refusals


@pytest.mark.parametrize("ending", [endings.GOOD, long(endings.KILLED)])
def test_a_group_of_two_worlds(ending: str):
    groups, worlds = ((0, 1, 2), (0, 2)), ((2, 0), (1,))
    verdict = run_episode(episode(3, ending, calls=150, groups=groups, worlds=worlds, kind=JOINT))
    assert not verdict.failures, "\n".join(text for _, text in verdict.failures)
    assert verdict.tally.calls["process group"] and verdict.tally.calls.total() >= 150


@pytest.mark.long
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

QUICK = ["--device", "cpu", "--ranks", "2", "--episode-calls", "60", "--seed", "1"]


def table_of(printed: str, *rows: str) -> list[list[str]]:
    """What does not depend on when a fault hit, nor on the time that it took."""
    lines = [line.split() for line in printed.splitlines()]
    return [line[:-5] + line[-4:] for line in lines if line and line[0] in rows]


@pytest.mark.long  # `make soak` is a campaign; ends of episodes are tested one by one above
def test_a_campaign_adds_up_and_an_episode_is_done_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "soak.txt"
    assert campaign.main([*QUICK, "--calls", "200", "--text", str(path)]) == 0
    printed = capsys.readouterr().out
    assert printed.strip() in path.read_text() and "command:" in path.read_text()
    ((_, episodes, failed, calls, *_),) = table_of(printed, "all")
    assert int(episodes) >= 3 and failed == "0" and int(calls) >= 200
    for _ in range(2):
        assert campaign.main([*QUICK, "--episode", "0"]) == 0
    first, second = capsys.readouterr().out.split("allocations", 1)
    assert table_of(first, "good", "all") == table_of(second, "good", "all") != []


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

    monkeypatch.setattr(campaign, "run_episode", run)


def test_ctrl_c_keeps_what_there_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    stand_in(monkeypatch, [[], [], KeyboardInterrupt()])
    with pytest.raises(KeyboardInterrupt):
        campaign.main([*QUICK, "--calls", "99", "--text", str(tmp_path / "soak.txt")])
    assert "gather 6" in capsys.readouterr().out and "gather 6" in (tmp_path / "soak.txt").read_text()


def test_failures_are_described_with_their_episode(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    stand_in(monkeypatch, [[], [(1, "PeerError: odd"), (None, "left behind: x")], []])
    assert campaign.main([*QUICK, "--calls", "9"]) == 1
    printed = capsys.readouterr().out
    assert "episode 1, rank 1:\nPeerError: odd" in printed and "episode 1:\nleft behind: x" in printed
    assert "again: make soak SOAK='--seed 1 --episode 1 --ranks 2 --device cpu --episode-calls 60'" in printed
    assert table_of(printed, "all") == [["all", "3", "1", "9", "0", "0", "2", "0"]]


def test_a_campaign_that_only_fails_ends(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    stand_in(monkeypatch, [[(0, "x" * 5000)] * 9] * 1000)
    assert campaign.main(["--device", "cpu", "--calls", "100000"]) == 1
    printed = capsys.readouterr().out
    assert table_of(printed, "all")[0][1] == str(campaign.MOST_FAILED) and len(printed) < 100_000


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("--map-memory sometimes", "--map-memory"),
        ("--device gpu", "no accelerator"),
    ],
)
def test_options_that_make_no_sense(arguments: str, reason: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        campaign.main(arguments.split())
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("module", [calls, judge], ids=lambda module: module.__name__)
def test_examples(module: ModuleType):
    outcome = doctest.testmod(module)
    assert outcome.attempted and not outcome.failed
