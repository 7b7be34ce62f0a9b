"""The user's file with times of fused operators, by which ``method="auto"`` chooses."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from sidelane.choice import Profile
from sidelane.choice.store import FUSED_FILE, read_profile, user_file
from sidelane.user_files import write_whole
from sidelane_lab.harness.parameters import required


def keep(measured: Profile) -> Path:
    """Write the user's file of a machine; times of shapes that it has already are replaced, others stay."""
    path = required("fused", user_file(measured.key, FUSED_FILE))
    try:
        before = read_profile(path)
    except ValueError:  # of another format: it is replaced
        before = None
    stay = before.operators if before is not None and not before.key.differences(measured.key) else ()
    found = {(t.op, t.world_size, t.captured, t.sizes, t.element_bytes): t for t in (*stay, *measured.operators)}
    write_whole(path, dataclasses.replace(measured, operators=tuple(found.values())).to_text().encode())
    return path
