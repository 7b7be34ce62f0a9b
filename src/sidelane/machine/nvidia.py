"""NVIDIA GPUs: their properties from torch, the driver and NVML."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from sidelane.errors import how_to_get
from sidelane.machine.inventory import Accelerators, InstalledGpu

DEVICE_TYPE = "cuda"
# NCCL moves bytes with copy engines (its ZERO-CTA policy) from this version on.
COPY_ENGINE_NCCL = (2, 28)


def device_count() -> int:
    """Return the number of GPUs that torch sees; 0 with a torch for ROCm, which also calls its devices cuda."""
    return torch.cuda.device_count() if torch.version.cuda and torch.cuda.is_available() else 0


def inspect() -> Accelerators:
    """Return the properties of the GPUs of this machine (there is at least one)."""
    count = device_count()
    notes: list[str] = []
    with _nvml(notes) as nvml:
        gpus = tuple(_gpu(index, nvml, notes) for index in range(count))
        driver = _driver_version(nvml)
    peer_access = tuple(
        tuple(i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)) for i in range(count)
    )
    return Accelerators(
        device_type=DEVICE_TYPE,
        gpus=gpus,
        peer_access=peer_access,
        driver=f"{driver}, CUDA {torch.version.cuda}",
        library=f"NCCL {_nccl_version_text()}",
        library_uses_copy_engines=nccl_uses_copy_engines(),
        symmetric_memory=importlib.util.find_spec("torch.distributed._symmetric_memory") is not None
        and all(all(row) for row in peer_access),
        notes=tuple(dict.fromkeys(notes)),
    )


def nccl_uses_copy_engines() -> bool:
    """Return True if NCCL can use copy engines: it is new enough, and torch passes the policy on."""
    process_group = getattr(dist, "ProcessGroupNCCL", None)
    return hasattr(process_group, "NCCL_CTA_POLICY_ZERO") and nccl_version() >= COPY_ENGINE_NCCL


def peers_by_driver(uuid: str) -> dict[str, bool]:
    """Return for the other GPUs of this machine, by UUID, whether a GPU reads their memory, also if torch sees none."""
    found: dict[str, bool] = {}
    with _nvml([]) as nvml:
        own = nvml and _query(nvml.nvmlDeviceGetHandleByUUID, f"GPU-{uuid}")
        for index in range((own and _query(nvml.nvmlDeviceGetCount)) or 0):
            handle = _query(nvml.nvmlDeviceGetHandleByIndex, index)
            name = handle and _query(nvml.nvmlDeviceGetUUID, handle)
            status = name and _query(nvml.nvmlDeviceGetP2PStatus, own, handle, nvml.NVML_P2P_CAPS_INDEX_READ)
            if name and status is not None:
                shown = name.decode() if isinstance(name, bytes) else name
                found[shown.removeprefix("GPU-")] = status == nvml.NVML_P2P_STATUS_OK
    found.pop(uuid, None)
    return found


def reported_versions() -> dict[str, str | None]:
    """Return the driver's version and what torch was built with, also where no GPU can be used; None if missing."""
    with _nvml([]) as nvml:
        driver = _driver_version(nvml) if nvml else None
    nccl = _nccl_version_text() if dist.is_nccl_available() else None
    return {"driver": driver, "cuda": torch.version.cuda, "nccl": nccl}


@contextlib.contextmanager
def _nvml(notes: list[str]) -> Iterator[Any]:
    """Yield NVML, or None with a note about the reason."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
    except Exception as problem:  # a missing package, a missing library, a refused call: all mean the same here
        notes.append(f"links and power are not known without NVML ({problem}): {how_to_get('pynvml')}")
        yield None
        return
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _gpu(index: int, nvml: Any, notes: list[str]) -> InstalledGpu:
    properties = torch.cuda.get_device_properties(index)
    links: int | None = None
    through_switch: bool | None = None
    power_cap_w: float | None = None
    if nvml:
        handle = _handle(nvml, index)
        states = [_query(nvml.nvmlDeviceGetNvLinkState, handle, link) for link in range(nvml.NVML_NVLINK_MAX_LINKS)]
        active = [link for link, state in enumerate(states) if state == nvml.NVML_FEATURE_ENABLED]
        links = len(active)
        ends = [_query(nvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link) for link in active]
        through_switch = nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH in ends if links else None
        cap_mw = _query(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        power_cap_w = cap_mw / 1000 if cap_mw is not None else None
    return InstalledGpu(
        index=index,
        name=properties.name,
        memory_bytes=properties.total_memory,
        compute_units=properties.multi_processor_count,
        copy_engines=_copy_engines(index, notes),
        links=links,
        through_switch=through_switch,
        power_cap_w=power_cap_w,
    )


def _copy_engines(index: int, notes: list[str]) -> int | None:
    try:
        driver = importlib.import_module("cuda.bindings.driver")
    except ImportError as problem:
        notes.append(f"copy engines are not known without cuda-bindings ({problem}): {how_to_get('cuda.bindings')}")
        return None
    driver.cuInit(0)
    status, device = driver.cuDeviceGet(index)
    if status == driver.CUresult.CUDA_SUCCESS:
        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT
        status, engines = driver.cuDeviceGetAttribute(attribute, device)
        if status == driver.CUresult.CUDA_SUCCESS:
            return int(engines)
    notes.append(f"the driver does not tell the number of copy engines ({status.name})")
    return None


def _handle(nvml: Any, index: int) -> Any:
    # NVML counts all GPUs of the machine, torch those that it is allowed to see: only the UUID is the same for both.
    return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(index).uuid}")


def _query(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call NVML; return None if the device does not support the query (every NVML error is a plain Exception)."""
    try:
        return function(*arguments)
    except Exception:
        return None


def _driver_version(nvml: Any) -> str:
    version = _query(nvml.nvmlSystemGetDriverVersion) if nvml else None
    return version.decode() if isinstance(version, bytes) else version or "unknown"


@functools.cache
def nccl_version() -> tuple[int, ...]:
    """Return the version of the NCCL that this process runs, ``(0,)`` for none.

    PyTorch says with which one it was compiled.
    """
    if not dist.is_nccl_available():
        return (0,)
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))  # that which is loaded, whatever its path
    except (OSError, AttributeError):
        return tuple(torch.cuda.nccl.version())
    return number.value // 10000, number.value // 100 % 100, number.value % 100


def _nccl_version_text() -> str:
    return ".".join(map(str, nccl_version()))
