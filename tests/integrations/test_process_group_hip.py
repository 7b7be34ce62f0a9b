"""The process group and FSDP2 on AMD GPUs, that is on the stand-in for the HIP runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import group_world
import hip_group
import pytest
import torch
from ranks import crew

from sidelane.collectives import backend_cuda, backend_hip
from sidelane.session import making


def test_calls_and_training_run_on_the_stand_in(tmp_path: Path) -> None:
    with crew(2) as ranks:
        ranks.run(group_world.leave)
        for made in ranks.run(hip_group.collectives, None, str(tmp_path / "calls")):
            assert {where for _, where in made} == {"sidelane"}
        for where in ranks.run(hip_group.fsdp_steps, None, str(tmp_path / "fsdp")):
            assert where == ["", "sidelane", "sidelane"]


@pytest.mark.parametrize(("hip", "expected"), [("6.4.43484", "HipBackend"), (None, "CudaBackend")])
def test_a_communicator_on_a_gpu_is_of_the_vendor_that_torch_names(
    monkeypatch: pytest.MonkeyPatch, hip: str | None, expected: str
) -> None:
    """The group and FSDP2 make their communicators by this function, with the device of their tensors."""
    made: list[tuple[str, torch.device]] = []

    def noted(name: str) -> Any:
        return lambda exchange, device, *_, **options: made.append((name, device))

    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(backend_hip, "HipBackend", noted("HipBackend"))
    monkeypatch.setattr(backend_cuda, "CudaBackend", noted("CudaBackend"))
    unused: Any = None
    device = torch.device("cuda", 1)
    making.make_backend(unused, device, unused, 1.0)
    assert made == [(expected, device)]
