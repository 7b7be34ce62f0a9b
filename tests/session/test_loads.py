"""Programs of one's own between CPU processes: right bytes next to collectives, refusals, billions of calls, deaths."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from contracts import under_contract
from counting import skip
from gather_rings import ring_of_gathers
from loads import INTS, POISON, Case, built, definitions, handover
from marks import long
from on_ranks import BOTH_STREAMS, default_stream, on_ranks
from ranks import crew
from sweeps import communicator

from sidelane.errors import PeerError, ProgramError, UnavailableError
from sidelane.program.builders import build
from sidelane.program.collective import ReduceOp, Reduction, Span, all_gather, all_reduce, reduce_scatter
from sidelane.program.ir import Copy, Engine, EngineKind, Queue
from sidelane_lab.model.engine_add import reduce_on_engines


@on_ranks(1, 2, 3, long(4), seed=2, calls=60)
@on_ranks(5, long(8), seed=4, calls=25)
@on_ranks(gpu=BOTH_STREAMS, seed=0, calls=200, timeout_s=150)
@on_ranks(gpu=BOTH_STREAMS, seed=1, calls=200, timeout_s=150)
def test_programs_of_all_builders_under_contracts(group: dist.ProcessGroup, seed: int, calls: int) -> None:
    """Programs of all builders under contracts, called at random next to each other and to collectives."""
    rng = random.Random(seed)
    with communicator(group) as comm:
        n = comm.world_size
        chosen = []
        for collective in definitions(n, rng):
            chosen.append(under_contract(built(collective, rng)))
        cases = [Case(comm, program) for program in chosen]
        delays = random.Random(seed + 1 + comm.rank)
        shard, whole = torch.empty(77, dtype=torch.int32), torch.empty(77 * n, dtype=torch.int32)
        for call in range(calls):
            case = rng.choice(cases)
            case.fill(call)
            if delays.random() < 0.1:
                time.sleep(delays.random() * 0.003)
            work = case.run(async_op=rng.random() < 0.2)
            if work is not None:
                work.wait()
            if rng.random() < 0.3:
                comm.all_gather(whole, shard.fill_(call + comm.rank))
                assert whole.view(n, -1)[:, 5].tolist() == [call + rank for rank in range(n)]
            comm.synchronize()
            case.check(call)
            assert comm.last_choice() is not None
        for case in cases:
            case.run.close()
            case.run.close()
    assert len(cases) == 9


@on_ranks(3, calls=40)
@on_ranks(gpu=default_stream, calls=100)
@pytest.mark.parametrize("slope", [1, 7])
def test_a_program_that_no_collective_is(group: dist.ProcessGroup, calls: int, slope: int) -> None:
    """One that no collective is, back to back, on tensors of two sizes at once."""
    with communicator(group) as comm:
        cases = [Case(comm, handover(comm.world_size, nbytes, slope=slope)) for nbytes in (4000, 33)]
        for call in range(calls):
            for case in cases:
                case.fill(call)
            for case in cases[:: 1 - 2 * (call % 2)]:
                case.run()
            comm.synchronize()
            for case in cases:
                case.check(call)


@on_ranks(3)
def test_a_built_in_program_is_loaded_like_any_other(group: dist.ProcessGroup) -> None:
    """A built-in program may be loaded as it is, too, with the names that collectives have."""
    with communicator(group) as comm:
        n = comm.world_size
        program = build(all_gather([40] * n), "b2b")
        output, input = comm.empty(40 * n, dtype=torch.uint8), comm.empty(40, dtype=torch.uint8)
        run = comm.load(program, {"input": input, "output": output})
        for value in range(20):
            input.fill_(value + comm.rank)
            output.fill_(POISON)
            run()
            comm.synchronize()
            assert output.view(n, 40)[:, 7].tolist() == [value + rank for rank in range(n)]


@on_ranks(3)
def test_engines_that_add(group: dist.ProcessGroup) -> None:
    """Programs whose copy engines reduce: an engine's thread adds between CPU processes."""
    words = [8 * (1 + rank) for rank in range(dist.get_world_size(group))]
    with communicator(group) as comm:
        for make, variant in itertools.product((reduce_scatter, all_reduce), ("b2b", "pcpy")):
            case = Case(comm, under_contract(reduce_on_engines(make(words, INTS), variant)))
            for seed in range(3):
                case.fill(seed)
                case.run()
                comm.synchronize()
                case.check(seed)
            case.run.close()


@on_ranks(3, nbytes=1027)
@on_ranks(gpu=default_stream, nbytes=(1 << 20) + 3)
def test_gathers_in_a_ring_with_and_without_entries(group: dist.ProcessGroup, nbytes: int) -> None:
    """Next to what reads them, with entries in a ring of two, and without in one of three, called back to back."""
    with communicator(group) as comm:
        n, gathers = comm.world_size, 6
        for slots, entries in ((2, True), (3, False)):
            program = ring_of_gathers(n, slots, nbytes, behind=2, entries=entries, rounds=gathers // slots)
            shards = torch.empty(gathers * nbytes, dtype=torch.uint8)
            used = [torch.full((gathers * n * nbytes,), POISON, dtype=torch.uint8) for _ in range(2)]
            runs = [comm.load(program, {"shards": shards, "used": one}) for one in used]
            for number in range(10):
                everyone = [
                    torch.randint(
                        256, shards.shape, generator=torch.Generator("cpu").manual_seed(n * number + rank), device="cpu"
                    )
                    for rank in range(n)
                ]
                shards.copy_(everyone[comm.rank])
                wanted = torch.stack([one.view(gathers, nbytes) for one in everyone], 1).flatten()
                for run in runs:
                    run()
                comm.synchronize()
                for one in used:
                    assert torch.equal(one.cpu(), wanted.to(torch.uint8)), (slots, number)
            for run in runs:
                run.close()


@on_ranks(2)
def test_a_call_waits_for_no_rank_to_begin_it(group: dist.ProcessGroup) -> None:
    """A rank begins a call of its program before its peers do: posts of what all ranks know are not compared."""
    with communicator(group) as comm:
        case = Case(comm, under_contract(build(all_gather([8] * comm.world_size), "b2b")))
        case.fill(0)
        if comm.rank:
            dist.barrier(group)
        work = case.run(async_op=True)
        if not comm.rank:
            dist.barrier(group)
        work.wait()
        case.check(0)


AROUND = [2**26 - 3, 2**31 - 9, 2**31 + 3, 3 * 2**30, 2**32 - 9, 2**33]


@on_ranks(3)
def test_flags_of_ones_own_are_renewed(group: dist.ProcessGroup) -> None:
    """Programs that are loaded after billions of calls, and such as have not been called for as many."""
    with communicator(group) as comm:
        cases = [Case(comm, handover(comm.world_size, slope=slope)) for slope in (1, 3)]
        for seed, number in enumerate(AROUND):
            skip(comm, number)
            cases.append(Case(comm, handover(comm.world_size, slope=1 + seed % 2)))
            for again, case in itertools.product(range(2), cases):
                case.fill(10 * seed + again)
                if comm.rank == (seed + again) % comm.world_size:
                    time.sleep(0.01)
                case.run()
                comm.synchronize()
                case.check(10 * seed + again)


@on_ranks(3)
def test_mistakes_are_refused_on_every_rank(group: dist.ProcessGroup) -> None:
    """Everything that is refused, on every rank alike, after which all goes on."""
    texts = []
    with communicator(group) as comm, communicator(group) as other:
        n = comm.world_size
        program = handover(n)
        cache, inbox = torch.empty(4100, dtype=torch.uint8), comm.empty(4032, dtype=torch.uint8)
        foreign, whole = other.empty(4032, dtype=torch.uint8), comm.empty(9000, dtype=torch.uint8)
        spoilt = dataclasses.replace(program, queues=(*program.queues[:-1], Queue(n - 1, Engine(EngineKind.DMA), ())))
        wrong: list[tuple[Any, Any]] = [
            ("handover", {}),
            (program, [cache, inbox]),
            (handover(n + 1), {"cache": cache, "inbox": inbox}),
            (program, {"cache": cache}),
            (program, {"cache": cache, "inbox": inbox, "outbox": cache}),
            (program, {"cache": cache[:-1], "inbox": inbox}),
            (program, {"cache": cache, "inbox": torch.empty(4032, dtype=torch.uint8)}),
            (program, {"cache": cache, "inbox": foreign}),
            (program, {"cache": torch.empty(8200, dtype=torch.uint8)[::2], "inbox": inbox}),
            (program, {"cache": cache, "inbox": "a string"}),
            (program, {"cache": whole[:4100], "inbox": whole[4000:8032]}),
            (spoilt, {"cache": cache, "inbox": inbox}),
        ]
        for given in wrong:
            try:
                comm.load(*given)
                texts.append("no error")
            except Exception as error:
                texts.append(f"{type(error).__name__}: {error}")
        case = Case(comm, program)
        case.fill(1)
        case.run()
        comm.synchronize()
        case.check(1)
        case.run.close()
        try:
            case.run()
        except RuntimeError as error:
            texts.append(f"{type(error).__name__}: {error}")
        comm.barrier()
    expected = [
        "TypeError: load: program (value=str",
        "TypeError: load: buffers (value=list",
        "ValueError: load: ranks of the program (value=4, have=3)",
        "are missing (value=['inbox'], needed=['cache', 'inbox'])",
        "ValueError: load: handover(3 ranks, 12000 bytes) has no such buffers (value=['outbox']",
        "ValueError: load: buffer 'cache' (value=4099 bytes, allowed=4100 and more)",
        "ValueError: load: buffer 'inbox' is touched by peers, so that it must be symmetric memory",
        "ValueError: a tensor is symmetric memory of another communicator",
        "ValueError: load: tensors must be contiguous",
        "TypeError: load: tensors expected (value=str, allowed=torch.Tensor)",
        "ValueError: load: buffers 'cache' and 'inbox' overlap",
        "ProgramError: verify: refused handover(3 ranks, 12000 bytes) push:",
        "RuntimeError: a call of handover(3 ranks, 12000 bytes) push, which was closed",
    ]
    assert len(texts) == len(expected)
    for text, words in zip(texts, expected, strict=True):
        assert words in text, texts


@on_ranks(3)
def test_texts_mean_what_they_say_and_memory_that_there_is_not_is_refused(group: dist.ProcessGroup) -> None:
    """Some ranks write texts and numpy's numbers, others members and plain ones: they load the same average. Bytes
    that there are not are refused, and all goes on.
    """
    with communicator(group) as comm:
        n, plain = comm.world_size, comm.rank % 2 == 0
        reduction = Reduction(ReduceOp.AVG, "float32") if plain else Reduction("avg", np.str_("float32"))  # type: ignore[arg-type]
        nbytes = 32 if plain else np.int64(32)
        program = build(all_reduce([nbytes] * n, reduction), "b2b")  # type: ignore[list-item]
        input, output = (comm.empty(8 * n, dtype=torch.float32) for _ in range(2))
        far = Copy(Span(0, "output", 0, 8), Span(n, "input", 0, 8))
        spoilt = dataclasses.replace(program, queues=[*program.queues, Queue(0, Engine("dma", 7), [far])])  # type: ignore[arg-type]
        with pytest.raises(ProgramError, match=r"(?s)verify: refused all_reduce\(3 ranks.*names a rank outside"):
            comm.load(spoilt, {"input": input, "output": output})
        run = comm.load(program, {"input": input, "output": output})
        input.copy_(torch.arange(8 * n) * (comm.rank + 1))
        run()
        comm.synchronize()
        total = input.cpu()
        dist.all_reduce(total, group=group)  # Gloo has no average
        assert torch.equal(output.cpu(), total / n)


@on_ranks(3)
def test_ranks_that_load_different_programs(group: dist.ProcessGroup) -> None:
    """Ranks that load other programs, or put a buffer elsewhere: all hear of it, and go on."""
    texts = []
    with communicator(group) as comm:
        n, odd = comm.world_size, comm.rank == 1
        cache, inbox = torch.empty(4100, dtype=torch.uint8), comm.empty(8064, dtype=torch.uint8)
        for program, start in ((handover(n, 3999 if odd else 4000), 0), (handover(n), 32 if odd else 0)):
            try:
                comm.load(program, {"cache": cache, "inbox": inbox[start : start + 4032]})
                texts.append("no error")
            except Exception as error:
                texts.append(f"{type(error).__name__}: {error}")
        case = Case(comm, handover(n))
        case.fill(2)
        case.run()
        comm.synchronize()
        case.check(2)
    assert all(text.startswith("MismatchError") for text in texts), texts


def left(group: dist.ProcessGroup, error: type[BaseException] | None) -> float:
    """Leave a communicator that has a program, while a call is under way that the other rank never makes."""
    comm = communicator(group, timeout_s=60)
    case = Case(comm, handover(comm.world_size))
    case.run()
    out, shard = comm.empty(4 * comm.world_size), comm.empty(4)
    comm.all_gather(out, shard)
    dist.barrier(group)
    began = time.monotonic()
    if comm.rank == 0:
        with contextlib.suppress(KeyboardInterrupt, ValueError), comm:
            comm.all_gather(out, shard, async_op=True)
            if error is not None:
                raise error
    took = time.monotonic() - began
    dist.barrier(group)
    comm.close()
    return took


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, ValueError])
def test_closing_does_not_wait_for_calls_that_peers_never_make(error: type[BaseException] | None) -> None:
    with crew(2) as ranks:
        assert max(ranks.run(left, 2, error)) < 20


@on_ranks(2)
def test_flags_of_a_program_that_a_rank_cannot_load_are_forgotten(group: dist.ProcessGroup) -> None:
    """A rank cannot bind the trigger of a call, so that all drop the memory that they have loaded it to."""
    with communicator(group) as comm:
        forgotten: list[object] = []
        backend: Any = comm.backend
        backend.forget_flags = lambda bases, block: forgotten.append(bases)
        if comm.rank == 0:
            backend.bind_trigger = refuse
        out, shard = comm.empty(4 * comm.world_size), comm.empty(4)
        error = PeerError if comm.rank else UnavailableError
        words = "rank 0 refused it: UnavailableError: no channel" if comm.rank else "^no channel is left"
        with pytest.raises(error, match=words):
            comm.prepare_all_gather(out, shard)
        assert len(forgotten) == 1 and not comm.preparer.own_programs


def refuse(*_: object) -> None:
    raise UnavailableError("no channel is left")
