"""What a replay in C needs around it, as a communicator has it: records, locks, numbers, tensors."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from fake_driver import addresses_of, c_function

from sidelane.memory.record import Record

RING, PAYLOAD = 4, b"all_gather\0"
STREAM, DEVICE = 0x7F00_0000_1234, 3


class Host:
    """Everything around a replay, as a communicator has it. ``orders``: it has functions that order streams."""

    def __init__(self, module: ModuleType, *, orders: bool = False) -> None:
        self.state = SimpleNamespace(closed=False, failure=None, last=STREAM)
        self.stream, self.device, self.captured = STREAM, DEVICE, False
        self.generation = [1000]
        self.numbers: Iterator[int] = itertools.count(1)
        self.module, self.memory = module, bytearray(RING * 64)
        self.begun = ctypes.c_uint64(0)
        self.posted: list[tuple[int, str]] = []
        self.unread = 0
        self.post_lock, self.lock = threading.Lock(), threading.Lock()
        self.tensors = (torch.zeros(8), torch.zeros(4))
        self.log: list[Any] = []
        self.failures: list[tuple[int, Any]] = []
        self.orders, self.reached = orders, 0
        self.refuses: list[str] = []
        self.capturing: list[int] = []
        self.events = itertools.count(100)
        self.use([memoryview(self.memory)[64 * i : 64 * i + 64] for i in range(RING)])

    def use(self, views: list[memoryview]) -> None:
        """Make a replay that posts in these records."""
        self.records = [Record(view) for view in views]
        self.replay = self.module.Replay(
            ((self.state, "closed", False), (self.state, "failure", None)),
            *(lambda index: self.stream, lambda: self.captured, lambda: self.device, DEVICE),
            *(self.generation, (self.state, "last"), (self, "numbers")),
            *(tuple(self.records), tuple(record.address for record in self.records), ctypes.addressof(self.begun)),
            *(self, self.post, self.post_lock, self.lock.acquire, self.lock.release),
            *(torch._C._increment_version, torch.Tensor, *((self.ordering(),) if self.orders else ())),
        )

    def ordering(self) -> tuple[object, ...]:
        """C functions that order streams: they note in the log what they are asked for."""

        def create(found: int, flags: int) -> int:
            ctypes.c_uint64.from_address(found).value = next(self.events)
            self.log.append("create")
            return self.refuses.count("create")

        def capturing(stream: int, found: int) -> int:
            ctypes.c_int.from_address(found).value = stream in self.capturing
            return 0

        def noting(name: str) -> Callable[..., int]:
            def note(first: int, second: int = 0, _: int = 0) -> int:
                self.log.append((name, first, second))
                return self.refuses.count(name)

            return note

        functions: dict[Callable[..., int], int] = {
            noting("record"): 2,
            noting("wait"): 3,
            lambda event: self.reached: 1,
            create: 2,
            noting("destroy"): 1,
            capturing: 2,
        }
        return addresses_of([c_function(*each) for each in functions.items()])

    def post(self, call: int, signature: str) -> None:
        self.posted.append((call, signature))
        self.records[call % RING].write(call, 0, PAYLOAD)

    def failed(self, index: int, error: Any) -> None:
        self.failures.append((index, error))
        raise RuntimeError("refused")

    def step(self, *values: Any) -> tuple[Callable[..., Any], tuple[Any, ...], None]:
        return self.log.append, values, None

    def remember(self, steps: Any = None, words: Any = (), notes: Any = (), **other: Any) -> None:
        tensors = other.get("tensors", self.tensors)
        identities = tuple((t.data_ptr(), t.nbytes, t.dtype) for t in tensors)
        parts = {"kind": "all_gather", "details": (), "variant": "auto", "beside": None, **other}
        steps = (self.step("ran"),) if steps is None else steps
        self.replay.remember(
            *(
                parts["kind"],
                identities,
                parts.get("lists", 0),
                parts["details"],
                parts["variant"],
                parts["beside"],
                self.generation[0],
            ),
            *(
                other.get("stream", STREAM),
                "all_gather",
                other.get("payload", PAYLOAD),
                steps,
                words,
                notes,
                self.failed,
                None,
                other.get("shape"),
            ),
        )

    def run(
        self,
        given: Any = None,
        *,
        kind: Any = "all_gather",
        details: Any = (),
        variant: Any = "auto",
        beside: Any = None,
        aside: Any = None,
    ) -> Any:
        more = () if aside is None else (aside,)
        return self.replay.run(kind, self.tensors if given is None else given, details, variant, beside, *more)


def callback(returns: int, arguments: int, log: list[Any]) -> Any:
    def call(*values: int) -> int:
        log.append(values)
        return returns

    return ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_uint64] * arguments)(call)


def c_step(function: Any, *arguments: int) -> tuple[int, tuple[int, ...], Any]:
    return ctypes.cast(function, ctypes.c_void_p).value or 0, arguments, function
