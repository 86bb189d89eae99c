"""The quickstart's training script: its data, and the validation of what a run leaves behind."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import pytest
import torch

SCRIPT = Path(__file__).parent.parent / "scripts" / "gpt_deepspeed.py"


@pytest.fixture(scope="module")
def gpt() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpt_deepspeed", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpt_deepspeed"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_training_and_validation_share_no_window_and_lose_none(gpt: ModuleType):
    text = torch.arange(16 * 100 + 1, dtype=torch.int64).remainder(251).to(torch.uint8)
    kept, held_out = (gpt.Windows(text, 16, validation) for validation in (False, True))
    assert (len(kept), len(held_out)) == (95, 5)
    assert sorted(kept.starts.tolist() + held_out.starts.tolist()) == list(range(0, 1600, 16))
    assert (
        kept.starts.tolist() == gpt.Windows(text, 16, False).starts.tolist() != sorted(kept.starts.tolist())
    )
    inputs, labels = kept[0]
    start = int(kept.starts[0])
    assert torch.equal(inputs, text[start : start + 16].long())
    assert torch.equal(labels, text[start + 1 : start + 17].long())


def test_text_comes_from_the_standard_library_a_folder_or_a_file(gpt: ModuleType, tmp_path: Path):
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    assert bytes(gpt.read_text(tmp_path).tolist()) == b"firstsecond"
    assert bytes(gpt.read_text(tmp_path / "a.txt").tolist()) == b"first"
    assert len(gpt.read_text(None)) > 1_000_000
    (tmp_path / "none").mkdir()
    with pytest.raises(SystemExit, match="no text"):
        gpt.read_text(tmp_path / "none")


def test_stages_join_to_the_whole_model_whose_validation_loss_is_that_of_chance_before_training(
    gpt: ModuleType, tmp_path: Path
):
    shape = gpt.Shape(length=16, width=8, heads=2, blocks=2, dropout=0.1)
    torch.manual_seed(0)
    whole = torch.nn.Sequential(*(kind(argument) for kind, argument in gpt.layers(shape))).state_dict()
    for stage in (0, 1):
        part = {
            name: value for name, value in whole.items() if (int(name.split(".")[0]) >= 2) == (stage == 1)
        }
        worse = {name: value + 0.5 for name, value in part.items()}
        dump = {"shape": asdict(shape), "initial": part, "parameters": worse}
        torch.save(dump, tmp_path / f"worker-2-{stage}.pt")
    (tmp_path / "text").write_bytes(bytes(range(256)) * 40)
    found = gpt.validate(tmp_path, tmp_path / "text", windows=8)
    assert abs(found["first_validation_loss"] - 5.545) < 0.3
    assert found["final_validation_loss"] != found["first_validation_loss"]
    with pytest.raises(SystemExit, match="train with --dump"):
        gpt.validate(tmp_path / "text")
