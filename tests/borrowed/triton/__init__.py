"""In place of triton, whose gigabyte no test on a CPU uses: newer cores import it, and mark functions that they never
call there. `scripts/setup.sh` lends it to environments that are made for tests alone."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class Anything:
    """What any name of triton's gives: as a decorator it leaves a function as it is."""

    def __init__(self, *given: Any, **keywords: Any) -> None:
        pass

    def __call__(self, *given: Any, **keywords: Any) -> Any:
        return given[0] if len(given) == 1 and not keywords and callable(given[0]) else Anything()

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __getitem__(self, key: Any) -> Anything:
        return Anything()


class Module(ModuleType):
    """One of triton's: names like classes' are classes, which torch compares types with."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (Anything,), {}) if name[0].isupper() and not name.isupper() else Anything()


class Modules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds all modules inside of this one."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith(f"{__name__}.") else None

    def create_module(self, spec: Any) -> ModuleType:
        return Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


__version__ = "3.0.0"
sys.meta_path.insert(0, Modules())
sys.modules[__name__].__class__ = Module
