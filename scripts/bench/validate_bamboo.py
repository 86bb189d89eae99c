#!/usr/bin/env python3
"""Our model of Bamboo beside Bamboo's own simulator, on the same trace.

    git clone https://github.com/uclasystem/bamboo /elsewhere/bamboo
    python scripts/bench/validate_bamboo.py --checkout /elsewhere/bamboo --trace /elsewhere/bamboo/traces/p3-trace.csv

Its simulator is loaded from the checkout (no part of it is here). It takes the times of an iteration from a table by
the number of pipelines; our policy gets the same table, and does not go back to a checkpoint after a fatal failure, as
that simulator does not. Iterations done in the trace's time are compared with it as it is, and without three slips
(`mended`), which account for most of the difference: at most 5 % from the latter, or status 1.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_recycle.plan import Costs
from megatron_recycle.tools.simulate.cluster import Cluster, changes
from megatron_recycle.tools.simulate.job import Job
from megatron_recycle.tools.simulate.plans import Plans
from megatron_recycle.tools.simulate.policies.bamboo import Bamboo, BambooConstants
from megatron_recycle.tools.simulate.policies.base import STANDS, Course, Setting
from megatron_recycle.tools.simulate.reading import read
from megatron_recycle.tools.simulate.run import simulate

MODELS = ("GPT-2", "ResNet")
"""Those whose table has a row for each number of pipelines that the trace leads to."""


class AsTabled(Bamboo):
    """Bamboo, with the iterations that its own simulator assumes."""

    def __init__(self, constants: BambooConstants, table: dict[int, float]) -> None:
        super().__init__(constants)
        self._table = table

    def _course(self) -> Course:
        if not self._pipelines:
            return STANDS
        seconds = self._table[self._pipelines] * (self.constants.slowdown if self._slow else 1.0)
        return Course(seconds, seconds, self.setting.job.batch)


def loaded(checkout: Path) -> ModuleType:
    """Bamboo's simulator. Exits if it is not there."""
    path = checkout / "project_pactum" / "simulation" / "simulator.py"
    if not path.exists():
        raise SystemExit(f"validate_bamboo.py: {path} is not there: give --checkout a clone of uclasystem/bamboo")
    spec = importlib.util.spec_from_file_location("bamboo_simulator", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def mended(stock: type) -> type:
    """Bamboo's simulator without three slips: the loss of a waiting machine, which has no stage, does not slow training
    down; a waiting machine that is lost does not wait any more; and an iteration that a fatal failure broke off is not
    counted, nor does its end let all meet a second time (which leaves nobody with a stage)."""

    class Mended(stock):  # type: ignore[misc, valid-type]
        def simulate_fatal_failure(self, delta: int, name: str) -> None:
            self.rendezvous_version += 1
            super().simulate_fatal_failure(delta, name)

        def simulate_spot_instance_remove(self, delta: int, data: dict[str, str]) -> None:
            running = self.spot_instances[data["name"]].is_running()
            waiting = self.spot_instances[data["name"]].is_ready()
            before = self.step_delta if hasattr(self, "step_delta") else 0, self.fallback_event, self.fallback_handled
            super().simulate_spot_instance_remove(delta, data)
            if not running:
                self.step_delta, self.fallback_event, self.fallback_handled = before
                self.num_workers_waiting = max(0, self.num_workers_waiting - waiting)

    return Mended


def theirs(simulation: type, model: str, trace: Path) -> tuple[Any, Any]:
    """Bamboo's simulator after the trace, and its result."""
    logging.disable(logging.INFO)
    last = int(trace.read_text(encoding="utf-8").splitlines()[-1].split(",")[0])
    with trace.open(encoding="utf-8") as lines:
        simulator = simulation(model=model, spot_instance_trace=lines)
        return simulator, simulator.simulate(last)


def table(simulator: Any, most: int) -> dict[int, float]:
    """Seconds of an iteration by the number of pipelines."""
    found = {}
    for pipelines in range(1, most + 1):
        simulator.num_pipelines, simulator.num_stages = pipelines, simulator.num_stages_target
        simulator.simulate_step_delta()
        found[pipelines] = simulator.step_delta / 1000
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--checkout", type=Path, required=True)
    parser.add_argument("--trace", type=Path, required=True, help="'time_ms,add|remove,node'")
    parser.add_argument("--model", nargs="+", choices=MODELS, default=MODELS)
    args = parser.parse_args()
    module, worst = loaded(args.checkout), 0.0
    for model in args.model:
        _, stock = theirs(module.Simulator, model, args.trace)
        simulator, result = theirs(mended(module.Simulator), model, args.trace)
        stages, most = simulator.num_stages_target, 4
        meeting = simulator.local_rendezvous_timeout_delta / 1000
        constants = BambooConstants(simulator.spot_instance_creation_time / 1000,
                                    simulator.global_rendezvous_timeout_delta / 1000, meeting,
                                    simulator.fallback_slowdown, rolls_back=False, save=0.0)
        trace = read(args.trace)
        cluster = Cluster(len(trace.hosts), 1)
        happened, _ = changes(trace, cluster)
        absent = {unit for change in happened if change.at == 0 for unit in change.lost}
        units = [unit for unit in cluster.units() if unit not in absent]
        job = Job(most, stages, 1, Costs.uniform(stages, 1, 1, 1))
        policy = AsTabled(constants, table(simulator, most))
        ours = simulate(policy, Setting(job, cluster, Plans(job), units, 1.0), happened, trace.duration)
        off, as_it_is = (ours.iterations / one.num_steps_complete - 1 for one in (result, stock))
        worst = max(worst, abs(off))
        print(f"{model}: {stages} stages; iterations {stock.num_steps_complete} as it is, {result.num_steps_complete}"
              f" mended, {ours.iterations} ours ({100 * as_it_is:+.2f} %, {100 * off:+.2f} %); fatal failures"
              f" {stock.num_fatal_failures}, {result.num_fatal_failures}, {ours.fatal}")
    return 0 if worst <= 0.05 else 1


if __name__ == "__main__":
    sys.exit(main())
