"""The type of row of every study."""

from __future__ import annotations

from sidelane_lab.harness.results.rows.calls import ChainRow, HostRow, PhaseRow, PowerRow
from sidelane_lab.harness.results.rows.collectives import CollectiveRow
from sidelane_lab.harness.results.rows.groups import GroupRow
from sidelane_lab.harness.results.rows.operators import FusedRow, GemmRow
from sidelane_lab.harness.results.rows.ordinary import OrdinaryRow
from sidelane_lab.harness.results.rows.pairs import C3Row, HeuristicRow, IsolatedRow, OccupancyRow
from sidelane_lab.harness.results.rows.soak import SoakRow
from sidelane_lab.harness.results.rows.training import FsdpRow

Row = (
    CollectiveRow
    | C3Row
    | HeuristicRow
    | OccupancyRow
    | IsolatedRow
    | PhaseRow
    | PowerRow
    | ChainRow
    | HostRow
    | FusedRow
    | GemmRow
    | FsdpRow
    | SoakRow
    | OrdinaryRow
    | GroupRow
)
ROWS: dict[str, type[Row]] = {
    "collectives": CollectiveRow,
    "c3": C3Row,
    "heuristics": HeuristicRow,
    "occupancy": OccupancyRow,
    "isolated": IsolatedRow,
    "phases": PhaseRow,
    "power": PowerRow,
    "chain": ChainRow,
    "host": HostRow,
    "fused": FusedRow,
    "gemms": GemmRow,
    "fsdp": FsdpRow,
    "soak": SoakRow,
    "ordinary": OrdinaryRow,
    "process_group": GroupRow,
}
