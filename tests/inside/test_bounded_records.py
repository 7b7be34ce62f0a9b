"""Records of calls stay small in a program that never ends."""

from __future__ import annotations

from pathlib import Path

from sidelane import flight_recorder, ranges
from sidelane.errors import PeerError


def test_groups_and_failures_are_bounded(tmp_path: Path) -> None:
    """A program may make ever new communicators, whose calls may fail again and again."""
    recorder = flight_recorder.FlightRecorder(f"{tmp_path}/", 4)
    for number in range(1000):
        group = "persistent" if number % 3 == 0 else f"group {number}"
        call = ranges.ObservedCall("barrier", (), (), (0,), group)
        recorder.end(call, recorder.begin(call), None)
        recorder.failed(PeerError(f"call {number}", (1,)))
    assert len(recorder._groups) <= 9 and len(recorder._sequences) <= 9
    content = recorder.content()
    assert [entry["process_group"][0] for entry in content["entries"]] == [
        "persistent",
        "group 997",
        "group 998",
        "persistent",
    ]
    assert content["entries"][-1]["collective_seq_id"] == 334, "a group with calls that are kept goes on counting"
    texts = [failure["text"] for failure in content["sidelane"]["failures"]]
    assert len(texts) == 101
    assert texts[0].startswith("PeerError: call 0") and texts[-1] == "others: 900 more failures"
