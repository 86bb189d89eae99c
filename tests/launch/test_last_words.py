"""A process that fails before it can tell anybody has said why in its log."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_recycle.launch.worker_logs import last_words

TRACEBACK = "Traceback (most recent call last):\n  File \"train.py\", line 1, in <module>\n"


@pytest.mark.parametrize(("text", "words"), [
    (TRACEBACK + "ModuleNotFoundError: No module named 'x'\n", "ModuleNotFoundError: No module named 'x'"),
    (TRACEBACK + "KeyError: 3\n[rank1]: " + TRACEBACK + "[rank1]: KeyError: 'x'\nbye\n", "KeyError: 'x'"),
    (TRACEBACK + "torch.distributed.DistNetworkError: no route\n", "torch.distributed.DistNetworkError: no route"),
    (TRACEBACK + "AssertionError\n", "AssertionError"),
    (TRACEBACK + "ValueError: 1\nmegatron-recycle: unknown key 'x'\n", "unknown key 'x'"),
    ("python -m megatron_recycle: there is no script x.py\n", "there is no script x.py"),
    ("usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --lrr\n", "unrecognized arguments: --lrr"),
    ("train.py: step 3\n", ""),
    ("ValueError: printed by the script itself, which then ended with 1\n", ""),
    ("", ""),
])
def test_the_end_of_the_last_traceback_is_what_it_says(tmp_path: Path, text: str, words: str):
    log = tmp_path / "worker-1.log"
    log.write_text("x" * 20000 + "\n" + text)
    assert last_words(log) == words


def test_a_log_that_cannot_be_read_says_nothing_and_a_long_text_is_cut(tmp_path: Path):
    assert last_words(tmp_path / "none.log") == ""
    log = tmp_path / "worker-1.log"
    log.write_text(TRACEBACK + "ValueError: " + "y" * 1000)
    assert len(last_words(log)) == 300
