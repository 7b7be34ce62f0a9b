"""Trains under torchrun, from the last step that all ranks have saved; its first life ends in the middle.

Arguments: what trains (``group``, ``fsdp``), and a folder. It prints what became of whom into files there.
"""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import sidelane
from sidelane import Config, SidelaneError, fsdp

STEPS, DIES_AT = 8, 4
CONFIG = Config(timeout_s=60)


@contextlib.contextmanager
def trained(what: str) -> Iterator[nn.Module]:
    """The model, with Sidelane where it is not the process group."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 33), nn.GELU(), nn.Linear(33, 7))
    if what == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (*model, model):
            fully_shard(layer, mesh=mesh)
        with fsdp.enable(model, config=CONFIG):
            yield model
    else:
        yield nn.parallel.DistributedDataParallel(model)


def local(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What this rank has of it."""
    return {name: value.to_local() if isinstance(value, DTensor) else value for name, value in state.items()}


def train(model: nn.Module, first: int, folder: Path | None) -> list[float]:
    """The rest of the steps; their losses on this rank, and the sum of what it has of the parameters."""
    rank, optimizer, told = dist.get_rank(), torch.optim.SGD(model.parameters(), lr=0.05), []
    for step in range(first, STEPS):
        torch.manual_seed(100 * step + rank)
        x = torch.randn(5, 7)
        loss = (model(x) - x).square().mean()
        if folder is not None and first == 0 and step == DIES_AT and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        told.append(loss.item())
        if folder is not None:
            torch.save(local(model.state_dict()), folder / f"{step}-of-{rank}.new")
            (folder / f"{step}-of-{rank}.new").rename(folder / f"{step}-of-{rank}.pt")
    return [*told, *(value.double().sum().item() for value in local(model.state_dict()).values())]


def main() -> None:
    what, folder = sys.argv[1], Path(sys.argv[2])
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun sends it to the others, which shall notice by themselves
    sidelane.register()
    dist.init_process_group("sidelane" if what == "group" else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    saved = [all((folder / f"{step}-of-{peer}.pt").exists() for peer in range(ranks)) for step in range(STEPS)]
    first = sum(saved)
    life = os.environ["TORCHELASTIC_RESTART_COUNT"]
    try:
        with trained(what) as model:
            if first:
                state = torch.load(folder / f"{first - 1}-of-{rank}.pt")
                with torch.no_grad():
                    for name, value in local(model.state_dict()).items():
                        value.copy_(state[name])
            got = train(model, first, folder)
        with trained(what) as model:  # the whole course, without an end in the middle
            wanted = train(model, 0, None)
    except (RuntimeError, SidelaneError) as error:
        (folder / f"life {life} of {rank}").write_text(f"{type(error).__name__}: {error}")
        raise
    assert got == wanted[first:], (got, wanted)
    used = {row.where for row in sidelane.report().rows}
    (folder / f"life {life} of {rank}").write_text(f"from step {first}, {'sidelane' in used}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
