"""The command ``sidelane gemms``: GEMMs of language models, alone."""

from __future__ import annotations

import dataclasses

from sidelane_lab.harness.options import StudyOptions, count, names, study_command


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmOptions(StudyOptions):
    """Time the GEMMs of language models alone, for predictions to be compared with.

    `sidelane claims --machine` compares them with what the machine's description predicts.
    """

    study = "gemms"
    examples = (
        ("sidelane gemms --json gemms.json", "the layers of eight models, on one GPU"),
        ("sidelane gemms --device cpu --models llama-8b", "those of one model, divided to suit a CPU core"),
    )

    models: tuple[str, ...] = names("--models", (), "Models whose GEMMs are timed.", shown="all")
    warmup: int = count("--warmup", 2, "Samples before the measured.", 0)
    repeats: int = count("--repeats", 9, "Measured samples.")


gemms = study_command("gemms", GemmOptions)
