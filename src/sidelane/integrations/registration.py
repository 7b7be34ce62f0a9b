"""Ways to a Sidelane group: the name ``sidelane`` for ``torch.distributed``, and :func:`wrap`.

Importing this module, and registering the name, imports no part of the group itself.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from sidelane.integrations.ledger import SIDELANE as NAME
from sidelane.modes import exclude_compilers

if TYPE_CHECKING:
    import torch.distributed as dist

    from sidelane.integrations.process_group import SidelaneGroup


def register() -> None:
    """Register the name ``sidelane`` in ``torch.distributed``. Idempotent; not needed if the package is installed with
    pip.

    The package names this function as an entry point of the group ``torch.distributed.backends``, which torch calls
    when the name is first used (2.14 and later).
    """
    import torch.distributed as dist

    if not dist.is_available() or NAME.upper() in dist.Backend._plugins:
        return
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def autoload() -> None:
    """Register the name when torch is imported (2.5 and later, unless ``TORCH_DEVICE_BACKEND_AUTOLOAD=0``).

    It is the entry point of the group ``torch.backends``. ``import torch`` fails with what it raises, so that an error
    is a warning here, also for a program that never uses Sidelane.
    """
    try:
        register()
    except Exception as error:
        warnings.warn(f"sidelane is no backend here: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=2)


def _create(options: Any, backend_options: Any) -> Any:
    """Make the group for ``init_process_group`` and ``new_group`` of torch."""
    from sidelane.integrations.torch_world import make_group

    return make_group(options, backend_options)


@exclude_compilers
def wrap(group: dist.ProcessGroup | None = None) -> SidelaneGroup:
    """Put Sidelane in front of a process group: it makes the calls that it has, and ``group`` makes all others.

    Every rank of ``group`` wraps it. The result is a group like those of ``dist.new_group``: pass it as
    ``group=`` wherever torch takes one, and destroy it with ``dist.destroy_process_group(wrapped)``; ``group`` stays.

    Args:
        group: group of any backend; None for the default group.

    Returns:
        Group for the calls.

    Raises:
        TypeError: ``group`` is no process group.
        RuntimeError: ``torch.distributed`` is not initialised.
        ValueError: this process is not in the group.
        CommunicatorClosedError: it is a forked copy of one that is.
    """
    from sidelane.integrations.torch_world import put_in_front
    from sidelane.memory.exchange import require_own
    from sidelane.session.making import group_for

    inner = group_for("wrap", group)
    require_own(inner, "wrap")
    register()
    return put_in_front(inner)
