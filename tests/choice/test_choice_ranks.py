"""The choice between real processes: one profile for all, calls that agree, and the proof of what ran."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from homeless import leave_home
from on_ranks import everyones, on_ranks

from sidelane import Communicator, Config, MismatchError, PeerError
from sidelane.choice import Candidate, Curve, Profile
from sidelane.choice.key import key_here
from sidelane.config import BUILTIN
from sidelane.execute.submitted import Counts
from sidelane.program.collective import Kind
from sidelane.program.shape import Computation

SMALL, LARGE = 64, 1 << 16


def crossing(path: Path, small: str, large: str, world_size: int = 3) -> Config:
    """A profile of this machine by which ``small`` is the fastest at small sizes and ``large`` at large ones."""
    times = {small: ((256, 1.0), (1 << 20, 900.0)), large: ((256, 2.0), (1 << 20, 100.0))}
    curves = tuple(
        Curve(Kind.ALL_GATHER, world_size, "float32", False, False, Candidate("dma", variant), points)
        for variant, points in times.items()
    )
    path.write_text(Profile("cpu", key_here("cpu"), "2026-01-02T03:04:05+00:00", "a test", curves).to_text())
    return Config(timeout_s=30, profile=str(path))


def ran(comm: Communicator, numel: int, **options: Any) -> tuple[str, str]:
    """Gather symmetric memory; what was chosen and what ran."""
    output = comm.empty(comm.world_size * numel)
    comm.all_gather(output, torch.full((numel,), float(comm.rank)), **options)
    assert output.view(comm.world_size, -1)[:, 0].tolist() == [float(rank) for rank in range(comm.world_size)]
    choice, submitted = comm.last_choice(), comm.last_submitted()
    assert choice is not None and submitted is not None
    return choice.candidate.variant, submitted.variant


@on_ranks(3, (1, 4, 6))
def test_all_ranks_choose_by_the_profile_of_rank_0(group: dist.ProcessGroup, tmp_path: Path) -> None:
    """Rank 0 of a sub-group is its own."""
    rank = dist.get_rank(group)
    # Every rank has a file of its own, and they contradict each other.
    variants = [("pcpy", "bcst"), ("b2b", "pcpy"), ("bcst", "b2b")][rank]
    config = crossing(tmp_path / f"{rank}.json", *variants)
    with Communicator(group, config=config) as comm:
        assert comm.last_choice() is None and comm.last_submitted() is None
        small, printed = ran(comm, SMALL), str(comm.last_choice())
        assert re.match(r"all_gather of \d+\w? by copy engines \(\w+\): [\d.]+ us expected, next dma ", printed), (
            printed
        )
        assert printed.endswith(f"; by {comm.profile.where}")
        assert "0.json" in comm.profile.where and everyones(group, comm.profile.where) == [comm.profile.where] * 3
        assert (small, ran(comm, LARGE)) == (("pcpy", "pcpy"), ("bcst", "bcst"))
        assert ran(comm, SMALL, variant="b2b") == ("b2b", "b2b")


@on_ranks(2)
def test_a_user_without_a_home_goes_by_the_tables_of_the_package(group: dist.ProcessGroup) -> None:
    told = []
    for home in (None, "relative", "/proc/none", "/dev/null"):
        with pytest.MonkeyPatch.context() as patch:
            leave_home(patch)
            if home is not None:
                patch.setenv("HOME", home)
            with Communicator(group, config=Config(timeout_s=30)) as comm:
                ran(comm, SMALL)
                told.append((comm.profile.where, *comm.profile.notes))
    assert everyones(group, told) == [told] * 2 and all("built-in table cpu" in where for where, *_ in told)
    nobody, relative, missing, file = ([*notes] for _, *notes in told)
    assert nobody == relative == ["no profile of this user is looked for: this user has no home"]
    assert missing == [] and "cannot be read" in file[0]


@on_ranks(3)
def test_a_missing_file_is_an_error_on_every_rank(group: dist.ProcessGroup, tmp_path: Path) -> None:
    # Only rank 0's setting counts; the others have none.
    path = str(tmp_path / "none.json")
    config = Config(timeout_s=30, profile=path if dist.get_rank(group) == 0 else None)
    with pytest.raises(ValueError, match=r"none\.json.*no such file|no such file.*none\.json"):
        Communicator(group, config=config)
    with Communicator(group, config=Config(timeout_s=30, profile=BUILTIN)) as comm:
        assert "built-in table cpu" in comm.profile.where
        ran(comm, SMALL)


@on_ranks(3)
def test_hints_are_part_of_what_ranks_agree_on(group: dist.ProcessGroup) -> None:
    with Communicator(group, config=Config(timeout_s=30, profile=BUILTIN)) as comm:
        output, shard = comm.empty(3 * SMALL), torch.ones(SMALL)
        with pytest.raises(ValueError, match=r"all_gather: beside .*'music'.*nothing, compute"):
            comm.all_gather(output, shard, beside="music")
        with pytest.raises(MismatchError, match="beside compute"):
            comm.all_gather(output, shard, beside="compute" if comm.rank == 1 else None)
        comm.all_gather(output, shard, beside="compute")
        comm.all_gather(output, shard, beside="compute")
        with pytest.raises(ValueError, match="music"):
            comm.all_to_all(
                output, output.clone(), output_split_sizes=[SMALL] * 3, input_split_sizes=[SMALL] * 3, beside="music"
            )
        assert output.eq(1).all()
    with Communicator(
        group, config=Config(timeout_s=30, beside="compute" if dist.get_rank(group) else "nothing")
    ) as comm:
        with pytest.raises(MismatchError, match="beside compute"):
            comm.all_reduce(torch.ones(4))
        comm.all_reduce(torch.ones(4), beside="nothing")


@on_ranks(4)
def test_what_ran_is_counted(group: dist.ProcessGroup) -> None:
    with Communicator(group, config=Config(timeout_s=30)) as comm:
        n = comm.world_size
        before = comm.submitted()
        whole = comm.empty(n * SMALL)
        part = whole[comm.rank * SMALL : (comm.rank + 1) * SMALL]
        for _ in range(3):
            comm.all_gather(whole, part, variant="b2b")
        last = comm.last_submitted()
        assert last is not None and (last.implementation, last.variant, last.captured) == ("dma", "b2b", False)
        # A signal and a wait for the entry and the exit of each peer, and nothing stays on its rank.
        handshakes = 2 * (n - 1)
        expected = Counts(peer_copies=n - 1, writes=handshakes, waits=handshakes, calls=1)
        assert last.counts == expected and comm.submitted() == before + expected * 3
        work = comm.reduce_scatter(torch.empty(SMALL), whole, async_op=True)
        assert work is not None
        work.wait()
        last = comm.last_submitted()
        assert last is not None and last.counts.kernels >= 1 and "reduce_scatter" in last.collective
        assert comm.submitted().kernels == last.counts.kernels


@on_ranks(2)
def test_repeated_calls_are_recalled(group: dist.ProcessGroup) -> None:
    """A repeated call chooses, plans and agrees no more."""
    with Communicator(group, config=Config(timeout_s=30)) as comm:
        output, shard = comm.empty(comm.world_size * SMALL), torch.ones(SMALL)
        comm.all_gather(output, shard)
        first = comm.last_choice()
        comm.preparer.prepare = None  # type: ignore[assignment,method-assign]
        for _ in range(3):
            comm.all_gather(output, shard)
        assert comm.last_choice() is first


@on_ranks(3)
def test_a_computation_is_the_same_on_all_ranks(group: dist.ProcessGroup) -> None:
    """What ranks say of a computation, and what their calls make of it."""
    rank, told = dist.get_rank(group), []
    with Communicator(group, config=Config(timeout_s=30)) as comm:
        hint = comm.computation(us=100.0 + rank)
        assert hint.gemm is None and ran(comm, SMALL, beside=hint)[0] == ran(comm, SMALL, beside="compute")[0]
        product = comm.computation(gemm=(96, 64, 32, "float32"))
        assert product.gemm == (96, 64, 32, "float32") and 0 < product.us < 1e6
        tensors = [torch.full((5,), float(rank)), torch.full((3,), 1.0)]
        comm.all_reduce(tensors, beside=hint)
        assert tensors[0].tolist() == [float(sum(range(comm.world_size)))] * 5
        splits = [1] * comm.world_size
        output = torch.empty(comm.world_size)
        comm.all_to_all(output, output + 1, input_split_sizes=splits, output_split_sizes=splits, beside=hint)
        for given in (
            {}, {"us": 1.0, "gemm": (1, 1, 1, "float32")}, {"us": 0.0}, {"us": "fast"}, {"gemm": (8, 8, "float32")},
            {"gemm": (8, 8, 8, "int8")}, {"gemm": (8, 0, 8, "float32")}, {"us": -1.0 if rank == 1 else 5.0},
            {"gemm": (8, 8 + rank, 8, "float32")},
        ):  # fmt: skip
            with pytest.raises((ValueError, PeerError, MismatchError)) as refused:
                comm.computation(**given)
            told.append(f"{refused.type.__name__}: {refused.value}")
        with pytest.raises(ValueError, match="allowed=nothing, compute, a result of Communicator.computation"):
            comm.all_gather(torch.empty(comm.world_size), torch.empty(1), beside=17.0)
        assert ran(comm, SMALL, beside=hint), "all of that has left the communicator as it was"
    hints = everyones(group, [str(hint), *told])
    assert [hint[0] for hint in hints] == ["compute of 102 us"] * 3
    assert all("ValueError: computation: " in text and "=" in text for hint in hints for text in hint[1:8])
    assert [hint[8].split(":")[0] for hint in hints] == ["PeerError", "ValueError", "PeerError"]
    assert all("us (value=-1.0" in hint[8] and "computation (8, 8, 8, 'float32')" in hint[9] for hint in hints)


@on_ranks(2)
def test_ranks_that_were_told_different_times_are_refused(group: dist.ProcessGroup) -> None:
    with Communicator(group, config=Config(timeout_s=30)) as comm:
        tensor = torch.empty(comm.world_size)
        with pytest.raises(MismatchError) as refused:
            comm.all_gather(tensor, torch.empty(1), beside=Computation(5.0 + comm.rank))
        assert "compute of 5 us" in str(refused.value) and "compute of 6 us" in str(refused.value)
