"""The metrics of a job, for Prometheus: a page of its own (`/metrics`), or a file for a node exporter.

`METRICS` is the only list of them: what is exported, docs/monitoring.md, the alerts and the dashboard follow from it.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_recycle.errors import ConfigError
from megatron_recycle.tools.operate.alarms import ALARMS
from megatron_recycle.tools.operate.outlook import Facts, judge

LIBRARY = "prometheus_client"
Samples = Iterable[tuple[Mapping[str, str], float | None]]
"""Labels and value of each; one that is None is left out."""


@dataclass(frozen=True)
class Watched:
    """What metrics are made of: the job, and what the watcher itself has done."""

    facts: Facts
    alarms: Mapping[str, int]
    held_back: int = 0
    failed: int = 0


@dataclass(frozen=True)
class Metric:
    """``name`` as it is exported; ``kind`` is gauge or counter; ``label`` distinguishes its samples, if it has some."""

    name: str
    kind: str
    help: str
    samples: Callable[[Watched], Samples]
    label: str = ""


def _one(value: Callable[[Watched], float | None]) -> Callable[[Watched], Samples]:
    return lambda now: [({}, value(now))]


def _by(label: str, values: Callable[[Watched], Mapping[str, float | None]]) -> Callable[[Watched], Samples]:
    return lambda now: [({label: name}, value) for name, value in values(now).items()]


def _workers(now: Watched) -> dict[str, float | None]:
    seen = now.facts.seen
    states = Counter({"up": 0, **Counter(one.kind for one in seen.out.values())})
    states["up"] = len(seen.members)
    return {**states}


def _against(now: Watched) -> dict[str, float | None]:
    seen = now.facts.seen
    plan = seen.period / seen.seconds if seen.period and seen.seconds else None
    return {"faultfree": now.facts.against_whole, "plan": plan}


def _copies(now: Watched) -> dict[str, float | None]:
    return {str(stage): float(count) for stage, count in enumerate(judge(now.facts).copies)}


METRICS: tuple[Metric, ...] = (
    Metric("recycle_health", "gauge", "0 healthy, 1 degraded, 2 at risk, 3 ended or unreachable, as `recycle status`",
           _one(lambda now: float(judge(now.facts).level))),
    Metric("recycle_last_commit_timestamp_seconds", "gauge", "when the last iteration was committed",
           _one(lambda now: now.facts.seen.last_commit)),
    Metric("recycle_iteration", "gauge", "the last committed iteration",
           _one(lambda now: float(now.facts.seen.iteration))),
    Metric("recycle_iteration_seconds", "gauge", "seconds of an iteration, the median of the latest 12",
           _one(lambda now: now.facts.seen.seconds)),
    Metric("recycle_throughput_ratio", "gauge", "throughput over that without failures, and over the plan's",
           _by("against", _against), "against"),
    Metric("recycle_workers", "gauge", "processes of the grid by state: up, or how they were lost",
           _by("state", _workers), "state"),
    Metric("recycle_grid_workers", "gauge", "processes of the whole grid",
           _one(lambda now: float(now.facts.seen.size))),
    Metric("recycle_stage_copies", "gauge", "workers of each stage: 1 is the last copy",
           _by("stage", _copies), "stage"),
    Metric("recycle_fatal_hosts", "gauge", "hosts whose loss ends the job",
           _one(lambda now: float(len(judge(now.facts).fatal_hosts)))),
    Metric("recycle_degraded_since_timestamp_seconds", "gauge", "since when somebody is out; absent while nobody is",
           _one(lambda now: now.facts.seen.degraded_since)),
    Metric("recycle_generation", "gauge", "number of the membership",
           _one(lambda now: float(now.facts.seen.generation))),
    Metric("recycle_committed_iterations_total", "counter", "committed iterations of this life of the job",
           _one(lambda now: float(now.facts.seen.committed))),
    Metric("recycle_workers_lost_total", "counter", "workers that were lost, by the kind of failure",
           _by("kind", lambda now: {**Counter(one.kind for one in now.facts.seen.failures)}), "kind"),
    Metric("recycle_workers_joined_total", "counter", "workers that have joined",
           _one(lambda now: float(now.facts.seen.joined))),
    Metric("recycle_recoveries_total", "counter", "recoveries after which training went on, by the kind of failure",
           _by("kind", lambda now: {**now.facts.seen.recoveries}), "kind"),
    Metric("recycle_lost_seconds_total", "counter", "seconds lost to failures: standing still, or in slow iterations",
           _by("phase", lambda now: {"standstill": now.facts.seen.stood_still,
                                     "slower": max(0.0, now.facts.seen.slower)}), "phase"),
    Metric("recycle_lost_iterations_total", "counter", "iterations that were made again after going back",
           _one(lambda now: float(now.facts.seen.lost_iterations))),
    Metric("recycle_skipped_microbatches_total", "counter", "micro-batches that were left out (poison: skip)",
           _one(lambda now: float(now.facts.seen.skipped))),
    Metric("recycle_checkpoint_timestamp_seconds", "gauge", "when the last checkpoint was whole",
           _one(lambda now: now.facts.seen.checkpoint.get("t"))),
    Metric("recycle_checkpoint_iteration", "gauge", "the iteration that the last checkpoint is of",
           _one(lambda now: now.facts.seen.checkpoint.get("iteration"))),
    Metric("recycle_coordinator_up", "gauge", "1 while the coordinator answers",
           _one(lambda now: float(not now.facts.silent and not now.facts.seen.finished))),
    Metric("recycle_coordinator_starts_total", "counter", "coordinators that have led the job, one after the other",
           _one(lambda now: float(now.facts.seen.coordinators))),
    Metric("recycle_lives_total", "counter", "how often the script was begun (--job-restarts)",
           _one(lambda now: float(now.facts.seen.lives))),
    Metric("recycle_watched_timestamp_seconds", "gauge", "when these numbers were made",
           _one(lambda now: now.facts.now)),
    Metric("recycle_alarms_total", "counter", "alarms, by their event",
           _by("event", lambda now: {name: float(now.alarms.get(name, 0)) for name in ALARMS}), "event"),
    Metric("recycle_alarms_held_back_total", "counter", "alarms that the rate limit of --on-event has held back",
           _one(lambda now: float(now.held_back))),
    Metric("recycle_hook_failures_total", "counter", "commands of --on-event that have failed or never ran",
           _one(lambda now: float(now.failed))),
)


def check_library(option: str) -> None:
    """Raises ConfigError if prometheus-client is not installed."""
    if find_spec(LIBRARY) is None:
        raise ConfigError(f"{option} needs prometheus-client: `pip install prometheus-client`")


class Exporter:
    """Gives the metrics of ``watched()``, which is asked each time, to Prometheus; all have the label ``run``."""

    def __init__(self, run: str, watched: Callable[[], Watched]) -> None:
        from prometheus_client import CollectorRegistry

        self._run = run
        self._watched = watched
        self._server: Any = None
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def describe(self) -> list[Any]:
        """Nothing: names are checked by a test, and to collect at the start would read the run twice."""
        return []

    def collect(self) -> Iterator[Any]:
        """All metrics, now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        now = self._watched()
        for metric in METRICS:
            labels = ["run", *([metric.label] if metric.label else [])]
            make = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
            family = make(metric.name, metric.help, labels=labels)
            for by, value in metric.samples(now):
                if value is not None:
                    family.add_metric([self._run, *by.values()], value)
            yield family

    def serve(self, host: str, port: int) -> int:
        """Serve `/metrics` in a thread; returns the port. Raises ConfigError."""
        from prometheus_client import start_http_server

        try:
            self._server, _ = start_http_server(port, host, self.registry)
        except OSError as error:
            raise ConfigError(f"nobody can listen on {host}, port {port} ({error.strerror}): give another --metrics "
                              "HOST:PORT") from error
        return int(self._server.server_port)

    def write(self, path: Path) -> None:
        """Write the file for a node exporter: whole, or not at all. Raises OSError."""
        from prometheus_client import write_to_textfile

        write_to_textfile(str(path), self.registry)

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()


def write_discovery(path: Path, target: str, labels: Mapping[str, str]) -> None:
    """Write a file for Prometheus' `file_sd_configs`, whole or not at all: where these metrics are. Raises OSError."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
        json.dump([{"targets": [target], "labels": dict(labels)}], file)
        file.write("\n")
    os.chmod(file.name, 0o644)
    try:
        os.replace(file.name, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(file.name)
        raise


def table() -> str:
    """The table of docs/monitoring.md."""
    rows = "".join(f"| `{one.name}` | {one.kind} | {f'`{one.label}`' if one.label else ''} | {one.help} |\n"
                   for one in METRICS)
    return f"| name | kind | label | meaning |\n| --- | --- | --- | --- |\n{rows}"
