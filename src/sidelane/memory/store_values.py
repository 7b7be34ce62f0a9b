"""Values that ranks exchange through a store: JSON, data and never code, checked when it is read.

The store is a TCP port or a file. A process that can write there can make communicators fail, and no more.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from sidelane import version
from sidelane.errors import MismatchError, PeerError, PeerTimeoutError

_NO_VALUE = "no value"

SHOWN = 200
"""Largest number of characters of a posted value in the text of an error."""


class Post(NamedTuple):
    """The post of a rank in an exchange.

    Attributes:
        version: version of Sidelane. Version and word come first in posts of all versions; the rest may differ.
        word: random word that identifies the rank's exchange object.
        what: subject of the exchange.
        reason: reason why the rank does not take part; "" if it does.
        item: the rank's value.
    """

    version: str
    word: str = ""
    what: str = ""
    reason: str = ""
    item: Any = None


def parsed(text: bytes | str) -> Any:
    """Parse JSON, with tuples for lists.

    Raises:
        ValueError: the text is no JSON.
    """
    try:
        return _with_tuples(json.loads(text))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def alike(own: Any, other: Any) -> bool:
    """Return True if two values have one form: the same type, and for tuples the same length and forms of the items."""
    if type(own) is not type(other):
        return False
    return not isinstance(own, tuple) or (len(own) == len(other) and all(map(alike, own, other)))


def not_understood(what: str, rank: int, received: bytes) -> PeerError:
    """Return the error for a value that this version of Sidelane cannot read."""
    return PeerError(
        f"{what}: rank {rank} sent something else than Sidelane {version.VERSION} sends (value={received[:SHOWN]!r})",
        (rank,),
    )


def require_one_version(what: str, versions: Sequence[str]) -> None:
    """Raise on every rank alike if ranks run different versions of Sidelane.

    Raises:
        MismatchError: the versions differ.
    """
    if len(set(versions)) > 1:
        named = "; ".join(f"rank {rank}: {its}" for rank, its in enumerate(versions))
        raise MismatchError(
            f"{what}: ranks run different versions of Sidelane: {named}; install one version on all ranks"
        )


class ExchangeOutcome(NamedTuple):
    """The outcome of an exchange, which the ranks decide once in the store.

    Attributes:
        met: digest of the words of all ranks, if all have met; "" if one has given up.
        text: error of the rank that gave up.
        ranks: ranks that were missing.
        timed_out: the rank gave up after its time-out.
    """

    met: str
    text: str = ""
    ranks: tuple[int, ...] = ()
    timed_out: bool = False

    @classmethod
    def of(cls, word: bytes | str) -> ExchangeOutcome:
        """Parse an outcome from the store. Raises RuntimeError if it is none."""
        try:
            met, text, ranks, timed_out = parsed(word)
            if alike(("", "", True), (met, text, timed_out)) and alike((0,) * len(ranks), ranks):
                return cls(met, text, ranks, timed_out)
        except (ValueError, TypeError):
            pass
        raise RuntimeError(f"it says {word[:SHOWN]!r} of what became of an exchange")

    def error(self, what: str) -> PeerError:
        """Return the error that the other ranks raise after one gave up."""
        kind = PeerTimeoutError if self.timed_out else PeerError
        return kind(f"{what}: another rank gave up: {self.text}", self.ranks)


def post_of(text: bytes | str) -> Post:
    """Parse a post from the store. Raises ValueError if it is none."""
    match parsed(text):
        case (str(its), str(word), *_) if its != version.VERSION:
            return Post(its, word)
        case (str(its), str(word), str(what), str(reason), item):
            return Post(its, word, what, reason, item)
    raise ValueError("no post")


def met(found: Sequence[Post]) -> ExchangeOutcome:
    """Return the outcome in which all ranks have met."""
    words = "/".join(post.word for post in found)
    return ExchangeOutcome(hashlib.blake2b(words.encode(), digest_size=16).hexdigest())


def gave_up(error: BaseException, rank: int) -> ExchangeOutcome:
    """Return the outcome in which a rank has given up with an error."""
    ranks = error.ranks if isinstance(error, PeerError) else (rank,)
    return ExchangeOutcome("", str(error) or type(error).__name__, tuple(ranks), isinstance(error, PeerTimeoutError))


def value_of(store: dist.Store, key: str) -> bytes | None:
    """Return the value of a key, or None if it has none now.

    It takes one operation. Another rank may delete the key between ``check`` and ``get``, and ``get`` would then wait
    for it until the store's own time-out.
    """
    found: bytes = store.compare_set(key, _NO_VALUE, _NO_VALUE)  # what is expected comes back where nothing is
    return None if found == _NO_VALUE.encode() else found


def _with_tuples(value: Any) -> Any:
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value
