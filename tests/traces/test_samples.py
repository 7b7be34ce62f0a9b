"""The record of public traces: a trace comes out of a git repository, and the long one is what it is said to be."""

import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from sidelane_lab.traces import samples
from sidelane_lab.traces.chakra import write_chakra
from sidelane_lab.traces.graph import NodeKind
from sidelane_lab.traces.samples import PublicTrace, long_trace, replayed, timed


def committed(clone: Path) -> str:
    """Commit what is in a new repository, and return the commit."""
    named = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("add", "."), (*named, "commit", "-q", "-m", "traces")):
        subprocess.run(["git", "-C", str(clone), *words], check=True)
    found = subprocess.run(["git", "-C", str(clone), "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    return found.stdout.strip()


def test_a_sample_is_read_from_its_commit_alone_or_out_of_an_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone = tmp_path / "somebody" / "traces"
    clone.mkdir(parents=True)
    trace = write_chakra(clone / "few.et", long_trace(40).nodes)
    with tarfile.open(clone / "more.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("inside/few.et")
        member.size = len(trace.read_bytes())
        archive.addfile(member, io.BytesIO(trace.read_bytes()))
    commit = committed(clone)
    monkeypatch.setattr(samples, "MACHINES", ("h100x8",))
    for path, member_name in (("few.et", ""), ("more.tar.gz", "inside/few.et")):
        sample = PublicTrace("somebody/traces", commit, path, "a few nodes", member_name)
        rows = list(replayed(sample, sample.write(tmp_path, tmp_path)))
        assert [(row["trace"], row["nodes"], row["collectives"]) for row in rows] == [("few.et", 40, 2)] * 3
        assert rows[0]["time_us"] > rows[-1]["time_us"] > 0
    with pytest.raises(subprocess.CalledProcessError):
        PublicTrace("somebody/traces", commit, "none.et", "nothing").write(tmp_path, tmp_path)


def test_the_long_trace_computes_and_communicates(tmp_path: Path) -> None:
    kinds = [node.kind for node in long_trace(170).nodes]
    assert len(kinds) == 170 and kinds.count(NodeKind.COLLECTIVE) == 10
    row = timed(tmp_path, 100)
    assert row["nodes"] == 100 and row["replays_s"] >= 0
