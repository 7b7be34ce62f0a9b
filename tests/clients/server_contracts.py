"""Compare the names that the plug-ins for servers take from their code with one version, which is not imported.

    python tests/clients/server_contracts.py [WHEEL ...]

Without a wheel it reads the packages that are installed. ``make test-clients`` calls it; a new release that breaks a
plug-in is seen here before any rank starts.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

PLUGINS = Path(__file__).resolve().parents[2] / "src" / "sidelane" / "servers"
COMMUNICATORS = "vllm/distributed/device_communicators"

CONTRACTS: dict[str, dict[str, str]] = {
    "vllm": {
        f"{COMMUNICATORS}/base_device_communicator.py": """
            DeviceCommunicatorBase.__init__(self, cpu_group, device, device_group, unique_name)
            DeviceCommunicatorBase.all_gather(self, input_, dim)
            DeviceCommunicatorBase.all_gatherv(self, input_, dim, sizes)
            DeviceCommunicatorBase.all_reduce(self, input_)
            DeviceCommunicatorBase.broadcast(self, tensor, src)
            DeviceCommunicatorBase.destroy(self)
            DeviceCommunicatorBase.reduce_scatter(self, input_, dim)
            DeviceCommunicatorBase.reduce_scatterv(self, input_, dim, sizes)""",
        f"{COMMUNICATORS}/cuda_communicator.py": """
            CudaCommunicator.__init__(self, cpu_group, device, device_group, unique_name)
            CudaCommunicator.ca_comm""",
        f"{COMMUNICATORS}/custom_all_reduce.py": """
            CustomAllreduce.capture(self)
            CustomAllreduce.custom_all_reduce(self, input)
            CustomAllreduce.disabled
            CustomAllreduce.should_custom_ar(self, inp)""",
        "vllm/distributed/parallel_state.py": """
            GroupCoordinator.device_communicator
            GroupCoordinator.use_custom_op_call
            _groups
            all_reduce(tensor, group_name)""",
        "vllm/platforms/interface.py": """
            Platform.get_device_communicator_cls(cls)
            Platform.is_rocm(self)
            Platform.use_custom_op_collectives(cls)""",
        "vllm/compilation/passes/pass_manager.py": """
            AllReduceFusionPass
            InductorPass
            PostGradPassManager.configure(self, config)
            PostGradPassManager.passes
            RMSNormQuantFusionPass""",
        "vllm/compilation/passes/inductor_pass.py": "InductorPass.uuid(self)",
        "vllm/ir/ops/layernorm.py": """
            fused_add_rms_norm(x, x_residual, weight, epsilon, variance_size)
            rms_norm(x, weight, epsilon, variance_size)""",
        "vllm/envs.py": """
            VLLM_BATCH_INVARIANT
            VLLM_PLUGINS
            compile_factors()""",
        "vllm/plugins/__init__.py": "load_general_plugins()",
        "vllm/_custom_ops.py": """
            rms_norm(out, input, weight, epsilon)
            scaled_fp8_quant(input, scale)""",
        "vllm/utils/import_utils.py": "resolve_obj_by_qualname(qualname)",
    },
    "sglang": {
        "sglang/srt/plugins/__init__.py": """
            GENERAL_PLUGINS_GROUP
            load_plugins()""",
        "sglang/srt/plugins/hook_registry.py": """
            HookRegistry.register(cls, target, hook, hook_type)
            HookType.AROUND""",
        "sglang/srt/distributed/parallel_state.py": """
            GroupCoordinator.__init__(self, group_ranks, local_rank)
            GroupCoordinator._all_gather_into_tensor(self, output, input)
            GroupCoordinator._all_reduce_in_place(self, input_)
            GroupCoordinator._reduce_scatter_tensor(self, output, input)
            GroupCoordinator.all_reduce(self, input_)
            GroupCoordinator.ca_comm
            GroupCoordinator.destroy(self)
            GroupCoordinator.world_size
            get_attn_tp_group()
            get_moe_ep_group()
            get_moe_tp_group()
            set_custom_all_reduce(enable)""",
        "sglang/srt/distributed/device_communicators/custom_all_reduce.py": """
            CustomAllreduce.__init__(self, group, device)
            CustomAllreduce.capture(self)
            CustomAllreduce.custom_all_reduce(self, input)
            CustomAllreduce.disabled
            CustomAllreduce.should_custom_ar(self, inp)
            dispatch_custom_allreduce()""",
        "sglang/srt/distributed/device_communicators/custom_all_reduce_v2.py": """
            CustomAllReduceV2.__init__(self, group, device)
            CustomAllReduceV2.disabled""",
        "sglang/srt/distributed/device_communicators/pynccl_allocator.py": "is_symmetric_memory_enabled()",
        "sglang/srt/layers/communicator.py": "apply_flashinfer_allreduce_fusion(batch_size)",
        "sglang/srt/layers/dp_attention.py": "is_dp_attention_enabled()",
        "sglang/srt/layers/flashinfer_comm_fusion.py": """
            flashinfer_allreduce_residual_rmsnorm(input_tensor, residual, weight, eps)""",
        "sglang/srt/environ.py": """
            Envs.SGLANG_ENABLE_DETERMINISTIC_INFERENCE
            Envs.SGLANG_PLUGINS""",
        "sglang/srt/server_args.py": """
            ServerArgs._handle_deterministic_inference(self)
            ServerArgs.disable_custom_all_reduce
            get_global_server_args()""",
        "sglang/version.py": "__version__",
    },
}
"""Names that must be there, for each server and file; functions with the parameters that they must begin with."""

OVERRIDES = {
    "vllm": (
        "vllm.py",
        "DeviceCommunicator",
        {
            f"{COMMUNICATORS}/base_device_communicator.py": "DeviceCommunicatorBase",
            f"{COMMUNICATORS}/cuda_communicator.py": "CudaCommunicator",
        },
    )
}
"""Classes of a plug-in whose methods have the parameters of the server's classes, where these have the method."""


def names_of(text: str) -> dict[str, list[str] | None]:
    """Return all names that a module defines, in classes with those in front, and the parameters of functions."""
    found: dict[str, list[str] | None] = {}
    for name, node in _defined(ast.parse(text).body):
        given = node.args if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else None
        found[name] = given and [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return found


def _defined(body: list[ast.stmt], before: str = "") -> Iterator[tuple[str, ast.AST]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield before + node.name, node
            if before and node.name == "__init__":
                set_here = [one for one in ast.walk(node) if isinstance(one, ast.Attribute) and _is_self(one.value)]
                yield from ((before + one.attr, one) for one in set_here)
            if not before:  # classes that functions make
                yield from _defined(node.body)
        elif isinstance(node, ast.ClassDef):
            yield before + node.name, node
            yield from _defined(node.body, f"{before}{node.name}.")
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from ((before + one.id, one) for one in targets if isinstance(one, ast.Name))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((before + (one.asname or one.name), one) for one in node.names)
        elif isinstance(node, ast.If | ast.Try | ast.With):
            for part in ("body", "orelse", "finalbody"):
                yield from _defined(getattr(node, part, []), before)


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def broken(server: str, read: Callable[[str], str]) -> list[str]:
    """Return what a server's files lack; ``read`` returns the text of one, or raises KeyError or OSError."""
    wrong: list[str] = []
    texts: dict[str, dict[str, list[str] | None]] = {}
    plugin, ours, theirs = OVERRIDES.get(server, ("", "", {}))
    for file in (*CONTRACTS[server], *theirs):
        try:
            texts[file] = names_of(read(file))
        except (KeyError, OSError):
            wrong.append(f"{file}: there is no such file")
            texts[file] = {}
    for file, lines in CONTRACTS[server].items():
        for line in filter(None, map(str.strip, lines.split("\n"))):
            name, called, rest = line.partition("(")
            if name not in texts[file]:
                wrong.append(f"{file}: {name} is not there")
            elif called:
                wanted = [each.strip() for each in rest.removesuffix(")").split(",") if each.strip()]
                if (got := texts[file][name]) is None or got[: len(wanted)] != wanted:
                    wrong.append(f"{file}: {line} has the parameters {got}")
    mine = names_of((PLUGINS / plugin).read_text(encoding="utf-8")) if plugin else {}
    for file, base in theirs.items():
        for name, parameters in mine.items():
            known = texts[file].get(f"{base}.{name.removeprefix(ours + '.')}")
            if name.startswith(f"{ours}.") and not name.endswith("__init__") and known and parameters != known:
                wrong.append(f"{file}: {base}.{name.partition('.')[2]} has the parameters {known}, ours {parameters}")
    return wrong


def main(wheels: list[str]) -> str | None:
    """Compare, print a line for each version, and return an error text if one does not fit."""
    failed = 0
    for server in CONTRACTS:
        found = [wheel for wheel in wheels if Path(wheel).name.startswith(server)]
        sources: list[tuple[str, Callable[[str], str]]] = []
        for wheel in found:
            archive = zipfile.ZipFile(wheel)
            sources.append((Path(wheel).name, lambda file, archive=archive: archive.read(file).decode()))
        spec = None if wheels else importlib.util.find_spec(server)
        if spec is not None and spec.origin is not None:
            installed = Path(spec.origin).parents[1]
            sources.append((f"{server} that is installed", lambda file, here=installed: (here / file).read_text()))
        if not sources and not wheels:
            print(f"{server}: skipped, it is not installed", flush=True)
        for name, read in sources:
            wrong = broken(server, read)
            failed += bool(wrong)
            print(f"{name}: {'; '.join(wrong) or 'fits'}", flush=True)
    return f"{failed} versions do not fit" if failed else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
