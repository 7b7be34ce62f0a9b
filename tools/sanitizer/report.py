"""What compute-sanitizer wrote about a process."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

_PREFIX = "========="
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) errors?$")
_RACES = re.compile(r"RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?, (\d+) warnings?\)")
_TROUBLE = re.compile(
    r"Internal Sanitizer Error|Target application|process didn't terminate|Device not supported|Error: No "
)
_ABOUT_ITSELF = ("COMPUTE-SANITIZER", "ERROR SUMMARY", "RACECHECK SUMMARY", "LEAK SUMMARY")
MOST_CHARACTERS = 400


@dataclasses.dataclass(frozen=True)
class Report:
    """One report.

    Attributes:
        errors: that the tool counted; None if it never came to its summary.
        warnings: of racecheck, which are no errors.
        first: the first finding, in one line.
        trouble: what the tool says of itself or of a process that ended badly.
    """

    errors: int | None
    warnings: int = 0
    first: str = ""
    trouble: str = ""

    @property
    def clean(self) -> bool:
        """The tool has seen everything and found nothing."""
        return self.errors == 0 and not self.warnings and not self.trouble


def parse(text: str) -> Report:
    """Read what the tool wrote with ``--log-file``."""
    lines = [line[len(_PREFIX) :].rstrip() for line in text.splitlines() if line.startswith(_PREFIX)]
    errors, warnings = None, 0
    for line in map(str.strip, lines):
        if found := _SUMMARY.search(line):
            errors = int(found[1])
        if found := _RACES.search(line):
            errors, warnings = int(found[1]), int(found[2])
    trouble = next((line.strip() for line in lines if _TROUBLE.search(line)), "")
    findings = (
        block
        for block in _blocks(lines)
        if not block[0].startswith(_ABOUT_ITSELF) and not _TROUBLE.search(block[0]) and len(block) > 1
    )
    first = "; ".join(next(findings, []))
    return Report(errors, warnings, first[:MOST_CHARACTERS], trouble[:MOST_CHARACTERS])


def _blocks(lines: Iterable[str]) -> Iterable[list[str]]:
    """A line that begins at the first column, with the indented ones behind it."""
    block: list[str] = []
    for line in lines:
        indented = line.startswith("  ")
        if block and (not line.strip() or not indented):
            yield block
            block = []
        if line.strip() and (block or not indented):
            block.append(line.strip())
    if block:
        yield block
