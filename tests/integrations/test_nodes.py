"""Process groups on several nodes: CPU ranks on virtual ones, Gloo between them."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import nodes_cases as cases
import nodes_world as scenarios
import pytest
import torch
import torch.distributed as dist
from group_world import leave
from marks import long
from on_ranks import on_ranks
from ranks import RankPool, crew

import sidelane
from sidelane import config
from sidelane.errors import CommunicatorClosedError, PeerError, UnavailableError
from sidelane.integrations import works
from sidelane.integrations.fallback import make_other
from sidelane.integrations.nodes import communicator, topology
from sidelane.integrations.nodes.topology import Nodes

FEW = (torch.float32, torch.uint8)
LAYOUTS = [(0, 0, 1, 1), (0, 1, 1, 0), (0, 0, 1, 1, 2, 2), (0, 1, 1), long((0, 0, 0, 0, 1, 1, 1, 1))]
"""Nodes of ranks: neighbours and not, three nodes, nodes of several sizes, which go flat, and nodes of four ranks."""


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("case", [cases.moves, cases.reduces], ids=lambda case: case.__name__)
def test_every_collective(pool: RankPool, case: object, layout: tuple[int, ...]) -> None:
    few = () if layout == (0, 0, 1, 1) else (FEW[: 1 if case is cases.reduces else 2],)
    pool.run(case, len(layout), layout, *few)  # type: ignore[arg-type]


@pytest.mark.parametrize(("case", "layout"), [(cases.in_pieces, (0, 0, 1, 1)), (cases.listed, (0, 1, 1, 0))])
def test_calls_in_pieces(pool: RankPool, case: object, layout: tuple[int, ...]) -> None:
    pool.run(case, len(layout), layout)  # type: ignore[arg-type]


class Lazy:
    """A rail whose calls spoil their outputs when they begin, and read their inputs when somebody waits."""

    def __init__(self, *arguments: object) -> None:
        self._group = make_other(*arguments)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._group, name)
        if name == "abort":
            return found

        def call(*arguments: Any) -> object:
            if name not in ("allreduce", "broadcast"):
                arguments[0].view(torch.uint8).fill_(85)
            begun: list[Any] = []

            def wait(timeout: object) -> bool:
                begun.extend([] if begun else [found(*arguments)])
                return bool(begun[0].wait(timeout))

            return mock.Mock(wait=wait)

        return call


@on_ranks(4, layout=(0, 0, 1, 1))
@on_ranks(long(6), layout=(0, 1, 2, 2, 1, 0))  # two nodes are late as well, and three are in test_every_collective
def test_calls_along_rails_may_read_and_write_until_they_are_waited_for(
    group: dist.ProcessGroup, layout: Sequence[int]
) -> None:
    """Calls along rails may read and write at any time until they are waited for."""
    with mock.patch.object(communicator, "make_other", Lazy):
        with mock.patch.object(topology, "PIECE_BYTES", 6 << 10):
            cases.moves(group, layout, (torch.float32, torch.uint8))
            cases.reduces(group, layout, (torch.float32, torch.int32))
        cases.listed(group, layout)


@on_ranks(4)
def test_what_has_no_steps_goes_flat(group: dist.ProcessGroup) -> None:
    """Calls that are small, have no steps, or have split sizes go flat, and are right."""
    with cases.on_nodes(group, (0, 1, 1, 0)) as nodes:
        rank, size = nodes.rank(), nodes.size()
        tensor = torch.full((5,), float(rank))
        dist.all_reduce(tensor, group=nodes)
        assert tensor.eq(sum(range(size))).all()
        sizes = [50_000 + 8 * other for other in range(size)]
        output = torch.empty(sum(sizes))
        given = torch.cat([torch.full((sizes[rank],), 10.0 * rank + other) for other in range(size)])
        dist.all_to_all_single(output, given, sizes, [sizes[rank]] * size, group=nodes)
        for other, part in enumerate(output.split(sizes)):
            assert part.eq(10.0 * other + rank).all()
        part, wide = torch.empty(20_000), [torch.full((20_000,), float(other)) for other in range(size)]
        dist.scatter(part, wide if rank == 1 else None, 1, nodes)
        assert part.eq(rank).all()
        dist.gather(part, [torch.empty(20_000) for _ in range(size)] if rank == 0 else None, 0, nodes)
        dist.barrier(nodes)
        rows = {row.operation: row for row in sidelane.report().rows}
        assert all(row.where == "gloo" for row in rows.values()), rows
        whys = {name: row.why for name, row in rows.items()}
        assert whys["all_reduce"].endswith("less than 64K: one call is sooner there than three"), rows
        assert "no steps for parts of several sizes: a rank knows its own only" in whys["all_to_all_single"], rows
        assert "all of it leaves by the root's network" in whys["scatter"], rows
        assert "all of it comes by the root's network" in whys["gather"], rows


@on_ranks(4)
def test_a_wrong_call_on_one_rank_is_an_error_on_all(group: dist.ProcessGroup) -> None:
    """A wrong call on one rank is an error on all of them, which names it; wrong settings, too."""
    layout = (0, 1, 0, 1)
    with cases.on_nodes(group, layout) as nodes:
        rank, size = nodes.rank(), nodes.size()
        dist.all_reduce(torch.ones(50_000), group=nodes)
        output = torch.empty(size * 50_000 + (rank == 1))
        with pytest.raises(
            (ValueError, PeerError), match=r"allowed=200000 and 50000|rank 1 .*refused the call"
        ) as caught:
            dist.all_gather_into_tensor(output, torch.ones(50_000), nodes)
        assert isinstance(caught.value, ValueError) == (rank == 1)
        assert rank == 1 or caught.value.ranks == (1,)
        with pytest.raises(CommunicatorClosedError, match=r"refused the call"):
            dist.all_reduce(torch.ones(50_000), group=nodes)
    whole, other = torch.zeros(len(layout) * 50_000), dist.BroadcastOptions()
    other.rootRank = 9
    wrong: tuple[tuple[str, Callable[[dist.ProcessGroup], object]], ...] = (
        (
            r"all_gather: tensors overlap: they lie apart, or the call is in place",
            lambda nodes: dist.all_gather_into_tensor(whole, whole[-50_000:], nodes),
        ),
        (
            r"reduce_scatter: tensors overlap",  # the first output lies in the second input
            lambda nodes: nodes.reduce_scatter_tensor_coalesced(
                [whole[60:69], whole[:9]], [whole[20:56], whole[56:92]]
            ),
        ),
        (r"broadcast: root \(value=9, allowed=0\.\.3\)", lambda nodes: nodes.broadcast([whole], other)),
    )
    for words, call in wrong:
        with mock.patch.object(works, "_PATIENCE_S", 0.1), mock.patch.object(topology, "LEAST_BYTES", 1):
            with (
                cases.on_nodes(group, layout) as nodes,
                pytest.raises((ValueError, PeerError), match=words) as caught,
            ):
                if nodes.rank() == 1:
                    call(nodes).wait()  # type: ignore[union-attr]
                else:
                    dist.all_reduce(torch.ones(50_000), group=nodes)
            assert isinstance(caught.value, ValueError) == (dist.get_rank(group) == 1)
    with (
        config.override(dataclasses.replace(config.current(), virtual_nodes=(0, 0, 1))),
        pytest.raises(ValueError, match=r"virtual_nodes must name a node for each rank"),
    ):
        sidelane.wrap(group)


@on_ranks(4)
def test_calls_that_nothing_hides_are_flat(group: dist.ProcessGroup) -> None:
    """Steps are predicted to take longer; ranks that disagree about a computation would wait for each other."""
    nodes = dataclasses.replace(config.current(), timeout_s=30, virtual_nodes=(0, 0, 1, 1))
    with config.override(nodes):
        flat = sidelane.wrap(group)
        x = torch.full((50_000,), float(dist.get_rank(group)))
        dist.all_reduce(x, group=flat)
        last = sidelane.report().last
        assert x.eq(6).all() and last is not None
        assert last.why.startswith("flat: 2 nodes of 2, 2 ranks; one call is predicted to be sooner"), last
        dist.destroy_process_group(flat)
    beside = config.COMPUTE if dist.get_rank(group) == 2 else config.NOTHING
    with (
        config.override(dataclasses.replace(nodes, beside=beside)),
        pytest.raises(ValueError, match=r"Config.beside differs \(value=.* 2: 'compute'.*, allowed=one value on"),
    ):
        sidelane.wrap(group)


@on_ranks(4)
def test_ctrl_c_while_a_far_step_waits(group: dist.ProcessGroup) -> None:
    """Ctrl-C while a far step waits: all ranks name that one, and no end of a group waits for its far step."""
    layout = (0, 0, 1, 1)
    for is_async in (False, True):
        with mock.patch.object(works, "_PATIENCE_S", 0.1), cases.on_nodes(group, layout) as nodes:
            rank, tensor = nodes.rank(), torch.ones(50_000)
            dist.all_reduce(tensor, group=nodes)

            def call(tensor: torch.Tensor = tensor, is_async: bool = is_async, nodes: object = nodes) -> None:
                work = dist.all_reduce(tensor, group=nodes, async_op=is_async)  # type: ignore[arg-type]
                assert work is None or work.wait()

            if rank == 3:
                before = signal.signal(signal.SIGINT, signal.default_int_handler)
                threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
                with pytest.raises(KeyboardInterrupt):
                    call()
                signal.signal(signal.SIGINT, before)
                with pytest.raises(CommunicatorClosedError, match="rank 3 was interrupted"):
                    call()
                continue
            if layout[rank] != layout[3]:
                time.sleep(2)
            with pytest.raises(PeerError, match=r"rank 3 .*was interrupted") as caught:
                call()
                assert layout[rank] != layout[3], "all of it was there, but rank 3 itself"
                call()
            assert caught.value.ranks == (3,)


@on_ranks(4)
def test_what_one_node_cannot_make_is_made_by_none(group: dist.ProcessGroup) -> None:
    """A communicator that one node cannot make is made by no node, and by all of them the next time."""
    layout = (0, 0, 1, 1)

    def fail(*_: object, **__: object) -> None:
        raise OSError("no room")

    with cases.on_nodes(group, layout) as nodes:
        for number in range(3):
            tensor = torch.ones(50_000)
            with pytest.MonkeyPatch.context() as patch:
                if number < 2 and layout[nodes.rank()] == number:
                    patch.setattr(communicator, "Communicator", fail)
                if number < 2:
                    with pytest.raises(PeerError, match=f"rank {2 * number}: OSError: no room; rank"):
                        dist.all_reduce(tensor, group=nodes)
                    continue
            dist.all_reduce(tensor, group=nodes)
            assert tensor.eq(nodes.size()).all()
            last = sidelane.report().last
            assert last is not None and last.where == "sidelane"
    with cases.on_nodes(group, layout) as nodes:
        tensor = torch.ones(50_000)
        with pytest.MonkeyPatch.context() as patch:
            if nodes.rank() % 2 == 0:  # all of a rail: of others the ranks would wait for each other
                patch.setattr(communicator, "make_other", fail)
            with pytest.raises(PeerError, match="rank 0: OSError: no room; rank 2: OSError: no room"):
                dist.all_reduce(tensor, group=nodes)
        dist.all_reduce(tensor, group=nodes)
        assert tensor.eq(nodes.size()).all()


@on_ranks(4)
def test_where_one_node_cannot_no_node_does(group: dist.ProcessGroup) -> None:
    """Where one node cannot, no node does: the ranks find out together, and the calls go flat."""
    layout = (0, 0, 1, 1)
    with cases.on_nodes(group, layout) as nodes, pytest.MonkeyPatch.context() as patch:
        if layout[nodes.rank()] == 1:

            def fail(*_: object, **__: object) -> None:
                raise UnavailableError("no such memory")

            patch.setattr(communicator, "Communicator", fail)
        for _ in range(2):
            tensor = torch.ones(50_000)
            dist.all_reduce(tensor, group=nodes)
            assert tensor.eq(nodes.size()).all()
        (row,) = sidelane.report().rows
        assert (row.where, row.calls) == ("gloo", 2), row
        assert "rank 2: UnavailableError: no such memory; rank 3: Unavail" in row.why, row


def test_nodes_are_those_that_names_say() -> None:
    nodes = Nodes.named(["b", "a", "b", "b", "a"])
    assert nodes.members == ((0, 2, 3), (1, 4)) and nodes.rails == 2 and not nodes.even and nodes.spans
    assert nodes.coordinates(3) == (0, 2) and str(nodes) == "2 nodes of 3, 2 ranks"
    assert not Nodes.named(["x"]).spans
    for of in ((), (1,), (0, 2), (0, -1)):
        with pytest.raises(ValueError, match=r"Nodes: of .*\(value="):
            Nodes(of)


def test_the_dead_are_named(tmp_path: Path) -> None:
    """Of a whole node nobody on its machine is left to tell."""
    with crew(6) as ranks:
        ranks.run(leave)
        ranks.run(scenarios.stays_away, None, str(tmp_path))
        found = ranks.run(scenarios.dies, None, str(tmp_path), dying=(2, 3, 5))
        assert found == [None, None, 7, 7, None, 7]
