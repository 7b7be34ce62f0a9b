"""Run a study with a trace of NCCL's steps on the first rank, for ``results/scripts/plans.py``.

    torchrun --nproc-per-node 2 results/scripts/traced.py FOLDER clients --programs fsdp --json FOLDER/T-clients.json
    torchrun --nproc-per-node 2 results/scripts/traced.py FOLDER e2e --workloads experts --json FOLDER/T-e2e.json

A trace has two steps; of decoding an eager one, which has the bytes of collectives, and one in a graph.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from sidelane import cli
from sidelane_lab.model.transformer import preset
from sidelane_lab.studies.clients import study as clients
from sidelane_lab.studies.clients.cases import MODELS, TENSOR, ClientModel
from sidelane_lab.studies.e2e import study as e2e
from sidelane_lab.studies.steps import EAGER

WARMUP = 3
"""Steps of the library before it is recorded."""


class Qwen3(ClientModel):
    """Hugging Face's Qwen3."""

    def make(self, device: torch.device, dtype: torch.dtype) -> Any:
        """Make it with the same random weights on all ranks."""
        from transformers import Qwen3Config, Qwen3ForCausalLM

        config = Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.feed,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head,
            tie_word_embeddings=self.tied,
            attn_implementation="sdpa",
            use_cache=False,
        )
        torch.manual_seed(0)
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with device:
                return Qwen3ForCausalLM(config)
        finally:
            torch.set_default_dtype(before)


MODELS["qwen3-1.7b"] = Qwen3(**{**dataclasses.asdict(preset("qwen3-1.7b")), "batch": 3})


def record(steps: Sequence[Callable[[], object]], path: Path) -> int:
    """Run steps in a row on all ranks, the first one twice; record them on the first rank. Returns how many."""
    on_gpu = torch.cuda.is_available()
    each = [steps[0], *steps]  # the first one warms the profiler up
    if dist.get_rank():
        for step in each:
            step()
    else:
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        with profile(
            activities=kinds,
            schedule=schedule(wait=0, warmup=1, active=len(steps)),
            on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
        ) as recorded:
            for step in each:
                step()
                if on_gpu:
                    torch.cuda.synchronize()
                recorded.step()
    dist.barrier()
    return len(each)


def main(folder: Path) -> None:
    """Run the command whose words follow, with a recorder in the two studies."""

    class Traced(clients.ClientTrial):
        def _time(self, built: Any, turns: int) -> None:
            library = built.get("nccl") or built.get("gloo")
            if library is not None:
                program, steps = self._case.program, list(library.steps.values())
                path = folder / f"trace-{program}-{self._case.model.name}.json.gz"
                count = record(steps if program == TENSOR else steps * 2, path)
                others = [one for one in built.values() if one is not library and program != TENSOR]
                for one in others:  # losses are compared after as many steps
                    for _ in range(count):
                        one.steps[EAGER]()
            super()._time(built, turns)

    compared = e2e._compared

    def traced(prepared: Any, meter: Any, options: Any, row: Any) -> Any:
        step = prepared.steps.get("nccl, our sums") or next(iter(prepared.steps.values()))
        for _ in range(WARMUP):
            step()
        names = f"{row.keywords['workload']}-{row.keywords['size']}".replace(" ", "-").replace(",", "")
        record([step, step], folder / f"trace-{names}.json.gz")
        return compared(prepared, meter, options, row)

    clients.ClientTrial = Traced  # type: ignore[misc]
    e2e._compared = traced
    cli.main()


if __name__ == "__main__":
    place = Path(sys.argv.pop(1))
    main(place)
