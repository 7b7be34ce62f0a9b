"""Import every file of this folder, so that each one registers its algorithms."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

PACKAGE = __name__.rpartition(".")[0]
FILES = tuple(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]))

for _name in FILES:
    importlib.import_module(f"{PACKAGE}.{_name}")
