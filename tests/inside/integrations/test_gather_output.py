"""A parameter group of FSDP2 with an output function of its own, as torch 2.15 lets it have: torch copies out."""

from __future__ import annotations

import contextlib
import functools

import pytest
import torch
import torch.distributed as dist
from fsdp_models import CONFIG, STRAIGHT, build, mesh_of
from marks import long
from on_ranks import on_ranks
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

import sidelane
from sidelane import fsdp
from sidelane.integrations import fsdp_calls, ledger
from sidelane.integrations.direct_gather import NEWER

OWN = functools.partial(getattr(_fsdp_collectives, f"_default_{NEWER}", print))
"""Does what torch's own function does, and is another one."""


@pytest.mark.parametrize("late", [False, True])
@on_ranks(2, long(3))
def test_a_group_with_an_output_function_of_its_own_is_copied_out(group: dist.ProcessGroup, late: bool) -> None:
    """One of several groups has it, from the begin or from the second step on; the others are gathered straight."""
    ledger.reset()
    losses, whys = [], []
    for on in (False, True):
        torch.manual_seed(5)
        model = build(mesh_of(group))
        params, *_ = fsdp_calls.param_groups(model.blocks[0])
        if on and not late:
            setattr(params, f"_{NEWER}", OWN)
        with fsdp.enable(model, config=CONFIG) if on else contextlib.nullcontext():
            for step in range(3):
                if on and step == 1:
                    setattr(params, f"_{NEWER}", OWN)
                loss = model(torch.arange(6).reshape(2, 3) + step).square().sum()
                loss.backward()
                losses.append([loss.detach(), *(p.grad.to_local().clone() for p in model.parameters())])
                whys.append({row.why for row in sidelane.report().rows if row.operation == "fsdp all_gather"})
                ledger.reset()
    for one, other in zip(losses[:3], losses[3:], strict=True):
        torch.testing.assert_close(one, other)
    own = {STRAIGHT, f"copied out: the group has an {NEWER} of its own"}
    assert whys[3:] == [{STRAIGHT} if late else own, own, own], whys
