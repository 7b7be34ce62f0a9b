"""Ordinary tensors that peers reach without staging, between real processes."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
from pathlib import Path

import pytest
import reach_cases
import torch
from marks import long
from ranks import RankPool

from sidelane.errors import UnavailableError
from sidelane.memory.ordinary import Allocation
from sidelane.memory.shared_tensors import SharedTensors
from sidelane.memory.storage import exchange_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say what is mapped where")


@pytest.mark.parametrize("n", [2, 3, long(4)])
def test_every_kind_at_odd_sizes_and_offsets(pool: RankPool, n: int) -> None:
    for staging in pool.run(reach_cases.every_kind, n, 5 * n, (1, 67, 4096)):
        assert staging["some"] > 0, "what one rank cannot offer is staged"


@pytest.mark.long
def test_eight_ranks(pool: RankPool) -> None:
    pool.run(reach_cases.every_kind, 8, 1, (100,))


@pytest.mark.parametrize(("n", "steps"), [long(2, 120), long(4, 120), (3, 15)])
def test_a_storm_of_tensors_that_come_and_go(pool: RankPool, n: int, steps: int) -> None:
    for left, mapped in pool.run(reach_cases.storm, n, n, steps):
        assert mapped > steps // 6
        assert left <= 2 * n * 2, "peers let go of what its owner has freed"


@pytest.mark.parametrize(("n", "steps"), [(2, 15), long(4, 60), long(8, 20)])
def test_a_storm_in_memory_of_several_pieces(pool: RankPool, n: int, steps: int) -> None:
    for left, mapped in pool.run(reach_cases.storm_of_pieces, n, 10 + n, steps):
        assert mapped > steps // 6
        assert left <= 2 * n * 2, "peers let go of what its owner has freed"


@pytest.mark.parametrize(("n", "steps"), [long(2, 40), (3, 20)])
def test_lists_batches_and_uneven_exchanges(pool: RankPool, n: int, steps: int) -> None:
    assert min(pool.run(reach_cases.lists, n, n, steps)) > steps


def test_nothing_is_left_mapped(pool: RankPool) -> None:
    assert pool.run(reach_cases.nothing_is_left, 3) == [(5 * 3, 2, 0)] * 3


def test_a_rank_that_cannot_map(pool: RankPool) -> None:
    staged = ("staged: rank 1 cannot map it: planted", 2)
    assert pool.run(reach_cases.one_cannot_map, 3) == [staged, ("mapped", 2), staged]


def test_what_a_communicator_says_of_tensors(pool: RankPool) -> None:
    staged = "staged: it is not in shared memory (Tensor.share_memory_)"
    off = "staged: Config.map_memory is not on"
    assert pool.run(reach_cases.answers, 2) == [["symmetric", "mapped", staged, "mapped: it has no bytes", off]] * 2


def test_memory_of_other_libraries_is_staged_with_the_reason(pool: RankPool, tmp_path: Path) -> None:
    staged = "staged: it is not in shared memory (Tensor.share_memory_)"
    for said, right in pool.run(reach_cases.of_other_libraries, 2, str(tmp_path)):
        assert said[0] == staged and said[1] in (staged, "mapped") and right


def test_asynchronous_calls_wait_for_nobody(pool: RankPool) -> None:
    pool.run(reach_cases.asynchronous_ones_wait_for_nobody, 3)


def test_an_allocation_has_a_name_of_its_own() -> None:
    memory = SharedTensors()
    tensor = torch.zeros(1000).share_memory_()
    found = memory.allocation_of(tensor[100:])
    assert isinstance(found, Allocation)
    assert found.start == tensor.data_ptr() and found.nbytes == 4000
    assert not memory.is_gone(found)
    mapping = memory.map(found.handle, found.name)
    tensor[7] = 5.0
    assert mapping.start != tensor.data_ptr() and mapping.bytes.view(torch.float32)[7] == 5.0
    assert memory.map(found.handle, found.name) is mapping, "mapped once in a process"
    with pytest.raises(UnavailableError, match="is another file by now"):
        memory.map(found.handle, "0:0")
    del tensor
    assert memory.is_gone(found)
    with pytest.raises(UnavailableError):
        SharedTensors().map(str(Path(found.handle).with_name("100000")), found.name)


def test_memory_under_a_name_that_is_not_gone() -> None:
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        tensor = torch.zeros(10).share_memory_()
    finally:
        torch.multiprocessing.set_sharing_strategy(before)
    memory = SharedTensors()
    found = memory.allocation_of(tensor)
    assert isinstance(found, Allocation), found
    tensor[3] = 9.0
    offset = (tensor.data_ptr() - found.start) // 4
    assert memory.map(found.handle, found.name).bytes.view(torch.float32)[offset + 3] == 9.0


@pytest.fixture(params=["asked", "read"])
def older_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that tell what is mapped at an address, and those that only list all that is mapped."""
    if request.param == "read":

        def refuse(*_: object) -> None:
            raise OSError(errno.ENOTTY, "planted")

        monkeypatch.setattr(fcntl, "ioctl", refuse)


@pytest.mark.usefixtures("older_kernel")
@pytest.mark.parametrize("way", ["freed", "back"])
def test_memory_is_known_by_its_file_and_not_by_its_address(way: str) -> None:
    memory = SharedTensors()
    tensor = torch.zeros(5000).share_memory_()
    before = memory.allocation_of(tensor)
    assert isinstance(before, Allocation) and not memory.is_gone(before)
    made = reach_cases.at_the_address_of(tensor, 3.0)
    if way == "back":
        exchange_memory(tensor.untyped_storage(), made.untyped_storage())
        made = tensor
    found = memory.allocation_of(made)
    assert isinstance(found, Allocation) and found.start == before.start
    assert found.name != before.name and not memory.is_gone(found)
    assert memory.map(found.handle, found.name).bytes.view(torch.float32)[7] == 3.0
    assert memory.is_gone(before)


@pytest.mark.usefixtures("older_kernel")
def test_exchanged_memory_keeps_its_name() -> None:
    memory = SharedTensors()
    tensors = [torch.full((5000,), value).share_memory_() for value in (1.0, 2.0)]
    before = [memory.allocation_of(tensor) for tensor in tensors]
    exchange_memory(*(tensor.untyped_storage() for tensor in tensors))
    assert [memory.allocation_of(tensor) for tensor in tensors] == before[::-1]
    assert not any(memory.is_gone(each) for each in before if isinstance(each, Allocation))


@pytest.mark.parametrize("way", ["freed", "back"])
def test_calls_on_addresses_that_come_again(pool: RankPool, way: str) -> None:
    assert min(pool.run(reach_cases.addresses_come_again, 2, way)) > 0, "they were mapped"


@pytest.mark.parametrize("what", ["link", "pipe", "folder"])
def test_a_peers_path_that_is_no_file_is_refused(tmp_path: Path, what: str) -> None:
    path, real = tmp_path / what, tmp_path / "real"
    real.write_bytes(b"mine")
    if what == "link":
        path.symlink_to(real)
    elif what == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    status = path.stat()
    with pytest.raises(UnavailableError, match="cannot be mapped"):
        SharedTensors().map(str(path), f"{status.st_dev:x}:{status.st_ino}")
    assert real.read_bytes() == b"mine"


def test_a_file_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.zeros(10).share_memory_()
    found = SharedTensors().allocation_of(tensor)
    assert isinstance(found, Allocation)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(UnavailableError, match="another file by now .*of user 12345"):
        SharedTensors().map(found.handle, found.name)


def test_private_memory_is_refused_with_the_reason() -> None:
    assert SharedTensors().allocation_of(torch.zeros(4)) == "it is not in shared memory (Tensor.share_memory_)"
