"""How the hosts of a job find the first one: by the file in the run folder, and by an answer that only this job's
coordinator can give."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_recycle.control.ports import listen
from megatron_recycle.control.wire import SecureChannel
from megatron_recycle.errors import ConfigError, RecycleError
from megatron_recycle.launch import health, meeting, reachability, slurm
from megatron_recycle.launch.meeting import Meeting
from megatron_recycle.launch.worker_command import torchrun_environment
from tests.membership.service import service

TOKEN, ANOTHER = "0123456789abcdef", "fedcba9876543210"


@contextmanager
def coordinator(token: str | None) -> Iterator[str]:
    """Something that listens, and greets each who comes if it has a token; gives its address."""
    with listen("127.0.0.1", 0) as listener:
        listener.settimeout(60.0)
        kept: list[socket.socket] = []

        def greet() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                kept.append(connection)
                if token is not None:
                    connection.sendall(SecureChannel.server(token).greeting())

        thread = threading.Thread(target=greet)
        thread.start()
        host, port = listener.getsockname()
        try:
            yield f"{host}:{port}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in kept:
                connection.close()


def test_an_open_port_is_not_taken_for_this_jobs_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "_CONNECT_LIMIT", 60.0)
    with coordinator(TOKEN) as ours, coordinator(ANOTHER) as theirs, coordinator(None) as store:
        assert reachability.knock(ours, TOKEN) is None
        assert "does not have this job's token" in str(reachability.knock(theirs, TOKEN))
        monkeypatch.setattr(reachability, "_CONNECT_LIMIT", 0.2)
        assert "it is no coordinator" in str(reachability.knock(store, TOKEN))
        with pytest.raises(RecycleError, match="does not answer within 0 s .*recycle run --node-rank 0"):
            reachability.await_coordinator(store, TOKEN, 0.0, print)
    assert "refused" in str(reachability.knock(ours, TOKEN))


def test_one_of_several_coordinators_that_answers_is_enough(tmp_path: Path) -> None:
    """Of those that stand by nobody answers."""
    with listen("127.0.0.1", 0) as listener:
        gone = f"127.0.0.1:{listener.getsockname()[1]}"
    with coordinator(TOKEN) as leads:
        assert reachability.knock(f"{gone},{leads},{gone}", TOKEN) is None
        meeting.publish(tmp_path, Meeting("store", f"{gone},{leads}", TOKEN))
        assert health.ill([tmp_path]) == []
    assert "refused" in str(reachability.knock(f"{gone},{leads}", TOKEN))
    assert len(health.ill([tmp_path])) == 1


def test_a_file_of_an_earlier_job_is_waited_out(tmp_path: Path) -> None:
    with coordinator(TOKEN) as ours, coordinator(ANOTHER) as theirs:
        late = Meeting("slurm-8.0.0", ours, TOKEN, 2)
        for wrong, why in ((Meeting("slurm-7.0.0", theirs, ANOTHER), "is of another job"),
                           (Meeting("slurm-8.0.0", theirs, TOKEN), "nobody of this job answers"), (None, "no .*yet")):
            if wrong is None:
                meeting.withdraw(tmp_path)
            else:
                meeting.publish(tmp_path, wrong)
            with pytest.raises(RecycleError, match=why):
                meeting.await_first(tmp_path, "slurm-8.0.0", 0.0, print)
        timer = threading.Timer(0.1, meeting.publish, (tmp_path, late))
        timer.start()
        assert meeting.await_first(tmp_path, "slurm-8.0.0", 60.0, print) == late
        timer.join()
    assert (tmp_path / meeting.FILE).stat().st_mode & 0o777 == 0o600


def test_a_host_does_not_wait_for_one_that_has_refused(tmp_path: Path) -> None:
    meeting.publish(tmp_path, Meeting("slurm-8.0.0", refusal="nobody can listen there"))
    with pytest.raises(RecycleError, match="the first host has not started: nobody can listen there"):
        meeting.await_first(tmp_path, "slurm-8.0.0", 20.0, print)


@pytest.mark.parametrize("text", ["{", '{"format": "recycle-join", "version": 2, "port": 3}', "[]"])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / meeting.FILE).write_text(text)
    with pytest.raises(ConfigError, match=r"join\.json is damaged"):
        meeting.read(tmp_path)


def test_a_coordinator_may_have_an_ipv6_address(tmp_path: Path) -> None:
    try:
        listener = listen("::1", 0)
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with service(tmp_path, token=TOKEN, listener=listener) as running:
        assert running.address.startswith("[::1]:")
        assert reachability.knock(running.address, TOKEN) is None
        assert Meeting("x", running.address).host == "::1"
        reachability.check_address("--join", running.address)
        environ = torchrun_environment({}, running.address, 1, 0)
        assert environ["MASTER_ADDR"] == "::1" and environ["MASTER_PORT"] == running.address.rpartition(":")[2]
    assert reachability.interface_towards("::1") == "lo"


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    meeting.publish(tmp_path / "elsewhere", Meeting("x"))
    (tmp_path / meeting.FILE).symlink_to(tmp_path / "elsewhere" / meeting.FILE)
    with pytest.raises(ConfigError, match="cannot be read"):
        meeting.read(tmp_path)


STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": "3", "SLURM_STEP_NUM_TASKS": "3",
        "SLURM_PROCID": "2", "SLURM_NNODES": "4"}


@pytest.mark.parametrize(("environ", "step"), [
    ({}, None),
    (STEP, slurm.Hosts(3, 2, "slurm-7.0.0", "runs/slurm-7")),
    ({**STEP, "SLURM_STEP_ID": "1", "SLURM_RESTART_COUNT": "2"}, slurm.Hosts(3, 2, "slurm-7.1.2", "runs/slurm-7.1")),
    ({**STEP, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}, None),
    ({"SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_NTASKS": "4"}, None),  # a batch script of one node
    ({**STEP, "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PTY_PORT": "9"}, None),  # its shell
])
def test_slurm_says_how_many_hosts_there_are(environ: Mapping[str, str], step: slurm.Hosts | None) -> None:
    assert slurm.step_of(environ) == step


@pytest.mark.parametrize(("environ", "why"), [
    ({"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "3"}, "3 nodes, and `recycle run` was started on one"),
    ({**STEP, "SLURM_STEP_ID": "4294967290"}, "4 nodes, and `recycle run` was started on one"),
    ({**STEP, "SLURM_PTY_PORT": "9"}, "3 nodes, and `recycle run` was started on one"),
    ({**STEP, "SLURM_HET_SIZE": "2"}, "heterogeneous"),
])
def test_what_is_not_one_launcher_per_node_is_refused(environ: Mapping[str, str], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        slurm.step_of(environ)


def test_a_host_whose_name_is_loopback_is_refused_where_others_must_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Debian, where /etc/hosts has 127.0.1.1 for the host's own name."""

    def debian(host: str, *rest: object, **more: object) -> list[tuple[object, ...]]:
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1" if host == "n3" else host, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", debian)
    reachability.check_host("n3", several=False)
    reachability.check_host("127.0.0.1", several=True)
    with pytest.raises(ConfigError, match=r"on this host n3 is 127\.0\.1\.1 .*--master-addr"):
        reachability.check_host("n3", several=True)


def test_the_own_address_is_never_loopback() -> None:
    assert reachability.own_address(["127.0.0.1", "no.such.host.invalid"]) in (None, reachability.own_address([]))
    assert not str(reachability.own_address([])).startswith("127.")


def test_slurm_without_its_commands_still_names_the_node_that_started_the_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert slurm.towards({"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_LAUNCH_NODE_IPADDR": "192.0.2.7"}) == ["192.0.2.7"]
    assert os.environ["PATH"] == str(tmp_path)
