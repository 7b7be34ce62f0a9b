"""``verify``, the shape of commands, queues and flags: every rule is broken once, and the refusal names the place."""

from __future__ import annotations

import dataclasses
import pickle

import pytest
from listings import parse, replace
from refusals import GATHER, gather, refused

from sidelane.errors import ProgramError
from sidelane.program import collective
from sidelane.program.builders import build
from sidelane.program.ir import Engine, EngineKind
from sidelane.program.transform import freeze
from sidelane.program.verify import verify, verify_sequence
from sidelane_lab.sim.prelaunch import prelaunch

COPY = "copy output@1[0:8] <- input@0[0:8]"
SIGNAL = "signal rank 1 flag 0 set epoch"
WAIT = "wait flag 1 >= epoch"
SUM = collective.Reduction(collective.ReduceOp.SUM, "float32")


def test_accepts_the_program_that_the_tests_break() -> None:
    verification = verify(gather())
    assert (verification.commands, verification.invocations) == (12, 2)
    assert verification.pairs > 0


def test_listings_read_what_programs_print() -> None:
    programs = [
        build(collective.all_gather((3, 4, 5)), "bcst"),
        build(collective.all_to_all([[4] * 3] * 3), "swap"),
        build(collective.all_reduce((8, 4), SUM), "pcpy"),
        freeze(prelaunch(build(collective.broadcast(9, 3, root=1), "b2b"))),
    ]
    for program in programs:
        listing = "\n".join(str(program).splitlines()[1:])
        again = parse(program.collective, listing, flags=program.flag_count, variant=program.variant)
        assert again.queues == program.queues


@pytest.mark.parametrize(
    ("line", "broken", "words"),
    [
        (COPY, "copy output@1[9:17] <- input@0[0:8]", "output@1[9:17] is out of bounds: output@1 has 16 bytes"),
        (COPY, "copy output@1[0:8] <- input@0[1:9]", "input@0[1:9] is out of bounds: input@0 has 8 bytes"),
        (COPY, "copy output@1[-1:7] <- input@0[0:8]", "output@1[-1:7] is out of bounds"),
        (COPY, "copy staging@1[0:8] <- input@0[0:8]", "staging@1[0:8] is out of bounds: staging@1 has 0 bytes"),
        (COPY, "copy output@2[0:8] <- input@0[0:8]", "output@2[0:8] names a rank outside of 0..1"),
        (COPY, "copy output@1[0:0] <- input@0[0:0]", "output@1[0:0] has 0 bytes"),
        (COPY, "copy output@1[0:8] <- input@0[0:4]", "operands differ in size (8, 4 bytes)"),
        (COPY, "copy output@1[0:8] <- output@1[4:12]", "operands output@1[0:8] and output@1[4:12] overlap"),
        (COPY, "swap output@1[0:8] <-> output@1[7:15]", "operands output@1[0:8] and output@1[7:15] overlap"),
        (COPY, "swap output@1[0:8] <-> output@0[0:4]", "operands differ in size"),
        (COPY, "broadcast output@1[0:8], output@1[4:12] <- input@0[0:8]", "operands output@1[0:8] and output@1[4:12]"),
        (COPY, "reduce output@1[0:8] <- sum float32(input@0[0:8])", "only compute engines reduce"),
        (SIGNAL, "signal rank 1 flag 16 set epoch", "flag 16 of rank 1 is out of range: there are 16 flags"),
        (SIGNAL, "signal rank 7 flag 0 set epoch", "flag 0 of rank 7: the rank is outside of 0..1"),
        (SIGNAL, "signal rank 1 flag 0 set 2147483648", "the value 2147483648 does not fit"),
        (SIGNAL, "signal rank 1 flag 0 set epoch+-2", "the value epoch+-2 does not fit"),
        (SIGNAL, "signal rank 1 flag 0 add 0", "the value 0 does not fit (allowed=1.."),
        (WAIT, "wait flag -1 >= epoch", "flag -1 of rank 0 is out of range"),
        (WAIT, "stamp -1", "the slot is negative"),
    ],
)
def test_commands(line: str, broken: str, words: str) -> None:
    lines = refused(gather(replace(GATHER, line, broken)), words=words)
    assert any(line.startswith("rank 0 dma:0 command ") and broken in line for line in lines)


def test_waits_for_a_flag_of_another_rank() -> None:
    program = gather()
    first = program.queues[0]
    wait = dataclasses.replace(first.commands[1], flag=dataclasses.replace(first.commands[1].flag, rank=1))
    commands = (first.commands[0], wait, *first.commands[2:])
    queues = (dataclasses.replace(first, commands=commands), *program.queues[1:])
    refused(
        dataclasses.replace(program, queues=queues),
        words=("rank 0 dma:0 command 1", "waits for a flag of rank 1; a queue waits only for flags of its own rank"),
    )


@pytest.mark.parametrize(
    ("reduce", "words"),
    [
        ("output@0[0:6] <- sum float32(input@0[0:6], staging@0[0:6])", "does not hold whole float32 elements"),
        ("output@0[0:8] <- sum float32(input@0[0:8], staging@0[2:10])", "staging@0[2:10] does not hold whole float32"),
        ("output@0[0:8] <- sum float32(input@0[0:8], staging@0[0:4])", "operands differ in size (8, 8, 4 bytes)"),
        ("input@0[4:12] <- sum float32(input@0[0:8], staging@0[0:8])", "may only be exactly one of the sources"),
    ],
)
def test_reduces(reduce: str, words: str) -> None:
    listing = f"rank 0 compute:0\n reduce {reduce}"
    program = parse(collective.reduce_scatter((8, 8), SUM), listing, staging=16)
    refused(program, words=("rank 0 compute:0 command 0", words))


def test_a_reduce_needs_sources() -> None:
    program = build(collective.all_reduce((8,), SUM), "b2b")
    queue = program.queues[0]
    reduce = build(collective.all_reduce((8, 8), SUM), "b2b").queues[1].commands[1]
    empty = dataclasses.replace(reduce, srcs=(), dst=queue.commands[0].dst)
    queues = (dataclasses.replace(queue, commands=(empty,)),)
    refused(dataclasses.replace(program, queues=queues), words="a reduce has two sources or more (value=0)")
    alone = dataclasses.replace(reduce, srcs=reduce.srcs[:1])
    queues = (dataclasses.replace(queue, engine=Engine(EngineKind.COMPUTE), commands=(alone,)),)
    refused(dataclasses.replace(program, queues=queues), words="a reduce has two sources or more (value=1)")


def test_engines() -> None:
    on_caller = gather(GATHER.replace("rank 0 local:0", "rank 0 caller:0"))
    refused(on_caller, words=("rank 0 caller:0 command 0", "the caller engine only signals and waits"))
    local_to_peer = gather(replace(GATHER, "copy output@0[0:8] <- input@0[0:8]", COPY))
    refused(local_to_peer, words=("rank 0 local:0", "output@1[0:8] is on another rank; a local engine moves bytes"))
    twice = gather(GATHER.replace("rank 0 local:0", "rank 0 dma:0"))
    refused(twice, words="rank 0 dma:0: 2 queues on one engine")
    nobody = gather(GATHER.replace("rank 0 local:0", "rank 2 local:0"))
    refused(nobody, words="rank 2 local:0: a queue on a rank outside of 0..1")


def test_stamps_of_one_slot() -> None:
    listing = GATHER.replace("rank 0 local:0", "stamp 0\nrank 0 local:0\n stamp 0")
    refused(gather(listing), words=("rank 0 local:0 command 0 (stamp 0)", "rank 0 dma:0 command 5", "the same slot"))
    verify(gather(GATHER.replace("rank 0 local:0", "stamp 0\nrank 0 local:0\n stamp 1")))


def test_sizes_of_staging_and_flags() -> None:
    refused(dataclasses.replace(gather(), staging_bytes=(0,)), words="staging_bytes gives 1 sizes for 2 ranks")
    refused(dataclasses.replace(gather(), staging_bytes=(0, -1)), words="negative size")
    refused(dataclasses.replace(gather(), flag_count=-1), words="flag_count is negative")


def test_a_flag_is_set_or_added_to() -> None:
    mixed = GATHER.replace("rank 0 local:0", "signal rank 1 flag 2 add 1\nrank 0 local:0")
    refused(gather(mixed), words=("rank 0 dma:0 command 3", "other signals add to this flag"))


def test_arguments() -> None:
    with pytest.raises(ValueError, match=r"verify: invocations \(value=0"):
        verify(gather(), invocations=0)
    with pytest.raises(ValueError, match="verify_sequence: needs programs and rounds"):
        verify_sequence([])
    with pytest.raises(ValueError, match="verify_sequence: needs programs and rounds"):
        verify_sequence([gather()], rounds=0)
    with pytest.raises(ValueError, match="one world size"):
        verify_sequence([gather(), build(collective.all_gather((8,)), "b2b")])


def test_a_refusal_travels_between_processes() -> None:
    """Ranks of a study hand their errors to the parent."""
    error = ProgramError("verify: refused x", ["one", "two"])
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.violations) == (str(error), ("one", "two"))
