"""A former entry point."""

from sidelane_lab.harness.options import loaded

nccl_tests = loaded("studies.nccl_tests").nccl_tests
