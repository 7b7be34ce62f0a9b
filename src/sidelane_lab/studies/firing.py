# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

"""A kernel that fires a prelaunched call, and one that does nothing, whose time is taken off."""

from __future__ import annotations

from sidelane.device.triton_language import tl, triton


# What changes from call to call must not choose between kernels: one that is loaded while a call is armed waits for it.
@triton.jit(do_not_specialize=["address", "value"])
def fire(address, value):
    """Store ``value`` at ``address`` as ``docs/internals/prelaunch.md`` has it: release, system scope."""
    tl.debug_barrier()
    word = tl.cast(address, tl.int64).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(word, tl.cast(value, tl.int32), sem="release", scope="sys")
