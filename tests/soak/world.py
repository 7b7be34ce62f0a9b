"""The ranks of one episode as processes: started, listened to, stopped and let go on, ended, and looked for."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import tempfile
import time
from collections.abc import Callable
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from sidelane_lab.harness.launch import store_on_loopback
from sidelane_lab.harness.processes import rank_context
from soak import endings, leftovers
from soak.endings import ENDINGS, objections
from soak.episode import Episode
from soak.judge import MOST_TEXT, Tally, shortened
from soak.rank import errors_of, rank_main
from soak.seat import BEAT, COUNTED, DONE, FAULTED, FROZEN, THAWED, Outcome

END_S = 20.0
"""Seconds that a process may take to end once it has said how it went."""

SAYS_S = 5.0
"""Seconds that a process may take to say where it is."""

_CULPRITS_LEFT = (endings.STOPPED, endings.CONTINUED, endings.NEVER_COMES)
"""Endings in which the others are done before the culprit goes on, or never does."""


@dataclasses.dataclass(slots=True)
class Verdict:
    """The result of an episode.

    Attributes:
        episode: the one that was run.
        tally: counts of all ranks together.
        leftovers: number of things that it left behind.
        failures: (rank, text) of everything that was not as it must be; no rank where it is nobody's.
        seconds: its duration.
        by_rank: counts of each rank that has said so.
    """

    episode: Episode
    tally: Tally = dataclasses.field(default_factory=Tally)
    leftovers: int = 0
    failures: list[tuple[int | None, str]] = dataclasses.field(default_factory=list)
    seconds: float = 0.0
    by_rank: dict[int, Tally] = dataclasses.field(default_factory=dict)


def run_episode(episode: Episode, heard: Callable[[int], None] = lambda calls: None) -> Verdict:
    """Run an episode in processes of its own. ``heard`` is called now and then with the calls that rank 0 counted."""
    began = time.monotonic()
    verdict = Verdict(episode)
    with tempfile.TemporaryDirectory(prefix="sidelane-soak-") as name:
        world = _World(episode, Path(name), verdict, heard)
        try:
            world.run()
        finally:
            world.end()
        if not verdict.failures:
            world.look_for_leftovers()
    verdict.seconds = time.monotonic() - began
    return verdict


class _World:
    """The processes of one episode."""

    def __init__(self, episode: Episode, folder: Path, verdict: Verdict, heard: Callable[[int], None]) -> None:
        self._episode, self._folder, self._verdict, self._heard = episode, folder, verdict, heard
        self._temporary = folder / "tmp"
        self._temporary.mkdir()
        self._shared = leftovers.shared_names()
        self._processes: list[BaseProcess] = []
        self._lines: dict[connection.Connection, int] = {}
        self._outcomes: dict[int, Outcome] = {}
        self._counted: dict[int, Tally] = {}
        self._faulted_at_s: float | None = None
        self._thaw_at: dict[int, float] = {}
        self._let_go = False

    def run(self) -> None:
        """Start the ranks, hear them out, and judge what they say."""
        context = rank_context()
        store = store_on_loopback()
        for rank in range(self._episode.world_size):
            ours, theirs = context.Pipe()
            job = (rank, self._episode, store.port, str(self._folder), theirs)
            process = context.Process(target=rank_main, args=job, name=f"sidelane-soak-rank{rank}", daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._lines[ours] = rank
        self._listen()
        self._wait_for_the_end()
        self._judge()

    def _listen(self) -> None:
        """Listen until every rank has said how it went, or its process has ended."""
        heard_at = time.monotonic()
        lines = dict(self._lines)
        while lines:
            for line in connection.wait(list(lines), timeout=0.05 if self._thaw_at else 0.5):
                assert isinstance(line, connection.Connection)
                heard_at = time.monotonic()
                try:
                    tag, payload = line.recv()
                except (EOFError, OSError):  # it ended, maybe in the middle of a word
                    del lines[line]
                    continue
                if self._hear(lines[line], tag, payload):
                    del lines[line]
            for rank in [rank for rank, at in self._thaw_at.items() if at < time.monotonic()]:
                self._signal(rank, signal.SIGCONT)
            self._see_to_the_culprit(set(lines.values()))
            if time.monotonic() - heard_at > (patience_s := self._episode.patience_s):
                self._explain(sorted(lines.values()), patience_s)
                return

    def _hear(self, rank: int, tag: str, payload: Any) -> bool:
        """Take one word of a rank; True if it was the last."""
        if tag == BEAT and rank == 0:
            self._heard(payload)
        elif tag == FROZEN:
            self._thaw_at[rank] = time.monotonic() + payload
        elif tag == THAWED:
            self._thaw_at.pop(rank, None)
        elif tag == FAULTED:
            self._faulted_at_s = payload
        elif tag == COUNTED:
            self._counted[rank] = payload.tally
        elif tag == DONE:
            self._outcomes[rank] = payload
        return tag == DONE

    def _see_to_the_culprit(self, silent: set[int]) -> None:
        """End a culprit that was stopped or waits, or let it go on, when all others have said how it went."""
        culprit, ending = self._episode.culprit, self._episode.ending
        if self._let_go or self._faulted_at_s is None or ending not in _CULPRITS_LEFT or silent != {culprit}:
            return
        self._let_go = True
        if ending == endings.STOPPED:
            self._signal(culprit, signal.SIGKILL)
        elif ending == endings.CONTINUED:
            self._signal(culprit, signal.SIGCONT)
        else:
            with contextlib.suppress(OSError):
                next(line for line, rank in self._lines.items() if rank == culprit).send(None)

    def _wait_for_the_end(self) -> None:
        deadline = time.monotonic() + END_S
        for rank, process in enumerate(self._processes):
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive() and not self._verdict.failures:
                self._explain([rank], END_S)

    def _judge(self) -> None:
        episode, verdict = self._episode, self._verdict
        ending = ENDINGS[episode.ending]
        for rank, process in enumerate(self._processes):
            is_culprit = rank == episode.culprit and episode.ending != endings.GOOD
            outcome = self._outcomes.get(rank)
            allowed = ending.exit_codes if is_culprit else (0,)
            if outcome is not None:
                verdict.by_rank[rank] = outcome.tally
                verdict.tally.add(dataclasses.replace(outcome.tally, texts=[]))
                verdict.failures += [(rank, text) for text in outcome.tally.texts]
                verdict.failures += [(rank, f"left in the process: {text}") for text in outcome.leftovers[:5]]
                verdict.leftovers += len(outcome.leftovers)
            elif rank in self._counted:
                verdict.tally.add(self._counted[rank])
            if process.exitcode not in allowed:
                code = f"the process ended with exit code {process.exitcode} (allowed={allowed})"
                self._fail(rank, f"{code}\n{self._said(rank)}".rstrip())
            elif allowed == (0,) and outcome is None:
                self._fail(rank, f"the process ended without a word\n{self._said(rank)}".rstrip())
            if outcome is None or outcome.tally.errors or episode.ending == endings.GOOD:
                continue
            at_s = self._faulted_at_s
            if at_s is None:
                self._fail(rank, f"{episode.ending}: the culprit never came to it")
                continue
            for text in objections(episode.ending, rank, episode.culprit, outcome.seen, at_s, episode.timeout_s):
                self._fail(rank, text)

    def look_for_leftovers(self) -> None:
        """Look for what was not there before, when all processes have ended."""
        pids = [process.pid or 0 for process in self._processes]
        left = leftovers.of_sessions(pids)
        left += [f"shared memory {name}" for name in sorted(leftovers.shared_names(pids) - self._shared)]
        left += leftovers.files_in(self._temporary, all_of_them=self._episode.setting.on_cpu)
        self._verdict.leftovers += len(left)
        self._verdict.failures += [(None, f"left behind: {text}") for text in left[:5]]

    def end(self) -> None:
        """Kill what is still there."""
        for process in self._processes:
            if process.is_alive():
                process.kill()
        for process in self._processes:
            process.join(END_S)
        for line in self._lines:
            line.close()

    def _explain(self, ranks: list[int], waited_s: float) -> None:
        """Have ranks that hang show where, if they still can."""
        before = {rank: self._said(rank) for rank in ranks}
        for rank in ranks:
            self._signal(rank, signal.SIGCONT)
            self._signal(rank, signal.SIGUSR1)
        deadline = time.monotonic() + SAYS_S
        while time.monotonic() < deadline and any(self._said(rank) == before[rank] for rank in ranks):
            time.sleep(0.1)
        time.sleep(0.5)  # to the last line
        for rank in ranks:
            self._fail(rank, f"no word and no end within {waited_s:.0f} s\n{self._said(rank)}".rstrip())

    def _fail(self, rank: int | None, text: str) -> None:
        self._verdict.tally.errors += 1
        self._verdict.failures.append((rank, text))

    def _said(self, rank: int) -> str:
        with contextlib.suppress(OSError):
            return shortened(errors_of(self._folder, rank).read_text(errors="replace"), MOST_TEXT)
        return ""

    def _signal(self, rank: int, signum: int) -> None:
        pid = self._processes[rank].pid
        if pid is not None and self._processes[rank].is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
