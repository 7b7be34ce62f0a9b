"""SGLang's plug-in without SGLang: its hook registry and the functions that are hooked, in a few lines each.

``tests/clients/sglang_contract.py`` compares the signatures with those of SGLang's wheel.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.machinery
import logging
import os
import pkgutil
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from expected import in_rank_order, numbers, same_bytes
from on_ranks import on_ranks
from torch.nn import functional

from sidelane import config
from sidelane.config import Config
from sidelane.machine.peers import PeerMemory
from sidelane.program.collective import ReduceOp
from sidelane.servers import sglang
from sidelane.servers.group import ServerGroup

STATE = "sglang.srt.distributed.parallel_state"
CUSTOM = "sglang.srt.distributed.device_communicators.custom_all_reduce"
NORM = "sglang.srt.layers.flashinfer_comm_fusion"
WEIGHTS = "sglang.srt.managers.scheduler_components.weight_updater"
ALL = "replaced: all_reduce, reduce_scatter_tensor, all_gather_into_tensor"
KEPT = "replaced: reduce_scatter_tensor; as before: all_reduce (SGLang's kernel is faster), flashinfer_allreduce_"
DEEP_EP = "; deep_ep: Sidelane's"


class Server:
    """Parts of the made-up SGLang that the tests set and read."""

    def __init__(
        self, version: str = "0.5.15", deterministic: bool = False, symmetric: bool = False, cuda: bool = False
    ) -> None:
        self.without_nvlink = False
        self.deterministic, self.symmetric, self.flashinfer, self.dp = deterministic, symmetric, False, False
        self.calls: list[str] = []
        self.arguments: Any = SimpleNamespace()
        self.hooks: dict[str, Callable[..., Any]] = {}
        self.groups: list[Any] = []
        self.modules: dict[str, ModuleType] = {}
        server = self

        class HookRegistry:
            @staticmethod
            def register(target: str, hook: Callable[..., Any], hook_type: str) -> None:
                assert hook_type == "around" and target not in server.hooks
                server.hooks[target] = hook

        class GroupCoordinator:
            def __init__(self, group: dist.ProcessGroup) -> None:
                self.group, self.world_size = group, group.size()
                self.ca_comm: Any = None
                if server.state.enabled and group.size() > 1:
                    made = sys.modules[CUSTOM].dispatch_custom_allreduce(group=group, device=torch.device("cpu"))
                    self.ca_comm = made(group=group, device=torch.device("cpu"))

            def destroy(self) -> None:
                self.ca_comm = None

            def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
                if sys.modules["sglang.srt.utils"].is_cuda() and self.ca_comm.should_custom_ar(input_):
                    return self.ca_comm.custom_all_reduce(input_)
                self._all_reduce_in_place(input_)
                return input_

            def _all_reduce_in_place(self, input_: torch.Tensor) -> None:
                server.calls.append("all_reduce")
                dist.all_reduce(input_, group=self.group)

            def _reduce_scatter_tensor(self, output: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
                server.calls.append("reduce_scatter")
                dist.reduce_scatter_tensor(output, input, group=self.group)
                return output

            def _all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor) -> None:
                server.calls.append("all_gather")
                dist.all_gather_into_tensor(output, input, group=self.group)

            def reduce_scatter_tensor(self, output: torch.Tensor, input: torch.Tensor) -> None:
                self._reduce_scatter_tensor(output, input)

            def all_gather_into_tensor(self, output: torch.Tensor, input: torch.Tensor) -> None:
                self._all_gather_into_tensor(output, input)

        class ServerArgs:
            def __init__(self, disable_custom_all_reduce: bool = False) -> None:
                self.disable_custom_all_reduce = disable_custom_all_reduce
                self._handle_deterministic_inference()

            def _handle_deterministic_inference(self) -> None:
                self.disable_custom_all_reduce |= server.deterministic

        class SchedulerWeightUpdaterManager:
            def release_memory_occupation(self, recv_req: Any) -> str:
                return "released"

            def resume_memory_occupation(self, recv_req: Any) -> str:
                return "resumed"

        def set_custom_all_reduce(enable: bool) -> None:
            server.state.enabled = enable

        def CustomAllReduceV2(group: dist.ProcessGroup, device: Any) -> Any:
            return SimpleNamespace(
                disabled=self.without_nvlink,
                special="theirs",
                should_custom_ar=lambda inp: inp.nbytes <= 100 and inp.dtype is not torch.float64,
                custom_all_reduce=lambda input: (
                    self.calls.append("theirs"),
                    dist.all_reduce(input, group=group),
                    input,
                )[2],
            )

        def dispatch_custom_allreduce(group: Any, device: Any) -> Any:
            return CustomAllReduceV2

        def flashinfer(
            input_tensor: Any, residual: Any, weight: Any, eps: float = 1e-6, max_token_num: int = 2048, **rest: Any
        ) -> Any:
            server.calls.append("norm")
            return (input_tensor, residual) if server.flashinfer else (None, None)

        variable = SimpleNamespace(get=lambda: self.deterministic)
        self._module("sglang.version", __version__=version)
        self._module(
            "sglang.srt.plugins.hook_registry", HookRegistry=HookRegistry, HookType=SimpleNamespace(AROUND="around")
        )
        self._module("sglang.srt.utils", is_cpu=lambda: not cuda, is_cuda=lambda: cuda)
        self._module("sglang.srt.environ", envs=SimpleNamespace(SGLANG_ENABLE_DETERMINISTIC_INFERENCE=variable))
        self._module(CUSTOM, dispatch_custom_allreduce=dispatch_custom_allreduce)
        allocator = f"{CUSTOM.rpartition('.')[0]}.pynccl_allocator"
        self._module(allocator, is_symmetric_memory_enabled=lambda: self.symmetric)
        self._module("sglang.srt.layers.dp_attention", is_dp_attention_enabled=lambda: self.dp)
        self._module("sglang.srt.server_args", get_global_server_args=lambda: self.arguments, ServerArgs=ServerArgs)
        fuses = {"apply_flashinfer_allreduce_fusion": lambda batch_size: self.flashinfer and 0 < batch_size <= 2048}
        self._module("sglang.srt.layers.communicator", **fuses)
        self._module(NORM, flashinfer_allreduce_residual_rmsnorm=flashinfer)
        self._module(WEIGHTS, SchedulerWeightUpdaterManager=SchedulerWeightUpdaterManager)
        groups = {f"get_{name}_group": lambda: self.groups[0] for name in ("attn_tp", "moe_ep", "moe_tp")}
        self.state: Any = self._module(
            STATE,
            GroupCoordinator=GroupCoordinator,
            set_custom_all_reduce=set_custom_all_reduce,
            enabled=True,
            **groups,
        )
        sys.modules["sglang.srt.distributed"].parallel_state = self.state  # type: ignore[attr-defined]

    def _module(self, name: str, **content: Any) -> ModuleType:
        for end in [*(i for i, letter in enumerate(name) if letter == "."), len(name)]:
            part = name[:end]
            if part not in self.modules:
                module = self.modules[part] = sys.modules[part] = ModuleType(part)
                module.__spec__ = importlib.machinery.ModuleSpec(part, None, is_package=True)
                module.__path__ = []
        vars(self.modules[name]).update(content)
        return self.modules[name]

    def load_plugins(self) -> None:
        """Call the entry point, and stand its hooks around what they name."""
        sglang.register()
        for target, hook in self.hooks.items():
            place, _, name = target.rpartition(".")
            owner = pkgutil.resolve_name(place)
            setattr(owner, name, _around(getattr(owner, name), hook))

    def start(self, disable_custom_all_reduce: bool = False) -> None:
        """Read the arguments of a command line, and switch custom all-reduces as they say."""
        self.arguments = sys.modules["sglang.srt.server_args"].ServerArgs(disable_custom_all_reduce)
        self.state.set_custom_all_reduce(not self.arguments.disable_custom_all_reduce)

    def group(self, group: dist.ProcessGroup) -> Any:
        """Return a group, whose object Sidelane or SGLang has made."""
        self.groups.append(self.state.GroupCoordinator(group))
        return self.groups[-1]


def _around(original: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def wrapper(*args: Any, **options: Any) -> Any:
        return hook(original, *args, **options)

    return wrapper


@contextlib.contextmanager
def serving(*, names: str | None = "sidelane", **options: Any) -> Iterator[tuple[Server, list[str]]]:
    """Start the made-up SGLang with SGLANG_PLUGINS; yield it and the lines of the log of its plug-in."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    given = {name: value for name, value in os.environ.items() if name not in ("SGLANG_PLUGINS", "SIDELANE_SERVERS")}
    with (
        mock.patch.dict(os.environ, given, clear=True),
        mock.patch.dict(sys.modules),
        config.override(Config(timeout_s=60)),
    ):
        if names is not None:
            os.environ["SGLANG_PLUGINS"] = names
        server = Server(**options)
        level, calls = sglang.LOG.level, logging.getLogger("sidelane").level
        sglang.LOG.addHandler(handler)
        sglang.LOG.setLevel(logging.INFO)
        try:
            server.load_plugins()
            yield server, lines
        finally:
            for each in sglang.made:
                each.close()
            sglang.made.clear()
            sglang.announce.cache_clear()
            sglang.LOG.removeHandler(handler)
            sglang.LOG.setLevel(level)
            logging.getLogger("sidelane").setLevel(calls)


def everyones(group: dist.ProcessGroup, *shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Numbers of every rank, which all ranks know."""
    count = torch.Size(shape).numel()
    return [numbers(count, rank, count, dtype).view(shape) for rank in range(group.size())]


@on_ranks(2, 3)
@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_calls(group: dist.ProcessGroup, dtype: torch.dtype, cuda: bool) -> None:
    """Sums, reduce-scatters and gathers are Sidelane's; what it does not take is the server's, in the same order.

    With ``cuda`` the server is one on GPUs with NVLink, whose kernel keeps the sums that it takes. Gathers are NCCL's,
    but for DP attention.
    """
    n, rank = group.size(), group.rank()
    with serving(cuda=cuda) as (server, lines):
        tp = server.group(group)
        assert isinstance(tp.ca_comm, ServerGroup) is not cuda
        for rows, width in ((1, 7), (5, 33), (1, 7)):
            parts = [
                each.round().clamp(-9, 9) if cuda else each for each in everyones(group, n * rows, width, dtype=dtype)
            ]
            total, mine = in_rank_order(parts, ReduceOp.SUM), parts[rank].clone()
            assert tp.all_reduce(mine) is mine and same_bytes(mine, total)
            shard, whole = torch.empty(rows, width, dtype=dtype), torch.empty(n * n * rows, width, dtype=dtype)
            tp.reduce_scatter_tensor(shard, parts[rank].clone())
            assert same_bytes(shard, total[rank * rows : (rank + 1) * rows])
            tp.all_gather_into_tensor(whole, parts[rank].clone())
            assert same_bytes(whole, torch.cat(parts))
        assert sorted(server.calls) == ["all_gather"] * 3 * cuda + ["theirs"] * 2 * cuda, "two of three are small"
        assert sglang.made[0].counts == {
            "reduce_scatter": 3,
            **({"all_reduce": 1} if cuda else {"all_reduce": 3, "all_gather": 3}),
        }
        double = torch.ones(4, dtype=torch.float64)
        assert tp.all_reduce(double).tolist() == [float(n)] * 4 and server.calls[5 * cuda :] == ["all_reduce"]
        server.dp = True
        tp.all_gather_into_tensor(whole := torch.empty(n, 3, dtype=torch.uint8), torch.ones(1, 3, dtype=torch.uint8))
        assert whole.sum() == 3 * n and server.calls[5 * cuda :] == ["all_reduce"], "gathers take any dtype"
        assert len(lines) == 1 and lines[0].startswith(
            f"INFO Sidelane {sglang.line.__globals__['VERSION']} in sglang 0.5.15: {KEPT if cuda else ALL}"
        )
        server.without_nvlink = True
        assert server.group(group).ca_comm is sglang.made[-1] and len(lines) == 1 + cuda, "one line for each kind"
        tp.destroy()
        assert len(sglang.made) == 1


@on_ranks(2)
def test_bits_of_a_row_in_batches_of_1_to_64(group: dist.ProcessGroup) -> None:
    """In deterministic mode, for which SGLang switches its own off, sums stay Sidelane's and norms are SGLang's.

    The server is one on GPUs with NVLink: its kernel does not take Sidelane's place there.
    """
    everyone = everyones(group, 64, 48, dtype=torch.bfloat16)
    mine, total = everyone[group.rank()], in_rank_order(everyone, ReduceOp.SUM)
    with serving(deterministic=True, cuda=True) as (server, lines):
        server.start()
        tp = server.group(group)
        for batch in range(1, 65):
            assert same_bytes(tp.all_reduce(mine[:batch].clone()), total[:batch]), batch
        assert server.calls == [] and "deterministic mode" in lines[0] and lines[0].startswith("INFO")
        assert not sys.modules["sglang.srt.layers.communicator"].apply_flashinfer_allreduce_fusion(1)


@on_ranks(2, interpreted=True)
def test_norms(group: dist.ProcessGroup) -> None:
    """Norms are fused where SGLang asks, also what the kernel does not take; FlashInfer's are those that it took."""
    hidden = 264
    with serving() as (server, lines):
        server.group(group)
        fuses: Any = sys.modules["sglang.srt.layers.communicator"]
        norm = sys.modules[NORM].flashinfer_allreduce_residual_rmsnorm
        assert [fuses.apply_flashinfer_allreduce_fusion(tokens) for tokens in (0, 1, 512, 513)] == [
            False,
            True,
            True,
            False,
        ]
        assert lines[0].endswith(f"{ALL}, flashinfer_allreduce_residual_rmsnorm{DEEP_EP}")
        for dtype, gain in (
            (torch.bfloat16, torch.bfloat16),
            (torch.float32, torch.float32),
            (torch.float64, torch.float64),
        ):
            everyone = [each.to(dtype) for each in everyones(group, 3, hidden)]
            residual, weight = (
                numbers(5, 0, 3 * hidden, torch.float32).view(3, hidden).to(dtype),
                torch.ones(hidden, dtype=gain),
            )
            kept = residual.clone()
            for is_attention in (True, False):
                y, found = norm(
                    input_tensor=everyone[group.rank()].clone(),
                    residual=residual,
                    weight=weight,
                    eps=1e-5,
                    max_token_num=2048,
                    use_attn_tp_group=is_attention,
                )
                total = torch.stack([each.double() for each in everyone]).sum(0) + kept.double()
                rough = 2e-2 if dtype is torch.bfloat16 else 1e-5
                torch.testing.assert_close(found.double(), total, rtol=rough, atol=rough)
                normalised = functional.rms_norm(total, (hidden,), eps=1e-5)
                torch.testing.assert_close(y.double(), normalised, rtol=rough, atol=rough)
            assert torch.equal(residual, kept)
        assert server.calls == ["all_reduce"] * 2, "those of float64"
        server.flashinfer = True
        assert fuses.apply_flashinfer_allreduce_fusion(2048)
        wide = torch.ones(513, 4)
        found = norm(input_tensor=wide, residual=wide, weight=torch.ones(4))
        assert found[0] is wide and server.calls[-1] == "norm"
        server.flashinfer, server.dp = False, True
        assert not fuses.apply_flashinfer_allreduce_fusion(1)
    with serving(cuda=True) as (server, lines):
        server.group(group)
        assert not sys.modules["sglang.srt.layers.communicator"].apply_flashinfer_allreduce_fusion(1)
        found = sys.modules[NORM].flashinfer_allreduce_residual_rmsnorm(
            input_tensor=wide, residual=wide, weight=torch.ones(4)
        )
        assert found == (None, None) and server.calls == ["norm"], "SGLang adds and normalises itself"


@on_ranks(2, 3, interpreted=True)
def test_norms_of_many_bytes_through_host_memory_are_the_servers(group: dist.ProcessGroup) -> None:
    """64 KiB of two ranks are fused. SGLang asks with tokens alone, for which rows count 16 KiB; these have 8."""
    with (
        mock.patch("sidelane.collectives.backend_cpu.CpuBackend.peers", PeerMemory(True, "a test")),
        serving() as (server, lines),
    ):
        server.group(group)
        fuses = sys.modules["sglang.srt.layers.communicator"].apply_flashinfer_allreduce_fusion
        assert ([tokens for tokens in range(1, 513) if fuses(tokens)], "as before" in lines[0]) == (
            ([1, 2, 3, 4], False) if group.size() == 2 else ([], True)
        ), "three ranks were not timed"
        for x in (torch.ones(tokens, 2048) for tokens in (4, 8, 9)):
            y, total = sys.modules[NORM].flashinfer_allreduce_residual_rmsnorm(
                input_tensor=x, residual=x, weight=torch.ones(2048)
            )
            assert (
                (total is not None and total.eq(3).all() and torch.allclose(y, x, atol=1e-5))
                == sglang.made[0].normalises(x, torch.ones(2048))
                == sglang.made[0].fuses(x.nbytes)
                == (group.size() == 2 and len(x) < 9)
            )
        assert server.calls == ["norm"] * (1 if group.size() == 2 else 3), "no sum and no norm in two calls"


@on_ranks(2)
def test_what_the_server_was_asked_for_comes_first(group: dist.ProcessGroup) -> None:
    """NCCL's symmetric memory, or no custom all-reduce at all; and a communicator that cannot be made."""
    with serving(symmetric=True) as (server, lines):
        tp = server.group(group)
        tp.reduce_scatter_tensor(torch.empty(2), torch.ones(4))
        tp.all_gather_into_tensor(torch.empty(4), torch.ones(2))
        assert server.calls == ["reduce_scatter", "all_gather"] and tp.ca_comm.special == "theirs"
        assert lines[0].endswith(f"replaced: nothing; as before: everything (--enable-symm-mem){DEEP_EP}")
    for deterministic in (False, True):
        with serving(deterministic=deterministic) as (server, lines):
            server.start(disable_custom_all_reduce=True)
            tp = server.group(group)
            assert tp.ca_comm is None and lines[0].endswith(
                f"replaced: nothing; as before: everything (--disable-custom-all-reduce){DEEP_EP}"
            )
            assert lines[0].startswith("WARNING")
            assert tp.all_reduce(torch.ones(3)).tolist() == [2.0] * 3 and server.calls == ["all_reduce"]
    for deterministic in (False, True):
        with (
            serving(deterministic=deterministic) as (server, lines),
            mock.patch.object(ServerGroup, "_join", lambda self: setattr(self, "reason", "no memory to share")),
        ):
            tp = server.group(group)
            assert "everything (no memory to share)" in lines[0] and lines[0].startswith("WARNING")
            assert tp.ca_comm.disabled if deterministic else tp.ca_comm.special == "theirs"
            assert tp.all_reduce(torch.ones(3)).tolist() == [2.0] * 3 and server.calls == ["all_reduce"]


@on_ranks(2)
def test_release_and_resume(group: dist.ProcessGroup) -> None:
    """The memory goes and comes back; in between, SGLang makes the calls, on all ranks."""
    with serving() as (server, lines):
        tp, updater = server.group(group), sys.modules[WEIGHTS].SchedulerWeightUpdaterManager()
        for _ in range(2):
            assert tp.all_reduce(torch.ones(300)).tolist() == [2.0] * 300 and server.calls == []
            assert updater.release_memory_occupation(None) == "released" == updater.release_memory_occupation(None)
            assert tp.ca_comm.memory_bytes() == 0
            assert tp.all_reduce(torch.ones(3)).tolist() == [2.0] * 3 and server.calls.pop() == "all_reduce"
            assert updater.resume_memory_occupation(None) == "resumed"
        assert len(lines) == 1
        gone = server.group(group)
        served = gone.ca_comm
        gone.destroy()
        assert gone.ca_comm is None and served.comm is None and sglang.made == [tp.ca_comm]
        with (
            mock.patch.object(ServerGroup, "suspend", return_value="graphs"),
            mock.patch.object(ServerGroup, "resume", return_value="none"),
        ):
            updater.release_memory_occupation(None)
            updater.resume_memory_occupation(None)
        assert lines[1:] == [
            "WARNING Sidelane: suspend of a group: graphs",
            "WARNING Sidelane: resume of a group: none",
        ]


def test_who_asks_and_what_fits() -> None:
    for names, asked in ((None, False), ("other", False), ("other, sidelane", True)):
        with serving(names=names) as (server, lines):
            assert bool(server.hooks) is asked and lines == []
    for version, fits in (
        ("0.5.12", True),
        ("0.5.15.post1", True),
        ("0.5.11", False),
        ("0.5.16", False),
        ("0.6.0", False),
    ):
        with serving(version=version) as (server, lines):
            assert bool(server.hooks) is fits is ("deep_ep" in sys.modules)
            text = f"everything (sglang {version} does not fit (allowed=0.5.12..0.5.15))"
            refused = f"in sglang {version}: replaced: nothing; as before: {text}"
            assert fits or (len(lines) == 1 and lines[0].startswith("WARNING") and lines[0].endswith(refused))
    with serving() as (server, lines):
        sys.modules["sglang.srt.utils"].is_cpu = lambda: False  # type: ignore[attr-defined]
        server.hooks.clear()
        sglang.register()
        assert (
            not server.hooks
            and "everything (its platform does not fit (value=another one, allowed=cuda, cpu))" in lines[0]
        )
