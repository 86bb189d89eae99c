"""`recycle doctor -- SCRIPT ARGUMENTS`: what a newcomer asks first, answered without training."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from megatron_recycle import cli
from megatron_recycle.tools import doctor, job_check
from megatron_recycle.tools.job_check import Check, check_job, check_json

FITS = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "Adam"}, "zero_optimization": {"stage": 1}}


def findings(folder: Path, content: dict) -> list[Check]:
    (folder / "ds.json").write_text(json.dumps(content))
    return list(check_json(folder / "ds.json"))


def test_a_json_that_fits_is_said_to(tmp_path: Path):
    assert [one.state for one in findings(tmp_path, FITS)] == ["ok"]


@pytest.mark.parametrize(("more", "said"), [
    ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage is 3, which is refused: set it to 1 or 0"),
    ({"optimizer": {"type": "OneBitAdam"}}, "use one of torch.optim"),
    ({"flops_profiler": {"enabled": True}}, "flops_profiler is"),
    ({"checkpoint": {"writer": {"type": "FAST"}}}, "checkpoint.writer is"),
    ({"wall_clock_breakdown": True}, "wall_clock_breakdown without steps_per_print"),
    ({"prescale_gradients": True}, "prescale_gradients with ZeRO-1"),
    ({"gradient_predivide_factor": 2.0}, "gradient_predivide_factor is refused: leave it at 1"),
    ({"amp": {"opt_level": "O1"}}, "amp is"),
    ({"recycle": {"reductoin": "exact"}}, 'the nearest known key is "reduction"'),
])
def test_a_key_that_is_refused_is_named_with_the_remedy(tmp_path: Path, more: dict, said: str):
    found = findings(tmp_path, {**FITS, **more})
    assert [one.state for one in found] == ["fail"] and said in found[0].text


def test_what_the_engine_takes_is_not_refused(tmp_path: Path):
    more = {"zero_optimization": {"stage": 0}, "prescale_gradients": True, "gradient_predivide_factor": 2.0,
            "progressive_layer_drop": {"enabled": False}}
    assert [one.state for one in findings(tmp_path, {**FITS, **more})] == ["ok"]


def test_every_section_that_the_engine_refuses_is_known_before():
    source = Path(job_check.__file__).parents[1] / "backends" / "deepspeed" / "support.py"
    table = next(node.value for node in ast.parse(source.read_text(encoding="utf-8")).body
                 if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_GIVEN_UP")
    assert set(ast.literal_eval(table)) <= {key for key, *_ in job_check.REFUSED}


def test_a_plugin_that_is_switched_off_is_a_warning(tmp_path: Path):
    assert "switches the plugin off" in findings(tmp_path, {**FITS, "recycle": {"enabled": False}})[0].text


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_check, "_rehearse", lambda *_: Check("script", "ok", "so far"))


def test_an_engine_without_pipeline_stages_is_a_warning(tmp_path: Path, rehearsed: None):
    script = tmp_path / "train.py"
    script.write_text("engine, *_ = deepspeed.initialize(model=model)\n")
    assert ["is not protected" in one.text for one in check_job([str(script)], 4)] == [True, False]
    script.write_text("model = PipelineModule(layers)\nengine, *_ = deepspeed.initialize(model=model)\n")
    assert [one.state for one in check_job([str(script)], 4)] == ["ok"]


def test_a_json_among_the_arguments_is_judged_and_a_missing_script_is_named(tmp_path: Path, rehearsed: None):
    (tmp_path / "ds.json").write_text(json.dumps({**FITS, "zero_optimization": {"stage": 2}}))
    (tmp_path / "train.py").touch()
    found = check_job([str(tmp_path / "train.py"), f"--deepspeed_config={tmp_path / 'ds.json'}"], 4)
    assert [one.state for one in found] == ["fail", "ok"]
    assert [one.text for one in check_job(["nosuch.py"], 4)] == ["there is no script nosuch.py"]


@pytest.mark.night
@pytest.mark.processes
def test_a_script_is_run_to_where_it_meets_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    """And not further; what it is refused for by then is told."""
    script = tmp_path / "train.py"
    script.write_text("import sys, torch.distributed as dist\n"
                      "if 'bad' in sys.argv:\n"
                      "    from megatron_recycle.errors import UnsupportedError\n"
                      "    raise UnsupportedError('experts: use dense layers')\n"
                      "dist.init_process_group('gloo')\n"
                      "open('too far', 'w')\n")
    monkeypatch.chdir(tmp_path)
    for name in ("check_versions", "check_system", "check_interface", "check_name", "check_token", "check_torch"):
        monkeypatch.setattr(doctor, name, lambda _: [])
    assert cli.main(["doctor", "--nproc", "4", "--", str(script), "--nproc", "9"]) == 0
    assert "nothing is refused up to where ranks meet" in capsys.readouterr().out
    assert cli.main(["doctor", "--", str(script), "bad"]) == 1
    assert "megatron-recycle: experts: use dense layers" in capsys.readouterr().out
    assert not (tmp_path / "too far").exists()


@pytest.mark.slow
@pytest.mark.processes
def test_a_script_that_insists_on_a_gpu_is_judged_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As Megatron-LM's do before they read an option: on a login node, too, people ask whether a job would run."""
    script = tmp_path / "train.py"
    script.write_text("import torch\n"
                      "assert torch.cuda.is_available(), 'Megatron requires CUDA.'\n"
                      "assert torch.cuda.get_device_properties('cuda:0').major >= 8\n"
                      "torch.cuda.set_device(0)\n"
                      "torch.distributed.init_process_group('nccl')\n")
    monkeypatch.chdir(tmp_path)
    run = job_check._run
    monkeypatch.setattr(job_check, "_run", lambda command, *more: run(command, *more) if "--pretend" in command else (
        1, ["AssertionError: Megatron requires CUDA."]))
    (found,) = check_job([str(script)], 4)
    assert found.state == "ok" and "judged without a GPU" in found.text
