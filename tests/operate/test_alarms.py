"""Alarms, the command that hears of them, and metrics; the alerts and the dashboard name what is exported."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import stat
import subprocess
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from megatron_recycle.errors import ConfigError
from megatron_recycle.launch import watching
from megatron_recycle.tools.operate.alarm_hook import Hook
from megatron_recycle.tools.operate.alarms import ALARMS, Alarm, Alarms, Rate, to_json
from megatron_recycle.tools.operate.job_history import JobHistory
from megatron_recycle.tools.operate.metrics import METRICS, Exporter, Watched, write_discovery
from megatron_recycle.tools.operate.outlook import Facts
from megatron_recycle.tools.operate.watch import Watcher
from tests.operate.test_status import DEGRADED, began, commits, lost

DOCS = Path(__file__).parents[2] / "docs"


def heard(events: list[dict[str, Any]], degraded_after: float = 600.0, now: float | None = None) -> list[Alarm]:
    seen, alarms = JobHistory(), Alarms(degraded_after)
    found = []
    for event in events:
        seen.add(event)
        found += alarms.add(event, seen)
    return found + alarms.tick(Facts(seen, events[-1]["t"] + 1.0 if now is None else now, "run"))


def test_all_that_were_lost_in_one_decision_are_one_alarm() -> None:
    out = {"1:0": "unreachable", "1:1": "unreachable"}
    both = [*began(), *lost("1:0", 1001.0, 2, out)[:1], *lost("1:1", 1001.0, 2, out)]
    first, second = heard(both)
    assert (first.name, first.workers) == ("lost", ("1:0", "1:1"))
    assert first.summary == ("lost 1:0 (unreachable on n0/0), 1:1 (unreachable on n0/0) in iteration 20; "
                             "4 of 6 workers go on")
    assert (second.name, second.summary) == ("resumed", "4 workers train again after 1000 ms")


@pytest.mark.parametrize(("event", "name", "text"), [
    ({"event": "last_copy", "stages": {"1": "2:1"}, "hosts": {"1": "n2"}}, "last_copy", "2:1 on n2 is the last worker"),
    ({"event": "last_host", "hosts": {"n2": [1]}}, "last_host", "without n2 the job cannot go on"),
    ({"event": "restored", "iteration": 7, "lost": 3}, "restored", "iteration 7: 3 iterations are lost"),
    ({"event": "started_again", "restart": 1, "of": 2, "reason": "stage 1 is gone"}, "restarted", "again (1 of 2)"),
    ({"event": "finished", "status": 1, "message": "no plan"}, "ended", "ended with status 1: no plan"),
])
def test_other_events_that_are_alarms(event: dict[str, Any], name: str, text: str) -> None:
    found = heard([*began(), {"t": 1000.5, **event}])
    assert [one.name for one in found] == [name] and text in found[0].summary


def test_time_that_passes_is_an_alarm_once() -> None:
    assert [one.name for one in heard(DEGRADED)] == ["lost", "resumed"]
    assert heard(DEGRADED, degraded_after=30.0)[-1].name == "degraded"
    assert heard(DEGRADED, now=2000.0)[-1].name == "stalled"
    seen, alarms = JobHistory(DEGRADED), Alarms(1.0)
    facts = Facts(seen, DEGRADED[-1]["t"] + 1.0, "run")
    assert [one.name for one in (*alarms.tick(facts), *alarms.tick(facts))] == ["degraded"]
    back = {"t": 1070.0, "event": "decided", "generation": 3, "members": dict.fromkeys(seen.hosts, ""), "out": {}}
    seen.add(back)
    assert [one.name for one in alarms.add(back, seen)] == ["whole"]


def test_a_command_hears_versioned_json_and_a_storm_of_alarms_is_held_back() -> None:
    (alarm, _) = heard(DEGRADED)
    told = to_json(alarm, Facts(JobHistory(DEGRADED), 1062.0, "run"), 3)
    assert (told["v"], told["event"], told["verdict"], told["suppressed"]) == (1, "lost", "degraded", 3)
    assert told["out"] == ["1:1"] and told["workers_now"] == 5 and "members" not in told["cause"]
    json.dumps(told)
    rate, passed = Rate(), [0] * 10
    assert [rate.lets(alarm, 1000.0) for _ in range(12)] == [*passed, None, None]
    assert rate.lets(Alarm("ended", 0.0, ""), 1000.0) == 2  # always, and it says how many were not told
    assert rate.lets(alarm, 1031.0) == 0 and rate.held_back == 2


def test_the_command_gets_the_alarm_and_nobody_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECYCLE_TOKEN", "a" * 32)
    said: list[str] = []
    hook = Hook(f'(echo "$RECYCLE_EVENT/$RECYCLE_TOKEN"; cat) >> {tmp_path / "heard"}; [ $RECYCLE_EVENT != lost ]',
                said.append)
    for name in ("lost", "ended"):
        hook.tell({"event": name, "v": 1})
    hook.close()
    assert (tmp_path / "heard").read_text() == 'lost/\n{"event": "lost", "v": 1}\nended/\n{"event": "ended", "v": 1}\n'
    assert said == ["recycle: --on-event: for lost the command ended with status 1"] and hook.failed == 1


def test_a_command_that_does_not_end_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    said: list[str] = []
    hook, since = Hook(f"(sleep 300; touch {tmp_path / 'late'}) & wait", said.append, limit=0.2), time.monotonic()
    hook.tell({"event": "lost"})
    assert time.monotonic() - since < 0.2
    for _ in range(30):
        hook.tell({"event": "lost"})
    ends = time.monotonic() + 60
    while not any("longer than 0.2 s and was killed" in line for line in said):
        assert time.monotonic() < ends, said
        time.sleep(0.01)
    hook.close()
    assert any("is not told: 20 others wait" in line for line in said)


def exported(events: list[dict[str, Any]]) -> Exporter:
    pytest.importorskip("prometheus_client")
    return Exporter("a-run", lambda: Watched(Facts(JobHistory(events), events[-1]["t"] + 1.0, "run"), {"lost": 2}, 1))


def test_metrics_are_written_whole_and_have_the_names_of_the_table(tmp_path: Path) -> None:
    path = tmp_path / "job.prom"
    exported([*DEGRADED, {"t": 1062.0, "event": "checkpoint", "iteration": 30, "place": "x"}]).write(path)
    text = path.read_text()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values['recycle_health{run="a-run"}']) == 1
    assert float(values['recycle_workers{run="a-run",state="exit"}']) == 1
    assert float(values['recycle_throughput_ratio{against="faultfree",run="a-run"}']) == pytest.approx(0.5)
    assert float(values['recycle_alarms_total{event="lost",run="a-run"}']) == 2
    assert {re.split("[{ ]", name)[0] for name in values} == {metric.name for metric in METRICS}
    assert [entry.name for entry in tmp_path.iterdir()] == ["job.prom"]


def test_metrics_are_served() -> None:
    exporter = exported([*began(), *commits(1000.0, 0, 5, 1.0)])
    port = exporter.serve("127.0.0.1", 0)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            assert 'recycle_iteration{run="a-run"} 4.0' in answer.read().decode()
        with pytest.raises(ConfigError, match="nobody can listen"):
            exported(began()).serve("127.0.0.1", port)
    finally:
        exporter.close()


def test_alerts_and_dashboard_name_metrics_and_labels_that_are_exported() -> None:
    labels = {metric.name: metric.label for metric in METRICS}
    board = json.loads((DOCS / "monitoring" / "grafana.json").read_text())
    exprs = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    text = (DOCS / "monitoring" / "alerts.yml").read_text() + "\n".join(exprs)
    named = re.findall(r"\b(recycle_\w+)(?:\{([^}]*)\})?", text)
    assert len({name for name, _ in named}) > 10
    for name, by in named:
        assert name in labels, f"nobody exports {name}"
        assert {label.partition("=")[0].rstrip("~!") for label in re.findall(r"\w+=~?", by)} <= {"run", labels[name]}
    events = set(re.findall(r'event="(\w+)"', text))
    assert events <= {*ALARMS}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_takes_the_rules_and_the_metrics(tmp_path: Path) -> None:
    rules = subprocess.run(["promtool", "check", "rules", str(DOCS / "monitoring" / "alerts.yml")], text=True,
                           capture_output=True)
    assert rules.returncode == 0 and "SUCCESS" in rules.stdout, rules.stdout + rules.stderr
    exported(DEGRADED).write(tmp_path / "job.prom")
    metrics = subprocess.run(["promtool", "check", "metrics"], stdin=(tmp_path / "job.prom").open(), text=True,
                             capture_output=True)
    assert metrics.returncode == 0, metrics.stdout + metrics.stderr


def test_the_page_has_the_tables_of_the_code() -> None:
    page = (DOCS / "monitoring.md").read_text()
    rows = (f"| `{one.name}` | {one.kind} | {f'`{one.label}`' if one.label else ''} | {one.help} |" for one in METRICS)
    assert "\n".join(("| name | kind | label | meaning |", "| --- | --- | --- | --- |", *rows)) in page
    alarms = page.partition("| event | when |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", alarms, re.MULTILINE) == [*ALARMS]


def options(**given: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    watching.add_arguments(parser)
    parser.set_defaults(token_file=None, **given)
    return parser.parse_args([])


@pytest.mark.parametrize(("given", "text"), [
    ({"on_event": " "}, "--on-event is empty"),
    ({"degraded_after": 0.0}, "--degraded-after is 0"),
    ({"metrics": "here"}, "give HOST:PORT"),
    ({"metrics_sd": Path("x")}, "give both"),
    ({"textfile": Path("x.txt")}, "ends with .prom"),
    ({"textfile": Path("/nowhere/x.prom")}, "no folder that can be written to"),
])
def test_options_that_cannot_work_are_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        watching.check(options(**given))


def test_a_watcher_reads_on_through_a_restart_and_tells_no_old_stories(tmp_path: Path) -> None:
    shift = time.time() - DEGRADED[-1]["t"]
    now = [{**event, "t": event["t"] + shift} for event in DEGRADED]
    events = tmp_path / "events.jsonl"
    events.write_text("".join(json.dumps({**event, "t": event["t"] - 3600}) + "\n" for event in now))
    args = options(on_event=f"cat >> {tmp_path / 'heard'}")
    watcher = Watcher(tmp_path, args, lambda line: None)
    watcher.look()
    events.rename(tmp_path / "before")
    again = {"t": time.time(), "event": "started_again", "restart": 1, "of": 1, "workers": 6, "reason": "stage 1"}
    events.write_text("".join(json.dumps(event) + "\n" for event in [again, *now]))
    done = threading.Event()
    done.set()
    watcher.watch(done)
    watcher.close()
    assert [json.loads(line)["event"] for line in (tmp_path / "heard").read_text().splitlines()] == [
        "degraded", "stalled", "restarted", "lost", "resumed"]


def test_where_metrics_are_served_is_written_for_prometheus(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    write_discovery(path, "n1:9464", {"run": "one"})
    assert json.loads(path.read_text()) == [{"targets": ["n1:9464"], "labels": {"run": "one"}}]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644 and len(list(tmp_path.iterdir())) == 1
