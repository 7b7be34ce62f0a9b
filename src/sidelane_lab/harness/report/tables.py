"""The tables of any study."""

from __future__ import annotations

from sidelane.cli.table import Table
from sidelane_lab.harness.results.files import Results
from sidelane_lab.harness.results.rows.calls import ChainRow, HostRow, PhaseRow, PowerRow
from sidelane_lab.harness.results.rows.collectives import CollectiveRow
from sidelane_lab.harness.results.rows.groups import GroupRow
from sidelane_lab.harness.results.rows.operators import FusedRow, GemmRow
from sidelane_lab.harness.results.rows.ordinary import OrdinaryRow
from sidelane_lab.harness.results.rows.pairs import C3Row, HeuristicRow, IsolatedRow, OccupancyRow
from sidelane_lab.harness.results.rows.soak import SoakRow
from sidelane_lab.harness.results.rows.training import FsdpRow
from sidelane_lab.soak.tables import soak_tables
from sidelane_lab.studies.c3.heuristic_tables import heuristic_tables
from sidelane_lab.studies.c3.occupancy_tables import occupancy_tables
from sidelane_lab.studies.c3.tables import c3_tables
from sidelane_lab.studies.chain.tables import chain_tables
from sidelane_lab.studies.collectives.tables import collective_tables
from sidelane_lab.studies.fsdp.tables import fsdp_tables
from sidelane_lab.studies.fused.tables import fused_tables
from sidelane_lab.studies.gemms.tables import gemm_tables
from sidelane_lab.studies.host.tables import host_tables
from sidelane_lab.studies.ordinary.tables import ordinary_tables
from sidelane_lab.studies.phases.tables import phase_tables
from sidelane_lab.studies.power.tables import power_tables
from sidelane_lab.studies.process_group.tables import group_tables
from sidelane_lab.studies.tune.isolated_tables import isolated_tables


def tables_of(results: Results) -> list[Table]:
    """The tables of a study."""
    if results.study == "collectives":
        return collective_tables([row for row in results.rows if isinstance(row, CollectiveRow)])
    if results.study == "occupancy":
        return occupancy_tables([row for row in results.rows if isinstance(row, OccupancyRow)])
    if results.study == "heuristics":
        return heuristic_tables([row for row in results.rows if isinstance(row, HeuristicRow)])
    if results.study == "isolated":
        return isolated_tables([row for row in results.rows if isinstance(row, IsolatedRow)])
    if results.study == "phases":
        return phase_tables([row for row in results.rows if isinstance(row, PhaseRow)])
    if results.study == "power":
        return power_tables([row for row in results.rows if isinstance(row, PowerRow)])
    if results.study == "chain":
        return chain_tables([row for row in results.rows if isinstance(row, ChainRow)])
    if results.study == "host":
        return host_tables([row for row in results.rows if isinstance(row, HostRow)])
    if results.study == "fused":
        return fused_tables([row for row in results.rows if isinstance(row, FusedRow)])
    if results.study == "gemms":
        return gemm_tables([row for row in results.rows if isinstance(row, GemmRow)])
    if results.study == "fsdp":
        return fsdp_tables([row for row in results.rows if isinstance(row, FsdpRow)])
    if results.study == "soak":
        return soak_tables([row for row in results.rows if isinstance(row, SoakRow)])
    if results.study == "ordinary":
        return ordinary_tables([row for row in results.rows if isinstance(row, OrdinaryRow)])
    if results.study == "process_group":
        return group_tables([row for row in results.rows if isinstance(row, GroupRow)])
    return c3_tables([row for row in results.rows if isinstance(row, C3Row)])
