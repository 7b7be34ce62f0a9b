"""Shared host memory: what peers see, what it refuses, what it leaves behind (nothing)."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import gc
import itertools
import mmap
import os
import resource
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from marks import long
from on_ranks import on_ranks
from ranks import RankPool, crew, shared_memory

from sidelane.errors import CommunicatorClosedError, MismatchError, UnavailableError
from sidelane.memory import host_shared
from sidelane.memory.exchange import Exchange
from sidelane.memory.host_shared import ShmMemory
from sidelane.memory.liveness import ProcessIdentity


@pytest.fixture(autouse=True)
def _nothing_else_shared(pool: RankPool) -> None:
    """Earlier tests may have left objects with shared memory to the garbage collector of a worker."""
    pool.run(collect, 8)


def collect(group: dist.ProcessGroup) -> None:
    gc.collect()
    held_before[:] = shared_memory()


held_before: list[str] = []


def leftovers() -> list[str]:
    """Shared memory that this process has open or mapped and had not before the test."""
    gc.collect()
    return [held for held in shared_memory() if held not in held_before]


@on_ranks(1, 2, long(8), (1, 4, 6), (7, 2))
def test_peers_see_each_others_bytes(group: dist.ProcessGroup) -> None:
    rank, n = dist.get_rank(group), dist.get_world_size(group)
    memory = ShmMemory(Exchange(group, 60.0))
    for nbytes in (1, 5000, 3 << 20):
        block = memory.allocate(nbytes)
        assert block.tensor.dtype == torch.uint8
        assert block.tensor.shape == (nbytes,)
        assert not block.tensor.any()
        assert block.addresses[rank] == block.tensor.data_ptr()
        assert block.addresses[rank] % 4096 == 0
        dist.barrier(group)
        block.tensor.fill_(rank + 1)
        dist.barrier(group)
        for peer in range(n):
            assert ctypes.string_at(block.addresses[peer], nbytes) == bytes([peer + 1]) * nbytes
        dist.barrier(group)
        ctypes.memset(block.addresses[(rank + 1) % n] + nbytes - 1, 100 + rank, 1)
        dist.barrier(group)
        assert block.tensor[-1] == 100 + (rank - 1) % n


@on_ranks(3)
@pytest.mark.parametrize(
    ("sizes", "error", "words"),
    [
        ([100, 100, 200], MismatchError, "rank 1: 100, rank 2: 200"),
        ([0] * 3, ValueError, r"^shared memory: nbytes must be positive \(value=0\)$"),
        ([-5] * 3, ValueError, r"^shared memory: nbytes must be positive \(value=-5\)$"),
        (
            [1 << 50] * 3,
            UnavailableError,
            r"bytes of all ranks together \(value=\d+, allowed=1\.\.",
        ),  # before it is a signal
    ],
)
def test_every_rank_refuses_sizes(
    group: dist.ProcessGroup, sizes: list[int], error: type[Exception], words: str
) -> None:
    memory = ShmMemory(Exchange(group, 60.0))
    with pytest.raises(error, match=words):
        memory.allocate(sizes[dist.get_rank(group)])
    assert memory.allocate(16).tensor.sum() == 0, "the group is as usable as before"
    del memory
    assert leftovers() == []


@on_ranks(3)
def test_a_rank_that_cannot_reserve_fails_all(group: dist.ProcessGroup) -> None:
    """One rank whose kernel has no pages left at the moment of reserving."""
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank(group) == 1:

            def full(*_: int) -> None:
                raise OSError(28, "No space left on device")

            patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(UnavailableError) as caught:
            ShmMemory(Exchange(group, 60.0)).allocate(1 << 20)
    assert leftovers() == []
    text = str(caught.value)
    assert "rank 1: cannot map and reserve" in text and "no more memory" in text and "No space left" in text


def _limit_with(few: int) -> int:
    """The limit of descriptors, which counts numbers, below which so few are free."""

    def is_free(number: int) -> bool:
        try:
            os.fstat(number)
        except OSError:
            return True
        return False

    return next(itertools.islice(filter(is_free, itertools.count()), few, None))


def out_of_descriptors(group: dist.ProcessGroup) -> list[str]:
    """Rank 1, then rank 0, may open no more files; then rank 1 gets no mapping."""
    rank, found = dist.get_rank(group), []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for poor in (1, 0):
        memory = ShmMemory(Exchange(group, 60.0))
        memory.allocate(100)
        if rank == poor:
            few = 2 - rank  # the store's own, and that of rank 0 while the others map it
            resource.setrlimit(resource.RLIMIT_NOFILE, (_limit_with(few), hard))
        try:
            with pytest.raises(UnavailableError) as caught:
                memory.allocate(100)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        found.append(str(caught.value))
        memory.close()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:

            def refused(*_: Any, **__: Any) -> None:
                raise OSError(errno.ENOMEM, "Cannot allocate memory")

            patch.setattr(mmap, "mmap", refused)
        with pytest.raises(UnavailableError) as caught:
            ShmMemory(Exchange(group, 60.0)).allocate(100)
        found.append(str(caught.value))
    return found


def test_what_a_rank_lacks_is_named() -> None:
    """Between ranks of their own: threads that other tests have left behind open files, too."""
    with crew(2) as ranks:
        told = ranks.run(out_of_descriptors)
    for texts in told:
        for text, rank, words in zip(texts, (1, 0, 1), ("(ulimit -n)", "(ulimit -n)", "no more memory"), strict=True):
            assert f"rank {rank}: cannot" in text and words in text, text


def pretend(group: dist.ProcessGroup, **changes: object) -> str:
    """Rank 1 claims to be somebody else."""
    exchange = Exchange(group, 60.0)
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank(group) == 1:
            process, word = exchange.liveness.member
            patch.setattr(exchange.liveness, "member", (ProcessIdentity(*process)._replace(**changes), word))
        with pytest.raises(UnavailableError) as caught:
            ShmMemory(exchange).allocate(100)
    assert leftovers() == []
    return str(caught.value)


@on_ranks(3)
def test_ranks_on_two_hosts_are_named(group: dist.ProcessGroup) -> None:
    text = pretend(group, host="elsewhere", boot="another")
    assert "must be on one machine" in text
    assert "rank 1 on elsewhere" in text
    assert f"rank 2 on {ProcessIdentity.own().host}" in text


@on_ranks(2)
def test_a_wrong_process_behind_the_pid_is_noticed(group: dist.ProcessGroup) -> None:
    """What a rank in another pid namespace may find behind the pid of rank 0: a different file."""
    stranger = os.memfd_create("stranger")
    real = os.open
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank(group) == 1:
            patch.setattr(os, "open", lambda path, flags: real(f"/proc/self/fd/{stranger}", flags))
        with pytest.raises(UnavailableError) as caught:
            ShmMemory(Exchange(group, 60.0)).allocate(100)
    os.close(stranger)
    text = str(caught.value)
    assert "rank 1:" in text
    assert "is not the file of rank 0" in text


SECRET = b"of somebody else"


def an_open_file(folder: Path, nbytes: int) -> int:
    path = folder / "sidelane-file"
    path.write_bytes(SECRET.ljust(nbytes, b"!"))
    path.chmod(0o600)
    return os.open(path, os.O_RDWR)


def a_pipe(folder: Path, nbytes: int) -> int:
    return os.pipe()[0]


def a_memfd(nbytes: int, seals: int, name: str = "sidelane") -> int:
    made = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.write(made, SECRET)
    os.ftruncate(made, nbytes)
    fcntl.fcntl(made, fcntl.F_ADD_SEALS, seals)
    return made


def an_unsealed_memfd(folder: Path, nbytes: int) -> int:
    return a_memfd(nbytes, fcntl.F_SEAL_SHRINK)


def a_small_memfd(folder: Path, nbytes: int) -> int:
    return a_memfd(nbytes // 2, host_shared.SEALS)


def a_memfd_of_another_library(folder: Path, nbytes: int) -> int:
    return a_memfd(nbytes, host_shared.SEALS, "sidelanes")


@on_ranks(2)
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (an_open_file, "no sealed memory"),
        (an_unsealed_memfd, "no sealed memory"),
        (a_memfd_of_another_library, "no sealed memory"),
        (a_small_memfd, "owner and bytes"),
        (a_pipe, "allowed=a regular file"),
    ],
)
def test_a_post_reaches_no_other_file(group: dist.ProcessGroup, make: Callable[[Path, int], int], words: str) -> None:
    """The post of rank 0 names a file that is not its own, as anyone may who can write to the store."""
    rank, nbytes = dist.get_rank(group), mmap.PAGESIZE
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        if rank == 0:
            given = make(Path(folder), dist.get_world_size(group) * nbytes)
            status, real = os.stat(given), host_shared._offer

            def offer(*arguments: Any) -> Any:
                return real(*arguments)._replace(descriptor=given, inode=(status.st_dev, status.st_ino))

            patch.setattr(host_shared, "_offer", offer)
        with pytest.raises(UnavailableError) as caught:
            ShmMemory(Exchange(group, 60.0)).allocate(nbytes)
        if rank == 0:
            after = os.stat(given)
            assert (after.st_size, after.st_blocks) == (status.st_size, status.st_blocks), "it was enlarged"
            os.close(given)
        dist.barrier(group)
    assert leftovers() == []
    text = str(caught.value)
    assert all(f"rank {rank}: " in text for rank in range(2)) and text.count(words) == 2, text


@on_ranks(2)
def test_memory_of_another_user_is_refused(group: dist.ProcessGroup) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank(group) == 1:
            patch.setattr(os, "geteuid", lambda: 12345)
        with pytest.raises(UnavailableError) as caught:
            ShmMemory(Exchange(group, 60.0)).allocate(100)
    text = str(caught.value)
    assert "a rank: rank 1: " in text and "allowed=(12345, " in text and "; rank" not in text, text


@on_ranks(2)
def test_a_view_keeps_the_memory_and_the_last_one_frees_it(group: dist.ProcessGroup) -> None:
    rank = dist.get_rank(group)
    memory = ShmMemory(Exchange(group, 60.0))
    block = memory.allocate(10_000)
    addresses = block.addresses
    tail = block.tensor[5000:].view(torch.int32)
    memory.close()
    memory.close()
    with pytest.raises(CommunicatorClosedError):
        memory.allocate(1)
    del block, memory
    gc.collect()
    tail.fill_(rank + 7)
    dist.barrier(group)
    # The whole allocation stays mapped as long as one view of it exists, in every process that has one.
    assert ctypes.string_at(addresses[1 - rank] + 5000, 4) == bytes([8 - rank, 0, 0, 0])
    dist.barrier(group)
    assert len(leftovers()) == (2 if sys.version_info < (3, 13) else 1), "one mapping, with its descriptor"
    del tail
    assert leftovers() == []


def test_the_limit_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from sidelane.memory import host_shared

    files = {
        "/proc/meminfo": "MemTotal: 100 kB\nMemAvailable:   90 kB\n",
        "/proc/self/cgroup": "4:cpu,memory:/job\n0::/job\n",
        "/sys/fs/cgroup/job/memory.max": "max\n",
        "/sys/fs/cgroup/job/memory.current": "5000\n",
        "/sys/fs/cgroup/memory/job/memory.limit_in_bytes": "30000\n",
        "/sys/fs/cgroup/memory/job/memory.usage_in_bytes": "20000\n",
        "/sys/fs/cgroup/memory/job/memory.stat": "cache 7000\ninactive_file 4000\n",
    }
    monkeypatch.setattr(host_shared, "_read", lambda path: files.get(str(path), ""))
    assert host_shared.available_bytes() == 14_000
    del files["/proc/self/cgroup"]
    assert host_shared.available_bytes() == 90 * 1024
    files.clear()
    assert host_shared.available_bytes() is None
