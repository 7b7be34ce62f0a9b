"""``verify``, races and provenance: the bytes that meet, and the bytes that end up in an output."""

from __future__ import annotations

import pytest
from listings import parse, replace, without
from refusals import GATHER, gather, refused

from sidelane.program.builders import Transport, build
from sidelane.program.collective import (
    ReduceOp,
    Reduction,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    reduce_scatter,
)
from sidelane.program.verify import verify, verify_sequence

COPY = "copy output@1[0:8] <- input@0[0:8]"
SUM = Reduction(ReduceOp.SUM, "float32")


class TestRaces:
    def test_two_copies_to_the_same_bytes(self) -> None:
        program = gather(replace(GATHER, "copy output@1[8:16] <- input@1[0:8]", "copy output@1[4:12] <- input@1[0:8]"))
        refused(
            program,
            words=(
                "race on output@1[4:8]: nothing orders",
                "rank 0 dma:0 command 2 (copy output@1[0:8] <- input@0[0:8]) in invocation 1, which writes it",
                "rank 1 local:0 command 0 (copy output@1[4:12] <- input@1[0:8]) in invocation 1, which writes it",
            ),
        )

    def test_a_copy_that_reads_what_another_writes(self) -> None:
        listing = GATHER.replace(COPY, f"{COPY}\n  copy staging@0[0:8] <- output@0[8:16]")
        refused(
            gather(listing, staging=8),
            words=("race on output@0[8:16]", "rank 0 dma:0 command 3", "which reads it", "which writes it"),
        )

    def test_two_reads_are_no_race(self) -> None:
        listing = GATHER.replace(
            "rank 0 local:0", "rank 0 local:1\n copy staging@0[0:8] <- input@0[0:8]\nrank 0 local:0"
        )
        verify(gather(listing, staging=8))

    def test_the_user_without_an_entry_handshake(self) -> None:
        program = gather(without(GATHER, "signal rank 1 flag 0 set epoch", "wait flag 0 >= epoch"))
        words = ("race on output@0[8:16]", "rank 1 dma:0 command 1", "writes it while rank 0's caller")
        refused(program, words=(*words, "before invocation 1 may use it"), rounds=1)
        refused(program, words=words)

    def test_the_user_without_an_exit_handshake(self) -> None:
        program = gather(without(GATHER, "signal rank 1 flag 2 set epoch", "wait flag 2 >= epoch"))
        refused(
            program,
            words=("race on output@1[0:8]", "rank 0 dma:0", "rank 1's caller between invocations 1 and 2"),
        )

    def test_the_user_who_overwrites_an_input_that_a_peer_still_pulls(self) -> None:
        pulled = build(all_gather((8, 8)), "b2b", Transport.PULL)
        verify(pulled)
        listing = "\n".join(str(pulled).splitlines()[1:])
        hasty = without(listing, "5: wait flag 3 >= epoch", "4: signal rank 0 flag 3 set epoch")
        refused(gather(hasty), words=("race on input@0[0:8]", "rank 1 dma:0", "reads it while rank 0's caller between"))

    def test_staging_that_the_next_invocation_overwrites(self) -> None:
        """Users never touch staging, so one invocation is fine; the second one's copy meets the first one's reader."""
        staged = build(all_gather((8, 8)), "b2b", Transport.STAGED)
        verify(staged)
        listing = "\n".join(str(staged).splitlines()[1:])
        hasty = without(listing, "4: wait flag 3 >= epoch", "3: signal rank 0 flag 3 set epoch")
        program = gather(hasty, staging=8)
        verify(program, invocations=1)
        refused(
            program,
            words=("race on staging@0[0:8]", "in invocation 1, which reads it", "in invocation 2, which writes it"),
        )

    def test_a_race_of_one_element_in_a_large_buffer(self) -> None:
        size = 1 << 40
        listing = GATHER.replace("[0:8]", f"[0:{size}]").replace("[8:16]", f"[{size}:{2 * size}]")
        verify(parse(all_gather((size, size)), listing))
        last = f"copy output@1[{size}:{2 * size}] <- input@1[0:{size}]"
        wide = replace(listing, last, f"copy output@1[{size - 1}:{2 * size}] <- input@1[0:{size + 1}]")
        collective = all_gather((size, size + 1))
        refused(parse(collective, wide), words=f"race on output@1[{size - 1}:{size}]")


class TestProvenance:
    def test_wrong_offset(self) -> None:
        listing = replace(GATHER, "copy output@0[8:16] <- input@1[0:8]", "copy output@0[8:12] <- input@1[0:4]")
        listing = listing.replace(
            "[8:12] <- input@1[0:4]", "[8:12] <- input@1[0:4]\n copy output@0[12:16] <- input@1[0:4]"
        )
        refused(
            gather(listing),
            words="wrong bytes: rank 0 ends invocation 1 with output@0[12:16] holding input@1[0:4], not input@1[4:8]",
        )

    def test_swapped_operands(self) -> None:
        listing = replace(GATHER, COPY, "copy input@0[0:8] <- output@1[0:8]")
        listing = without(listing, "copy output@0[0:8] <- input@0[0:8]")
        lines = refused(gather(listing), words=("output@1[0:8] holding output@1[0:8], not input@0[0:8]"))
        assert any("input@0[0:8] holding output@1[0:8], not input@0[0:8]" in line for line in lines)

    def test_shard_of_the_wrong_rank(self) -> None:
        collective = all_to_all([[4, 4], [4, 4]])
        listing = GATHER.replace("copy output@0[0:8] <- input@0[0:8]", "copy output@0[0:4] <- input@0[0:4]")
        listing = listing.replace("copy output@1[8:16] <- input@1[0:8]", "copy output@1[4:8] <- input@1[4:8]")
        listing = listing.replace("copy output@0[8:16] <- input@1[0:8]", "copy output@0[4:8] <- input@1[0:4]")
        right = listing.replace(COPY, "copy output@1[0:4] <- input@0[4:8]")
        verify(parse(collective, right))
        wrong = listing.replace(COPY, "copy output@1[0:4] <- input@0[0:4]")
        refused(
            parse(collective, wrong),
            words="rank 1 ends invocation 1 with output@1[0:4] holding input@0[0:4], not input@0[4:8]",
        )

    def test_bytes_that_nobody_delivers(self) -> None:
        program = gather(without(GATHER, "copy output@1[8:16] <- input@1[0:8]"))
        refused(program, words="rank 1 ends invocation 1 with output@1[8:16] holding output@1[8:16], not input@1[0:8]")

    def test_half_a_copy(self) -> None:
        program = gather(replace(GATHER, COPY, "copy output@1[0:7] <- input@0[0:7]"))
        refused(program, words="with output@1[7:8] holding output@1[7:8], not input@0[7:8]")

    def test_stale_bytes_of_the_last_invocation(self) -> None:
        """The copy out of staging runs before the copy into it: right order of nothing, wrong order of bytes."""
        listing = """
        rank 0 local:0
          copy output@0[0:8] <- staging@0[0:8]
          copy staging@0[0:8] <- input@0[0:8]
        """
        program = parse(all_gather((8,)), listing, staging=8)
        unwritten = "output@0[0:8] holding staging@0[0:8], which nobody wrote, not input@0[0:8]"
        stale = (
            "rank 0 ends invocation 2 with output@0[0:8] holding stale input@0[0:8] of invocation 1, not input@0[0:8]"
        )
        lines = refused(program, words=stale)
        assert any(unwritten in line for line in lines)
        assert len(lines) == 2

    def test_stale_bytes_of_another_program(self) -> None:
        late = "rank 0 local:0\n copy output@0[0:8] <- staging@0[0:8]\n copy staging@0[0:8] <- input@0[0:8]"
        early = "rank 0 local:0\n copy staging@0[0:8] <- input@0[0:8]\n copy output@0[0:8] <- staging@0[0:8]"
        programs = [parse(all_gather((8,)), listing, staging=8) for listing in (early, late)]
        refused(
            *programs, words="rank 0 ends invocation 2 with output@0[0:8] holding stale input@0[0:8] of invocation 1"
        )

    def test_an_input_that_is_scribbled_on(self) -> None:
        listing = GATHER.replace(
            "copy output@0[0:8] <- input@0[0:8]",
            "copy output@0[0:8] <- input@0[0:8]\n copy staging@0[0:4] <- input@0[0:4]",
        )
        verify(gather(listing, staging=4))
        alone = """
        rank 0 local:0
          copy output@0[0:8] <- input@0[0:8]
          copy input@0[0:4] <- output@0[4:8]
        """
        refused(parse(all_gather((8,)), alone), words="with input@0[0:4] holding input@0[4:8], not input@0[0:4]")

    def test_swaps(self) -> None:
        listing = """
        rank 0 local:0
          copy output@0[0:8] <- input@0[0:8]
          swap output@0[0:4] <-> output@0[4:8]
          swap output@0[4:8] <-> output@0[0:4]
        """
        verify(parse(all_gather((8,)), listing))
        once = without(listing, "swap output@0[4:8] <-> output@0[0:4]")
        lines = refused(parse(all_gather((8,)), once), words="output@0[0:4] holding input@0[4:8], not input@0[0:4]")
        assert len(lines) == 2

    def test_broadcast_command(self) -> None:
        program = build(broadcast(8, 3, root=0), "bcst")
        verify(program)
        listing = "\n".join(str(program).splitlines()[1:])
        wrong = listing.replace(
            "broadcast output@1[0:8], output@2[0:8] <- input@0[0:8]",
            "broadcast output@1[0:4], output@2[0:4] <- input@0[0:4]",
        )
        refused(
            parse(program.collective, wrong), words="rank 2 ends invocation 1 with output@2[4:8] holding output@2[4:8]"
        )


def reduction(line: str, *, op: ReduceOp = ReduceOp.SUM, in_place: bool = False):
    """A reduce_scatter of two shards of 8 bytes, with another ``Reduce`` on rank 0."""
    program = build(reduce_scatter((8, 8), Reduction(op, "float32"), in_place=in_place), "b2b")
    listing = "\n".join(str(program).splitlines()[1:])
    right = f"2: reduce output@0[0:8] <- {op} float32(input@0[0:8], staging@0[0:8])"
    listing = replace(listing.replace("1: reduce output@0", "2: reduce output@0"), right, line)
    return parse(program.collective, listing, staging=256)


class TestReductions:
    def test_right(self) -> None:
        verify(reduction("reduce output@0[0:8] <- sum float32(input@0[0:8], staging@0[0:8])"))

    def test_in_two_steps(self) -> None:
        steps = "copy output@0[0:8] <- input@0[0:8]\n reduce output@0[0:8] <- {} float32(output@0[0:8], staging@0[0:8])"
        verify(reduction(steps.format("sum")))
        verify(reduction(steps.format("max"), op=ReduceOp.MAX))

    def test_in_parts(self) -> None:
        verify(
            reduction(
                "reduce output@0[0:4] <- sum float32(input@0[0:4], staging@0[0:4])\n"
                "reduce output@0[4:8] <- sum float32(input@0[4:8], staging@0[4:8])"
            )
        )

    @pytest.mark.parametrize(
        ("line", "words"),
        [
            (
                "reduce output@0[0:8] <- sum float32(input@0[0:8], input@0[0:8])",
                "the sum float32 of (input@0[0:8], input@0[0:8]), not the sum float32 of (input@0[0:8], input@1[0:8])",
            ),
            (
                "reduce output@0[0:8] <- sum float32(input@0[0:8], staging@0[0:8], staging@0[0:8])",
                "holding the sum float32 of (input@0[0:8], input@1[0:8], input@1[0:8])",
            ),
            ("copy output@0[0:8] <- staging@0[0:8]", "holding input@1[0:8], not the sum float32 of"),
            ("copy output@0[0:8] <- input@0[0:8]", "holding input@0[0:8], not the sum float32 of"),
            ("reduce output@0[0:8] <- max float32(input@0[0:8], staging@0[0:8])", "holding the max float32 of"),
            ("reduce output@0[0:8] <- sum int32(input@0[0:8], staging@0[0:8])", "holding the sum int32 of"),
            (
                "reduce output@0[0:8] <- sum float32(input@0[8:16], staging@0[0:8])",
                "holding the sum float32 of (input@0[8:16], input@1[0:8]), not",
            ),
            (
                "copy output@0[4:8] <- input@0[0:4]\n copy output@0[0:4] <- input@0[4:8]\n"
                "reduce output@0[0:8] <- sum float32(output@0[0:8], staging@0[0:8])",
                "with output@0[0:4] holding the sum float32 of (input@0[4:8], input@1[0:4]), not",
            ),
            (
                "copy output@0[0:6] <- input@0[2:8]\n copy output@0[6:8] <- input@0[0:2]\n"
                "reduce output@0[0:8] <- sum float32(output@0[0:8], staging@0[0:8])",
                "combines elements that begin inside others",
            ),
        ],
    )
    def test_wrong(self, line: str, words: str) -> None:
        refused(reduction(line), words=("wrong bytes: rank 0", words))

    def test_averages_of_averages(self) -> None:
        """The average of (the average of two) and a third is not the average of the three."""
        average = Reduction(ReduceOp.AVG, "float32")
        program = build(reduce_scatter((4, 4, 4), average), "b2b")
        verify(program)
        listing = "\n".join(str(program).splitlines()[1:])
        line = "reduce output@0[0:4] <- avg float32(input@0[0:4], staging@0[0:4], staging@0[256:260])"
        assert line in listing
        nested = listing.replace(
            line,
            "reduce output@0[0:4] <- avg float32(input@0[0:4], staging@0[0:4])\n"
            "reduce output@0[0:4] <- avg float32(output@0[0:4], staging@0[256:260])",
        )
        refused(
            parse(program.collective, nested, staging=512), words=("wrong bytes: rank 0", "the avg float32 of (the avg")
        )

    def test_result_of_an_all_reduce_in_the_wrong_place(self) -> None:
        program = build(all_reduce((8, 8), SUM), "b2b", Transport.STAGED)
        listing = "\n".join(str(program).splitlines()[1:])
        line = "copy output@1[0:8] <- staging@0[256:264]"
        assert line in listing
        wrong = listing.replace(line, "copy output@1[0:8] <- staging@0[0:8]")
        refused(
            parse(program.collective, wrong, staging=512),
            words="rank 1 ends invocation 1 with output@1[0:8] holding input@1[0:8], not the sum float32 of",
        )

    def test_in_place_keeps_the_shards_of_others(self) -> None:
        program = build(reduce_scatter((8, 8), SUM, in_place=True), "b2b")
        verify(program)
        listing = "\n".join(str(program).splitlines()[1:])
        line = "reduce input@0[0:8] <- sum float32(input@0[0:8], staging@0[0:8])"
        scribble = listing.replace(line, f"{line}\n copy input@0[8:16] <- staging@0[0:8]")
        assert scribble != listing
        refused(parse(program.collective, scribble, staging=256), words="input@0[8:16]")


def test_a_sequence_of_different_programs() -> None:
    """One communicator: flags and staging are shared, user buffers differ in size from call to call."""
    programs = [
        build(all_gather((8, 8)), "b2b"),
        build(all_reduce((16, 16), SUM), "pcpy"),
        build(all_gather((3, 5)), "pcpy", Transport.STAGED),
        build(all_to_all([[4, 4], [4, 4]], in_place=True), "swap"),
    ]
    verification = verify_sequence(programs)
    assert verification.invocations == 8
