"""A way to run one case on one pair of tensors, which studies declare without loading PyTorch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sidelane_lab.harness.ways import Way

if TYPE_CHECKING:
    from sidelane_lab.baselines.reference import Case


class CaseWay(Way):
    """A way to run a collective.

    Args:
        case: what it does.
        tensors: its ``output``, None until the first run of what allocates it, and its ``input``.
        label: name in errors.
    """

    def __init__(self, case: Case, tensors: Any, label: str) -> None:
        self.case, self.tensors, self.label = case, tensors, label

    def fill(self, seed: int) -> None:
        from sidelane_lab.baselines.reference import fill_input, poison

        if self.tensors.output is not None:
            poison(self.tensors.output)
        fill_input(self.case, self.tensors.input, seed)

    def error(self, seed: int) -> str | None:
        from sidelane_lab.baselines.reference import output_error

        output = self.tensors.output
        return "there is no output" if output is None else output_error(self.case, output, seed)
