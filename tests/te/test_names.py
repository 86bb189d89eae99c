"""What the plugin uses of Transformer Engine without a promise is where its list says, in each version that is here."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_recycle.backends.releases import release_of
from tests.backends.megatron_names import ENGINE
from tests.backends.private_names import missing
from tests.te.stand_in import version_in
from tests.te.versions import engines

pytest.importorskip("megatron.core")


@engines
def test_each_name_is_where_the_list_says(engine: Path):
    from megatron_recycle.backends.megatron import te

    release = release_of(version_in(engine))
    assert release[:2] in te.TESTED
    assert missing(ENGINE, release, engine) == []
