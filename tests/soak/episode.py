"""From (seed, number) to an episode: its ranks, its settings and its end."""

from __future__ import annotations

import dataclasses
import random

from soak.endings import ENDINGS, GOOD, REFUSED, SLACK_S, START_S

CPU = "cpu"
SIZES = {1: 5, 2: 53, 3: 17, 4: 10, 5: 4, 6: 4, 7: 3, 8: 4}
"""Ranks of a world on CPUs, with how often they are drawn."""

SHARE = {1: 2.0, 2: 1.0, 3: 0.4, 4: 0.2, 5: 0.1, 6: 0.07, 7: 0.05, 8: 0.04}
"""Calls of an episode by its ranks, against those of two: on two cores, a call among eight takes as long as twenty."""

CALLS = 4000
"""Calls of an episode of two ranks; on GPUs, where starting one takes seconds, there are twice as many."""

PLAIN, SIZED, JOINT, MADE_UP = "plain", "other sizes", "two worlds", "made-up driver"
KINDS = {PLAIN: 50, SIZED: 14, JOINT: 20, MADE_UP: 16}
"""Kinds of episodes on CPUs, with how often they are drawn: most calls are of sizes that never come again; the group of
all ranks joins two worlds, in which they have other numbers; ranks take the path of GPUs, on a made-up driver."""


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """The settings that all episodes of a campaign share.

    Attributes:
        device_type: type of the ranks' devices.
        world_sizes: numbers of ranks that may be drawn.
        calls: calls of an episode of two ranks.
    """

    device_type: str = CPU
    world_sizes: tuple[int, ...] = tuple(SIZES)
    calls: int = CALLS

    @property
    def on_cpu(self) -> bool:
        return self.device_type == CPU


@dataclasses.dataclass(frozen=True, slots=True)
class Episode:
    """A world of ranks with some calls and one ending.

    Attributes:
        seed, number, setting: the campaign's, and its number in it.
        world_size: ranks.
        calls: calls that it makes, and checks, before it ends.
        ending: one of ``ENDINGS``.
        culprit: the rank that ends it.
        within_s: the fault hits that long after the culprit has begun its last calls; None: between two of them.
        groups: groups of ranks; the first is that of all.
        debug, timeout_s: settings of its communicators.
        kind: one of ``KINDS``.
        worlds: of two worlds, the ranks of each in the order of their numbers there.
    """

    seed: int
    number: int
    setting: Setting
    world_size: int
    calls: int
    ending: str
    culprit: int
    within_s: float | None
    groups: tuple[tuple[int, ...], ...]
    debug: bool
    timeout_s: float
    kind: str = PLAIN
    worlds: tuple[tuple[int, ...], ...] = ()

    @property
    def patience_s(self) -> float:
        """Seconds without a word of any rank after which something hangs."""
        return START_S + 2 * SLACK_S + 2 * self.timeout_s

    @staticmethod
    def draw(seed: int, number: int, setting: Setting) -> Episode:
        """Draw the episode ``number`` of a campaign."""
        draw = random.Random(f"sidelane soak {seed} {number}")
        sizes = setting.world_sizes
        n = draw.choices(sizes, [SIZES.get(size, 1) for size in sizes])[0]
        kind = draw.choices(list(KINDS), list(KINDS.values()))[0] if setting.on_cpu and n > 1 else PLAIN
        possible = {name: each.weight for name, each in ENDINGS.items() if each.kind in (None, kind)}
        if kind == MADE_UP:
            possible = {GOOD: 1.0, REFUSED: 2.0}
        ending = draw.choices(list(possible), list(possible.values()))[0] if n > 1 else GOOD
        debug = draw.random() < 0.15
        within = ENDINGS[ending].within and draw.random() < 0.7
        order, first = draw.sample(range(n), n), draw.randrange(1, max(2, n))
        some = [tuple(sorted(draw.sample(range(n), draw.randrange(1, n + 1)))) for _ in range(draw.randrange(3))]
        return Episode(
            seed=seed,
            number=number,
            setting=setting,
            world_size=n,
            calls=max(40, int(setting.calls * (SHARE.get(n, SHARE[8]) if setting.on_cpu else 1.0))),
            ending=ending,
            culprit=draw.randrange(n),
            within_s=0.02 * draw.random() ** 2 if within else None,
            groups=(tuple(range(n)), *some),
            kind=kind,
            worlds=(tuple(order[:first]), tuple(order[first:])) if kind == JOINT else (),
            debug=debug,
            # On GPUs a rank may be compiling a kernel that its peers wait for.
            timeout_s=(6.0 if n <= 4 and setting.on_cpu else 8.0) if ENDINGS[ending].times_out else 40.0,
        )
