"""Measure a machine with GPUs, all that is published of one: in parts, each with a time-out.

`make results RESULTS=folder` calls it. There are parts because GPUs are lent by the minute: what was measured is kept,
whatever becomes of the rest, and the same command goes on with what is missing. What failed is tried once more, behind
everything else.

Exit status: 1 if something failed or was wrong, also in an earlier call, or became slower than in the folder of
--before; 0 if not, and more may be left.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from node.folder import DONE, Folder, Place
from node.parts import ROOT, Part, all_parts
from node.session import Session, rest, say
from outputs import folder_to_write
from sidelane.machine.inventory import machine_name
from sidelane_lab.harness import provenance, regress
from sidelane_lab.harness.launch import choose_target

DIRTY = "-dirty"
SMALLEST_CHANGE = 0.02
"""Smallest change of a point that counts when two folders are compared, as a share."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts that are missing; 1 if any did not end well."""
    known = all_parts()
    names = list(dict.fromkeys(name for part in known for name in (part.study, part.name)))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=folder_to_write, required=True, help="folder for the result files")
    parser.add_argument("--seconds", type=float, default=math.inf, help="end by then, and go on in the next call")
    parser.add_argument("--list", action="store_true", help="show the parts, how they stand and what they take")
    parser.add_argument("--again", action="store_true", help="set aside what the folder has, and start anew")
    parser.add_argument("--dry-run", action="store_true", help="each part in its smallest form, on CPU ranks")
    parser.add_argument("--before", type=Path, help="earlier results: say what is slower than there")
    parser.add_argument("names", nargs="*", metavar="NAME", help="parts, or files without their ending; default: all")
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.names if name not in names]:
        parser.error(f"NAME (value={', '.join(unknown)}, allowed={', '.join(names)})")
    if not given.seconds > 0:
        parser.error(f"--seconds (value={given.seconds:g}, allowed=more than 0)")
    if given.before is not None and not given.before.is_dir():
        parser.error(f"--before (value={given.before}, allowed=a folder of results)")
    out = Path(os.path.abspath(given.out))
    place = place_here(out, dry=given.dry_run)
    if place.ranks < 2 and not given.list:
        parser.error(
            "two GPUs are needed at least (--dry-run shows that it works without them; sidelane collective, host, "
            "phases ... measure CPU ranks)"
        )
    chosen = [part for part in known if not given.names or {part.name, part.study} & {*given.names}]
    try:
        folder = Folder(out, known, place)
        if given.again and not given.list and (earlier := folder.set_aside(chosen)):
            say(f"set aside: {earlier}")
    except ValueError as problem:
        if given.list or not given.again:
            parser.error(str(problem))
        (out / "parts" / "state.json").unlink()
        folder = Folder(out, known, place)
        folder.set_aside(chosen)
    if given.list:
        print("\n".join([listed(folder, chosen), *(f"not of this: {text}" for text in folder.objections())]))
        return 0
    if objections := folder.objections():
        parser.error(
            f"{given.out} has results of something else (take another folder, or --again to start anew):\n  "
            + "\n  ".join(objections)
        )
    warn_of(place)
    code = Session(folder, chosen, seconds=given.seconds, dry=given.dry_run, again=bool(given.names)).run()
    if given.before is None:
        return code
    unfinished = {part.file for part in known if folder.state(part).state != DONE}
    return max(code, compare_with(given.before, out, unfinished))


def compare_with(before: Path, out: Path, unfinished: Collection[str] = ()) -> int:
    """Say what is slower beyond noise in the files that both folders have (``sidelane regress``); 1 if anything is.

    Files that are ``unfinished`` may still lack points.
    """
    code = 0
    for new in sorted(out.glob("*.json")):
        old = before / new.name
        if not old.exists():
            continue
        say(f"{new.name}, next to {old}")
        try:
            code |= regress.main(old, new, SMALLEST_CHANGE, None, is_whole=new.name not in unfinished)
        except ValueError as problem:  # of another study or machine, or with no times in it
            say(f"not compared: {problem}")
    return code


def place_here(out: Path, *, dry: bool) -> Place:
    """What there is to be measured: all GPUs, or CPU ranks in a dry run. Fewer than two ranks: nothing."""
    target = choose_target(2, "cpu") if dry else choose_target()
    if target.on_cpu:
        machine, device, ranks = "cpu", provenance.processor_name(), 2 if dry else 0
    else:
        device, count = provenance.accelerator_name()
        machine, ranks = machine_name(device, count), target.world_size
    return Place(machine, device, ranks, commit_but_for(out), provenance.software_versions())


def commit_but_for(out: Path) -> str:
    """The commit; it is ``-dirty`` only if other files than results in this folder differ from it."""
    commit = provenance.commit()
    if not commit.endswith(DIRTY) or not out.is_relative_to(ROOT):
        return commit
    status = ("git", "status", "--porcelain", "--untracked-files=no", "--", ".", f":(exclude){out.relative_to(ROOT)}")
    done = subprocess.run(status, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    return commit if done.returncode or done.stdout.strip() else commit.removesuffix(DIRTY)


def warn_of(place: Place) -> None:
    """Say what makes the results worth less."""
    if place.commit.endswith(DIRTY):
        say(f"WARNING: files differ from the commit that the results will name ({place.commit})")
    if place.commit == "unknown":
        say("WARNING: no checkout: set SIDELANE_COMMIT, or nobody will know what was measured")


def listed(folder: Folder, parts: Sequence[Part]) -> str:
    """The parts, how they stand, and what is left."""
    width = max(len(part.name) for part in parts)
    lines = [f"{'part':{width}}  {'file':22}  {'state':10}  {'rows':>5}  {'took':>6}  {'about':>6}  {'most':>6}  needs"]
    for part in parts:
        state = folder.state(part)
        needs = ", ".join(dict.fromkeys(name.partition("-")[0] for name in (*part.needs, *part.after)))
        took = f"{state.seconds:.0f} s" if state.seconds else ""
        lines.append(
            f"{part.name:{width}}  {part.file:22}  {state.state:10}  {state.rows or '':>5}  {took:>6}  "
            f"{part.seconds:4.0f} s  {part.timeout_s:4.0f} s  {needs}".rstrip()
        )
    left = sum(rest(part, folder.state(part)) for part in parts)
    lines.append(f"left: about {left / 60:.0f} minutes ('about' is reckoned from two H200s)")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
