"""Errors say at their end where to read on, and the page says what they name."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
import subprocess
import sys
import tomllib
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from marks import long

import sidelane
from goldens import check_golden
from interpreter import Interpreter
from sidelane import Communicator, config, errors, fsdp, overlap, pool, wrap
from sidelane.c3.overlap import possible
from sidelane.cli.output import FailedError
from sidelane.config import VARIABLES, Config, from_environment
from sidelane.errors import PACKAGES, Page, last_line, missing, page_of, see

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("page", Page)
def test_pages_are_there(page: Page) -> None:
    assert (ROOT / page).is_file()


@pytest.mark.parametrize("place", ["lib/python3.11/site-packages", "target"])
def test_a_wheel_shows_the_pages_that_it_has_installed(
    place: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In an environment, and in the folder of ``pip install --target``."""
    module = tmp_path / place / "sidelane" / "errors.py"
    shared = tmp_path / ("" if place.startswith("lib") else place) / "share" / "doc" / "sidelane"
    monkeypatch.setattr(errors, "__file__", str(module))
    errors.installed_pages.cache_clear()
    try:
        assert see(ValueError(), Page.ERRORS).__notes__ == [f"See {Page.ERRORS}"], "there is none"
        errors.installed_pages.cache_clear()
        (shared / Page.ERRORS).parent.mkdir(parents=True)
        (shared / Page.ERRORS).touch()
        error = see(ValueError("wrong"), Page.TUNING)
        assert error.__notes__ == [f"See {shared}/{Page.TUNING}"] and page_of(error) is Page.TUNING
        assert last_line("".join(traceback.format_exception(error))) == "ValueError: wrong"
        assert FailedError("x", Page.OWN).page.shown == f"{shared}/{Page.OWN}"
    finally:
        errors.installed_pages.cache_clear()


def test_every_setting_is_described_where_its_errors_send_readers() -> None:
    text = (ROOT / Page.SETTINGS).read_text(encoding="utf-8")
    for name in (*VARIABLES, *(field.name for field in dataclasses.fields(Config))):
        assert f"`{name}`" in text, name
    assert config.__doc__ is not None and all(f"``{name}``" in config.__doc__ for name in VARIABLES)
    assert Config.__doc__ is not None and all(f"{f.name}: " in Config.__doc__ for f in dataclasses.fields(Config))


SETTINGS = """
SIDELANE_TIMEOUT_S=soon SIDELANE_TIMEOUT_S=-1 SIDELANE_DEBUG=yes SIDELANE_DETERMINISTIC=2 SIDELANE_NATIVE=
SIDELANE_BESIDE=all SIDELANE_MEMORY_BYTES=1.2Q SIDELANE_VIRTUAL_NODES=2x2 SIDELANE_VIRTUAL_NODES=0,-1
"""
REFUSED: dict[str, Callable[[], object]] = {
    **{setting: lambda setting=setting: from_environment(dict([setting.split("=")])) for setting in SETTINGS.split()},
    "Config(besides=)": lambda: Config(besides="compute"),
    "Config(colour=)": lambda: Config(colour=3),
    "replace(Config(), besides=)": lambda: dataclasses.replace(Config(), besides="compute"),
    "overlap()": lambda: overlap(),
    "overlap(on=3)": lambda: overlap(lambda: None, lambda comm: None, 3),
    "overlap(strategi=)": lambda: overlap(1, 2, 3, strategi=4),
    "possible(fastest)": lambda: possible("fastest", torch.device("cpu")),
    "fsdp.enable()": lambda: fsdp.enable(),
    "fsdp.enable(modle=)": lambda: fsdp.enable(modle=3),
    "fsdp.enable(a layer)": lambda: fsdp.enable(torch.nn.Linear(2, 2)),
    "pool(nbytes)": lambda: pool(1 << 20),
    "pool(nbytes, 3)": lambda: pool(1 << 20, 3),
    "Communicator(timeout_s=)": lambda: Communicator(timeout_s=3),
    **{
        f"{make.__name__}({group})": lambda make=make, group=given: make(*group)
        for make in (Communicator, wrap)
        for group, given in {
            "": (),
            "gloo": ("gloo",),
            "0": (0,),
            "a mesh": (SimpleNamespace(get_group=print),),
        }.items()
    },
}


def test_what_is_refused_says_where_to_read() -> None:
    """Without a process group: ``goldens/errors.txt`` has the errors, and the last line that Python prints."""
    found = {}
    for name, call in REFUSED.items():
        with pytest.raises((ValueError, TypeError, RuntimeError)) as refused:
            call()
        *_, page = traceback.format_exception(refused.value)
        found[name] = f"{type(refused.value).__name__}: {refused.value}\n{page}"
    check_golden("errors", found)


def test_settings_are_values() -> None:
    for made in (Config(5.0), Config(beside="compute")):
        assert pickle.loads(pickle.dumps(made)) == made == copy.copy(made)


def test_an_error_from_inside_of_a_call_stays_as_it_is() -> None:
    def inner() -> None:
        raise TypeError("of a callee")

    with pytest.raises(TypeError, match=r"^of a callee$"):
        errors.explained(Page.ERRORS)(lambda: inner())()


def test_names_of_the_package_are_listed_and_the_nearest_is_shown() -> None:
    assert set(sidelane.__all__) <= set(dir(sidelane))
    line = [sys.executable, "-c", "import sidelane; sidelane.Comunicator"]
    told = subprocess.run(line, capture_output=True, text=True, timeout=100).stderr
    assert "Did you mean: 'Communicator'?" in told, told


def test_an_unknown_setting_warns_with_the_page() -> None:
    with pytest.warns(UserWarning, match=r"no such setting.*See docs/reference/settings\.md"):
        from_environment({"SIDELANE_TIMEOUT": "1"})


@pytest.mark.parametrize(
    ("text", "nbytes"), [("1.2G", 1288490192), ("512M", 512 << 20), ("0", 0), ("1000", 1000), ("", None)]
)
def test_memory_is_a_size(text: str, nbytes: int | None) -> None:
    assert from_environment({"SIDELANE_MEMORY_BYTES": text}).memory_bytes == nbytes


def made() -> list[errors.SidelaneError]:
    return [
        errors.SidelaneError("text"),
        errors.ProgramError("title", ["a violation"]),
        errors.UnavailableError("text"),
        errors.UnavailableError("text", page=Page.SETTINGS),
        errors.CommunicatorClosedError("text"),
        errors.MismatchError("text"),
        errors.PeerError("text", [1]),
        errors.PeerTimeoutError("text", [1]),
    ]


@pytest.mark.parametrize("error", made(), ids=lambda error: type(error).__name__)
def test_errors_keep_their_page_and_text_among_processes(error: errors.SidelaneError) -> None:
    page, text = page_of(error), str(error)
    assert page is not None and str(page) not in text
    again = pickle.loads(pickle.dumps(error))
    assert (page_of(again), str(again), again.__notes__) == (page, text, [f"See {page}"])
    assert traceback.format_exception(error)[-1] == f"See {page}\n"
    assert last_line("".join(traceback.format_exception(error))).endswith(last_line(text))


def test_what_an_error_says_last_is_not_where_to_read() -> None:
    assert last_line("Traceback ...\nValueError: no\nSee docs/guide/errors.md\n") == "ValueError: no"
    assert last_line("ValueError: no") == "ValueError: no"
    assert page_of(see(ValueError("no"), Page.TUNING)) is Page.TUNING
    assert page_of(ValueError("no")) is None


def test_what_is_optional_is_in_the_extra() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(PACKAGES.values()) == set(project["optional-dependencies"]["cuda"])
    assert [PACKAGES["triton"]] == project["optional-dependencies"]["kernels"]
    names = {re.split(r"[<>=]", package)[0] for package in PACKAGES.values()}
    assert not names & {re.split(r"[<>=]", package)[0] for package in project["dependencies"]}


def test_one_sentence_names_the_command() -> None:
    error = missing("kernels need Triton", "triton", ImportError("No module named 'triton'"))
    assert str(error) == "kernels need Triton (No module named 'triton'): pip install 'triton>=3.6'"
    assert page_of(error) is Page.INSTALLATION


# What to hide, what to do without it, and what is said.
HIDDEN = [
    long("cuda.bindings", "from sidelane.execute.cuda.driver import load_api; load_api()", "copy engines need"),
    long("pynvml", "from sidelane_lab.studies.power.sensors import load_nvml; load_nvml()", "power needs NVML"),
    (
        "triton",
        "from sidelane.execute.cpu.kernel_call import CpuKernelCall; CpuKernelCall(None, None, None)",
        "kernels need Triton",
    ),
    ("triton", "from sidelane import ops", "kernels need Triton"),
    ("triton", "import sidelane.ops", "kernels need Triton"),
]


@pytest.mark.parametrize(("module", "does", "said"), HIDDEN)
def test_what_is_missing_is_told_in_a_sentence(
    module: str, does: str, said: str, interpreter: Interpreter, tmp_path: Path
) -> None:
    interpreter.start(f"import sys; sys.modules[{module!r}] = None; {does}", tmp_path, ())
    *_, error, note = interpreter.wait()[2][0].rstrip().splitlines()
    assert error.startswith(f"sidelane.errors.MissingPackageError: {said}")
    assert error.endswith(errors.how_to_get(module)) and note == f"See {Page.INSTALLATION}"


def test_a_machine_without_anything_optional_still_measures(interpreter: Interpreter, tmp_path: Path) -> None:
    hidden = ", ".join(map(repr, PACKAGES))
    line = "collective --device cpu --ranks 2 --collective all_gather --variants b2b --max-bytes 1K --iterations 1"
    code = (
        f"import sys; sys.modules.update(dict.fromkeys([{hidden}])); from sidelane.cli import main; "
        f"main({line.split()!r}, prog_name='sidelane')"
    )
    assert "b2b" in interpreter.run(code, tmp_path)


ONE_RANK = """
import sys, torch, torch.distributed as dist
from sidelane import Communicator
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 1), rank=0, world_size=1)
with Communicator() as comm:
    comm.all_gather(torch.zeros(4), torch.zeros(4), variant="no_such")
"""


def test_refused_arguments_of_a_call_say_where_to_read(interpreter: Interpreter, tmp_path: Path) -> None:
    interpreter.start(ONE_RANK, tmp_path, (tmp_path / "store",))
    _, _, (told,) = interpreter.wait()
    lines = [line.removeprefix("[rank0]: ") for line in told.rstrip().splitlines()]  # as torch prints them
    place = next(n for n, line in enumerate(lines) if line.startswith("ValueError: ") and "no_such" in line)
    assert lines[place + 1] == f"See {Page.ERRORS}"
