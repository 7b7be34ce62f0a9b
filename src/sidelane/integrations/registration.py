"""The name ``sidelane`` for ``torch.distributed``. Registering it imports no part of the group itself."""

from __future__ import annotations

from typing import Any

from sidelane.integrations.ledger import SIDELANE as NAME

DEVICES = ("cpu", "cuda")


def register() -> None:
    """Register the name ``sidelane`` in ``torch.distributed``. Idempotent; not needed if the package is installed with
    pip.

    The package names this function as an entry point, which torch calls: in the group ``torch.backends`` when it is
    imported (2.5 and later, unless ``TORCH_DEVICE_BACKEND_AUTOLOAD=0``), in the group ``torch.distributed.backends``
    when the name is first used (2.14 and later).
    """
    import torch.distributed as dist

    if not dist.is_available() or NAME.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=list(DEVICES))


def _create(options: Any, backend_options: Any) -> Any:
    """Make the group for ``init_process_group`` and ``new_group`` of torch."""
    from sidelane.integrations.process_group import SidelaneGroup

    return SidelaneGroup.of_options(options, backend_options)
