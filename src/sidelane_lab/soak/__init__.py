"""A campaign of random calls with faults among them: every byte checked, every fault held against what is promised."""
