"""A host that wants to join a running job asks for vacancies, and waits for some."""

from __future__ import annotations

import re
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from megatron_recycle.errors import RecycleError
from megatron_recycle.launch.join_request import ask
from megatron_recycle.membership import inputs, open_positions
from megatron_recycle.membership.protocol import Places
from tests.membership.cluster import report
from tests.membership.service import DESCRIPTION, LIMIT, TOKEN, Service, agent, service

NAMES = [f"{d}:{s}" for d in range(3) for s in range(2)]


def in_training(running: Service, stack: ExitStack) -> None:
    agents = {name: agent(running.address, name) for name in NAMES}
    for one in agents.values():
        stack.callback(one.close)
        one.ready(DESCRIPTION, report(attempt=0))
    for one in agents.values():
        assert one.wait_go(1, LIMIT) is not None


def test_a_host_that_joins_waits_until_a_place_is_free_and_gives_up_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_positions, "_AGAIN_S", 0.02)
    said: list[str] = []
    found: list[Places] = []
    with service(tmp_path, offered=open_positions.Offered({})) as running, ExitStack() as stack:
        with pytest.raises(RecycleError, match="its training has not begun yet$"):
            ask(running.address, TOKEN, 2, 0.0, said.append)
        in_training(running, stack)
        with pytest.raises(RecycleError, match=r"\(6 in all\); waited 0 s \(--join-timeout\)"):
            ask(running.address, TOKEN, 2, 0.1, lambda text: None)
        waiting = threading.Thread(target=lambda: found.append(ask(running.address, TOKEN, 2, LIMIT, said.append)))
        waiting.start()
        limit = time.monotonic() + LIMIT
        while not said:
            assert time.monotonic() < limit
            time.sleep(0.005)
        assert len(said) == 1 and re.fullmatch(
            r"recycle: waiting up to \d+ s \(--join-timeout\) for a place in the job: it has no place without a worker "
            r"\(6 in all\)", said[0])
        running.call(running.coordinator.feed, inputs.Exited(3, 1003, -9, time.time()))
        waiting.join(LIMIT)
    assert [one.ranks for one in found] == [(3,)]
