"""Options of studies: a field of a dataclass is an option of the study's command, with its help and what it may be.

    class HostOptions(StudyOptions):
        calls: int = count("--calls", 40, "Calls in a batch.")

The field has the default, checks itself when the options are made, and makes the option of the command. Help appears
at once, so neither this module nor one that declares options loads PyTorch.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import click
from click.shell_completion import CompletionItem

from sidelane.cli.help import LABORATORY, Example
from sidelane.cli.output import STDOUT, plain_errors
from sidelane.program.collective import Kind
from sidelane.sizes import parse_bytes
from sidelane_lab.harness.files import Written
from sidelane_lab.harness.help import HOW, OUTPUT, WHAT, GroupedCommand, Option, json_option, where
from sidelane_lab.harness.parameters import (
    NameChoice,
    device_option,
    given,
    ranks_option,
    refuse_beside_machine,
    report_option,
    sizes_between,
    timeout_option,
)
from sidelane_lab.harness.parameters import names as read_names
from sidelane_lab.harness.parameters import size as read_size

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
MOST_TENSORS = 1024
"""Tensors of a list at the most: proving a program takes longer with each, and a study proves many."""


class MachineName(click.types.StringParamType):
    """Type of a machine's name in the catalogue, or of a file that describes one. A shell completes both."""

    name = "name_or_file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the name as the catalogue writes it."""
        return str(loaded("machines.load").canonical_name(super().convert(value, param, ctx)))

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Return the names that begin so; files where none does."""
        names = loaded("machines.load").machine_names()
        found = [CompletionItem(name) for name in names if name.startswith(incomplete.lower())]
        return found or [CompletionItem(incomplete, type="file")]


MACHINE_NAME = MachineName()
machine_option = where(
    "--machine",
    type=MACHINE_NAME,
    help="Predict for this machine instead of measuring: one of `sidelane machines`, or a TOML or JSON file.",
)

LAUNCHES, PLACES = ("eager", "graph"), ("in", "out")
WRITTEN, SPAN = ("json", "report"), ("min_bytes", "max_bytes", "factor")
"""Parameters of commands for files that are written, and for sizes."""

LEAST = {"warmup": 0, "repeats": 1, "calls": 1, "rounds": 1, "sizes": 1}
"""The least value of fields that many studies have, and of the members of a tuple."""


def require_all(where: str, name: str, values: Collection[str], allowed: Collection[str]) -> None:
    """Refuse values that are not among ``allowed``, saying where and which."""
    unknown = [value for value in values if value not in allowed]
    if unknown:
        raise ValueError(f"{where}: {name} (value={', '.join(unknown)}, allowed={', '.join(allowed)})")


def require_file_to_resume(options: Any) -> None:
    """Refuse ``resume`` without a file to go on with. Takes the options of a study that has it."""
    if options.resume and (options.json is None or options.json == STDOUT):
        where = type(options).__name__
        raise ValueError(f"{where}: resume (value={options.resume}, allowed=with a file that json names)")


def require(where: str, name: str, value: str, allowed: Sequence[str]) -> None:
    """Refuse a value that is not one of ``allowed``, saying where and which."""
    if value not in allowed:
        raise ValueError(f"{where}: {name} (value={value!r}, allowed={', '.join(allowed)})")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Declared:
    """The declaration of a field.

    Attributes:
        decorators: function that makes the options of a command from the field's name.
        read: function that makes the field's value from the command's parameters and its name.
        allowed: values that the field, or each of its members, may have; empty: any.
        some: an empty tuple is refused.
        predicted: it belongs to predictions, and is refused without ``--machine``.
        usual: sizes that an empty field takes, by whether ranks are CPU processes.
    """

    decorators: Callable[[str], Sequence[Decorator]]
    read: Callable[[Mapping[str, Any], str], Any] = lambda parameters, name: parameters[name]
    allowed: Collection[str] = ()
    some: bool = False
    predicted: bool = False
    usual: Callable[[bool], tuple[int, ...]] | None = None

    def check(self, where: str, name: str, value: Any) -> None:
        """Refuse a value that is not allowed."""
        values = value if isinstance(value, tuple) else (value,)
        if self.some and not values:
            raise ValueError(f"{where}: at least one of {name} is needed (value=none)")
        if self.allowed:
            require_all(where, name, values, self.allowed)


def declared(options: Any) -> dict[str, Declared]:
    """Return the declarations of a class of options, or of one of them, by field."""
    found = ((field.name, field.metadata.get("declared")) for field in dataclasses.fields(options))
    return {name: one for name, one in found if one is not None}


def declared_field(default: Any, declaration: Declared) -> Any:
    """Return a field of a dataclass with its declaration."""
    return dataclasses.field(default=default, metadata={"declared": declaration})


def option(
    flag: str,
    default: Any,
    text: str,
    /,
    *,
    group: str = WHAT,
    convert: Callable[[Any], Any] | None = None,
    allowed: Collection[str] = (),
    some: bool = False,
    predicted: bool = False,
    **attributes: Any,
) -> Any:
    """Declare a field with one option.

    Args:
        flag: flag as users type it.
        default: default of the field, and of the option unless ``attributes`` has another one.
        text: help.
        group: heading of the help.
        convert: function that makes the field's value from the option's; None: they are the same.
        allowed: see :class:`Declared`.
        some: see :class:`Declared`.
        predicted: see :class:`Declared`.
        attributes: further arguments of ``click.option``.
    """
    attributes = {"default": default, **attributes}

    def decorators(name: str) -> Sequence[Decorator]:
        return (click.option(flag, name, cls=Option, group=group, help=text, **attributes),)

    def read(parameters: Mapping[str, Any], name: str) -> Any:
        return parameters[name] if convert is None else convert(parameters[name])

    return declared_field(
        default, Declared(decorators=decorators, read=read, allowed=allowed, some=some, predicted=predicted)
    )


def argument(name: str, *, convert: Callable[[Any], Any] = lambda value: value, **attributes: Any) -> Any:
    """Declare a field without a default, given by its place; ``convert``: makes its value of what was given."""
    declaration = Declared(
        decorators=lambda field: (click.argument(name, **attributes),),
        read=lambda parameters, field: convert(parameters[name]),
    )
    return dataclasses.field(metadata={"declared": declaration})


def shared(decorator: Decorator, default: Any) -> Any:
    """Declare a field with an option that other commands have, too."""
    return declared_field(default, Declared(decorators=lambda name: (decorator,)))


def count(flag: str, default: int, text: str, least: int = 1, group: str = HOW, **attributes: Any) -> Any:
    """Declare a whole number from ``least`` on."""
    return option(flag, default, text, group=group, type=click.IntRange(min=least), **attributes)


def names(
    flag: str,
    default: Sequence[str],
    text: str,
    *,
    allowed: Collection[str] = (),
    shown: str | bool = True,
    **more: Any,
) -> Any:
    """Declare names separated by commas; ``shown``: the default in words."""
    spelled: dict[str, Any] = {
        "default": ",".join(default),
        "metavar": "NAME,...",
        "callback": read_names,
        "show_default": shown,
    }
    return option(flag, tuple(default), text, allowed=allowed, **(spelled | more))


def words(
    flag: str, allowed: Sequence[str], default: Sequence[str], text: str, *, every: str = "", **attributes: Any
) -> Any:
    """Declare an option that may be repeated, and takes some words; ``every``: the word for all of them."""

    def convert(chosen: tuple[str, ...]) -> tuple[Any, ...]:
        kind = type(default[0]) if default else str
        return tuple(map(kind, dict.fromkeys(allowed if every in chosen else chosen)))

    choice = NameChoice([*allowed, *filter(None, [every])])
    usual = (every,) if every and set(default) == set(allowed) else tuple(map(str, default))
    spelled: dict[str, Any] = {"default": usual, "multiple": True, "type": choice}
    return option(flag, tuple(default), text, convert=convert, allowed=allowed, **(spelled | attributes))


def kinds(default: Sequence[Kind], allowed: Sequence[str], text: str = "May be repeated.", **attributes: Any) -> Any:
    """Declare collectives."""
    return words("--collective", allowed, default, text, some=True, **attributes)


def either(flag: str, allowed: Sequence[str], text: str, every: str = "both") -> Any:
    """Declare one of some words; ``every``, the default, takes all of them and is an empty field."""
    return option(
        *(flag, (), text),
        convert=lambda word: () if word == every else (word,),
        allowed=allowed,
        default=every,
        type=click.Choice([*allowed, every]),
    )


def launches() -> Any:
    """Declare the ways to launch."""
    return either("--launch", LAUNCHES, "Call by call, or in a CUDA graph.")


def places() -> Any:
    """Declare calls in place and out of place."""
    return either("--place", PLACES, "Calls in place, out of place, or both.")


IMPLEMENTATIONS = (
    "nccl, nccl_ce (NCCL on copy engines), symm_mem (PyTorch's symmetric memory), gloo, dma (Sidelane on copy "
    "engines), sm (Sidelane's kernels), auto (what Sidelane chooses)"
)
"""Names of what is compared in most studies, with what each is."""


def implementations(known: str = IMPLEMENTATIONS) -> Any:
    """Declare what is compared; ``known``: the names."""
    return names("--implementations", (), f"Measure only these: {known}.", shown="all that this machine has")


def word(flag: str, allowed: Sequence[str], default: str, text: str, group: str = WHAT) -> Any:
    """Declare one of some words."""
    return option(flag, default, text, group=group, allowed=allowed, type=NameChoice(list(allowed)))


def size_list(flag: str, text: str, gpus: Sequence[str], cpus: Sequence[str] = ()) -> Any:
    """Declare sizes, each given by itself. An empty field takes ``gpus``, on CPU ranks ``cpus`` if there are any."""
    shown = f"{_listed(gpus)} on GPUs, {_listed(cpus)} on CPUs" if cpus else _listed(gpus)
    attributes: dict[str, Any] = {"cls": Option, "group": WHAT, "metavar": "SIZE", "multiple": True}
    attributes |= {"callback": read_size, "show_default": shown, "help": text}

    def usual(on_cpu: bool) -> tuple[int, ...]:
        return tuple(map(parse_bytes, (cpus if on_cpu else ()) or gpus))

    return declared_field((), Declared(decorators=lambda name: (click.option(flag, name, **attributes),), usual=usual))


def _listed(sizes: Sequence[str]) -> str:
    *most, last = sizes
    return f"{', '.join(most)} and {last}" if most else last


def folder(flag: str, text: str) -> Any:
    """Declare a folder that is written."""
    return option(flag, None, text, group=OUTPUT, type=Written(is_folder=True), metavar="FOLDER")


def file_read(flag: str, text: str, *, group: str = WHAT, **attributes: Any) -> Any:
    """Declare a file that is read."""
    path = click.Path(dir_okay=False, exists=True, path_type=Path)
    return option(flag, None, text, group=group, type=path, metavar="FILE", **attributes)


FACTOR = 4


def size_span(gpus: tuple[str, str], cpus: tuple[str, str] | None = None) -> Any:
    """Declare sizes by ``--min-bytes``, ``--max-bytes`` and ``--factor``.

    An empty field takes sizes from the first to the second of ``gpus``, on CPU ranks of ``cpus`` if it is given.
    """

    def ends(on_cpu: bool) -> tuple[int, int]:
        smallest, largest = map(parse_bytes, (cpus if on_cpu else None) or gpus)
        return smallest, largest

    def decorators(name: str) -> Sequence[Decorator]:
        pairs = zip(gpus, cpus or gpus, strict=True)
        shown = [ours if ours == theirs else f"{ours} on GPUs, {theirs} on CPUs" for ours, theirs in pairs]
        size = functools.partial(click.option, cls=Option, group=WHAT, metavar="SIZE", callback=read_size)
        factor = functools.partial(click.option, cls=Option, group=WHAT, type=click.IntRange(min=2), default=FACTOR)
        return (
            size("--min-bytes", show_default=shown[0], help="Smallest size, such as 64K."),
            size("--max-bytes", show_default=shown[1], help="Largest size, such as 1.2G."),
            factor("--factor", help="Ratio of a size to the one before it."),
        )

    def read(parameters: Mapping[str, Any], name: str) -> tuple[int, ...]:
        smallest, largest = ends(cpus is not None and _on_cpu(parameters))
        smallest = smallest if parameters["min_bytes"] is None else parameters["min_bytes"]
        largest = max(smallest, largest) if parameters["max_bytes"] is None else parameters["max_bytes"]
        return tuple(sizes_between(smallest, largest, parameters["factor"]))

    def usual(on_cpu: bool) -> tuple[int, ...]:
        return tuple(sizes_between(*ends(on_cpu), FACTOR))

    return declared_field((), Declared(decorators=decorators, read=read, usual=usual))


def _on_cpu(parameters: Mapping[str, Any]) -> bool:
    """Return True where ranks would be CPU processes; predictions are of GPUs."""
    if parameters.get("machine") is not None:
        return False
    from sidelane_lab.harness.launch import choose_target

    return choose_target(parameters["ranks"], parameters["device"]).on_cpu


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """Options of a command. The docstring of a class below is its help, and ``examples`` stand at the end of that."""

    examples: ClassVar[tuple[Example, ...]] = ()

    def __post_init__(self) -> None:
        for name, one in declared(self).items():
            one.check(type(self).__name__, name, getattr(self, name))


@dataclasses.dataclass(frozen=True, kw_only=True)
class StudyOptions(CommandOptions):
    """Options of every study. ``LEAST`` holds fields that many of them have; ``budget_s`` is above 0.

    Attributes:
        study: name of the study.
        ranks: processes; None takes every accelerator, or a few processes on the CPU.
        device: ``auto``, ``gpu`` or ``cpu`` (see ``launch.choose_target``).
        implementations: names to keep; empty keeps all of this machine.
        json: file for the results, or ``written.STDOUT``, which then has nothing else; None writes none.
        report: folder for the page and the pictures; None writes none.
        timeout_s: for the whole study.
        step_timeout_s: for one sample, check or allocation; a device that takes longer counts as hanging.
        seed: of the random inputs.
        command: what to type to run it again; empty takes this process's command line.
        quiet: neither progress nor tables.
    """

    study: ClassVar[str] = ""

    implementations: tuple[str, ...] = ()
    ranks: int | None = shared(ranks_option, None)
    device: str = shared(device_option, "auto")
    json: Path | None = shared(json_option, None)
    report: Path | None = shared(report_option, None)
    timeout_s: float = shared(timeout_option, 600.0)
    step_timeout_s: float = 60.0
    seed: int = 0
    command: str = ""
    quiet: bool = False

    def __post_init__(self) -> None:
        where = type(self).__name__
        if self.timeout_s <= 0 or self.step_timeout_s <= 0:
            raise ValueError(f"{where}: time-outs must be positive (value={self.timeout_s}, {self.step_timeout_s})")
        for name, least in LEAST.items():
            value = getattr(self, name, least)
            if min(value if isinstance(value, tuple) else (value,), default=least) < least:
                raise ValueError(f"{where}: {name} (value={value}, allowed={least} and more)")
        budget_s = getattr(self, "budget_s", None)
        if budget_s is not None and not budget_s > 0:
            raise ValueError(f"{where}: budget_s (value={budget_s}, allowed=more than 0)")
        CommandOptions.__post_init__(self)

    @property
    def step_s(self) -> float:
        """The time-out of a step, which is never longer than that of the study."""
        return min(self.step_timeout_s, self.timeout_s)

    def sizes_on(self, device_type: str, name: str = "sizes") -> tuple[int, ...]:
        """Return the sizes of a field, or where it is empty those that are usual on such devices."""
        usual = declared(self)[name].usual
        assert usual is not None, f"{name} is no field of sizes"
        chosen: tuple[int, ...] = getattr(self, name)
        return chosen or usual(device_type == "cpu")


Predict = Callable[[str, Any], object]
"""Type of what predicts for a machine, with the options of a study."""


def decorators_of(*classes: type[CommandOptions], besides: Sequence[Decorator] = ()) -> Iterator[Decorator]:
    """Yield the options of fields: of the studies, then ``besides``, then those of every study. A name counts once."""
    base = {field.name for field in dataclasses.fields(StudyOptions)}
    found = {name: one for each in reversed(classes) for name, one in declared(each).items()}
    order = dict.fromkeys(name for each in classes for name in declared(each))
    for name in order:
        if name not in base:
            yield from found[name].decorators(name)
    yield from besides
    for name in order:
        if name in base:
            yield from found[name].decorators(name)


def values_of(options: type[CommandOptions], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of fields from the parameters of a command."""
    return {name: one.read(parameters, name) for name, one in declared(options).items()}


def loaded(module: str) -> Any:
    """Return a module of the laboratory, imported now: declarations import nothing that measures or predicts."""
    return importlib.import_module(f"sidelane_lab.{module}")


def run(options: StudyOptions) -> object:
    """Run the study of some options."""
    return loaded("harness.running").run(options)


def study_command(
    name: str,
    options: type[StudyOptions],
    predict: Predict | None = None,
    beside: Sequence[str] = (),
    heading: str = LABORATORY,
) -> GroupedCommand:
    """Make the command that runs a study.

    Args:
        name: name of the command.
        options: options of the study; their docstring is the help.
        predict: function that predicts for ``--machine`` instead, where more has to be done than ``predict_study``.
        beside: parameters that go with ``--machine``; without any, the command has no such option.
        heading: heading in the help that lists commands.
    """

    def callback(machine: str | None = None, **parameters: Any) -> None:
        if machine is not None:
            refuse_beside_machine(*beside)
            predicts = predict or loaded("machines.numbers").predict_study
            predicts(machine, options(**values_of(options, {**parameters, "machine": machine})))
            return
        for field, one in declared(options).items():
            if one.predicted and given(field):
                flag = next(each.opts[0] for each in found.params if each.name == field)
                raise ValueError(f"{flag} is for predictions; it needs --machine")
        run(options(**values_of(options, parameters)))

    found = command(name, callback, (options,), (machine_option,) if beside else (), heading)
    return found


def command(
    name: str,
    callback: Callable[..., None],
    classes: Sequence[type[CommandOptions]],
    besides: Sequence[Decorator] = (),
    heading: str = LABORATORY,
    hints: Mapping[str, str] = MappingProxyType({}),
) -> GroupedCommand:
    """Make a command with some options, the first class of which says what it does.

    Args:
        name: name of the command.
        callback: function that gets its parameters; errors that it raises are shown plainly.
        classes: classes of the options.
        besides: further options.
        heading: heading in the help that lists commands.
        hints: answers to options that it does not have; empty: to words without one.
    """

    def function(**parameters: Any) -> None:
        with plain_errors():
            callback(**parameters)

    made: Callable[..., Any] = function
    for decorator in reversed([*decorators_of(*classes, besides=besides)]):
        made = decorator(made)
    first = classes[0]
    text = inspect.cleandoc(first.__doc__ or "")
    return click.command(name, cls=GroupedCommand, heading=heading, examples=first.examples, hints=hints, help=text)(
        made
    )
