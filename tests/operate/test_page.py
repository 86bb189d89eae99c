"""The page of a job: what it shows, who may look, and how it works in a real browser."""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from megatron_recycle.errors import ConfigError
from megatron_recycle.launch import watching
from megatron_recycle.plan import Grid
from megatron_recycle.tools.operate.page.server import Server, is_loopback, secret_of
from megatron_recycle.tools.operate.page.state import History, schedule
from megatron_recycle.tools.operate.watch import Watcher
from tests.observe.plans import simple_plan
from tests.operate.browser import BROWSER, DRIVER, Browser

TOKEN = "0123456789abcdef" * 2


class Run:
    """A run's folder in which a job of this grid writes its events."""

    def __init__(self, folder: Path, pipelines: int, stages: int, microbatches: int) -> None:
        self.folder = folder
        self.names = [str(worker) for worker in Grid(stages, (microbatches,) * pipelines).workers()]
        self._shape = (pipelines, stages, microbatches)
        self._generation = 1
        self._iteration = 0
        self._out: dict[str, str] = {}
        self._file = (folder / "events.jsonl").open("w", buffering=1)
        self.tell("started", generation=1, v=1, members={name: f"{name}/0" for name in self.names},
                  ranks={name: rank for rank, name in enumerate(self.names)},
                  pids={name: 4000 + rank for rank, name in enumerate(self.names)},
                  hosts={name: f"n{rank // 8}/{rank // 8}" for rank, name in enumerate(self.names)}, survival="",
                  fatal_hosts={}, grid={"stages": stages, "microbatches": [microbatches] * pipelines}, max_restarts=0)
        self._planned()

    def tell(self, event: str, t: float | None = None, **fields: Any) -> None:
        self._file.write(json.dumps({"t": t or time.time(), "event": event, **fields}) + "\n")

    def commit(self, count: int, seconds: float) -> None:
        """So many iterations, the last one now."""
        now = time.time()
        for number in range(count):
            self.tell("committed", t=now - seconds * (count - 1 - number - 0.05 * (number % 3)),
                      generation=self._generation, iteration=self._iteration, loss=2.0)
            self._iteration += 1

    def lose(self, worker: str) -> None:
        """This worker is killed."""
        self._out[worker] = "exit"
        self._generation += 1
        members = {name: f"{name}/0" for name in self.names if name not in self._out}
        self.tell("suspected", generation=self._generation - 1, iteration=self._iteration, worker=worker, kind="exit",
                  ms=3.0, rank=self.names.index(worker), pid=4000 + self.names.index(worker), error="signal SIGKILL")
        self.tell("decided", generation=self._generation, ms=4.0, members=members, out=self._out)
        self._planned()
        self.tell("resumed", generation=self._generation, attempt=1, iteration=self._iteration, ms=150.0,
                  survivors=len(members))

    def close(self) -> None:
        self._file.close()

    def _planned(self) -> None:
        plan = simple_plan(*self._shape, failed=tuple(self._out))
        (self.folder / "plans").mkdir(exist_ok=True)
        plan.save(self.folder / "plans" / f"{plan.digest.rpartition(':')[2][:16]}.json")
        self.tell("planned", generation=self._generation, plan_ms=1.0, digest=plan.digest, period=plan.period)


def watch_options(*texts: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    watching.add_arguments(parser)
    parser.add_argument("--token-file", type=Path)
    return parser.parse_args([*texts, "--until-told"])


class Watched:
    """A run with a page at `address`."""

    def __init__(self, folder: Path, pipelines: int = 3, stages: int = 4, microbatches: int = 6,
                 host: str = "127.0.0.1") -> None:
        self.run = Run(folder, pipelines, stages, microbatches)
        self.run.commit(40, 0.3)
        self._done = threading.Event()
        said: list[str] = []
        self._watcher = Watcher(folder, watch_options("--page", f"{host}:0"), said.append)
        self.address = said[0].partition("page at ")[2].partition("?")[0]
        self._thread = threading.Thread(target=self._watcher.watch, args=(self._done,))
        self._thread.start()

    def close(self) -> None:
        self._done.set()
        self._thread.join()
        self._watcher.close()
        self.run.close()


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    found = Watched(tmp_path)
    yield found
    found.close()


def got(address: str, **headers: str) -> tuple[int, str, Mapping[str, str]]:
    """Status, text and headers, redirections followed."""
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=10) as answer:
            return answer.status, answer.read().decode(), dict(answer.headers)
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(), dict(error.headers)


def state_when(watched: Watched, true: Any, seconds: float = 5.0) -> dict[str, Any]:
    limit = time.monotonic() + seconds
    while not true(found := json.loads(got(watched.address + "state")[1])):
        assert time.monotonic() < limit, found
        time.sleep(0.1)
    return found


def test_the_state_has_the_status_the_iterations_and_the_events(watched):
    found = state_when(watched, lambda now: len(now["iterations"]) == 39)
    assert (found["verdict"], found["grid"], len(found["workers"])) == ("healthy", [3, 4], 12)
    assert [one["event"] for one in found["events"]] == ["started", "planned"]
    watched.run.lose("1:2")
    found = state_when(watched, lambda now: now["out"])
    assert [one["text"] for one in found["marks"]] == ["lost 1:2 (exit)"]
    assert [one["event"] for one in found["events"]][-1] == "resumed"


def test_the_schedule_is_the_one_in_force_and_a_large_one_comes_by_pipelines(tmp_path):
    plan = simple_plan(20, 4, 3)
    (tmp_path / "plans").mkdir()
    plan.save(tmp_path / "plans" / f"{plan.digest.rpartition(':')[2][:16]}.json")
    found = schedule(tmp_path, plan.digest, 7)
    assert (found["rows"], found["pipelines"]) == (["7:0", "7:1", "7:2", "7:3"], 20)
    assert {box[0] for box in found["boxes"]} == {0, 1, 2, 3}
    assert "cannot be read" in schedule(tmp_path, "sha256:0000", None)["why"]


def test_nothing_on_the_page_comes_from_elsewhere(watched):
    status, text, headers = got(watched.address)
    assert status == 200 and "default-src 'none'" in headers["Content-Security-Policy"]
    for path in ("", "page.css", "page.js"):
        text = got(watched.address + path)[1]
        assert "http://www.w3.org/2000/svg" in text or "://" not in text


def test_a_site_that_lends_its_name_to_this_machine_sees_nothing(watched):
    assert got(watched.address + "state", Host="evil.example:80")[0] == 421
    assert got(watched.address + "state", Host="localhost")[0] == 200


def test_elsewhere_than_on_a_loopback_address_it_needs_the_secret_and_not_the_jobs_token(tmp_path, monkeypatch):
    monkeypatch.setenv("RECYCLE_TOKEN", TOKEN)
    found = Watched(tmp_path, host="0.0.0.0")
    port = found.address.rpartition(":")[2]
    address = f"http://127.0.0.1:{port}"
    try:
        assert got(address + "state")[0] == got(address + f"?token={TOKEN}")[0] == 403
        file = tmp_path / "page.token"
        assert file.stat().st_mode & 0o777 == 0o600 and file.read_text().strip() == secret_of(TOKEN) != TOKEN
        opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
        with opener.open(address + f"?token={secret_of(TOKEN)}", timeout=10) as answer:
            assert answer.url == address and "token" not in answer.url
        with opener.open(address + "state", timeout=10) as answer:
            assert json.loads(answer.read())["verdict"] in ("starting", "healthy")
    finally:
        found.close()


@pytest.mark.parametrize(("host", "alone"), [
    ("127.0.0.1", True), ("127.3.2.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("n3", False)])
def test_which_addresses_are_for_this_machine_alone(host, alone):
    assert is_loopback(host) is alone


def test_a_port_that_is_taken_is_told_with_the_remedy(watched):
    port = int(watched.address.rstrip("/").rpartition(":")[2])
    with pytest.raises(ConfigError, match=f"port {port} .*give another --page HOST:PORT"):
        Server(dict, lambda pipeline: {}, None).start("127.0.0.1", port)


def test_a_history_keeps_the_latest_only_and_a_suspected_worker_that_stays_is_no_mark():
    from megatron_recycle.tools.operate.job_history import JobHistory

    history, seen = History(), JobHistory()
    for number in range(2000):
        history.add({"t": 1000.0 + number, "event": "committed", "iteration": number}, seen)
    history.add({"t": 4000.0, "event": "suspected", "worker": "1:1", "kind": "slow", "removed": False}, seen)
    assert len(history.iterations) == 600 and not history.marks


# In a browser


def pictures() -> Path | None:
    """Where to leave pictures for people; None: nowhere."""
    folder = os.environ.get("PAGE_PICTURES")
    return None if folder is None else Path(folder)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize(("pipelines", "stages"), [(3, 4), (64, 8)])
@pytest.mark.slow
def test_a_kill_is_on_the_page_and_keys_reach_the_worker(tmp_path, pipelines, stages, dark):
    if not (BROWSER and DRIVER):
        pytest.skip("chromium and chromedriver are not installed")
    (tmp_path / "run").mkdir()
    watched = Watched(tmp_path / "run", pipelines, stages)
    try:
        with Browser(tmp_path / "profile", dark=dark) as browser:
            browser.open(watched.address)
            browser.until("return document.querySelector('#word').textContent === 'HEALTHY' && "
                          f"document.querySelectorAll('#grid button').length === {pipelines * stages}", 15)
            watched.run.lose("1:2")
            browser.until("return document.querySelectorAll('#grid button.lost').length === 1 && "
                          "document.querySelector('#word').textContent === 'DEGRADED'", 10)
            watched.run.commit(12, 0.42)
            browser.until("const mark = document.querySelector('#chart .mark'); "
                          "return mark && +mark.getAttribute('x1') < 992 && "
                          "document.querySelector('#line').textContent.includes('iteration 51') && "
                          "document.querySelectorAll('#plan rect').length > 20", 10)
            label = "return document.activeElement.getAttribute('aria-label')"
            browser.run("document.querySelector('#grid button').focus()")
            down, right = (2, 1) if pipelines > stages else (1, 2)  # a large grid lies on its side
            browser.press(*["Down"] * down, *["Right"] * right)
            host = (stages + 2) // 8
            assert browser.run(label) == f"worker 1:2, exit, on n{host}/{host}"
            browser.press("Enter")
            assert "out since" in browser.run("return document.querySelector('#worker').textContent")
            contrast = browser.run(CONTRAST)
            assert min(contrast.values()) >= 4.5, contrast
            if (folder := pictures()) is not None:
                browser.picture(folder / f"{pipelines}x{stages}-{'dark' if dark else 'light'}.png")
                browser.run("document.querySelector('#schedule').scrollIntoView()")
                browser.picture(folder / f"{pipelines}x{stages}-{'dark' if dark else 'light'}-below.png")
            assert browser.complaints() == []
            watched.close()
            browser.until("return !document.querySelector('#gone').hidden", 10)
    finally:
        watched.close()


CONTRAST = """
const luminance = (text) => {
  const [r, g, b] = text.match(/[\\d.]+/g).slice(0, 3).map((v) => v / 255).map(
    (v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ground = (node) => {
  for (; node; node = node.parentElement) {
    const found = getComputedStyle(node).backgroundColor;
    if (!found.endsWith(', 0)') && found !== 'transparent') return found;
  }
  return 'rgb(255, 255, 255)';
};
const found = {};
for (const name of ['#word', '#line', 'h1', '.hint', 'dt', '#grid button', '#grid button.lost', '#grid th',
                    '#events li', '#events .bad b', '#events time', 'summary']) {
  const node = document.querySelector(name);
  const [a, b] = [luminance(getComputedStyle(node).color), luminance(ground(node))].sort((x, y) => y - x);
  found[name] = (a + 0.05) / (b + 0.05);
}
return found;
"""
"""The contrast of texts with their ground; WCAG asks for 4.5."""
