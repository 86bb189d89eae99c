"""Jobs of public repositories, read from their shell scripts and judged by their options (scripts/field)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FIELD = ROOT / "scripts" / "field"
SCRIPT = """#!/bin/bash
#SBATCH --nodes=24
PP_SIZE=12   # of one pipeline
MBS=2
ZERO_STAGE=1
no_pp="false"
ZERO_STAGE=$1
config_json="./ds_config.$SLURM_JOB_ID.json"
cat <<EOT > $config_json
{
  "train_micro_batch_size_per_gpu": $MBS,
  "train_batch_size": $(( MBS * NODES )),
  "zero_optimization": {"stage": $ZERO_STAGE},
  "bf16": {"enabled": true},
}
EOT
ARGS=" \\
    --pipeline-model-parallel-size ${PP_SIZE} \\
    --lr 1e-4 \\
    --deepspeed_config=${config_json} \\
    "
if [ "${no_pp}" = "true" ]; then
ARGS="${ARGS} \\
    --no-pipeline-parallel"
else
ARGS="${ARGS} --checkpoint-activations"
fi
# --universal-checkpoint
CMD="pretrain_gpt.py $ARGS --deepspeed"
"""


@pytest.fixture(autouse=True)
def with_field(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(FIELD))
    before = set(sys.modules)
    yield
    for name in {*sys.modules} - before & {"shell", "deepspeed_jobs"}:
        del sys.modules[name]


def test_variables_branches_and_json_of_a_shell_script_are_followed_without_running_it(tmp_path):
    from shell import ShellScript

    path = tmp_path / "train.slurm"
    path.write_text(SCRIPT)
    script = ShellScript(path)
    assert script.value("pipeline_model_parallel_size") == 12
    assert script.flags["deepspeed"] is True and script.flags["lr"] == "1e-4"
    assert {*script.flags} == {"pipeline_model_parallel_size", "lr", "deepspeed_config", "deepspeed",
                               "checkpoint_activations"}
    assert script.settings == [{"train_micro_batch_size_per_gpu": 2, "train_batch_size": 1,
                                "zero_optimization": {"stage": 1}, "bf16": {"enabled": True}}]


@pytest.mark.parametrize(("settings", "optimizer", "experts", "refused"), [
    ({"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}, "FusedAdam", 1, []),
    ({"prescale_gradients": True, "fp16": {"enabled": True}}, "FusedAdam", 1, []),
    ({"zero_optimization": {"stage": 2}}, "FusedAdam", 1, ["ZeRO 2 and 3"]),
    ({"zero_optimization": {"stage": 1}}, "FusedLamb", 1, ["optimizer FusedLamb with ZeRO-1"]),
    ({"curriculum_learning": {"enabled": True}}, "FusedAdam", 1, ["curriculum_learning"]),
    ({"checkpoint": {"load_universal": True}, "zero_optimization": {"stage": 1}}, "FusedAdam", 1, []),
    ({"checkpoint": {"load_universal": True}}, "FusedAdam", 1, ["checkpoint.load_universal without ZeRO"]),
    ({}, "FusedAdam", 4, ["mixture-of-experts layers"])])
def test_a_jobs_json_is_judged_by_the_plugins_own_rules(settings, optimizer, experts, refused):
    from deepspeed_jobs import judge

    assert judge(settings, optimizer, experts) == ("", refused)


@pytest.mark.slow
@pytest.mark.parametrize(("variable", "stages", "starts"), [
    ("MEGATRON_DEEPSPEED", "2 stages or more", 12), ("BIGSCIENCE", "2 stages or more", 60),
    ("GPT_NEOX", "one stage", 36)])
def test_so_many_jobs_of_a_checkout_start(variable: str, stages: str, starts: int) -> None:
    if variable not in os.environ:
        pytest.skip(f"{variable} does not name a checkout")
    command: list[Any] = [sys.executable, "-W", "ignore", str(FIELD / "matrix.py"), os.environ[variable], "--table"]
    printed = subprocess.run(command, text=True, capture_output=True, timeout=240, check=True).stdout
    assert f"| {stages} | " in printed and f"| **{starts}** |" in printed
