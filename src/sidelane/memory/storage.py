"""Storages of a part of other memory, which say when their last reference goes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch


class _Part:
    """What a storage refers to, for as long as it lives."""

    __slots__ = ("__array_interface__", "__cuda_array_interface__", "_gone", "_whole")

    def __init__(self, whole: torch.Tensor, offset: int, nbytes: int, gone: Callable[[], object]) -> None:
        self._whole, self._gone = whole, gone
        interface: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (whole.data_ptr() + offset, False),
            "strides": None,
            "version": 3,
        }
        if whole.is_cuda:
            self.__cuda_array_interface__ = interface
        else:
            self.__array_interface__ = interface

    def __del__(self) -> None:
        self._gone()


def storage_of(whole: torch.Tensor, offset: int, nbytes: int, gone: Callable[[], object]) -> torch.Tensor:
    """Bytes of ``whole`` as a 1-d uint8 tensor with a storage of its own, which keeps ``whole``.

    Args:
        whole: contiguous bytes.
        offset: of the first byte.
        nbytes: how many, > 0.
        gone: called when the last reference to the storage goes: in any thread, and in the middle of anything.
    """
    assert offset >= 0
    assert 0 < nbytes <= whole.nbytes - offset
    part = _Part(whole, offset, nbytes, gone)
    made = torch.as_tensor(part, device=whole.device) if whole.is_cuda else torch.from_numpy(np.asarray(part))
    assert made.data_ptr() == whole.data_ptr() + offset, "a copy"
    return made
