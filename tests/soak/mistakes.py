"""Wrong calls, each made from a right one: the change, and the error that the rank which makes it must get."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from sidelane.program.collective import Kind
from sidelane.session import Communicator

MOVING = (Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.BROADCAST, Kind.SCATTER, Kind.GATHER)
REDUCING = (Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)
TWO = (Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.REDUCE_SCATTER)
LISTED = (*TWO, Kind.ALL_REDUCE, Kind.BROADCAST)
ROOTED = (Kind.BROADCAST, Kind.SCATTER, Kind.GATHER)
ALL = (*MOVING, *REDUCING)


@dataclasses.dataclass(slots=True)
class Wrong:
    """A right call on its way to become a wrong one.

    Attributes:
        method: the communicator's method.
        tensors: its tensors, outputs first; None where this rank has none.
        options: its other arguments.
        world_size: ranks of the communicator.
        foreign: memory of another communicator.
    """

    method: str
    tensors: list[Any]
    options: dict[str, Any]
    world_size: int
    foreign: torch.Tensor | None = None

    @property
    def tensor(self) -> torch.Tensor:
        """The first tensor that is there: roots alone have some."""
        tensor: torch.Tensor = next(tensor for tensor in self.tensors if tensor is not None)
        return tensor

    def replace(self, make: Callable[[torch.Tensor], object]) -> None:
        """Put something else in the place of the first tensor."""
        number = next(number for number, tensor in enumerate(self.tensors) if tensor is not None)
        self.tensors[number] = make(self.tensors[number])

    def replace_all(self, make: Callable[[torch.Tensor], object]) -> None:
        self.tensors = [None if tensor is None else make(tensor) for tensor in self.tensors]

    def make(self, communicator: Communicator) -> None:
        """Make the call."""
        if self.method == "batch":
            with communicator.batch():
                raise LookupError("the block ends with this")
        getattr(communicator, self.method)(*self.tensors, **self.options)


@dataclasses.dataclass(frozen=True, slots=True)
class Mistake:
    """One way to get a call wrong.

    Attributes:
        kinds: kinds of calls that can be got wrong so.
        change: makes it wrong.
        errors: one of which the rank gets that makes it.
        on_root: on the root, if on one rank.
        needs_other: memory of another communicator.
    """

    kinds: tuple[Kind, ...]
    change: Callable[[Wrong], None]
    errors: tuple[type[Exception], ...] = (ValueError,)
    on_root: bool = False
    needs_other: bool = False


def _put(make: Callable[[torch.Tensor], object]) -> Callable[[Wrong], None]:
    return lambda wrong: wrong.replace(make)


def _put_everywhere(make: Callable[[torch.Tensor], object]) -> Callable[[Wrong], None]:
    return lambda wrong: wrong.replace_all(make)


def _set(**options: Any) -> Callable[[Wrong], None]:
    return lambda wrong: wrong.options.update(options)


def _make(method: str, *tensors: Any, **options: Any) -> Callable[[Wrong], None]:
    """Call another method instead."""

    def change(wrong: Wrong) -> None:
        wrong.method, wrong.tensors, wrong.options = method, list(tensors), options

    return change


def _another_dtype(tensor: torch.Tensor) -> torch.Tensor:
    other = torch.float64 if tensor.dtype is not torch.float64 else torch.int8
    return torch.empty(tensor.numel(), dtype=other, device=tensor.device)


def _freed(tensor: torch.Tensor) -> torch.Tensor:
    made = torch.empty_like(tensor)
    made.untyped_storage().resize_(0)
    return made


def _lazy(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=torch.complex64, device=tensor.device).conj()


def _overlapping(wrong: Wrong) -> None:
    output, input = wrong.tensors
    longest = max(output.numel(), input.numel())
    both = output.new_empty(longest + wrong.world_size * input.numel() + 1)
    # Neither the same place nor that of any rank's own part.
    wrong.tensors = [both[: output.numel()], both[1 : input.numel() + 1]]


def _foreign(wrong: Wrong) -> None:
    assert wrong.foreign is not None
    nbytes, dtype, foreign = wrong.tensor.nbytes, wrong.tensor.dtype, wrong.foreign
    wrong.replace(lambda _: foreign[:nbytes].view(dtype))


def _rooted(wrong: Wrong) -> None:
    """Pass a tensor where there must be none, or none where there must be one."""
    number = 1 if wrong.method == "scatter" else 0
    wrong.tensors[number] = wrong.tensors[1 - number] if wrong.tensors[number] is None else None


def _listed_variant(wrong: Wrong) -> None:
    wrong.tensors = [[tensor] for tensor in wrong.tensors]
    wrong.options["variant"] = "no such list"


def _uneven_lists(wrong: Wrong) -> None:
    wrong.tensors = [[wrong.tensors[0]], [wrong.tensors[1]] * 2]


def _half_lists(wrong: Wrong) -> None:
    wrong.tensors = [[wrong.tensors[0]], wrong.tensors[1]]


def _half_of_the_splits(wrong: Wrong) -> None:
    wrong.options["input_split_sizes"] = [1] * wrong.world_size


def _splits(wrong: Wrong, more: int = 0, number: type = int) -> None:
    """Exchange all rows with rank 0, or ``more``, in numbers of a type."""
    rest = [0] * (wrong.world_size - 1)
    outputs, inputs = (tensor.shape[0] for tensor in wrong.tensors)
    wrong.options["output_split_sizes"] = [number(size) for size in (outputs, *rest)]
    wrong.options["input_split_sizes"] = [number(size) for size in (inputs + more, *rest)]


def _prepared(wrong: Wrong) -> None:
    wrong.method = f"prepare_{wrong.method}"
    wrong.options = {"variant": "one_shot"}


def _no_arguments(wrong: Wrong) -> None:
    wrong.tensors, wrong.options = [], {}


MISTAKES: dict[str, Mistake] = {
    "too long": Mistake(TWO, _put(lambda tensor: tensor.new_empty(tensor.numel() + 1))),
    "dtypes differ": Mistake(TWO, _put(_another_dtype)),
    "strided": Mistake(ALL, _put(lambda tensor: tensor.new_empty(2 * tensor.numel())[::2])),
    "on meta": Mistake(ALL, _put_everywhere(lambda tensor: tensor.to("meta"))),
    "no memory": Mistake(ALL, _put(_freed)),
    "sparse": Mistake(
        (Kind.ALL_GATHER, Kind.ALL_REDUCE, Kind.BROADCAST),
        _put_everywhere(lambda tensor: torch.zeros(tensor.shape, device=tensor.device).to_sparse()),
    ),
    "conjugated": Mistake((Kind.ALL_TO_ALL, Kind.ALL_REDUCE, Kind.BROADCAST), _put_everywhere(_lazy)),
    "overlap": Mistake(TWO, _overlapping),
    "no tensor": Mistake(ALL, _put(lambda _: "a tensor"), (TypeError,)),
    "memory of another": Mistake(ALL, _foreign, needs_other=True),
    "no such variant": Mistake(ALL, _set(variant="no such variant")),
    "variant of another kind": Mistake((Kind.ALL_GATHER, *REDUCING), _set(variant="swap")),
    "variant is None": Mistake(ALL, _set(variant=None), (TypeError,)),
    "beside nobody": Mistake(ALL, _set(beside="nobody")),
    "no such op": Mistake(REDUCING, _set(op="product")),
    "op is a list": Mistake(REDUCING, _set(op=["sum"]), (ValueError, TypeError)),
    "root outside": Mistake(ROOTED, lambda wrong: wrong.options.update(root=wrong.world_size)),
    "root is no number": Mistake(ROOTED, _set(root=0.5), (TypeError,)),
    "root has none": Mistake((Kind.SCATTER, Kind.GATHER), _rooted, on_root=True),
    "no such variant for lists": Mistake(LISTED, _listed_variant),
    "lists of two lengths": Mistake(TWO, _uneven_lists),
    "half a list": Mistake(TWO, _half_lists, (TypeError,)),
    "twice in a list": Mistake(LISTED, _put_everywhere(lambda tensor: [tensor, tensor])),
    "half of the splits": Mistake((Kind.ALL_TO_ALL,), _half_of_the_splits),
    "splits that do not add up": Mistake((Kind.ALL_TO_ALL,), lambda wrong: _splits(wrong, more=1)),
    "splits are no numbers": Mistake((Kind.ALL_TO_ALL,), lambda wrong: _splits(wrong, number=float), (TypeError,)),
    "a prepared kernel": Mistake((Kind.ALL_GATHER, Kind.ALL_TO_ALL), _prepared),
    "no arguments": Mistake(ALL, _no_arguments, (TypeError,)),
    "a block that fails": Mistake((Kind.ALL_GATHER, Kind.BROADCAST), _make("batch"), (LookupError,)),
    "fewer than nothing": Mistake((Kind.ALL_GATHER,), _make("empty", -1)),
    "memory without a dtype": Mistake((Kind.ALL_GATHER,), _make("empty", 3, dtype="float32"), (TypeError,)),
}
"""By name. On other ranks the call is a right one, and new to all of them: only then do they compare it."""
