"""Which of Megatron-LM's own configurations start: a few of them, of a checkout that MEGATRON_LM names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.backends import test_megatron_lm as gpt

ROOT = Path(__file__).resolve().parents[2]
VERDICTS = {
    "gpt/gpt3_mcore_tp1_pp2": "starts",
    "t5/t5_mcore_tp4_pp1": "starts",
    "gpt/gpt3_mcore_te_tp1_pp4_vp1": "starts",
    "gpt/gpt3_mcore_te_tp4_pp1_qk_layernorm_test_mode": "starts",
}


@pytest.mark.slow
@pytest.mark.skipif("MEGATRON_LM" not in os.environ, reason="MEGATRON_LM does not name a checkout")
def test_configurations_start_or_are_kept_out_by_what_they_are_known_for():
    checkout = Path(os.environ["MEGATRON_LM"])
    known = {name: verdict for name, verdict in VERDICTS.items()
             if (checkout / "tests" / "functional_tests" / "test_cases" / name).exists()}
    assert len(known) >= 3
    environ = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}
    command = [sys.executable, "-W", "ignore", str(ROOT / "scripts" / "field" / "matrix.py"), str(checkout), "--each",
               "--only", *(name.partition("/")[2] for name in known)]
    printed = subprocess.run(command, env=environ, text=True, capture_output=True, timeout=gpt.LIMIT, check=True).stdout
    found = {name: verdict for line in printed.splitlines() if line.partition(" (")[0] in known
             for name, verdict in [(line.partition(" (")[0], line.partition("): ")[2])]}
    assert found == known
