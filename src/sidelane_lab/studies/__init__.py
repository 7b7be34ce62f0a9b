"""Studies, each declared at the end of the module that measures it."""

STUDIES = {
    "collectives": "sidelane_lab.studies.collectives",
    "c3": "sidelane_lab.studies.c3.study",
    "heuristics": "sidelane_lab.studies.c3.heuristics",
    "occupancy": "sidelane_lab.studies.c3.occupancy",
    "isolated": "sidelane_lab.studies.tune.isolated",
    "phases": "sidelane_lab.studies.phases.study",
    "power": "sidelane_lab.studies.power.study",
    "chain": "sidelane_lab.studies.chain",
    "host": "sidelane_lab.studies.host",
    "prelaunch": "sidelane_lab.studies.prelaunch",
    "fused": "sidelane_lab.studies.fused.study",
    "gemms": "sidelane_lab.studies.gemms",
    "fsdp": "sidelane_lab.studies.fsdp.study",
    "layouts": "sidelane_lab.studies.layouts",
    "ordinary": "sidelane_lab.studies.ordinary",
    "clients": "sidelane_lab.studies.clients.study",
    "e2e": "sidelane_lab.studies.e2e.study",
    "process_group": "sidelane_lab.studies.process_group",
}
"""The module of each study, by its name in result files."""
