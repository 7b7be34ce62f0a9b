"""One call: which parts run, in which order, for how long; and how all of it stands at the end."""

from __future__ import annotations

import dataclasses
import math
import os
import shlex
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from node import running
from node.folder import DONE, FAILED, NOT_YET, UNFINISHED, Folder, State
from node.goals import goals
from node.parts import ROOT, Part
from sidelane_lab.machines.load import machine_names

MOST_TRIES = 2
DRY_S = 200.0
"""Time-out of a part in its smallest form."""
DRY_LEAST_S = 20.0
"""What it takes, about."""
LEAST_BUDGET_S = 15.0
"""Of a part that goes on in the next call: it takes as long to start."""
SLACK = 1.3
"""What a part that was ended because the call was over is given the next time, over what it had."""


class Session:
    """One call.

    Args:
        folder: that grows.
        parts: that are wanted.
        seconds: for all of it.
        dry: run the smallest form of each part, or show what would be typed.
        again: also try what has failed too often.
    """

    def __init__(self, folder: Folder, parts: Sequence[Part], *, seconds: float, dry: bool, again: bool) -> None:
        self._folder, self._parts, self._dry = folder, list(parts), dry
        self._deadline = time.monotonic() + seconds
        self._most_tries = {
            part.name: max(MOST_TRIES, folder.state(part).tries + 1) if again else MOST_TRIES for part in parts
        }
        self._left_out: dict[str, str] = {}

    def run(self) -> int:
        """Run what is missing, then once more what has failed, and say how all of it stands."""
        handler = signal.signal(signal.SIGTERM, _interrupt)
        try:
            for part in self._in_order():
                self._one(part)
        except KeyboardInterrupt:
            say("interrupted")
            self._summary()
            return 130
        finally:
            signal.signal(signal.SIGTERM, handler)
        return self._summary()

    def _in_order(self) -> Iterator[Part]:
        """What has not failed; then what has, in this call or before; then what had to wait for these."""
        failed_before = [part for part in self._parts if self._folder.state(part).tries]
        yield from (part for part in self._parts if part not in failed_before)
        yield from (part for part in self._parts if self._folder.state(part).tries)
        yield from (part for part in self._parts if self._folder.state(part).state == NOT_YET)

    def _one(self, part: Part) -> None:
        self._left_out.pop(part.name, None)
        while (state := self._folder.state(part)).state != DONE:
            reason = self._objection(part, state)
            if reason is not None:
                self._left_out[part.name] = reason
                return
            before = state
            state = self._measure(part, state)
            self._folder.note(part, state)
            if state.state == FAILED or (state.state == UNFINISHED and state.rows <= before.rows):
                return

    def _objection(self, part: Part, state: State) -> str | None:
        """Why a part does not run now."""
        if state.tries >= self._most_tries[part.name]:
            return f"it failed {state.tries} times (its name as an argument tries again)"
        if waits := [one.name for one in self._folder.parts if self._holds_up(one, part)]:
            return f"it waits for {', '.join(waits)}"
        if part.study == "claims" and not self._dry and (reason := self._no_claims()):
            return reason
        if self._dry and not part.small:
            return f"it needs GPUs: {shlex.join(self._command(part, dry=False))}"
        left, least = self._limit(part), self._least(part, state)
        return None if left >= least else f"it takes about {least:.0f} s, and {max(left, 0):.0f} are left"

    def _holds_up(self, first: Part, part: Part) -> bool:
        state = self._folder.state(first)
        if self._dry and not first.small:
            return False
        is_over = state.state == DONE or state.tries >= MOST_TRIES
        return (first.name in part.needs and state.state != DONE) or (first.name in part.after and not is_over)

    def _no_claims(self) -> str | None:
        machine = self._folder.place.machine
        if machine not in machine_names():
            return f"{machine} is not described (sidelane machines)"
        name = self._folder.path.resolve().name
        return None if name == machine else f"it reads a folder {machine}, and this one is {name}"

    def _limit(self, part: Part) -> float:
        """Seconds that a part may take now: what is left behind it is for its ending."""
        return min(self._most(part), self._deadline - time.monotonic() - running.ENDING_S)

    def _most(self, part: Part) -> float:
        return DRY_S if self._dry else part.timeout_s

    def _least(self, part: Part, state: State) -> float:
        if part.budget:
            return LEAST_BUDGET_S + part.margin_s
        usual = min(DRY_LEAST_S, part.seconds) if self._dry else part.seconds
        return min(max(usual, SLACK * state.needed_s), self._most(part))

    def _measure(self, part: Part, state: State) -> State:
        limit_s = self._limit(part)
        budget_s = max(1, math.floor(limit_s - part.margin_s)) if part.budget else math.inf
        command = [*self._command(part, dry=self._dry, budget_s=budget_s, limit_s=limit_s)]
        title = f"{part.name} ({self._parts.index(part) + 1} of {len(self._parts)})"
        say(f"{title}: up to {limit_s:.0f} s: {_shown(command)}")
        target = self._folder.target(part)
        target.parent.mkdir(parents=True, exist_ok=True)
        interrupt: KeyboardInterrupt | None = None
        began = time.monotonic()
        try:
            ended = running.run(
                [*command, part.into, str(target)],
                limit_s,
                self._folder.log(part),
                folder=ROOT,
                environment=_environment(self._folder.place.commit),
                say=lambda seconds, line: say(f"  {seconds:.0f} s: {line[:100] or 'it begins'}"),
            )
        except KeyboardInterrupt as problem:
            interrupt, ended = problem, running.Ended("interrupted", time.monotonic() - began, is_late=True)
        # Of wrong rows the file says as much, and the next call would make them again.
        problem_text = "" if "rows are WRONG:" in ended.problem and not ended.is_late else ended.problem
        try:
            rows, wrong = self._folder.keep(part, is_whole=not problem_text)
        except (ValueError, OSError) as problem:
            rows, wrong, problem_text = state.rows, state.wrong, f"{problem_text}\n{problem}".strip()
        if not problem_text and not self._folder.has(part):
            problem_text = "it wrote nothing"
        # One that grows had a budget, and was late all the same: it counts by what it has found.
        cut = interrupt is not None or (ended.is_late and limit_s < self._most(part) and not part.budget)
        found = dataclasses.replace(
            state, rows=rows, wrong=wrong, seconds=state.seconds + ended.seconds, problem=problem_text
        )
        if not problem_text:
            # One that grows was not ended by its budget if it was shorter.
            name = DONE if ended.seconds < budget_s else UNFINISHED
            found = dataclasses.replace(found, state=name, tries=0)
        elif cut or (part.budget and rows > state.rows):
            needed = 0.0 if interrupt is not None or part.budget else ended.seconds
            found = dataclasses.replace(found, state=UNFINISHED, needed_s=max(needed, state.needed_s))
        else:
            found = dataclasses.replace(found, state=FAILED, tries=state.tries + 1)
        wrong_rows = f", {wrong} WRONG" if wrong else ""
        say(f"{title}: {found.state}, {f'{rows} rows, ' if rows else ''}{ended.seconds:.0f} s{wrong_rows}")
        if problem_text:
            print(problem_text, flush=True)
        if interrupt is not None:
            self._folder.note(part, found)
            raise interrupt
        return found

    def _command(
        self, part: Part, *, dry: bool, budget_s: float = math.inf, limit_s: float = math.inf
    ) -> Iterator[str]:
        out = self._folder.path.resolve()
        for word in part.small if dry else part.command:
            yield word.format(out=out, above=out.parent, machine=self._folder.place.machine)
        if part.budget and math.isfinite(budget_s):
            yield from (part.budget, f"{budget_s:.0f}")
            if part.budget == "--budget":
                yield from ("--timeout", f"{limit_s:.0f}")

    def _summary(self) -> int:
        states = [(part, self._folder.state(part)) for part in self._parts]
        done = [part for part, state in states if state.state == DONE]
        say(f"done: {len(done)} of {len(states)} parts, in {self._folder.path}")
        left: dict[tuple[str, str], list[str]] = {}
        for part, state in states:
            if state.state in (NOT_YET, UNFINISHED):
                reason = self._left_out.get(part.name, "its turn did not come")
                left.setdefault((state.state, reason), []).append(part.name)
        for (how, reason), names in left.items():
            say(f"left, {how}: {', '.join(names)}: {reason}")
        bad = [(part, state) for part, state in states if state.state == FAILED or state.wrong]
        for part, state in bad:
            what = f"{state.wrong} of {state.rows} rows are WRONG" if state.wrong else state.problem.partition("\n")[0]
            say(f"FAILED: {part.name}: {what} ({self._folder.log(part)})")
        if len(done) < len(states) and not self._dry:
            seconds = sum(rest(part, state) for part, state in states)
            say(f"the same command goes on; about {seconds / 60:.0f} minutes are left")
        if not self._dry:
            for line in goals(self._folder.path):
                say(line)
        table = self._folder.path / "parts" / "auto-table.json"
        if table.exists() and not self._dry:
            target = f"src/sidelane/choice/builtin/{self._folder.place.machine}.json"
            say(f"auto's table: cp {table} {target}")
        return 1 if bad else 0


def say(text: str) -> None:
    print(f"[sidelane] {text}", flush=True)


def rest(part: Part, state: State) -> float:
    if state.state == DONE or state.tries >= MOST_TRIES:
        return 0.0
    return max(part.seconds - (state.seconds if part.budget else 0.0), 20.0)


def _shown(command: Sequence[str]) -> str:
    words = [Path(word).name if word.startswith("/") else word for word in command]
    return shlex.join(words)[:160]


def _environment(commit: str) -> dict[str, str]:
    """Of a part: this checkout, wherever it runs, and its commit, whatever has been written since the call began."""
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "SIDELANE_COMMIT": commit}


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
