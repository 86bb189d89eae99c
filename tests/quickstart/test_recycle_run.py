"""`recycle run` with a real DeepSpeed script that is not changed for it, as a user meets it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_recycle.observe.events import read_events

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
LIMIT = 150

HAS_THE_FLAG = """
import argparse, runpy, sys
import megatron_recycle

parser = argparse.ArgumentParser()
megatron_recycle.add_arguments(parser)
_, sys.argv[1:] = parser.parse_known_args()
runpy.run_path({script!r}, run_name="__main__")
"""
TRAINING = ["--length", "16", "--width", "16", "--blocks", "2", "--batch", "2"]


def run(command: list[str], cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", **environ}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=LIMIT, env=environ)


@pytest.mark.night
@pytest.mark.processes
@pytest.mark.timeout(LIMIT + 30)
def test_under_torchrun_the_job_trains_and_one_line_names_recycle_run(tmp_path: Path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command += ["-m", "megatron_recycle", str(SCRIPTS / "gpt_deepspeed.py"), "--iterations", "3", *TRAINING]
    done = run(command, tmp_path, RECYCLE_RUN_DIR=str(tmp_path / "run"))
    assert done.returncode == 0, done.stdout + done.stderr
    told = [line for line in (done.stdout + done.stderr).splitlines() if "recycle run" in line]
    assert len(told) == 1 and "ends the other workers" in told[0]
    events = read_events(tmp_path / "run/events.jsonl")
    assert [event["iteration"] for event in events if event["event"] == "committed"] == [0, 1, 2]


@pytest.mark.night
@pytest.mark.processes
@pytest.mark.timeout(LIMIT + 30)
def test_the_json_file_can_switch_the_plugin_off(tmp_path: Path):
    (tmp_path / "ds.json").write_text(
        '{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "steps_per_print": 1, '
        '"optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "recycle": {"enabled": false}}'
    )
    command = [sys.executable, "-m", "megatron_recycle.cli", "run", "--nproc", "2", "--run-dir", str(tmp_path / "run")]
    training = ["--iterations", "2", "--deepspeed_config", str(tmp_path / "ds.json"), *TRAINING]
    done = run([*command, str(SCRIPTS / "gpt_deepspeed.py"), *training], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "none of them trained with the plugin" in done.stdout
    assert re.findall(r"^steps: (\d+)", (tmp_path / "run/worker-0.log").read_text(), re.MULTILINE) == ["1", "2"]


@pytest.mark.night
@pytest.mark.processes
@pytest.mark.timeout(LIMIT + 30)
def test_a_script_with_our_flags_trains_with_the_plugin_only_if_the_flag_is_given(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(HAS_THE_FLAG.format(script=str(SCRIPTS / "gpt_deepspeed.py")))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    training = ["--iterations", "2", "--log-every", "1", *TRAINING]
    alone = run([*torchrun, "1", str(script), *training, "--stages", "1"], tmp_path,
                RECYCLE_RUN_DIR=str(tmp_path / "without"))
    assert alone.returncode == 0, alone.stdout + alone.stderr
    said = alone.stdout + alone.stderr
    assert "megatron-recycle:" not in said and not (tmp_path / "without").exists()
    given = ["--recycle", "--recycle-reduction", "exact", "--recycle-run-dir", str(tmp_path / "given")]
    with_it = run([*torchrun, "2", str(script), *given, *training], tmp_path)
    assert with_it.returncode == 0, with_it.stdout + with_it.stderr
    assert re.search(r"reduction \.+ exact +--recycle-reduction", with_it.stdout)
    assert [e["iteration"] for e in read_events(tmp_path / "given/events.jsonl") if e["event"] == "committed"] == [0, 1]
