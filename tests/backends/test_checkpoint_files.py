"""Files of checkpoints that were cut off, emptied or removed are found without reading them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_recycle.backends.checkpoint_files import unreadable


@pytest.mark.parametrize(("bytes_left", "says"), [
    (None, None), (-1, "is cut off"), (200, "is cut off"), (0, "is empty")])
def test_a_file_that_torch_has_written_is_whole_or_not(tmp_path: Path, bytes_left, says):
    file = tmp_path / "mp_rank_00_model_states.pt"
    torch.save({"weight": torch.zeros(1000)}, file)
    if bytes_left is not None:
        file.write_bytes(file.read_bytes()[:bytes_left])
    why = unreadable([file])
    assert why is None if says is None else why is not None and why == f"{file} {says}"


def test_a_file_that_is_gone_or_shorter_than_its_index_says(tmp_path: Path):
    file = tmp_path / "__0_0.distcp"
    assert unreadable([file]) == f"{file}: No such file or directory"
    file.write_bytes(bytes(10))
    assert unreadable([file]) is None and unreadable([file], {str(file): 10}) is None
    assert unreadable([file], {str(file): 11}) == f"{file} has 10 bytes and should have 11"
