"""torchtitan's trainer with Sidelane: ``--override.imports sidelane.torchtitan.fsdp`` (torchtitan 0.3.0 and newer).

torchtitan swaps a part of its configuration for another one by a function of a package like this. The optimizers are
the part that it builds behind the sharded model and its weights.
"""

# mypy: disable-error-code="misc, untyped-decorator"
# torchtitan is not installed where types are checked.

from __future__ import annotations

import dataclasses
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config import override
from torchtitan.config.override import derive

from sidelane.fsdp import enable


@override(target=OptimizersContainer.Config, description="FSDP2 gathers parameters by Sidelane's copy engines.")
def fsdp(config: Any, **options: Any) -> Any:
    """Return the configuration of the same optimizers, which makes :func:`sidelane.fsdp.enable` of the model first.

    Args:
        config: configuration of any ``OptimizersContainer``.
        options: arguments of :func:`sidelane.fsdp.enable`, as in ``'sidelane.torchtitan.fsdp={"zero_copy": false}'``.
    """
    base: Any = config._owner

    class Enabled(base):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(base.Config):
            pass

        def __init__(self, config: Any, *, model_parts: list[nn.Module]) -> None:
            self.enabled = [enable(part, **options) for part in model_parts if isinstance(part, FSDPModule)]
            super().__init__(config, model_parts=model_parts)

    return derive(config, Enabled.Config)
