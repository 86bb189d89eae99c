"""What is to work with every supported version of megatron-core, and what of it has: the table in docs/versions.md.

`scripts/test.sh --core VERSION` runs these tests and writes what came of them into docs/versions.json. ``python -m
tests.backends.stories`` prints their names, and with ``table`` the table.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

FOLDER = Path("tests") / "backends"
RESULTS = Path(__file__).resolve().parents[2] / "docs" / "versions.json"

STORIES: Mapping[str, str] = {
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
}
"""Each with the test that tells it; one without [parameters] with all of them."""


class Recorder:
    """Writes what came of the stories of a run of pytest into ``path``, for the installed version."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._passed: dict[str, bool] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Called for each phase of each test."""
        test = report.nodeid.rpartition("/")[2]
        for story, name in STORIES.items():
            if (test == name or test.startswith(f"{name}[")) and (report.failed or report.when == "call"):
                self._passed[story] = self._passed.get(story, True) and report.passed

    def pytest_sessionfinish(self) -> None:
        """Stories that were skipped stay as they are written there."""
        if not self._passed:
            return
        found = json.loads(self._path.read_text()) if self._path.exists() else {}
        of_this = found.setdefault(version("megatron-core"), {"stories": {}})
        of_this["python"] = ".".join(map(str, sys.version_info[:2]))
        of_this["torch"] = version("torch").partition("+")[0]
        of_this["stories"].update({story: "passed" if passed else "failed" for story, passed in self._passed.items()})
        self._path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


def table(found: Mapping[str, Any]) -> str:
    """Rows of stories, columns of versions."""
    versions = sorted(found)
    head = ["story", *(f"{one} (Python {found[one]['python']}, torch {found[one]['torch']})" for one in versions)]
    rows = [head, ["---"] * len(head)]
    rows += [[story, *(found[one]["stories"].get(story, "not run") for one in versions)] for story in STORIES]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


if __name__ == "__main__":
    print(table(json.loads(RESULTS.read_text())) if sys.argv[1:] == ["table"] else
          "\n".join(str(FOLDER / name) for name in STORIES.values()))
