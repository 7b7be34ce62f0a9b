"""Wrong calls, each made from a right one: what is changed, and which error the rank that makes it must get."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from sidelane.program.collective import Kind
from sidelane.session import Communicator

Changes = Callable[["Wrong"], None]
MOVING = (Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.BROADCAST, Kind.SCATTER, Kind.GATHER)
REDUCING = (Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)
TWO = (Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.REDUCE_SCATTER)
LISTED = (*TWO, Kind.ALL_REDUCE, Kind.BROADCAST)
ALL = (*MOVING, *REDUCING)


@dataclasses.dataclass(slots=True)
class Wrong:
    """A right call on its way to become a wrong one.

    Attributes:
        method: of the communicator.
        tensors: that it takes, outputs first; those that this rank has.
        options: its other arguments.
        world_size: of the communicator.
        foreign: memory of another communicator.
        act: what to do instead of calling ``method``.
    """

    method: str
    tensors: list[Any]
    options: dict[str, Any]
    world_size: int
    foreign: torch.Tensor | None = None
    act: Callable[[Communicator], object] | None = None

    @property
    def which(self) -> int:
        """A tensor that is there: roots alone have some."""
        return next(number for number, tensor in enumerate(self.tensors) if tensor is not None)

    @property
    def tensor(self) -> torch.Tensor:
        tensor: torch.Tensor = self.tensors[self.which]
        return tensor

    def replace(self, tensor: object) -> None:
        self.tensors[self.which] = tensor

    def make(self, communicator: Communicator) -> None:
        """Make the call."""
        if self.act is not None:
            self.act(communicator)
        else:
            getattr(communicator, self.method)(*self.tensors, **self.options)


@dataclasses.dataclass(frozen=True, slots=True)
class Mistake:
    """One way to get a call wrong.

    Attributes:
        kinds: of calls that can be got wrong so.
        change: makes it wrong.
        errors: one of which the rank gets that makes it.
        alone: one rank can make it while the others make the right call.
        on_root: on the root, if on one rank.
        dtype: that the right call must have; empty for any.
        needs_other: memory of another communicator.
    """

    kinds: tuple[Kind, ...]
    change: Changes
    errors: tuple[type[Exception], ...] = (ValueError,)
    alone: bool = True
    on_root: bool = False
    dtype: str = ""
    needs_other: bool = False


def _longer(wrong: Wrong) -> None:
    wrong.replace(wrong.tensor.new_empty(wrong.tensor.numel() + 1))


def _another_dtype(wrong: Wrong) -> None:
    other = torch.float64 if wrong.tensor.dtype is not torch.float64 else torch.int8
    wrong.replace(torch.empty(wrong.tensor.numel(), dtype=other, device=wrong.tensor.device))


def _strided(wrong: Wrong) -> None:
    wrong.replace(wrong.tensor.new_empty(2 * wrong.tensor.numel())[::2])


def _meta(wrong: Wrong) -> None:
    wrong.tensors = [tensor if tensor is None else tensor.to("meta") for tensor in wrong.tensors]


def _freed(wrong: Wrong) -> None:
    tensor = torch.empty_like(wrong.tensor)
    tensor.untyped_storage().resize_(0)
    wrong.replace(tensor)


def _sparse(wrong: Wrong) -> None:
    wrong.tensors = [None if t is None else torch.zeros(t.shape, device=t.device).to_sparse() for t in wrong.tensors]


def _lazy(wrong: Wrong) -> None:
    wrong.tensors = [
        None if t is None else torch.zeros(t.shape, dtype=torch.complex64, device=t.device).conj()
        for t in wrong.tensors
    ]


def _overlapping(wrong: Wrong) -> None:
    output, input = wrong.tensors
    longest = max(output.numel(), input.numel())
    both = output.new_empty(longest + wrong.world_size * input.numel() + 1)
    # Neither the same place nor that of any rank's own part.
    wrong.tensors = [both[: output.numel()], both[1 : input.numel() + 1]]


def _no_tensor(wrong: Wrong) -> None:
    wrong.replace("a tensor")


def _foreign(wrong: Wrong) -> None:
    assert wrong.foreign is not None
    item = wrong.tensor.element_size()
    wrong.replace(wrong.foreign[: wrong.tensor.numel() * item].view(wrong.tensor.dtype))


def _set(**options: Any) -> Changes:
    return lambda wrong: wrong.options.update(options)


def _root(wrong: Wrong) -> None:
    wrong.options["root"] = wrong.world_size


def _rooted(wrong: Wrong) -> None:
    """A tensor where there must be none, or none where there must be one."""
    number = 1 if wrong.method == "scatter" else 0
    wrong.tensors[number] = wrong.tensors[1 - number] if wrong.tensors[number] is None else None


def _as_lists(wrong: Wrong) -> None:
    wrong.tensors[0] = [wrong.tensors[0]]
    if len(wrong.tensors) == 2:
        wrong.tensors[1] = [wrong.tensors[1]]


def _listed_variant(wrong: Wrong) -> None:
    _as_lists(wrong)
    wrong.options["variant"] = "no such list"


def _uneven_lists(wrong: Wrong) -> None:
    wrong.tensors = [[wrong.tensors[0]], [wrong.tensors[1]] * 2]


def _half_lists(wrong: Wrong) -> None:
    wrong.tensors = [[wrong.tensors[0]], wrong.tensors[1]]


def _twice(wrong: Wrong) -> None:
    wrong.tensors = [[tensor, tensor] for tensor in wrong.tensors]


def _split(wrong: Wrong) -> None:
    wrong.options["input_split_sizes"] = [1] * wrong.world_size


def _split_sums(wrong: Wrong) -> None:
    rows = [tensor.shape[0] for tensor in wrong.tensors]
    wrong.options["output_split_sizes"] = [rows[0], *[0] * (wrong.world_size - 1)]
    wrong.options["input_split_sizes"] = [rows[1] + 1, *[0] * (wrong.world_size - 1)]


def _split_types(wrong: Wrong) -> None:
    sizes = [float(wrong.tensors[0].shape[0]), *[0.0] * (wrong.world_size - 1)]
    wrong.options.update(output_split_sizes=sizes, input_split_sizes=sizes)


def _prepared(wrong: Wrong) -> None:
    wrong.method = f"prepare_{wrong.method}"
    wrong.options = {"variant": "alternating"}


def _negative(wrong: Wrong) -> None:
    wrong.method, wrong.tensors, wrong.options = "empty", [-1], {}


def _no_dtype(wrong: Wrong) -> None:
    wrong.method, wrong.tensors, wrong.options = "empty", [3], {"dtype": "float32"}


def _no_arguments(wrong: Wrong) -> None:
    wrong.tensors, wrong.options = [], {}


def _failing_block(wrong: Wrong) -> None:
    def act(communicator: Communicator) -> None:
        with communicator.batch():
            raise LookupError("the block ends with this")

    wrong.act = act


MISTAKES: dict[str, Mistake] = {
    "too long": Mistake(TWO, _longer),
    "dtypes differ": Mistake(TWO, _another_dtype),
    "strided": Mistake(ALL, _strided),
    "on meta": Mistake(ALL, _meta),
    "no memory": Mistake(ALL, _freed),
    "sparse": Mistake((Kind.ALL_GATHER, Kind.ALL_REDUCE, Kind.BROADCAST), _sparse),
    "conjugated": Mistake((Kind.ALL_TO_ALL, Kind.ALL_REDUCE, Kind.BROADCAST), _lazy),
    "overlap": Mistake(TWO, _overlapping),
    "no tensor": Mistake(ALL, _no_tensor, (TypeError,)),
    "memory of another": Mistake(ALL, _foreign, needs_other=True),
    "no such variant": Mistake(ALL, _set(variant="no such variant")),
    "variant of another kind": Mistake((Kind.ALL_GATHER, *REDUCING), _set(variant="swap")),
    "variant is None": Mistake(ALL, _set(variant=None), (TypeError,)),
    "beside nobody": Mistake(ALL, _set(beside="nobody")),
    "no such op": Mistake(REDUCING, _set(op="product")),
    "op is a list": Mistake(REDUCING, _set(op=["sum"]), (ValueError, TypeError)),
    "root outside": Mistake((Kind.BROADCAST, Kind.SCATTER, Kind.GATHER), _root),
    "root is no number": Mistake((Kind.BROADCAST, Kind.SCATTER, Kind.GATHER), _set(root=0.5), (TypeError,)),
    "root has none": Mistake((Kind.SCATTER, Kind.GATHER), _rooted, on_root=True),
    "no such variant for lists": Mistake(LISTED, _listed_variant),
    "lists of two lengths": Mistake(TWO, _uneven_lists),
    "half a list": Mistake(TWO, _half_lists, (TypeError,)),
    "twice in a list": Mistake(LISTED, _twice),
    "half of the splits": Mistake((Kind.ALL_TO_ALL,), _split),
    "splits that do not add up": Mistake((Kind.ALL_TO_ALL,), _split_sums),
    "splits are no numbers": Mistake((Kind.ALL_TO_ALL,), _split_types, (TypeError,)),
    "prepared alternating": Mistake((Kind.ALL_GATHER, Kind.ALL_TO_ALL), _prepared),
    "no arguments": Mistake(ALL, _no_arguments, (TypeError,)),
    "a block that fails": Mistake((Kind.ALL_GATHER, Kind.BROADCAST), _failing_block, (LookupError,)),
    "fewer than nothing": Mistake((Kind.ALL_GATHER,), _negative),
    "memory without a dtype": Mistake((Kind.ALL_GATHER,), _no_dtype, (TypeError,)),
}
"""By name. On other ranks the call is a right one, and new to all of them: only then do they compare it."""
