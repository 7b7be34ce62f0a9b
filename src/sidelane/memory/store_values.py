"""What ranks keep for each other in a store: JSON, which is data and never code, checked where it is read.

The store is TCP on a port, or a file: whoever reaches it can write there. It can make communicators fail, and no more.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from sidelane import version
from sidelane.errors import MismatchError, PeerError, PeerTimeoutError

SHOWN = 200
"""Characters of what a rank posted, in the text of an error."""


class Post(NamedTuple):
    """What a rank says in an exchange.

    Attributes:
        version: of Sidelane. It and the word come first in posts of all versions; of another one no more is known.
        word: for itself.
        what: the exchange is about.
        reason: why the rank takes no part in it; "" if it does.
        item: what it tells.
    """

    version: str
    word: str = ""
    what: str = ""
    reason: str = ""
    item: Any = None


def parsed(text: bytes | str) -> Any:
    """What ``text`` says, with tuples for lists.

    Raises:
        ValueError: it is no JSON.
    """
    try:
        return _with_tuples(json.loads(text))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def alike(own: Any, other: Any) -> bool:
    """True if two values have one form: they are of one type, or tuples of one length whose values are alike."""
    if type(own) is not type(other):
        return False
    return not isinstance(own, tuple) or (len(own) == len(other) and all(map(alike, own, other)))


def not_understood(what: str, rank: int, said: bytes) -> PeerError:
    """The error where a rank said what this version of Sidelane does not."""
    return PeerError(
        f"{what}: rank {rank} said {said[:SHOWN]!r} (allowed=what Sidelane {version.VERSION} says there)", (rank,)
    )


def require_one_version(what: str, versions: Sequence[str]) -> None:
    """Raise on every rank alike if ranks run different versions of Sidelane.

    Raises:
        MismatchError: they do.
    """
    if len(set(versions)) > 1:
        named = "; ".join(f"rank {rank}: {its}" for rank, its in enumerate(versions))
        raise MismatchError(f"{what}: ranks run different versions of Sidelane: {named} (allowed=one on all ranks)")


class ExchangeOutcome(NamedTuple):
    """What has become of an exchange.

    Attributes:
        met: all ranks have come, with certain words; "" if one has given up.
        text: why it did.
        ranks: that it missed.
        timed_out: it waited as long as it may.
    """

    met: str
    text: str = ""
    ranks: tuple[int, ...] = ()
    timed_out: bool = False

    @classmethod
    def of(cls, word: bytes | str) -> ExchangeOutcome:
        """As the store has it. Raises RuntimeError where it has something else."""
        try:
            met, text, ranks, timed_out = parsed(word)
            if alike(("", "", True), (met, text, timed_out)) and alike((0,) * len(ranks), ranks):
                return cls(met, text, ranks, timed_out)
        except (ValueError, TypeError):
            pass
        raise RuntimeError(f"it says {word[:SHOWN]!r} of what became of an exchange")

    def error(self, what: str) -> PeerError:
        """What a rank raises where another one gave up."""
        kind = PeerTimeoutError if self.timed_out else PeerError
        return kind(f"{what}: another rank gave up: {self.text}", self.ranks)


def post_of(text: bytes | str) -> Post:
    """A post as the store has it. Raises ValueError where it has something else."""
    match parsed(text):
        case (str(its), str(word), *_) if its != version.VERSION:
            return Post(its, word)
        case (str(its), str(word), str(what), str(reason), item):
            return Post(its, word, what, reason, item)
    raise ValueError("no post")


def met(found: Sequence[Post]) -> ExchangeOutcome:
    """All ranks have come."""
    words = "/".join(post.word for post in found)
    return ExchangeOutcome(hashlib.blake2b(words.encode(), digest_size=16).hexdigest())


def gave_up(error: BaseException, rank: int) -> ExchangeOutcome:
    """A rank has raised an error."""
    ranks = error.ranks if isinstance(error, PeerError) else (rank,)
    return ExchangeOutcome("", str(error) or type(error).__name__, tuple(ranks), isinstance(error, PeerTimeoutError))


def _with_tuples(value: Any) -> Any:
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value
