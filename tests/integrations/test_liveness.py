"""A rank that leaves, is late or has a wrong setting is named, from the making of the group on.

These are programs of several ranks. Time-outs are longer than the tests' own, except where they are the subject.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from marks import long

from interpreter import Interpreter

PROGRAM = """
import dataclasses, datetime, json, logging, os, pathlib, signal, sys, time
import torch, torch.distributed as dist
import sidelane
from sidelane import fsdp
from torch.distributed.fsdp import fully_shard

rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3])
options, last = sys.argv[4:], size - 1
torch.set_num_threads(1)
sidelane.register()

def begin(backend="sidelane", **options):
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, **options)

def until(name):
    while not (folder / name).exists():
        time.sleep(0.01)

def group(ranks=None, backend="sidelane"):
    return dist.new_group(ranks, backend=backend)

def fsdp_enable():
    return fsdp.enable(fully_shard(torch.nn.Linear(8, 8)))

CALLS = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(4)),
    "large": lambda: dist.all_reduce(torch.ones(100_000)),
    "product": lambda: dist.all_reduce(torch.ones(4), op=dist.ReduceOp.PRODUCT),  # which Gloo makes
    "async": lambda: dist.all_reduce(torch.ones(4), async_op=True).wait(),
    "new_group": group,
    "split_group": lambda: dist.split_group(None, [list(range(size))]),
    "wrap": lambda: sidelane.wrap(),
    "communicator": lambda: sidelane.Communicator(device="cpu"),
    "fsdp": fsdp_enable,
}
"""

LEAVES = """
how, call = options

def leave(error=None):  # a survivor that ends before the others have named the rank would be named, too
    if error is not None:
        print(type(error).__name__, error.ranks, error, flush=True)
    (folder / f"{rank} has named it").touch()
    if size > 3:
        for other in range(last):
            until(f"{other} has named it")
    os._exit(0)

def connected(connect):
    try:
        return connect()
    except sidelane.PeerError as error:  # the last rank has ended before this one had connected
        leave(error)

if call.startswith("gloo"):
    begin("gloo")
    sidelane.Communicator(device="cpu").close()  # from here on, ranks know each other
else:
    connected(begin)
make = CALLS.get(call)
if call == "subgroup":
    part = connected(lambda: group([0, last]))
    make = lambda: dist.all_reduce(torch.ones(4), group=part)
elif call == "empty":
    made = dist.group.WORLD.communicator("cpu")
    make = lambda: made.empty(1000)
elif call == "gloo":
    make = CALLS["communicator"]
if rank == last:
    if how == "exits":
        sys.exit()
    if how == "destroys":
        dist.destroy_process_group()
        for other in range(last):
            until(f"{other} has named it")
        sys.exit()
    os.kill(os.getpid(), signal.SIGKILL)
if call == "subgroup" and rank:
    sys.exit()
try:
    make()
except sidelane.PeerError as error:
    leave(error)
leave()
"""


def run(interpreter: Interpreter, folder: Path, program: str, size: int, *options: object) -> tuple[list[str], ...]:
    ranks = [(rank, size, folder, *options) for rank in range(size)]
    interpreter.start(PROGRAM + program, folder, *ranks)
    codes, said, errors = interpreter.wait(60)
    return [str(code) for code in codes], said, errors


@pytest.mark.parametrize(
    ("how", "call"),
    [
        *((how, "all_reduce") for how in ("exits", "is killed", "destroys")),
        *(("is killed", call) for call in ("new_group", "communicator", "fsdp", "gloo")),
        ("destroys", "product"),
        *(long("is killed", call) for call in ("async", "split_group", "wrap", "empty")),
        *(long("destroys", call) for call in ("new_group", "communicator", "fsdp")),
    ],
)
def test_a_rank_that_leaves_before_its_first_call_is_named(
    interpreter: Interpreter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, call: str
) -> None:
    monkeypatch.setenv("SIDELANE_TIMEOUT_S", "1000")
    _, said, errors = run(interpreter, tmp_path, LEAVES, 2, how, call)
    assert said[0].startswith("PeerError (1,) "), f"{said}{errors}"
    assert ("was destroyed on rank 1" if how == "destroys" else "rank 1 (") in said[0]


@pytest.mark.parametrize(
    ("how", "call"),
    [("is killed", "large"), long("destroys", "large"), long("is killed", "fsdp"), long("destroys", "fsdp")],
)
def test_a_rank_that_leaves_another_node_is_named(
    interpreter: Interpreter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, call: str
) -> None:
    monkeypatch.setenv("SIDELANE_TIMEOUT_S", "1000")
    monkeypatch.setenv("SIDELANE_VIRTUAL_NODES", "0,0,1,1")
    monkeypatch.setenv("SIDELANE_BESIDE", "compute")
    _, said, errors = run(interpreter, tmp_path, LEAVES, 4, how, call)
    for text in said[:3]:
        assert text.startswith("PeerError (3,) "), f"{said}{errors}"


def test_a_rank_that_leaves_is_named_in_a_subgroup(
    interpreter: Interpreter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIDELANE_TIMEOUT_S", "1000")
    _, said, errors = run(interpreter, tmp_path, LEAVES, 3, "is killed", "subgroup")
    assert said[0].startswith("PeerError (1,) ") and "rank 1 (rank 2 of the world, " in said[0], f"{said}{errors}"


TIMED_OUT = """
which = options[0]
seconds = {"timeout": datetime.timedelta(seconds=float(options[1]))} if options[1:] else {}
if which == "init":
    begin(**seconds)
    chosen = dist.group.WORLD
else:
    begin(timeout=datetime.timedelta(seconds=70))
    if which == "new_group":
        chosen = dist.new_group(backend="sidelane", **seconds)
    elif which == "wrap":
        chosen = sidelane.wrap()
    else:
        chosen = dist.split_group(None, [[0, 1]], **seconds)
gloo = chosen._other._get_backend(torch.device("cpu"))
print(chosen.communicator("cpu").config.timeout_s, gloo.options._timeout.total_seconds(), flush=True)
(folder / f"{rank} is there").touch()
until(f"{1 - rank} is there")
os._exit(0)
"""


@pytest.mark.parametrize(
    ("options", "ours", "others"),
    [
        (("init",), 80, 80),
        (("init", "90"), 90, 90),
        (("new_group", "90"), 90, 90),
        (("split_group",), 70, 70),
        long(("new_group",), 80, 80),
        long(("split_group", "90"), 90, 90),
        (("wrap",), 80, 70),
    ],
)
def test_the_time_out_of_a_group_is_its_own_or_that_of_the_settings(
    interpreter: Interpreter,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    ours: int,
    others: int,
) -> None:
    monkeypatch.setenv("SIDELANE_TIMEOUT_S", "80")
    _, said, errors = run(interpreter, tmp_path, TIMED_OUT, 2, *options)
    assert said == [f"{float(ours)} {float(others)}\n"] * 2, errors


LATE = """
call = options[0]

class Seen(logging.Handler):
    def emit(self, record):
        if not (folder / "comes").exists():  # what follows may last, too, on a busy machine
            print(record.levelname, record.getMessage())
        (folder / "seen").touch()

begin()
make = CALLS.get(call)
if call == "again" or call == "another":
    tensor = torch.ones(4)
    for _ in range(5):
        dist.all_reduce(tensor)
    if call == "another":
        tensor = torch.ones(5)
    make = lambda: dist.all_reduce(tensor)
(folder / f"{rank} is ready").touch()
for other in range(size):
    until(f"{other} is ready")
if rank == 0:
    logging.getLogger("sidelane").addHandler(Seen(logging.WARNING))
else:
    until("seen")
    time.sleep(0.7)  # time for a second line, which must not come
    (folder / "comes").touch()
make()
if call != "wrap":
    dist.barrier()
os._exit(0)
"""


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ("fsdp", "fsdp.enable (<program>:"),
        ("all_reduce", "all_reduce (<program>:"),
        ("again", "all_reduce(2 ranks, 16 bytes"),
        long("communicator", "Communicator (<program>:"),
        long("new_group", "new_group (<program>:"),
        long("wrap", "wrap (<program>:"),
        long("another", "all_reduce (<program>:"),
        long("async", "all_reduce"),
    ],
)
def test_a_wait_that_lasts_is_one_line_of_the_log(
    interpreter: Interpreter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, words: str
) -> None:
    monkeypatch.setenv("SIDELANE_WARN_S", "0.3")
    monkeypatch.setenv("SIDELANE_TIMEOUT_S", "1000")
    codes, (said, other), errors = run(interpreter, tmp_path, LATE, 2, call)
    assert codes == ["0", "0"] and not other, f"{said}{errors}"
    (line,) = said.splitlines()
    assert line.startswith(f"WARNING {words}") or call == "async", line
    assert re.search("rank 0 has waited [0-9] s for rank 1 ", line) and "the time-out is 1000 s" in line


HANDED = """
import traceback
begin()
if "later" in options:
    dist.all_reduce(torch.ones(4, dtype=torch.int32))
try:
    # Rank 0 leaves its call to Gloo.
    work = dist.all_reduce(torch.ones(4, dtype=torch.float32 if rank else torch.float64), async_op="async" in options)
    "async" in options and work.wait()
except Exception as error:
    print("".join(traceback.format_exception_only(error)), flush=True)
(folder / f"{rank} has ended").touch()
until(f"{1 - rank} has ended")
os._exit(0)
"""


@pytest.mark.parametrize("options", [("first",), ("later",), ("later", "async"), long(("first", "async"))])
@pytest.mark.parametrize("debug", [False, True])
def test_a_call_that_one_rank_hands_over_is_named_to_the_others(
    interpreter: Interpreter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], debug: bool
) -> None:
    """With debug all ranks learn of it before anything moves, otherwise those that wait, in the log and at the end."""
    for name, value in (("WARN_S", "0.3"), ("TIMEOUT_S", "100" if debug else "3"), ("DEBUG", str(int(debug)))):
        monkeypatch.setenv(f"SIDELANE_{name}", value)
    _, (first, second), errors = run(interpreter, tmp_path, HANDED, 2, *options)
    made = "all_reduce of float64 on cpu is made by gloo: sum of float64"
    hint = f"it may be in a call that it handed over: {made}"
    differ = f"MismatchError: .*rank 0: {made}, bytes 32, op sum; rank 1"
    waits = f"PeerTimeoutError: .*{hint}", f"\n{made}\nSee docs/guide/errors.md", f"rank 1 has waited .*{hint}"
    for text, found in zip((differ, differ) if debug else waits, (second, first, errors[1]), strict=False):
        assert re.search(text, found), f"{found}{errors}"


UNHEARD = """
begin()
if rank:
    until("err-0-has-it")
else:
    import threading
    def look():
        while "has waited" not in (folder / "err-0").read_text():
            time.sleep(0.01)
        (folder / "err-0-has-it").touch()
    threading.Thread(target=look, daemon=True).start()
dist.all_reduce(torch.ones(4))
os._exit(0)
"""


def test_a_program_without_logging_sees_the_line(
    interpreter: Interpreter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SIDELANE_WARN_S", "0.3")
    codes, _, errors = run(interpreter, tmp_path, UNHEARD, 2)
    assert codes == ["0", "0"] and errors[0].count("rank 0 has waited 0 s for rank 1 to come") == 1, errors


WRONG = """
name, value, wrong, kind = options
if wrong in ("all", str(rank)):
    os.environ[name] = value
store = dist.FileStore(str(folder / "store"), size)
if kind == "tcp":  # it ends with rank 0
    if rank == 0:
        server = dist.TCPStore("127.0.0.1", 0, size, True, wait_for_workers=False)
        (folder / "port.new").write_text(str(server.port))
        (folder / "port.new").rename(folder / "port")
        store = server
    else:
        until("port")
        store = dist.TCPStore("127.0.0.1", int((folder / "port").read_text()), size, False)
        time.sleep(1)  # it comes when rank 0 has refused
try:
    dist.init_process_group("sidelane", store=store, rank=rank, world_size=size)
except (ValueError, sidelane.PeerError) as error:
    print(type(error).__name__, getattr(error, "ranks", ()), error)
    sys.exit()
print("made")
"""


@pytest.mark.parametrize(
    ("name", "value", "wrong", "kind"),
    [
        *(("SIDELANE_TIMEOUT_S", value, "1", "file") for value in ("nan", "soon")),
        ("SIDELANE_TIMEOUT_S", "nan", "0", "tcp"),
        ("SIDELANE_LOG", "loud", "1", "file"),
        *(long("SIDELANE_TIMEOUT_S", value, "1", "file") for value in ("inf", "-1", "0", "1e300")),
        long("SIDELANE_TIMEOUT_S", "nan", "all", "tcp"),
        long("SIDELANE_WARN_S", "nan", "1", "file"),
        long("SIDELANE_VIRTUAL_NODES", "0,a", "0", "file"),
    ],
)
def test_a_wrong_setting_of_one_rank_is_told_to_its_peers(
    interpreter: Interpreter, tmp_path: Path, name: str, value: str, wrong: str, kind: str
) -> None:
    _, said, errors = run(interpreter, tmp_path, WRONG, 2, name, value, wrong, kind)
    for rank, text in enumerate(said):
        if wrong in ("all", str(rank)):
            assert text.startswith(f"ValueError () {name}: "), f"{said}{errors}"
        else:
            assert text.startswith(f"PeerError ({wrong},) process group: not every rank can take part"), said
            assert f"rank {wrong}: ValueError: {name}: " in text


FAKE = """
from torch.testing._internal.distributed.fake_pg import FakeStore
from sidelane.integrations.nodes.scale_out import scale_out
kind = options[0]
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
CALLS["scale_out"] = lambda: scale_out(device="cpu").__enter__()
if kind == "init":
    dist.destroy_process_group()
    CALLS["init"] = lambda: dist.init_process_group("sidelane", store=FakeStore(), rank=0, world_size=4)
try:
    CALLS[kind]()
except sidelane.UnavailableError as error:
    print(error)
"""


@pytest.mark.parametrize("kind", ["communicator", "init", "fsdp", *map(long, ("wrap", "new_group", "scale_out"))])
def test_a_fake_group_is_refused_in_words(interpreter: Interpreter, tmp_path: Path, kind: str) -> None:
    _, (said,), errors = run(interpreter, tmp_path, FAKE, 1, kind)
    assert "the group's store keeps no values, as that of torch's fake groups" in said, f"{said}{errors}"
    assert "INTERNAL ASSERT" not in said
