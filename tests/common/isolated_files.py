"""Files of isolated times that are made up: one GEMM and one size of collectives."""

from __future__ import annotations

import json
from typing import Any

SIZE = 1 << 28


def row(what: str, time_us: float | None, **others: Any) -> dict[str, Any]:
    plain = {
        "what": what, "gemm": "", "m": 0, "n": 0, "k": 0, "dtype": "bfloat16", "collective": "", "bytes": 0,
        "implementation": "", "variant": "", "means": "", "units": 0, "device_units": 132, "time_us": time_us,
        "alone_us": None, "gbps": None, "note": "" if time_us else "it could not run",
    }  # fmt: skip
    return {**plain, **others}


def gemm(time_us: float, means: str = "split", units: int = 0) -> dict[str, Any]:
    return row("gemm", time_us, m=8192, n=8192, k=8192, means=means, units=units)


def collective(time_us: float, implementation: str, units: int = 0, kind: str = "all_gather") -> dict[str, Any]:
    return row("collective", time_us, collective=kind, bytes=SIZE, implementation=implementation, units=units)


def pair(
    strategy: str,
    time_us: float,
    implementation: str,
    units: int = 0,
    alone: float | None = None,
    *,
    rows: int = 8192,
    kind: str = "all_gather",
) -> Any:
    one = row("pair", time_us, m=rows, n=8192, k=8192, collective=kind, bytes=SIZE)
    return {**one, "implementation": implementation, "means": strategy, "units": units, "alone_us": alone}


def file_of(*rows: dict[str, Any]) -> str:
    return json.dumps({"study": "isolated", "rows": [row("memory", 1.0, gbps=4000.0), *rows]})
