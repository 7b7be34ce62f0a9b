"""Tests that ranks execute: ``@on_ranks(2, 3, gpu=True)`` makes a test of a function of a rank.

    @on_ranks(2, long(8), gpu=True)
    @pytest.mark.parametrize("numel", [1, 1000])
    def test_all_gather(group: dist.ProcessGroup, numel: int) -> None:
        with communicator(group) as comm: ...

Every rank calls it with its process group. pytest collects it as ``test_all_gather[2-1]``, ``[8-1]`` and ``[gpu-1]``.
The first two run in CPU processes. The last one, which is marked ``device``, runs on GPUs, where tensors are on the
rank's GPU unless the test says otherwise. A function with ``context`` as its first parameter is one for GPUs only.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import pytest
import torch
import torch.distributed as dist
from device_pool import Pool, Ranks, gpus, world_size
from ranks import Crew, RankPool
from vendors import reason_to_skip

from interpreter import Interpreter

if TYPE_CHECKING:
    from device_context import Context

Function = TypeVar("Function", bound=Callable[..., None])
OF_RANKS = ("group", "context")
DEVICE_TEST_S = 180
PARAM = type(pytest.param())
"""One of several arguments, with marks."""


class Place(NamedTuple):
    """Where ranks run a test: so many CPU processes (or those with these numbers), or GPUs in a certain way."""

    ranks: int | Sequence[int] = 0
    way: Callable[..., Any] | None = None
    interpreted: bool = False
    fresh: bool = False
    environment: Mapping[str, str] = MappingProxyType({})
    crew: str = "ranks"
    timeout_s: float = 120.0

    def executors(self, request: pytest.FixtureRequest) -> Ranks | Pool:
        """Return the ranks on GPUs."""
        if self.fresh:
            return request.getfixturevalue("fresh_pool")(environment=self.environment)  # type: ignore[no-any-return]
        return request.getfixturevalue(self.crew)  # type: ignore[no-any-return]

    def __str__(self) -> str:
        if self.way is not None:
            return "gpu" if self.way is own_stream else f"gpu_{self.way.__name__}"
        return str(self.ranks) if isinstance(self.ranks, int) else "+".join(map(str, self.ranks))


def own_stream(context: Context, function: Callable[..., Any]) -> Any:
    """Execute a test on this rank's GPU, on a stream of its own."""
    with torch.cuda.stream(torch.cuda.Stream()):
        return default_stream(context, function)


def default_stream(context: Context, function: Callable[..., Any]) -> Any:
    """Execute a test on this rank's GPU, on the legacy default stream."""
    torch.set_default_device(context.device)
    try:
        return function(dist.group.WORLD)
    finally:
        torch.set_default_device(None)


BOTH_STREAMS = (default_stream, own_stream)


def on_ranks(
    *ranks: Any,
    gpu: bool | Callable[..., Any] | Iterable[Callable[..., Any]] = False,
    interpreted: bool = False,
    fresh: bool = False,
    environment: Mapping[str, str] | None = None,
    crew: str = "ranks",
    timeout_s: float = 120.0,
    **arguments: Any,
) -> Callable[[Function], Function]:
    """Make a test of a function of a rank; further ones of the same function come from further decorators.

    Args:
        ranks: numbers of CPU ranks, each for a test; or tuples of ranks, which form a group.
        gpu: a test on GPUs; or how they execute it: ``own_stream`` (True), ``default_stream`` or functions like them,
            with marks where there is a reason to skip it.
        interpreted: the CPU ranks interpret Triton's kernels; tests share four of them, and others have eight.
        fresh: the ranks on GPUs are processes of the test's own, which end with it.
        environment: of processes of the test's own.
        crew: the fixture that has the ranks on GPUs.
        timeout_s: for the ranks to answer.
        arguments: parameters of the function that these tests have in common.
    """
    ways = [own_stream] if gpu is True else [gpu] if callable(gpu) or isinstance(gpu, PARAM) else list(gpu or ())

    def decorate(function: Function) -> Function:
        tests = []
        for each in (*ranks, *ways):
            (value,), marks = (each.values, each.marks) if isinstance(each, PARAM) else ((each,), ())
            if callable(value):
                own = fresh or environment is not None
                place = Place(way=value, fresh=own, environment=environment or {}, crew=crew, timeout_s=timeout_s)
                marks = (*marks, *ON_GPUS)
            else:
                place = Place(value, interpreted=interpreted, timeout_s=timeout_s)
            tests.append((place, arguments, marks))
        function.on_ranks = [*tests, *getattr(function, "on_ranks", ())]  # type: ignore[attr-defined]
        return function

    return decorate


def everyones(group: dist.ProcessGroup, value: Any) -> list[Any]:
    """Return what each rank has, by rank."""
    found = [None] * group.size()
    with torch.device("cpu"):
        dist.all_gather_object(found, value, group)
    return found


ON_GPUS = (pytest.mark.device, pytest.mark.timeout(DEVICE_TEST_S))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    tests = getattr(metafunc.function, "on_ranks", ())
    if not tests:
        return
    first = next(iter(inspect.signature(metafunc.function).parameters))
    assert first in OF_RANKS, f"{metafunc.function.__name__}: the first parameter is one of {OF_RANKS}, not {first}"
    names = list(dict.fromkeys(name for _, arguments, _ in tests for name in arguments))
    sets = [pytest.param(place, *(arguments[name] for name in names), marks=marks) for place, arguments, marks in tests]
    metafunc.parametrize(
        (first, *names), sets, ids=lambda value: str(value) if isinstance(value, Place) else None, indirect=[first]
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests for GPUs where there are none, as on CI's machines: `make test-device` is for one that has them."""
    for item in items:
        if item.get_closest_marker("device") is not None:
            name = getattr(item, "originalname", item.name)
            if reason := reason_to_skip(item.path.stem, name, gpus()):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Let the ranks call the function, in place of this process."""
    if not hasattr(pyfuncitem.obj, "on_ranks"):
        return None
    first, *others = [name for name in inspect.signature(pyfuncitem.obj).parameters if name in pyfuncitem.funcargs]
    function = functools.partial(pyfuncitem.obj, **{name: pyfuncitem.funcargs[name] for name in others})
    answers = pyfuncitem.funcargs[first](function)
    assert set(map(type, answers)) == {type(None)}, "a test returns nothing: it asserts by itself"
    return True


@pytest.fixture
def group(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """Has a function executed by the ranks of the test, and returns what each returned."""
    place: Place = request.param
    if place.way is None:
        interpreters = "eight" if place.ranks in range(5, 9) else "four"
        crew = request.getfixturevalue(interpreters if place.interpreted else "pool")
        return lambda function: crew.run(function, place.ranks, timeout_s=place.timeout_s)
    ranks = place.executors(request)
    return lambda function: ranks.run(place.way, function, timeout_s=place.timeout_s)


@pytest.fixture
def context(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """Return a caller, as ``group`` does, of functions that get the context of a rank on a GPU."""
    place: Place = request.param
    ranks = place.executors(request)
    return lambda function: ranks.run(function, timeout_s=place.timeout_s)


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Eight ranks that all tests share. Their start is no part of the test that needs them first."""
    ranks = RankPool()
    ranks.run(id, 1)
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def four() -> Iterator[Crew]:
    """Processes that interpret kernels; this one does not, nor does anybody whom it starts later.

    All tests share them: a process rewrites every kernel for the interpreter once, a third of the time of few calls.
    """
    yield from interpreting(4)


@pytest.fixture
def eight() -> Iterator[Crew]:
    """Eight of them for one test."""
    yield from interpreting(8)


def interpreting(world_size: int) -> Iterator[Crew]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        found = Crew(world_size)
        found.run(id)
    yield found
    found.close()


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Ranks on GPUs that all tests share; others after a test that failed."""
    made = Ranks(world_size())
    yield made
    made.close()


@pytest.fixture
def fresh_pool() -> Iterator[type[Pool]]:
    """Makes pools of their own for tests that kill ranks or change the environment; ends them all."""
    made: list[Pool] = []

    class OwnPool(Pool):
        def __init__(self, **options: object) -> None:
            super().__init__(world_size(), **options)  # type: ignore[arg-type]
            made.append(self)

    yield OwnPool
    for pool in made:
        pool.close()


@pytest.fixture(scope="session")
def shared_interpreter(request: pytest.FixtureRequest) -> Iterator[list[Interpreter]]:
    """The interpreter of :func:`interpreter`, if one has been started."""
    if request.config.option.no_ranks:
        pytest.skip("it starts programs")
    started: list[Interpreter] = []
    yield started
    for each in started:
        each.close()


@pytest.fixture
def interpreter(shared_interpreter: list[Interpreter]) -> Interpreter:
    """An interpreter whose copies are programs; another one after a test whose programs had to be killed."""
    if not shared_interpreter or shared_interpreter[0].closed:
        shared_interpreter[:] = [Interpreter()]
        shared_interpreter[0].start("", Path())  # no program: its imports are no part of the test
        shared_interpreter[0].wait()
    return shared_interpreter[0]
