"""Between two lives of a job its ports may be anybody's for a moment."""

from __future__ import annotations

import pytest

from megatron_recycle.errors import ConfigError
from megatron_recycle.launch import command


def test_a_job_that_starts_again_waits_for_its_ports_and_one_that_begins_does_not(monkeypatch):
    monkeypatch.setattr(command, "_PAUSE", 0.0)
    tries: list[int] = []

    def lead() -> str:
        tries.append(1)
        if len(tries) < 3:
            raise ConfigError("nobody can listen there")
        return "led"

    with pytest.raises(ConfigError):
        command._lead_in_time(lead, 0.0)
    assert len(tries) == 1 and command._lead_in_time(lead, 60.0) == "led" and len(tries) == 3
