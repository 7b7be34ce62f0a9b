"""The inventory of AMD GPUs: torch for ROCm, the kernel's topology and amdsmi are made up."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hip_world import UNITS, StandinDriver

from sidelane.c3 import partitions
from sidelane.errors import UnavailableError
from sidelane.execute import vendor
from sidelane.execute.hip import runtime
from sidelane.machine import amd, local
from sidelane_lab.studies.power import sensors

GPUS = 4


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Make torch one for ROCm with four MI300X, and return the folder of the topology, which has none yet."""
    properties = SimpleNamespace(name="AMD Instinct MI300X", total_memory=192 << 30, multi_processor_count=UNITS)
    monkeypatch.setattr(torch.version, "hip", "6.4.43484")
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: GPUS)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
    monkeypatch.setattr(amd, "TOPOLOGY", tmp_path)
    amd.engine_counts.cache_clear()
    amd.link_counts.cache_clear()
    yield tmp_path
    amd.engine_counts.cache_clear()
    amd.link_counts.cache_clear()


def list_nodes(topology: Path) -> None:
    """Two processors and four GPUs, every two of which have a link."""
    for node in range(2 + GPUS):
        folder = topology / str(node)
        (folder / "io_links").mkdir(parents=True)
        is_gpu = node >= 2
        engines = "num_sdma_engines 2\nnum_sdma_xgmi_engines 14\n" if is_gpu else ""
        (folder / "properties").write_text(
            f"cpu_cores_count {0 if is_gpu else 96}\nsimd_count {1216 * is_gpu}\n{engines}"
        )
        others = [other for other in range(2 + GPUS) if other != node] if is_gpu else []
        for number, other in enumerate(others):
            (folder / "io_links" / str(number)).mkdir()
            kind = 11 if other >= 2 else 2  # XGMI or PCIe
            (folder / "io_links" / str(number) / "properties").write_text(
                f"type {kind}\nnode_from {node}\nnode_to {other}\n"
            )


def test_the_inventory_has_units_engines_and_links(rocm: Path) -> None:
    list_nodes(rocm)
    assert local.device_type_and_count() == ("cuda", GPUS)
    assert local.device_names() == ("AMD Instinct MI300X",) * GPUS
    found = local.inspect().accelerators
    assert found is not None and found.driver == "ROCm 6.4.43484" and found.library.startswith("RCCL")
    assert [(gpu.compute_units, gpu.copy_engines, gpu.links) for gpu in found.gpus] == [(UNITS, 16, 3)] * GPUS
    assert any("never run on AMD hardware" in note for note in found.notes)


def test_without_a_topology_a_note_says_so(rocm: Path) -> None:
    found = local.inspect().accelerators
    assert found is not None and found.gpus[0].links is None and found.gpus[0].copy_engines is None
    assert any(str(rocm) in note for note in found.notes)


def test_a_torch_for_cuda_has_no_amd_gpus() -> None:
    assert torch.version.hip is None and amd.device_count() == 0 and local.driver_versions() == {}


def test_a_bug_report_names_rocm_and_cuda(rocm: Path) -> None:
    assert {"cuda": None, "rocm": "6.4.43484"}.items() <= local.reported_versions().items()


class MadeUpSmi:
    def __init__(self, **power: object) -> None:
        self.power = power

    def amdsmi_init(self) -> None: ...

    def amdsmi_shut_down(self) -> None: ...

    def amdsmi_get_processor_handles(self) -> list[int]:
        return [70, 71]

    def amdsmi_get_gpu_device_bdf(self, handle: int) -> str:
        return {70: "0000:05:00.0", 71: "0000:26:00.0"}[handle]

    def amdsmi_get_power_info(self, handle: int) -> dict[str, object]:
        assert handle == 71
        return self.power

    def amdsmi_get_energy_count(self, handle: int) -> dict[str, float]:
        return {"energy_accumulator": 2_000_000, "counter_resolution": 15.3, "timestamp": 1}


def test_power_is_read_from_amdsmi(rocm: Path) -> None:
    sensor = sensors.AmdSmiSensor(1, amdsmi=MadeUpSmi(current_socket_power=512, average_socket_power="N/A"))
    assert sensor.watts() == 512.0 and sensor.averaged
    assert sensor.energy_mj() == pytest.approx(30_600)
    sensor.close()
    assert (
        sensors.AmdSmiSensor(1, amdsmi=MadeUpSmi(current_socket_power="N/A", average_socket_power=140)).watts() == 140.0
    )
    with pytest.raises(UnavailableError, match="no socket power"):
        sensors.AmdSmiSensor(1, amdsmi=MadeUpSmi(current_socket_power="N/A"))
    with pytest.raises(UnavailableError, match="does not know GPU 2"):
        sensors.AmdSmiSensor(2, amdsmi=MadeUpSmi(current_socket_power=1))


def renumber(monkeypatch: pytest.MonkeyPatch, *addresses: tuple[int, int]) -> None:
    """Let torch tell the PCI addresses of the GPUs that ``HIP_VISIBLE_DEVICES`` leaves, in its order."""

    def properties(index: int) -> SimpleNamespace:
        bus, device = addresses[index]
        return SimpleNamespace(pci_domain_id=0, pci_bus_id=bus, pci_device_id=device)

    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(addresses))
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)


def test_a_gpu_is_found_by_its_pci_address(rocm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HIP_VISIBLE_DEVICES=1 makes the second GPU number 0 in torch, but not in amdsmi and in the topology."""
    renumber(monkeypatch, (0x26, 0))
    assert sensors.AmdSmiSensor(0, amdsmi=MadeUpSmi(current_socket_power=512)).watts() == 512.0  # of handle 71
    renumber(monkeypatch, (0x46, 0))
    with pytest.raises(UnavailableError, match="none of its 2 GPUs is at 0000:46:00"):
        sensors.AmdSmiSensor(0, amdsmi=MadeUpSmi(current_socket_power=1))


def test_nodes_of_the_topology_are_found_by_pci_address(rocm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    list_nodes(rocm)
    for node in range(2, 2 + GPUS):
        file = rocm / str(node) / "properties"
        engines = file.read_text().replace("xgmi_engines 14", f"xgmi_engines {node}")
        file.write_text(f"{engines}location_id {(0x10 + node) << 8}\ndomain 0\n")
    (rocm / "5" / "io_links" / "4" / "properties").unlink()  # the link from the last one to the third
    renumber(monkeypatch, (0x15, 0), (0x12, 0), (0x14, 0))
    assert amd.engine_counts() == {0: 2 + 5, 1: 2 + 2, 2: 2 + 4}
    assert amd.link_counts() == {0: 1, 1: 2, 2: 2}


def test_partitions_of_a_gpu_are_alike_in_order(rocm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    list_nodes(rocm)
    for node in range(2, 2 + GPUS):
        file = rocm / str(node) / "properties"
        file.write_text(f"{file.read_text()}location_id {0x2600 + node - 2}\ndomain 0\n")
    renumber(monkeypatch, (0x26, 0), (0x26, 0))
    assert len(amd.engine_counts()) == 2 and amd.link_counts() == {0: 1, 1: 1}


def test_a_machine_without_amdsmi_or_rocm_says_so(rocm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "amdsmi" in (sensors.power_problem() or "")
    with pytest.raises(UnavailableError, match="amdsmi does not know GPU 0"):
        sensors.power_sensor(0)
    monkeypatch.setattr(runtime, "LIBRARY_NAMES", ("libno-such-hip.so",))
    runtime.load_runtime.cache_clear()
    monkeypatch.setattr(torch.cuda, "device", lambda index: pytest.fail("no device is touched"))
    with pytest.raises(UnavailableError, match="there is no HIP runtime"):
        vendor.make_driver(torch.device("cuda", 0))
    runtime.load_runtime.cache_clear()


def test_partitions_are_cu_masks(rocm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitions, "make_driver", lambda device: StandinDriver())
    found, why = partitions.DevicePartitions.on(torch.device("cuda", 0))
    assert found is not None and not why and found.units == UNITS
    assert found.objection() == ""
    usual: Any = None  # it fails before
    with pytest.raises(UnavailableError, match=r"allowed=1\.\.303"):
        found.streams(304, usual, confine=True)
