#!/usr/bin/env python3
"""Our model of Bamboo beside Bamboo's own simulator, on the same trace.

    git clone https://github.com/uclasystem/bamboo /elsewhere/bamboo
    python scripts/bench/validate_bamboo.py --checkout /elsewhere/bamboo --trace /elsewhere/bamboo/traces/p3-trace.csv

Its simulator is loaded from the checkout as it is (no part of it is here). It takes the times of an iteration from a
table by the number of pipelines; our policy gets the same table, and does not go back to a checkpoint after a fatal
failure, as that simulator does not. Iterations done in the trace's time are compared: at most 5 % apart, or status 1.
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
from megatron_recycle.simulate.cluster import Cluster, changes
from megatron_recycle.simulate.job import Job
from megatron_recycle.simulate.plans import Plans
from megatron_recycle.simulate.policies.bamboo import Bamboo, BambooConstants
from megatron_recycle.simulate.policies.base import STANDS, Course, Setting
from megatron_recycle.simulate.reading import read
from megatron_recycle.simulate.run import simulate

MODELS = ("GPT-2", "ResNet", "GNMT", "VGG", "AlexNet")
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


def theirs(module: ModuleType, model: str, trace: Path) -> tuple[Any, Any]:
    """Bamboo's simulator after the trace, and its result."""
    logging.disable(logging.INFO)
    last = int(trace.read_text(encoding="utf-8").splitlines()[-1].split(",")[0])
    with trace.open(encoding="utf-8") as lines:
        simulator = module.Simulator(model=model, spot_instance_trace=lines)
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
        simulator, result = theirs(module, model, args.trace)
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
        off = ours.iterations / result.num_steps_complete - 1
        worst = max(worst, abs(off))
        print(f"{model}: {stages} stages; iterations {result.num_steps_complete} theirs, {ours.iterations} ours"
              f" ({100 * off:+.2f} %); fatal {result.num_fatal_failures} theirs, {ours.fatal} ours")
    return 0 if worst <= 0.05 else 1


if __name__ == "__main__":
    sys.exit(main())
