"""Metrics of a job, for Prometheus: a page of its own (`/metrics`), or a file for a node exporter.

`METRICS` is the only list of them: the export, docs/monitoring.md, the alerts and the dashboard follow from it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_recycle.errors import ConfigError
from megatron_recycle.observe.disk import write_whole
from megatron_recycle.tools.operate.alarms import ALARMS
from megatron_recycle.tools.operate.job_history import JobHistory
from megatron_recycle.tools.operate.outlook import Facts, judge

Value = float | None
"""Value of a sample; None: the sample is left out."""


@dataclass(frozen=True)
class Watched:
    """Input of the metrics: the job, and the watcher's own counts."""

    facts: Facts
    alarms: Mapping[str, int]
    held_back: int = 0
    failed: int = 0

    @property
    def seen(self) -> JobHistory:
        """Summary of the job's events."""
        return self.facts.seen


@dataclass(frozen=True)
class Metric:
    """``name`` as it is exported; ``kind`` is gauge or counter; ``value`` is that of its sample, or of each sample by
    ``label``, if it has one."""

    name: str
    kind: str
    help: str
    value: Callable[[Watched], Value | Mapping[str, Value]]
    label: str = ""


def _workers(now: Watched) -> dict[str, int]:
    return {"up": len(now.seen.members), **Counter(one.kind for one in now.seen.out.values())}


def _against(now: Watched) -> dict[str, float | None]:
    seen = now.seen
    plan = seen.period / seen.seconds if seen.period and seen.seconds else None
    return {"faultfree": now.facts.against_whole, "plan": plan}


def _copies(now: Watched) -> dict[str, int]:
    return {str(stage): count for stage, count in enumerate(judge(now.facts).copies)}


METRICS: tuple[Metric, ...] = (
    Metric("recycle_health", "gauge", "0 healthy, 1 degraded, 2 at risk, 3 ended or unreachable, as `recycle status`",
           lambda now: judge(now.facts).level),
    Metric("recycle_last_commit_timestamp_seconds", "gauge", "when the last iteration was committed",
           lambda now: now.seen.last_commit),
    Metric("recycle_iteration", "gauge", "the last committed iteration", lambda now: now.seen.iteration),
    Metric("recycle_iteration_seconds", "gauge", "seconds of an iteration, the median of the latest 12",
           lambda now: now.seen.seconds),
    Metric("recycle_throughput_ratio", "gauge", "throughput over that without failures, and over the plan's",
           _against, "against"),
    Metric("recycle_workers", "gauge", "processes of the grid by state: up, or how they were lost", _workers, "state"),
    Metric("recycle_grid_workers", "gauge", "processes of the whole grid", lambda now: now.seen.size),
    Metric("recycle_stage_copies", "gauge", "workers of each stage: 1 is the last copy", _copies, "stage"),
    Metric("recycle_fatal_hosts", "gauge", "hosts whose loss ends the job",
           lambda now: len(judge(now.facts).fatal_hosts)),
    Metric("recycle_degraded_since_timestamp_seconds", "gauge", "since when somebody is out; absent while nobody is",
           lambda now: now.seen.degraded_since),
    Metric("recycle_generation", "gauge", "number of the membership", lambda now: now.seen.generation),
    Metric("recycle_committed_iterations_total", "counter", "committed iterations of this life of the job",
           lambda now: now.seen.committed),
    Metric("recycle_workers_lost_total", "counter", "workers that were lost, by the kind of failure",
           lambda now: Counter(one.kind for one in now.seen.failures), "kind"),
    Metric("recycle_workers_joined_total", "counter", "workers that have joined", lambda now: now.seen.joined),
    Metric("recycle_recoveries_total", "counter", "recoveries after which training went on, by the kind of failure",
           lambda now: now.seen.recoveries, "kind"),
    Metric("recycle_lost_seconds_total", "counter", "seconds lost to failures: standing still, or in slow iterations",
           lambda now: {"standstill": now.seen.stood_still, "slower": max(0.0, now.seen.slower)}, "phase"),
    Metric("recycle_lost_iterations_total", "counter", "iterations that were made again after going back",
           lambda now: now.seen.lost_iterations),
    Metric("recycle_skipped_microbatches_total", "counter", "micro-batches that were left out (poison: skip)",
           lambda now: now.seen.counts["skipped"]),
    Metric("recycle_checkpoint_timestamp_seconds", "gauge", "when the last checkpoint was whole",
           lambda now: now.seen.checkpoint.get("t")),
    Metric("recycle_checkpoint_iteration", "gauge", "the iteration that the last checkpoint is of",
           lambda now: now.seen.checkpoint.get("iteration")),
    Metric("recycle_coordinator_up", "gauge", "1 while the coordinator answers",
           lambda now: not now.facts.silent and not now.seen.finished),
    Metric("recycle_coordinator_starts_total", "counter", "coordinators that have led the job, one after the other",
           lambda now: 1 + now.seen.counts["restarted"]),
    Metric("recycle_lives_total", "counter", "how often the script was begun (--job-restarts)",
           lambda now: now.seen.lives),
    Metric("recycle_watched_timestamp_seconds", "gauge", "when these numbers were made", lambda now: now.facts.now),
    Metric("recycle_alarms_total", "counter", "alarms, by their event",
           lambda now: {name: now.alarms.get(name, 0) for name in ALARMS}, "event"),
    Metric("recycle_alarms_held_back_total", "counter", "alarms that the rate limit of --on-event has held back",
           lambda now: now.held_back),
    Metric("recycle_hook_failures_total", "counter", "commands of --on-event that have failed or never ran",
           lambda now: now.failed),
)


class Exporter:
    """Exports the metrics of ``watched()``, called each time, to Prometheus; all have the label ``run``."""

    def __init__(self, run: str, watched: Callable[[], Watched]) -> None:
        from prometheus_client import CollectorRegistry

        self._run = run
        self._watched = watched
        self._server: Any = None
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)

    def describe(self) -> list[Any]:
        """Empty: names are checked by a test, and to collect at the start would read the run twice."""
        return []

    def collect(self) -> Iterator[Any]:
        """All metrics, now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        now = self._watched()
        for metric in METRICS:
            labels = ["run", *([metric.label] if metric.label else [])]
            make = GaugeMetricFamily if metric.kind == "gauge" else CounterMetricFamily
            family = make(metric.name, metric.help, labels=labels)
            found = metric.value(now)
            for by, value in found.items() if isinstance(found, Mapping) else (("", found),):
                if value is not None:
                    family.add_metric([self._run, by][:len(labels)], value)
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
        """Write the file for a node exporter atomically. Raises OSError."""
        from prometheus_client import write_to_textfile

        write_to_textfile(str(path), self.registry)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()


def write_discovery(path: Path, target: str, labels: Mapping[str, str]) -> None:
    """Write a file for Prometheus' `file_sd_configs`: the address of these metrics. Raises OSError."""
    write_whole(path, json.dumps([{"targets": [target], "labels": dict(labels)}]) + "\n", mode=0o644)
