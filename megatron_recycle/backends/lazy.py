"""Code that runs after a module's import, so that unused frameworks are not loaded."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


def when_imported(name: str, then: Callable[[], None]) -> None:
    """Call ``then()`` as soon as module ``name`` is loaded: now if it is already."""
    _forget(name)
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Watch(name, then))


def _forget(name: str) -> None:
    sys.meta_path[:] = [finder for finder in sys.meta_path if not (isinstance(finder, _Watch) and finder.name == name)]


class _Watch(MetaPathFinder):
    """Finds one module as usual, once, with a loader that reports when it is done."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name = name
        self._then = then

    def find_spec(self, fullname: str, path: Sequence[str] | None,
                  target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != self.name:
            return None
        _forget(self.name)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Reporting(spec.loader, self._then)
        return spec


class _Reporting(Loader):
    def __init__(self, loader: Loader, then: Callable[[], None]) -> None:
        self._loader = loader
        self._then = then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._then()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)
