"""`recycle doctor` says what would make a job fail, and how to mend it."""

from __future__ import annotations

import json
import os

import pytest

from megatron_recycle import RecycleConfig, cli
from megatron_recycle.tools import doctor

torch = pytest.importorskip("torch")


def test_this_host_is_fit_and_the_findings_are_also_json(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in (
        "settings",
        "python",
        "torch",
        "deepspeed",
        "threads",
        "devices",
        "determinism",
        "fingerprint",
    ):
        assert any(line.split()[1] == name for line in lines), name
    assert cli.main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] and {check["state"] for check in found["checks"]} <= {"ok", "warn"}


def test_impossible_settings_and_a_foreign_interface_are_failures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("RECYCLE_TRANSPORT_TIMEOUT", "1")
    assert cli.main(["doctor"]) == 1
    assert (
        "fail  settings       transport_timeout (from RECYCLE_TRANSPORT_TIMEOUT)" in capsys.readouterr().out
    )
    monkeypatch.delenv("RECYCLE_TRANSPORT_TIMEOUT")
    assert cli.main(["doctor", "--recycle-interface", "192.0.2.7"]) == 1
    assert "cannot listen on 192.0.2.7" in capsys.readouterr().out


def test_a_kernel_that_tells_of_no_exits_is_a_failure(monkeypatch: pytest.MonkeyPatch):
    def missing(pid: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", missing)
    found = {check.name: check for check in doctor.check_system(RecycleConfig())}
    assert found["process exits"].state == "fail"


def test_listening_everywhere_is_pointed_out():
    (check,) = doctor.check_interface(RecycleConfig(interface="0.0.0.0"))
    assert check.state == "warn"


def test_a_name_that_leads_nowhere_and_a_short_token_are_pointed_out(monkeypatch: pytest.MonkeyPatch):
    for name, state in (("localhost", "warn"), ("no.such.host.invalid", "warn"), ("192.0.2.7", "ok")):
        monkeypatch.setattr(doctor.socket, "gethostname", lambda name=name: name)
        (check,) = doctor.check_name(RecycleConfig())
        assert check.state == state, check
    for token, state in (("", "ok"), ("secret", "fail"), ("0123456789abcdef", "ok")):
        (check,) = doctor.check_token(RecycleConfig(), {"RECYCLE_TOKEN": token})
        assert check.state == state and (not token or token not in check.text)


def test_unset_threads_matter_only_to_exact():
    for reduction, state in (("exact", "warn"), ("fast", "ok")):
        found = {check.name: check for check in doctor.check_torch(RecycleConfig(reduction=reduction), {})}
        assert found["threads"].state == state
    found = {check.name: check for check in doctor.check_torch(RecycleConfig(), {"OMP_NUM_THREADS": "1"})}
    assert found["threads"].state == "ok"


def test_kernels_that_change_bits_fail_exact_and_warn_fast(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "_same_twice", lambda torch, device: False)
    for reduction, state in (("exact", "fail"), ("fast", "warn")):
        found = doctor.check_torch(RecycleConfig(reduction=reduction))
        assert state in {check.state for check in found if check.name == "determinism"}


def test_a_version_outside_the_declared_range_is_pointed_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "_declared", lambda: {"torch": ">=99", "no-such-package": ""})
    found = {check.name: check for check in doctor.check_versions(RecycleConfig())}
    assert found["torch"].state == "warn" and ">=99" in found["torch"].text
    assert "not installed" in found["no-such-package"].text


def test_a_setting_of_torch_under_which_survivors_die_is_pointed_out():
    found = doctor.check_torch(RecycleConfig(), {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3", "NCCL_NVLS_ENABLE": "0"})
    (check,) = [check for check in found if check.name == "nccl"]
    assert check.state == ("fail" if torch.cuda.is_available() else "warn")
    assert check.text.startswith("TORCH_NCCL_ASYNC_ERROR_HANDLING=3: torch ends the process when a peer has died")
