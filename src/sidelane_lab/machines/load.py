"""Reading machine descriptions: the catalogue in this package, and users' TOML or JSON files.

A number is a table ``{ value = 5300, source = "datasheet", of = "...", low = ..., high = ... }``. A plain number is
taken as ``assumed``. ``base = "mi300x8"`` starts from a machine of the catalogue, so that a file may state what
differs only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import importlib.resources
import re
import sys
import tomllib
import typing
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

from sidelane.user_files import json_of
from sidelane_lab.harness.files import text_of
from sidelane_lab.machines import spec

TOP_LEVEL = ("name", "title", "gpus", "nodes", "base", "runs")
RUNS = {"measured": spec.RunStatus.MEASURED, "never": spec.RunStatus.UNRUN, "unsupported": spec.RunStatus.UNSUPPORTED}
"""Values of ``runs``. A machine takes over only ``unsupported`` from its base: AMD GPUs, which never ran Sidelane."""
HOP_US = 0.70
"""Microseconds of a hop of NCCL's rings, as measured among two and four H200s."""
HOPS = {"library.all_gather_us": 1, "library.reduce_scatter_us": 1, "library.all_reduce_us": 2}
"""Hops that each further GPU adds to a ring."""
MOST_GPUS = 8
"""GPUs of a node at the most that is not in the catalogue."""
MOST_NODES = 1024
"""Nodes at the most of a machine that the catalogue describes with two."""
NOT_THE_NAME = re.compile(
    r"\d+ ?gb(?!\w)|hbm\w*|nvidia|amd|instinct|geforce|rtx|sxm\d?|hgx|"
    r"(?:blackwell )?(?:server|workstation) edition|oam|/mi250|nodes?|gpus?|\bof\b|[-_*]"
)
"""Parts of the names that people write which say nothing more than the GPU does."""
OF_ONE_GPU = ("power",)  # optional sections that a machine with other GPUs does not take over from its base
QUANTITY_KEYS = ("value", "source", "of", "low", "high")

LIBRARY_SPEEDS = tuple(f"library.{kind}_gbps" for kind in ("all_gather", "all_to_all", "all_reduce", "reduce_scatter"))

AT_MOST: tuple[tuple[str, str], ...] = (
    ("links.usable_gbps", "links.peak_gbps"),
    *((speed, "links.peak_gbps") for speed in LIBRARY_SPEEDS),
    ("links.peak_gbps", "gpu.memory_gbps"),
    ("dma.engine_gbps", "gpu.memory_gbps"),
    ("dma.local_gbps", "gpu.memory_gbps"),
    ("dma.reduce_gbps", "gpu.memory_gbps"),
    ("dma.add_gbps", "gpu.memory_gbps"),
    ("dma.next_copy_us", "dma.copy_us"),
    ("library.default_units", "gpu.units"),
    ("library.all_to_all_units", "gpu.units"),
    ("library.all_gather_need", "gpu.units"),
    ("library.all_to_all_need", "gpu.units"),
    ("matmul.bound_intensity", "matmul.intensity"),
    ("gpu.l2_mb", "gpu.cache_mb"),
    ("power.compute_idle_w", "power.idle_w"),
    ("power.idle_w", "power.cap_w"),
    ("occupancy.library_threads", "occupancy.threads"),
    ("occupancy.library_shared_kb", "gpu.shared_kb"),
)
"""Pairs of numbers of which the first cannot be greater than the second."""


def machine_names(*, one_node: bool = False) -> tuple[str, ...]:
    """Return names in the catalogue: all of them, or those of machines of one node."""
    folder = importlib.resources.files("sidelane_lab.machines") / "catalog"
    names = sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))
    return tuple(name for name in names if not one_node or named(name).nodes == 1)


def canonical_name(text: str) -> str:
    """Return a machine's name as the catalogue writes it, of the ways in which people write it.

    More GPUs than a node has are whole nodes; a DGX has eight GPUs. What names no GPU of the catalogue is returned.

    >>> [canonical_name(text) for text in ("8 x H100 SXM", "2x8xh100", "DGX-H100", "256xMI300X", "2xRTX4090", "h200x4")]
    ['h100x8', 'h100x8x2', 'h100x8', 'mi300x8x32', '4090x2', 'h200x4']
    >>> canonical_name("8 x NVIDIA H100 80GB HBM3"), canonical_name("4 x NVIDIA A100-SXM4-40GB")  # as torch has them
    ('h100x8', 'a100-40x4')
    """
    written, plain = {gpu.replace("-", " "): gpu for gpu in _gpus()}, _plain(text)
    found = re.fullmatch(rf"([\dx ]*?)({'|'.join(sorted(written, reverse=True))})((?:[x ][\dx ]*)?)", plain)
    if found is None:
        return text
    before, gpu, after = found[1], written[found[2]], found[3]
    numbers = [*re.findall(r"\d+", after), *reversed(re.findall(r"\d+", before))]  # GPUs of a node, then nodes
    counts = [str(int(number)) for number in numbers]
    if len(counts) == 1 and int(counts[0]) > MOST_GPUS and int(counts[0]) % MOST_GPUS == 0:
        counts = [str(MOST_GPUS), str(int(counts[0]) // MOST_GPUS)]
    return "x".join((gpu, *(count for number, count in enumerate(counts) if number == 0 or count != "1")))


def _plain(text: str) -> str:
    """Return a name without the parts that say nothing more than the GPU does."""
    of_memory = re.sub(r"a100(.*?)40 ?gb", r"a100-40\1", text.lower())  # an A100 has 80 GB, if nothing is said
    of_memory = re.sub(r"([ah]100)(.*?)64 ?gb", r"\1 64gib\2", of_memory)  # no GPU of the catalogue
    plain = NOT_THE_NAME.sub(" ", of_memory.replace("dgx", "8x").replace("pro 6000", "pro6000"))
    return re.sub(r" +", " ", plain).strip()


def _gpus() -> dict[str, int]:
    """Return the GPUs of the catalogue, and how many of each its largest node has."""
    found = dict[str, int]()
    for gpu, gpus in re.findall(r"(?m)^([\w-]+?)x(\d+)(?:x\d+)?$", "\n".join(machine_names())):
        found[gpu] = max(found.get(gpu, 0), int(gpus))
    return found


@functools.cache
def named(name: str) -> spec.Machine:
    """Return the machine of the catalogue with that name, or one with as many of its GPUs as the name says.

    Others than the catalogue has are a part of its largest node, or up to eight where no link joins every two of them.
    Nodes that it has twice are there in any other number, too: ``h100x8x4`` is ``h100x8x2`` with four.

    Raises:
        ValueError: there is none.
    """
    known, wanted = machine_names(), canonical_name(name)
    if wanted in known:
        entry = importlib.resources.files("sidelane_lab.machines") / "catalog" / f"{wanted}.toml"
        return parse(entry.read_text(encoding="utf-8"), f"{wanted}.toml")
    parts = re.fullmatch(r"([\w-]+?)x(\d{1,4})(?:x(\d{1,4}))?", wanted)
    gpu, gpus, nodes = (parts[1], int(parts[2]), int(parts[3] or 1)) if parts else ("", 0, 1)
    described = [f"{gpu}x{count}{'x2' * (nodes > 1)}" for count in (gpus, _gpus().get(gpu))]
    base = next((named(one) for one in described if one in known), None)
    most = 0 if base is None else base.gpus if base.links.topology is spec.Topology.MESH else max(base.gpus, MOST_GPUS)
    if base is None or not (0 < gpus <= most and nodes <= MOST_NODES):
        kind = _plain(name).replace(" ", "-")
        kind = next((one for one in (kind, gpu) if one in _gpus()), "") or re.sub(
            r"^(\d++ ?(x ?)?)+(?=\D)|( ?x ?\d++)+$", "", _plain(name)
        )
        near = [f"{_gpus()[one]}x{one}" for one in difflib.get_close_matches(kind, _gpus(), 3, 0)]
        few = f"up to {most} of these GPUs in a node are described" if most else "these GPUs are not described"
        few = f"{few}; more are whole nodes" * (most > 0 and gpus > MOST_GPUS) or few
        apart = f"several nodes of these GPUs are not described, but {near[0]} is"
        few = apart if nodes > 1 and gpu in _gpus() else few
        few = f"say how many, such as {near[0]}" if kind in _gpus() and not parts else few
        on_pcie = '"l40sx8" (PCIe 4.0, no NVLink) and changes units, peak_tflops, memory_gbps and memory_gb of [gpu]'
        raise ValueError(
            f"machine: {name!r}: {few}; the nearest names are {', '.join(near)}. Yours can be described in a file that "
            f"""begins with base = {on_pcie if "pcie" in name.lower() else f'"{canonical_name(near[0])}"'} """
            "(docs/internals/model.md)"
        )
    return dataclasses.replace(with_nodes(_with_gpus(base, gpus), nodes), name=wanted)


def _with_gpus(machine: spec.Machine, gpus: int) -> spec.Machine:
    """Return a machine with another number of GPUs in a node, whose rings have other hops; nothing was measured."""
    if gpus == machine.gpus:
        return machine
    title = re.sub(r"\d+ x ", f"{gpus} x ", machine.title)
    runs = spec.RunStatus.UNSUPPORTED if machine.runs is spec.RunStatus.UNSUPPORTED else spec.RunStatus.UNRUN
    library = _assumed(machine.library, machine.title)
    changed = dataclasses.replace(machine, gpus=gpus, title=title, runs=runs, library=library)
    if machine.host is None and machine.runs is not spec.RunStatus.UNSUPPORTED:
        for path, hops in HOPS.items():
            us = float(machine.quantities()[path]) - hops * HOP_US * (machine.gpus - gpus)
            changed = changed.with_value(path, us)
    return changed


def with_nodes(machine: spec.Machine, nodes: int) -> spec.Machine:
    """Return a machine with another number of nodes; a torus of them is as even as it can be."""
    if nodes == machine.nodes:
        return machine
    kind = machine.title.split(" nodes of ", 1)[-1]
    runs = spec.RunStatus.UNSUPPORTED if machine.runs is spec.RunStatus.UNSUPPORTED else spec.RunStatus.UNRUN
    title = f"{nodes} nodes of {kind}"
    changed = dataclasses.replace(machine, name=_among(machine, nodes), nodes=nodes, title=title, runs=runs)
    if machine.links.network is not spec.NetworkTopology.TORUS:
        return changed
    row = min(side for side in range(1, nodes + 1) if nodes % side == 0 and side * side >= nodes)
    return changed.with_value("links.torus_row", row)


def _among(machine: spec.Machine, nodes: int) -> str:
    """Return the name of a machine of the catalogue in another number of nodes; others keep theirs."""
    one = re.fullmatch(r"([\w-]+?x\d+)(?:x\d+)?", machine.name)
    return machine.name if one is None else f"{one[1]}{f'x{nodes}' * (nodes > 1)}"


def find(name_or_path: str, *, least: int = 2, nodes: int = 0) -> spec.Machine:
    """Return a machine of so many GPUs at least by its name in the catalogue, or from a TOML or JSON file.

    So many nodes of it are joined as the catalogue joins nodes of such GPUs, if it has any.

    Raises:
        ValueError: no such name, or the file is wrong; the text names the number and what is allowed.
    """
    path = Path(name_or_path)
    if path.suffix in (".toml", ".json"):
        if not path.is_file():
            raise ValueError(f"machine: no such file: {name_or_path!r}; `sidelane machines` lists those with a name")
        found = parse(text_of(path), name_or_path)
        return with_nodes(found, nodes or found.nodes)
    machine = named(name_or_path)
    if nodes and nodes != machine.nodes:
        among = with_nodes(machine, nodes)
        with contextlib.suppress(ValueError):
            return named(among.name) if among.name != machine.name else among
        return among
    if machine.world_size < least:
        raise ValueError(f"machine: {machine.title} communicates nothing: at least {least} GPUs are needed")
    return machine


def parse(text: str, where: str) -> spec.Machine:
    """Make a machine from the text of a file.

    Args:
        text: TOML, or JSON if ``where`` ends with ``.json``.
        where: name of the file, for messages.

    Raises:
        ValueError: ``where: path of the number: what is wrong``.
    """
    kind = "JSON" if where.endswith(".json") else "TOML"
    try:
        content = json_of(text) if kind == "JSON" else tomllib.loads(text)
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"{where}: not {kind}: {problem}") from problem
    try:
        return _machine(content)
    except ValueError as mistake:
        raise ValueError(f"{where}: {mistake}") from mistake


def _machine(content: Any) -> spec.Machine:
    """Make a machine of a file's content.

    Raises:
        ValueError: ``path of the number: what is wrong``.
    """
    if not isinstance(content, Mapping):
        raise ValueError("must be a table of sections")
    sections = _sections()
    _check_keys((), content, (*TOP_LEVEL, *sections))
    base = None
    if "base" in content:
        try:
            base = named(str(content["base"]))
        except ValueError as problem:
            raise _mistake("base", problem) from problem
    values = _about(content, base)
    for name, (section, optional) in sections.items():
        inherited = getattr(base, name) if base is not None else None
        if base is not None and inherited is not None and "gpu" in content:
            # Watts follow the GPU more than anything else does: those of another one are worse than none.
            inherited = None if name in OF_ONE_GPU else _assumed(inherited, base.title)
        if name in content:
            values[name] = _section(name, section, content[name], inherited)
        elif inherited is not None or optional:
            values[name] = inherited
        else:
            raise _mistake(name, "section is missing")
    if base is not None:
        _follow_links(base, content, values)
    machine = spec.Machine(**values)
    for path, text in contradictions(machine):
        raise _mistake(path, text)
    return machine


def _about(content: Mapping[str, Any], base: spec.Machine | None) -> dict[str, Any]:
    """Return what a file, or else its base, says of a machine as a whole."""
    keys = ("name", "title", "gpus", "nodes")
    usual = {"nodes": 1} if base is None else {key: getattr(base, key) for key in keys}
    values = {key: content.get(key, usual.get(key)) for key in keys}
    least = {"gpus": 2 if values["nodes"] == 1 else 1, "nodes": 1}
    for key, value in values.items():
        if key not in least and not isinstance(value, str):
            raise _mistake(key, f"missing or wrong (value={value!r}, allowed=a text)")
        if key in least and not (type(value) is int and least[key] <= value <= 4096):
            allowed = f"a whole number from {least[key]} to 4096"
            raise _mistake(key, f"missing or wrong (value={value!r}, allowed={allowed})")
    runs = content.get(
        "runs", "unsupported" if base is not None and base.runs is spec.RunStatus.UNSUPPORTED else "never"
    )
    if runs not in tuple(RUNS):
        raise _mistake("runs", f"(value={runs!r}, allowed={', '.join(RUNS)})")
    values["runs"] = RUNS[runs]
    if base is not None and "title" not in content and (values["gpus"], values["nodes"]) != (base.gpus, base.nodes):
        many = f"{values['nodes']} nodes of " if values["nodes"] > 1 else ""
        values["title"] = re.sub(r"^(\d+ nodes of )?\d+ x ", f"{many}{values['gpus']} x ", base.title)
    return values


def _mistake(path: str, text: object) -> ValueError:
    """Return the error of the number, or the section, at a path."""
    return ValueError(f"{path}: {text}")


def _follow_links(base: spec.Machine, content: Mapping[str, Any], values: dict[str, Any]) -> None:
    """Take what was measured over a base's links, and not stated anew, over to the links that a file states."""
    stated = content.get("links", {})
    if "topology" in stated and values["links"].topology is not base.links.topology:
        needed = ("links.peak_gbps", "links.usable_gbps", "dma.engine_gbps", *LIBRARY_SPEEDS)
        missing = [path for path in needed if not _holds(content, path)]
        if missing:
            text = f"(value={stated['topology']!r}, allowed={base.links.topology} as {base.name} has it"
            raise _mistake("links.topology", f"{text}, or with {', '.join(missing)} of these links)")
    links = values["links"]
    if "peak_gbps" in stated and "usable_gbps" not in stated:
        links = _scaled(links, ("usable_gbps",), links.peak_gbps / base.links.peak_gbps, "links.peak_gbps")
    longer = links.usable_gbps / base.links.usable_gbps
    inherited = [path.partition(".")[2] for path in LIBRARY_SPEEDS if not _holds(content, path)]
    values["links"] = links
    values["library"] = _scaled(values["library"], inherited, longer, "links.usable_gbps")


def _scaled(section: Any, names: Sequence[str], factor: float, why: str) -> Any:
    """Return the numbers of a section in proportion to another number that has changed by a factor."""
    if factor == 1.0:
        return section
    changes = {}
    for name in names:
        old = getattr(section, name)
        ends = (None, None) if old.low is None else (old.low * factor, old.high * factor)
        changes[name] = spec.Quantity(
            old * factor, spec.NumberSource.ASSUMED, f"in proportion to {why}: {old.of or old.source}", *ends
        )
    return dataclasses.replace(section, **changes)


def _holds(content: Mapping[str, Any], path: str) -> bool:
    """Return True if a file states the number at a path."""
    section, _, name = path.partition(".")
    return name in content.get(section, {})


def _section(name: str, section: type, content: Any, inherited: Any) -> Any:
    if not isinstance(content, Mapping):
        raise _mistake(name, "must be a section with numbers")
    hints = typing.get_type_hints(section)
    _check_keys((name,), content, tuple(hints))
    limits = limits_of(section)
    usual = {field.name for field in dataclasses.fields(section) if field.default is not dataclasses.MISSING}
    values = {}
    for key, hint in hints.items():
        path = f"{name}.{key}"
        if key not in content:
            if inherited is not None:
                values[key] = getattr(inherited, key)
            elif key not in usual:
                raise _mistake(name, f"{key} is missing")
        elif not issubclass(hint, StrEnum):
            values[key] = _quantity(path, content[key], limits[key])
        elif content[key] in tuple(hint):
            values[key] = hint(content[key])
        else:
            raise _mistake(path, f"(value={content[key]!r}, allowed={', '.join(hint)})")
    return section(**values)


def limits_of(section: type) -> dict[str, spec.NumberLimit]:
    """Return what each number of a section can be."""
    hints = typing.get_type_hints(section, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if hasattr(hint, "__metadata__")}


def _assumed(section: Any, title: str) -> Any:
    """A section taken over from a machine with other GPUs: what was found out about those is assumed of these."""
    changes = {}
    for field in dataclasses.fields(section):
        given = getattr(section, field.name)
        if isinstance(given, spec.Quantity) and given.source is not spec.NumberSource.ASSUMED:
            text = f"as on {title}: {given.of or given.source}"
            changes[field.name] = spec.Quantity(float(given), spec.NumberSource.ASSUMED, text, given.low, given.high)
    return dataclasses.replace(section, **changes)


def _quantity(path: str, content: Any, limit: spec.NumberLimit) -> spec.Quantity:
    if isinstance(content, int | float) and not isinstance(content, bool):
        content = {"value": content, "source": "assumed", "of": "stated without a source"}
    if not isinstance(content, Mapping) or "value" not in content or "source" not in content:
        raise _mistake(path, f"(value={content!r}, allowed=a number, or a table of {', '.join(QUANTITY_KEYS)})")
    _check_keys((path,), content, QUANTITY_KEYS)
    if content["source"] not in tuple(spec.NumberSource):
        raise _mistake(path, f"source (value={content['source']!r}, allowed={', '.join(spec.NumberSource)})")
    source = spec.NumberSource(content["source"])
    if source is not spec.NumberSource.DATASHEET and not content.get("of"):
        raise _mistake(path, f"'of' must say which file, claims or argument (source={source})")
    for key in ("value", "low", "high"):
        number = content.get(key, 0.0)
        if type(number) not in (int, float) or (type(number) is int and abs(number) > sys.float_info.max):
            raise _mistake(path, f"{key} (value={number!r:.100}, allowed=a finite number)")
        text = limit.outside(path, number) if key in content else ""
        if text:
            raise _mistake(path, text if key == "value" else f"{key} {text}")
        if not abs(number) <= sys.float_info.max:
            raise _mistake(path, f"{key} (value={number!r:.100}, allowed=a finite number)")
    try:
        return spec.Quantity(content["value"], source, content.get("of", ""), content.get("low"), content.get("high"))
    except ValueError as problem:
        raise _mistake(path, problem) from problem


def _sections() -> dict[str, tuple[type, bool]]:
    found = {}
    for name, hint in typing.get_type_hints(spec.Machine).items():
        options = [option for option in typing.get_args(hint) or (hint,) if option is not type(None)]
        if dataclasses.is_dataclass(options[0]):
            found[name] = (typing.cast(type, options[0]), len(typing.get_args(hint)) > 1)
    return found


def _check_keys(path: tuple[str, ...], content: Mapping[str, Any], allowed: tuple[str, ...]) -> None:
    for key in content:
        if key not in allowed:
            near = difflib.get_close_matches(key, allowed, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise _mistake(".".join((*path, key)), f"unknown name (allowed={', '.join(allowed)}){hint}")


def contradictions(machine: spec.Machine) -> Iterator[tuple[str, str]]:
    """Yield numbers that cannot be so beside others: the path of each, and the reason in words."""
    known = machine.quantities()
    for path, ceiling in AT_MOST:
        if path in known and ceiling in known and known[path] > known[ceiling]:
            yield path, f"(value={known[path]:g}, allowed=up to {known[ceiling]:g}, which is {ceiling})"
    links = machine.links
    each, nics = float(links.nics_per_gpu), float(links.nics_per_gpu * machine.gpus)
    if each > 1 and not each.is_integer():
        yield "links.nics_per_gpu", f"(value={each:g}, allowed=a whole number, or less than 1 where GPUs share NICs)"
    elif machine.nodes > 1 and abs(nics - round(nics)) > 1e-3:  # a third of a NIC has no end
        yield "links.nics_per_gpu", f"(value={each:g}, allowed=whole NICs a node, which has {machine.gpus} GPUs)"
    if machine.nodes > 1 and links.network is spec.NetworkTopology.TORUS and machine.nodes % int(links.torus_row):
        yield "links.torus_row", f"(value={links.torus_row:g}, allowed=a divisor of the {machine.nodes} nodes)"
