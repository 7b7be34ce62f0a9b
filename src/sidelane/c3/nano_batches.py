"""Nano-batches: parts of a batch take turns, so that one is computed while the collective of another one runs.

    part 0   compute | all_reduce ......... | compute | all_reduce ......... |
    part 1           | compute | all_reduce ......... | compute | all_reduce ...

The ConCCL paper names this as one source of computations and collectives that do not depend on each other (sections I
and II-C; NanoFlow, arXiv:2408.12757).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable
from typing import Any, Protocol, TypeVar

import torch
from torch.autograd.function import once_differentiable

from sidelane.errors import Page, see

T = TypeVar("T")


class Waitable(Protocol):
    """Work under way, such as a collective with ``async_op=True``."""

    def wait(self) -> Any:
        """Order the caller after the work."""


Started = tuple[torch.Tensor, Waitable | None]
"""Output of a collective that was started, and its work."""


def nano_batches(parts: Iterable[Generator[Waitable | None, Any, T]]) -> list[T]:
    """Run the parts of a batch in turn: each until it yields a collective, which then runs beside the next part.

    A part is a generator. It yields each collective that it has started, gets control back once that collective has
    been waited for, and returns its result. ``yield`` gives what ``wait()`` returned. The parts read nothing that
    another one writes. On GPUs everything is queued on the current stream and on the streams of the collectives, so
    that a CUDA graph can capture it. The ranks make the same collectives in the same order, as the parts of every rank
    take turns alike.

    Gradients flow through collectives that :func:`begin_collective` began. One backward pass of all results takes turns
    as the forward pass did: autograd goes back through the steps in the reverse order of their launches.

    Args:
        parts: generators, such as ``(forward(half) for half in batch.chunk(2))``.

    Returns:
        The results, in the order of the parts.

    Raises:
        ValueError: there is no part, or one is no generator.
        Exceptions of the parts, and of collectives. Collectives that other parts have begun are waited for.
    """
    turns = list(parts)
    if not turns or not all(isinstance(part, Generator) for part in turns):
        text = f"nano_batches: parts must be one generator or more, each yielding its collectives (value={turns!r})"
        raise see(ValueError(text), Page.OVERLAP)
    results: dict[int, T] = {}
    under_way: dict[int, Waitable | None] = dict.fromkeys(range(len(turns)))
    try:
        while under_way:
            for number, work in list(under_way.items()):
                waited = None if work is None else work.wait()
                under_way[number] = None
                try:
                    under_way[number] = turns[number].send(waited)
                except StopIteration as ended:
                    results[number] = ended.value
                    del under_way[number]
    except BaseException:
        for number, work in under_way.items():
            with contextlib.suppress(Exception), contextlib.closing(turns[number]):  # the first failure counts
                if work is not None:
                    work.wait()
        raise
    return [results[number] for number in range(len(turns))]


class BegunCollective:
    """A collective under way whose output has gradients; ``wait`` returns that output."""

    def __init__(self, start: Callable[[torch.Tensor], Started], backward: Callable[[torch.Tensor], Started]) -> None:
        self.start, self.backward = start, backward
        self.output: torch.Tensor | None = None
        self._held: tuple[torch.Tensor, Started] | None = None  # input and output live until the collective has ended

    def run(self, start: Callable[[torch.Tensor], Started], tensor: torch.Tensor) -> torch.Tensor:
        """Start a collective, of the input or of a gradient, and return its output, which is not written yet."""
        self._held = tensor, start(tensor)
        return self._held[1][0].detach()  # another tensor than the caller's, which may be used for the next call

    def finish(self) -> torch.Tensor:
        """Order the caller after the collective that was started last, and return its output."""
        assert self._held is not None, "a collective is under way"
        (_, (output, work)), self._held = self._held, None
        if work is not None:
            work.wait()
        return output.detach()

    def wait(self) -> torch.Tensor:
        """Order the caller after the collective, and return its output."""
        begun, self.output = self.output, None
        if begun is None:
            raise RuntimeError("BegunCollective.wait: it has been waited for already; a work is waited for once")
        output: torch.Tensor = _Finish.apply(begun, self)  # type: ignore[no-untyped-call]
        return output


def begin_collective(
    start: Callable[[torch.Tensor], Started],
    input: torch.Tensor,
    backward: Callable[[torch.Tensor], Started] | None = None,
) -> BegunCollective:
    """Start a collective that has gradients; its ``wait``, or ``yield`` in :func:`nano_batches`, returns the output.

    In the backward pass the collective of the gradient starts where the output was waited for, and is waited for where
    the collective was started.

    Args:
        start: function of a tensor that starts a collective out of place, and returns its output and its work.
        input: tensor to call it with.
        backward: the same for the gradient of the output; its own output is the gradient of ``input``. None takes
            ``start``, which is right for sums over all ranks and for all-to-alls of equal parts.

    Returns:
        The collective under way. Wait for it once.
    """
    begun = BegunCollective(start, start if backward is None else backward)
    begun.output = _Start.apply(input, begun)  # type: ignore[no-untyped-call]
    return begun


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, begun: BegunCollective) -> torch.Tensor:
        ctx.begun = begun
        return begun.run(begun.start, input)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.begun.finish(), None  # the gradient of the output has gone into the collective


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, begun: BegunCollective) -> torch.Tensor:
        ctx.begun = begun
        return begun.finish()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.begun.run(ctx.begun.backward, gradient.contiguous())
        return gradient, None
