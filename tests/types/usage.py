"""A user's program, for mypy alone: ``make types`` fails if a public name, or what it returns, is of any type.

Nothing here runs. ``disallow_any_expr`` of pyproject.toml holds for this file: an expression whose type mypy does not
know is an error, so that an editor can complete each of them and a misspelt name is found.
"""

from __future__ import annotations

from typing import assert_type

import torch
import torch.distributed as dist
from torch import nn

import sidelane
from sidelane import (
    Batched,
    BoundProgram,
    Communicator,
    CommunicatorClosedError,
    Config,
    MismatchError,
    Overlap,
    PeerError,
    PeerTimeoutError,
    Prelaunched,
    ProgramError,
    Report,
    SidelaneError,
    SidelaneGroup,
    SymmetricPool,
    UnavailableError,
    Work,
    choose_overlap,
    fsdp,
    ops,
    overlap,
    pool,
    register,
    report,
    scale_out,
    wrap,
)
from sidelane.ops.scale_out import ScaleOut
from sidelane.program.collective import Span
from sidelane.program.contract import Contract, Result
from sidelane.program.ir import EPOCH, Copy, Engine, EngineKind, Flag, Program, Queue, Signal, Wait
from sidelane.program.transform import lower
from sidelane.program.verify import Verification, verify
from sidelane_lab.sim.prelaunch import prelaunch


def collectives(comm: Communicator, a: torch.Tensor, b: torch.Tensor) -> None:
    assert_type(comm.rank, int)
    assert_type(comm.world_size, int)
    assert_type(comm.device, torch.device)
    assert_type(comm.config, Config)
    assert_type(comm.name, str)
    assert_type(comm.empty(2, 3, dtype=torch.float32), torch.Tensor)
    assert_type(comm.empty((2, 3)), torch.Tensor)
    assert_type(comm.all_gather(a, b), Work | None)
    assert_type(comm.all_gather([a, a], [b, b], variant="b2b", async_op=True), Work | None)
    assert_type(comm.all_to_all(a, b, scatter_dim=0, gather_dim=1), Work | None)
    assert_type(comm.reduce_scatter(a, b), Work | None)
    assert_type(comm.all_reduce(a, op="max"), Work | None)
    assert_type(comm.broadcast(a, root=0), Work | None)
    assert_type(comm.scatter(a, None, root=0), Work | None)
    assert_type(comm.gather(None, a, root=0), Work | None)
    if (work := comm.all_reduce(a, async_op=True)) is not None:
        assert_type(work.wait(), bool)
        assert_type(work.is_completed(), bool)
    with comm.batch() as batch:
        assert_type(batch, Batched)
        batch.all_gather(a, b)
    with comm.prepare_all_gather(a, b, host_trigger=True) as prelaunched:
        assert_type(prelaunched, Prelaunched)
        prelaunched.trigger()
        prelaunched.wait()
    assert_type(comm.peers(a), torch.Tensor)
    assert_type(str(comm.reach(a)), str)
    assert_type(comm.memory().used, int)
    if (choice := comm.last_choice()) is not None:
        assert_type(str(choice), str)
    comm.barrier()
    comm.synchronize()
    comm.close()


def lanes(group: dist.ProcessGroup, a: torch.Tensor) -> None:
    first = Communicator(group, device="cpu", config=Config(timeout_s=9.0))
    with Communicator(first, name="side") as comm, pool(comm, 1 << 20) as memory:
        assert_type(memory, SymmetricPool)
        assert_type(memory.nbytes, int)
        assert_type(memory.used, int)


def overlaps(comm: Communicator, a: torch.Tensor, b: torch.Tensor) -> None:
    def gather(on: Communicator) -> Work | None:
        return on.all_gather(a, b)

    beside = comm.computation(gemm=(1, 2, 3, "bfloat16"))
    moves = [("all_gather", 1 << 20)]
    assert_type(choose_overlap(comm, beside, moves).reason, str)
    assert_type(overlap(lambda: a @ b, gather, comm, computation=beside, moves=moves), tuple[torch.Tensor, Work | None])
    step = Overlap(comm)
    assert_type(step(lambda: a @ b, gather), tuple[torch.Tensor, Work | None])
    assert_type(step.times_us, dict[str, float])


def groups(model: nn.Module) -> None:
    register()
    with scale_out(dist.group.WORLD) as ranks:
        assert_type(ranks, ScaleOut)
    assert_type(wrap(), SidelaneGroup)
    found = report()
    assert_type(found, Report)
    assert_type(str(found), str)
    with fsdp.enable(model) as sharded:
        assert_type(sharded.calls, int)


def operators(comm: Communicator, a: torch.Tensor, b: torch.Tensor) -> None:
    assert_type(sidelane.ops.gemm_all_reduce(comm, a, b), torch.Tensor)
    assert_type(ops.all_gather_gemm(comm, a, b), torch.Tensor)
    assert_type(ops.all_reduce_rms_norm(comm, a, b, b), tuple[torch.Tensor, torch.Tensor])
    assert_type(ops.gemv_all_reduce(comm, a, b), torch.Tensor)


def programs(comm: Communicator, a: torch.Tensor) -> None:
    here, there = Span(0, "cache", 0, 8), Span(1, "inbox", 0, 8)
    free, full = Flag(0, 0), Flag(1, 0)
    engine = Engine(EngineKind.DMA)
    queues = (
        Queue(0, engine, (Wait(free, EPOCH), Copy(there, here), Signal(full, EPOCH))),
        Queue(1, engine, (Signal(free, EPOCH), Wait(full, EPOCH))),
    )
    contract = Contract.of("handover", {"cache": [8, 0], "inbox": [0, 8]}, [Result(there, (here,))])
    program = Program(contract, "push", queues, staging_bytes=(0, 0), flag_count=1)
    assert_type(verify(program).pairs, int)
    assert_type(verify(prelaunch(program)), Verification)
    assert_type(lower(program, frozenset()), Program)
    with comm.load(program, {"inbox": a}) as run:
        assert_type(run, BoundProgram)
        assert_type(run(async_op=True), Work | None)
        assert_type(run.program, Program)
        assert_type(run.triggers, int)


def failures(comm: Communicator, a: torch.Tensor) -> None:
    try:
        comm.all_reduce(a)
    except PeerTimeoutError as error:
        assert_type(error.ranks, tuple[int, ...])
    except PeerError as error:
        assert_type(error.ranks, tuple[int, ...])
    except ProgramError as error:
        assert_type(error.title, str)
        assert_type(error.violations, tuple[str, ...])
    except (MismatchError, UnavailableError, CommunicatorClosedError, SidelaneError) as problem:
        assert_type(str(problem), str)
