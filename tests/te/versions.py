"""The Transformer Engines that there are, for tests that want one."""

from __future__ import annotations

import pytest

from tests.te.stand_in import found

_FOUND = found()
_NONE = pytest.param(None, id="none", marks=pytest.mark.skip(
    reason="no Transformer Engine's Python is here: scripts/setup.sh fetches it, or TRANSFORMER_ENGINES names folders"))

engines = pytest.mark.parametrize("engine", [
    pytest.param(folder, id=version, marks=[pytest.mark.night] * (version != [*_FOUND][-1]))
    for version, folder in _FOUND.items()] or [_NONE])
"""With each of them; by day with the newest."""
newest = pytest.mark.parametrize("engine", [pytest.param(folder, id=version)
                                            for version, folder in list(_FOUND.items())[-1:]] or [_NONE])
"""With the newest."""
