"""Do all ranks make the same call? Compared through the control block, before any of them moves a byte."""

from __future__ import annotations

import json
from collections.abc import Sequence

from sidelane.errors import MismatchError, PeerError
from sidelane.memory.control import ControlBlock, PostedCall

_SPLITS = " splits "
_DIFFERENT = "ranks made different calls"


def agree(control: ControlBlock, call: int, timeout_s: float) -> None:
    """Wait until every rank has posted call number ``call`` and compare.

    Raises:
        PeerError: a rank refused the call; its reason is repeated.
        MismatchError: two ranks made different calls; both are named.
        PeerTimeoutError: a rank did not come.
    """
    _compare(control, call, control.calls_of_all(call, timeout_s))


def agree_on_splits(
    control: ControlBlock,
    call: int,
    head: str,
    output_bytes: Sequence[int],
    input_bytes: Sequence[int],
    *,
    timeout_s: float,
) -> tuple[tuple[int, ...], ...]:
    """Post this rank's split sizes and collect everyone's.

    Returns:
        ``counts[i][j]``: bytes that rank i sends to rank j.

    Raises:
        As :func:`agree`, and MismatchError where a rank expects other sizes than its peer sends.
    """
    splits = json.dumps([list(input_bytes), list(output_bytes)], separators=(",", ":"))
    control.post_call(call, head + _SPLITS + splits)
    posts = control.calls_of_all(call, timeout_s)
    heads = [post.signature.partition(_SPLITS)[0] for post in posts]
    _compare(control, call, posts, heads)
    sent, expected = zip(*(json.loads(post.signature.partition(_SPLITS)[2]) for post in posts), strict=True)
    for src in range(len(posts)):
        for dst in range(len(posts)):
            if sent[src][dst] != expected[dst][src]:
                raise MismatchError(
                    f"call {call}, all_to_all: rank {src} sends {sent[src][dst]} bytes to rank {dst}, "
                    f"which expects {expected[dst][src]}"
                )
    return tuple(tuple(row) for row in sent)


def _compare(
    control: ControlBlock, call: int, posts: Sequence[PostedCall], signatures: Sequence[str] | None = None
) -> None:
    texts = [post.signature for post in posts] if signatures is None else signatures
    refused = [(rank, post.refusal) for rank, post in enumerate(posts) if post.refusal is not None]
    error: MismatchError | PeerError | None = None
    if refused:
        rank, reason = refused[0]
        if _DIFFERENT in reason:  # another rank compared first and found this
            raise MismatchError(reason)
        error = PeerError(f"call {call}: rank {rank} refused it: {reason}", ranks=[rank for rank, _ in refused])
    elif other := next((rank for rank, text in enumerate(texts) if text != texts[0]), None):
        error = MismatchError(f"call {call}: {_DIFFERENT}: rank 0: {texts[0]}; rank {other}: {texts[other]}")
    if error is not None:
        # A rank that had made its call before did not compare; it finds the refusal while it waits for this one.
        control.post_call(call, texts[control.rank], refusal=str(error))
        raise error
