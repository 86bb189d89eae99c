"""What is to work with every supported version of a framework and of torch, and what of it has: docs/versions.md.

`scripts/test.sh --core VERSION`, `--torch VERSION` and `--deepspeed VERSION` run these tests in an environment of these
versions and write what came of them into docs/versions.json. ``python -m tests.backends.stories`` prints the names of
tests, and with ``table`` the tables.
"""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from packaging.version import Version

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "versions.json"

OF_MEGATRON: Mapping[str, str] = {
    "bits of core's own schedule": "test_megatron_recovery.py::test_without_failures_parameters_have_the_bits_of_cores_"
                                   "own_schedule[3-options0-data_parallel0]",
    "killed": "test_megatron_recovery.py::test_a_worker_killed_in_mid_iteration_leaves_the_same_bits",
    "comes back": "test_megatron_joins.py::test_a_killed_worker_is_replaced_and_training_goes_on_with_all[1:1]",
    "tensor parallel, a part killed and back":
        "test_megatron_joins.py::test_a_killed_part_of_a_worker_is_replaced_and_its_other_part_works_again",
    "distributed optimizer": "test_megatron_distributed.py::test_a_killed_workers_shards_live_on_and_all_has_the_bits_"
                             "of_stocks_own[]",
    "virtual pipelines": "test_megatron_virtual.py::test_a_job_that_has_lost_a_worker_ends_with_the_bits_of_stocks_own_"
                         "interleaving[--distributed-optimizer]",
    "two chunks per stage (V)": "test_megatron_vshape.py::test_a_v_that_has_lost_a_worker_ends_with_the_weights_of_the_"
                                "job_without_it[--untied --distributed-optimizer --eval-every 2]",
    "lent layers": "test_megatron_lent.py::test_whoever_runs_a_layer_the_bits_are_the_same",
    "`pretrain_gpt.py`: patch": "test_megatron_lm.py::test_the_patch_applies",
    "`pretrain_gpt.py`: trains as stock":
        "test_megatron_lm.py::test_the_unchanged_script_trains_as_without_the_plugin",
    "`pretrain_gpt.py`: killed": "test_megatron_lm.py::test_the_last_rank_killed_leaves_the_same_numbers",
    "`pretrain_gpt.py`: checkpoints, workers missing":
        "test_megatron_lm.py::test_checkpoints_of_a_job_with_a_worker_missing_are_the_undisturbed_jobs_and_stock_goes_"
        "on[torch_dist-more1]",
    "`pretrain_gpt.py`: written beside training":
        "test_megatron_lm.py::test_checkpoints_that_are_written_beside_training_are_whole_or_given_up",
    "`pretrain_gpt.py`: comes back":
        "test_megatron_lm.py::test_a_worker_comes_back_to_where_the_job_is_and_not_to_its_newest_checkpoint"
        "[torch_dist-more1]",
    "Transformer Engine: killed": "te/test_recovery.py::test_a_worker_killed_in_mid_iteration_leaves_the_same_bits",
    "Transformer Engine: tensor parallel, a part killed":
        "te/test_recovery.py::test_one_process_of_a_tensor_parallel_worker_killed_leaves_the_same_bits",
    "Transformer Engine: comes back":
        "te/test_recovery.py::test_a_killed_worker_comes_back_and_all_end_with_the_same_bits",
    "Transformer Engine: precision-aware optimizer": "te/test_recovery.py::test_a_precision_aware_optimizer_makes_the_"
                                                     "parameters_and_moments_of_core_s_own_schedule",
    "Megatron-Bridge: killed, comes back, checkpoints of stock": "bridge/test_bridge.py::test_a_worker_is_killed_and_"
                                                                 "comes_back_with_the_numbers_and_checkpoints_of_stock",
    "Megatron-Bridge, `recycle run`: killed": "bridge/test_run.py::test_a_kill_leaves_the_numbers_of_torchrun",
    "Megatron-Bridge, `recycle run`: comes back":
        "bridge/test_run.py::test_a_killed_worker_is_started_again_and_comes_back",
}
"""Each with the test that tells it, of tests/backends or of the folder that is named; one without [parameters] with all
of them."""

OF_DEEPSPEED: Mapping[str, str] = {
    "bits of the stock engine": "test_deepspeed_recovery.py::test_without_failures_losses_and_parameters_have_the_"
                                "stock_engines_bits",
    "killed": "test_deepspeed_recovery.py::test_a_worker_killed_in_mid_iteration_leaves_the_same_bits",
    "comes back": "test_deepspeed_joins.py::test_a_killed_worker_is_replaced_and_training_goes_on_with_all",
    "checkpoints": "test_deepspeed_checkpoint.py::test_a_run_goes_on_from_a_checkpoint[fp16]",
    "ZeRO-1, a worker killed": "test_deepspeed_zero.py::test_a_job_of_stocks_moves_to_the_plugin_loses_a_worker_and_"
                               "writes_what_stock_would[kind0-0.0001]",
    "fp16": "test_deepspeed_fp16.py::test_every_stage_skips_the_step_in_which_one_overflowed",
    "tensor parallel, a part killed":
        "test_deepspeed_parts.py::test_one_process_killed_takes_its_worker_out_and_leaves_the_same_bits[1:0.1-1]",
    "two chunks per stage (V)": "test_deepspeed_chunks.py::test_a_killed_worker_is_replaced_and_the_bits_are_those_of_"
                                "stages_with_one_chunk",
    "lent layers": "test_deepspeed_lent.py::test_whoever_runs_a_layer_the_bits_are_the_same",
}
"""Likewise."""

STORIES: Mapping[str, Mapping[str, str]] = {"megatron": OF_MEGATRON, "deepspeed": OF_DEEPSPEED}
"""By framework."""
PACKAGES = ("torch", "megatron-core", "deepspeed")
"""Whose versions a run is of."""


def path_of(test: str) -> str:
    """The name of a story's test for pytest."""
    return f"tests/{test}" if "/" in test.partition("::")[0] else f"tests/backends/{test}"


def of(framework: str, story: str) -> str:
    """The name of a story among those of all frameworks."""
    return f"{framework}: {story}"


def commit() -> str:
    """The commit that the tests are of; one of a changed tree, docs apart, ends in "+"."""
    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=RESULTS.parent, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":(top,exclude)docs")
    return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")


def versions() -> dict[str, str]:
    """Of Python and of what is tested, in this environment."""
    found = {"python": ".".join(map(str, sys.version_info[:2]))}
    for package in PACKAGES:
        try:
            found[package] = version(package).partition("+")[0]
        except PackageNotFoundError:
            found[package] = "none"
    return found


class Recorder:
    """Writes what came of the stories of a run of pytest into ``path``, for the installed versions.

    What is there of another commit goes: all results are of one.
    """

    def __init__(self, path: Path, commit: str) -> None:
        self._path = path
        self._commit = commit
        self._passed: dict[str, bool] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Called for each phase of each test."""
        test = report.nodeid
        for framework, stories in STORIES.items():
            for story, name in zip(stories, map(path_of, stories.values())):
                if (test == name or test.startswith(f"{name}[")) and (report.failed or report.when == "call"):
                    key = of(framework, story)
                    self._passed[key] = self._passed.get(key, True) and report.passed

    def pytest_sessionfinish(self) -> None:
        """Stories that were skipped stay as they are written there."""
        if not self._passed:
            return
        with self._path.open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # runs in several environments may end at once
            file.seek(0)
            text = json.dumps(self._added(json.loads(file.read() or "{}")), indent=1, sort_keys=True)
            file.truncate(0)
            file.write(f"{text}\n")

    def _added(self, found: dict[str, Any]) -> dict[str, Any]:
        if found.get("commit") != self._commit:
            found = {"commit": self._commit, "runs": []}
        own = versions()
        of_this = next((run for run in found["runs"] if run.items() >= own.items()), None)
        if of_this is None:
            of_this = {**own, "stories": {}}
            found["runs"].append(of_this)
        of_this["stories"].update({story: "passed" if passed else "failed" for story, passed in self._passed.items()})
        found["runs"].sort(key=lambda run: [run[name] for name in ("python", *PACKAGES)])
        return found


def table(framework: str, runs: Sequence[Mapping[str, Any]]) -> str:
    """Rows of the stories of ``framework``, columns of the runs that have any of them."""
    stories = STORIES[framework]
    runs = [run for run in runs if any(of(framework, story) in run["stories"] for story in stories)]
    package = {"megatron": "megatron-core", "deepspeed": "deepspeed"}[framework]
    head = ["story", *(f"{run[package]} (torch {run['torch']}, Python {run['python']})" for run in runs)]
    rows = [head, ["---"] * len(head)]
    rows += [[story, *(run["stories"].get(of(framework, story), "not run") for run in runs)] for story in stories]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def passed_with(package: str, runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The versions of ``package`` in runs of which nothing has failed."""
    return sorted({run[package] for run in runs if {*run["stories"].values()} == {"passed"}}, key=Version)


def main(arguments: list[str]) -> None:
    """Print the names of the tests of frameworks, all if none is given; or the tables."""
    if arguments == ["table"]:
        found = json.loads(RESULTS.read_text())
        for framework in STORIES:
            print(f"{table(framework, found['runs'])}\n")
        return
    for framework in arguments or STORIES:
        print("\n".join(map(path_of, STORIES[framework].values())))


if __name__ == "__main__":
    main(sys.argv[1:])
