"""Comparison of a call between all ranks, through the control block, before any of them moves a byte."""

from __future__ import annotations

from collections.abc import Sequence

from sidelane.errors import MismatchError, PeerError
from sidelane.memory.control import ControlBlock
from sidelane.memory.posts import PostedCall

Location = tuple[int, int] | None
"""Number of a symmetric block and offset in it; None for ordinary memory."""


def compare(control: ControlBlock, call: int, posts: Sequence[PostedCall]) -> None:
    """Check that all ranks posted the same call.

    Raises:
        PeerError: a rank refused the call; its reason is repeated.
        MismatchError: two ranks made different calls; both are named.
    """
    texts = [post.common for post in posts]
    # The refusal of a rank that compared first (it blames another one) only repeats the cause that is found here.
    refused = [(post.rank, post.refusal) for post in posts if post.refusal is not None and post.blames is None]
    if refused:
        culprit, reason = refused[0]
        found = f"call {call}: rank {culprit} refused it: {reason}"
    elif other := next((rank for rank, text in enumerate(texts) if text != texts[0]), None):
        culprit = other
        found = f"call {call}: ranks made different calls: rank 0: {texts[0]}; rank {other}: {texts[other]}"
    else:
        return
    # A rank that knew the call from before has not compared; it finds the refusal while it waits for this rank.
    control.post_call(call, posts[control.rank].signature, refusal=found, blames=culprit)
    if refused:
        raise PeerError(found, ranks=[rank for rank, _ in refused])
    raise MismatchError(found)
