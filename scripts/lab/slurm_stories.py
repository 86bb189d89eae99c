#!/usr/bin/env python3
"""The stories of scripts/lab/slurm.sh: what becomes of jobs on a real slurmctld and slurmd when things fail.

Each prints what it has seen, and how long it took; report.json in the lab's folder has the same. Exit status: 0 if
every story went as it should.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BIN = ROOT / ".venv" / "bin"
SCRIPT = ROOT / "scripts/gpt_deepspeed.py"
SCRIPTS = {"deepspeed": SCRIPT, "megatron": ROOT / "scripts/pretrain_gpt_megatron.py"}
LIMIT = 300.0
"""Seconds that any one thing may take."""
HEARTBEAT_S = 10.0
"""heartbeat_timeout, as it is unless a job says otherwise."""
Event = dict[str, Any]
ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "RECYCLE_REDUCTION": "exact",
           "PATH": f"{BIN}:{os.environ['PATH']}"}
CONTROLLER = "10.79.0.254"
"""The machine outside of all nodes: a login or service node."""


class StoryFailed(Exception):
    """Something did not come, or was not as it should be."""


def slurm(*command: str, check: bool = True, environ: Mapping[str, str] | None = None) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT, env=environ)
    if check and done.returncode:
        raise StoryFailed(f"{' '.join(command)}: {done.stderr}")
    return done.stdout + done.stderr


def until(what: str, found: Callable[[], Any], limit: float = LIMIT) -> Any:
    """What ``found`` gives once it gives something."""
    deadline = time.monotonic() + limit
    while not (result := found()):
        if time.monotonic() > deadline:
            raise StoryFailed(f"no {what} within {limit:.0f} s")
        time.sleep(0.1)
    return result


def read(path: Path, name: str) -> list[Event]:
    """The events of this name in a file, which may be written to meanwhile."""
    if not path.exists():
        return []
    records = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [record for record in records if record["event"] == name]


@dataclass
class Job:
    """A job of Slurm's; its folder is where it was submitted."""

    number: str
    folder: Path

    @property
    def run_dir(self) -> Path:
        return self.folder / f"runs/slurm-{self.number}"

    @property
    def output(self) -> str:
        path = self.folder / "out"
        return path.read_text(errors="replace") if path.exists() else ""

    def state(self, name: str = "JobState") -> str:
        found = re.search(rf"\b{name}=(\S+)", slurm("scontrol", "show", "job", "-o", self.number, check=False))
        return found[1] if found else "gone"

    def events(self, name: str) -> list[Event]:
        """Of all coordinators that the job has had; what one that takes over tells again counts once."""
        found = [event for path in (self.run_dir, *sorted(self.run_dir.glob("node-*")))
                 for event in read(path / "events.jsonl", name)]
        once = {json.dumps(event, sort_keys=True): event for event in sorted(found, key=lambda event: event["t"])}
        return list(once.values())

    def event(self, name: str, after: float = 0.0, **fields: Any) -> Event:
        def found() -> Event | None:
            return next((one for one in self.events(name) if one["t"] >= after
                         and all(one.get(key) == value for key, value in fields.items())), None)

        try:
            return until(f"event {name} {fields or ''}", found)
        except StoryFailed as error:
            raise StoryFailed(f"{error}\n{self.output[-3000:]}") from None

    def committed(self, more: int = 5) -> int:
        """Wait for some more iterations; returns the last."""
        before = len(self.events("committed"))
        return int(until(f"{more} more iterations", lambda: (self.events("committed")[before + more:] or [None])[-1]
                         )["iteration"])


def submit(lab: Path, name: str, nodes: str, *arguments: str, options: tuple[str, ...] = (), nproc: int = 2,
           iterations: int = 10**6, framework: str = "deepspeed", **environ: str) -> Job:
    """The quickstart's model on these nodes, by the sbatch script that users have."""
    folder = lab / name
    folder.mkdir()
    count = len(nodes.split(","))
    number = subprocess.run(
        ["sbatch", "--parsable", f"--nodes={count}", f"--nodelist={nodes}", f"--output={folder}/out", *options,
         str(ROOT / f"scripts/slurm/{framework}.sbatch"), str(SCRIPTS[framework]), "--stages", "2",
         "--iterations", str(iterations), *arguments],
        check=True, capture_output=True, text=True, cwd=folder, timeout=LIMIT,
        env={**os.environ, "NPROC": str(nproc), "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
             "PATH": f"{BIN}:{os.environ['PATH']}", **environ}).stdout.strip()
    return Job(number, folder)


def ours(node: int) -> list[int]:
    """The launcher and the workers on a node, in the order in which they were started."""
    found = []
    for pid in slurm("ip", "netns", "pids", f"rclab{node}").split():
        try:
            line = Path("/proc", pid, "cmdline").read_bytes()
        except OSError:
            continue
        if b"recycle\0run" in line or b"-m\0megatron_recycle" in line:
            found.append(int(pid))
    return sorted(found)


def kill(pids: list[int]) -> float:
    """SIGKILL to all; returns when."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return time.time()


def cancel(*jobs: Job) -> None:
    for job in jobs:
        slurm("scancel", job.number, check=False)
    for job in jobs:
        until(f"end of job {job.number}", lambda job=job: job.state() not in ("RUNNING", "COMPLETING"))


def check(what: str, true: bool, detail: object = "") -> None:
    if not true:
        raise StoryFailed(f"{what}: {detail}")


def power_off(node: int) -> float:
    """A whole host is gone: its network, and everything that runs on it, slurmd too. Returns when."""
    slurm("ip", "link", "set", f"rclab-v{node}", "down")
    pids = [int(pid) for pid in slurm("ip", "netns", "pids", f"rclab{node}").split()]
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return time.time()


def power_on(lab: Path, node: int) -> None:
    """The host is back, with nothing of what was on it."""
    slurm("ip", "link", "set", f"rclab-v{node}", "up")
    slurm(str(ROOT / "scripts/lab/cluster.sh"), "node", str(lab.parent), str(node))
    slurm("scontrol", "update", f"NodeName=n{node}", "State=RESUME", check=False)
    until(f"n{node}", lambda: slurm("sinfo", "-h", "-n", f"n{node}", "-o", "%T").strip() == "idle")


def allocate(folder: Path, nodes: str) -> Job:
    """An allocation without a batch script."""
    folder.mkdir()
    told = subprocess.run(["salloc", "--no-shell", "--no-kill", "--exclusive", f"--nodes={len(nodes.split(','))}",
                           f"--nodelist={nodes}"], check=True, capture_output=True, text=True, cwd=folder,
                          timeout=LIMIT).stderr
    return Job(re.search(r"allocation (\d+)", told)[1], folder)  # type: ignore[index]


def reference(lab: Path, losses: dict[int, float], options: Sequence[str]) -> int:
    """Train the same on one host without failures; returns how many of these ``losses`` it has to the last bit."""
    run_dir = lab / "reference"
    slurm(str(BIN / "recycle"), "run", "--nproc", "6", "--run-dir", str(run_dir), str(SCRIPT), *options,
          "--iterations", str(max(losses) + 1), environ=ENVIRON)
    own = {event["iteration"]: event["loss"] for event in read(run_dir / "events.jsonl", "committed")}
    return sum(losses[iteration] == own[iteration] for iteration in losses)


def first_resumed(job: Job, killed: float) -> float:
    """Seconds after which the others trained again."""
    return float(job.event("resumed", after=killed)["t"]) - killed


# Stories. Each returns its figures.


def losses(lab: Path) -> Event:
    """A worker is killed, a step, a node is set DOWN; two hosts are healed; the job is told to go, and goes on."""
    job = submit(lab, "losses", "n1,n2,n3", "--checkpoints", str(lab / "ckpt"), "--save-every", "20", REQUEUE="1",
                 RECYCLE_EMERGENCY_CHECKPOINT=str(lab / "ckpt"))
    began = time.time()
    started = job.event("started")
    figures: Event = {"start_s": started["t"] - began}
    check("no warning of a job with all options", "recycle: warning" not in job.output, job.output)
    job.committed()
    t = kill([job.event("started")["pids"]["1:0"]])
    figures["worker_resumed_s"] = job.event("resumed", after=t)["t"] - t
    job.committed()
    t = kill(ours(3))
    figures["step_resumed_s"] = job.event("resumed", after=t + 0.5)["t"] - t
    check("Slurm keeps the job", job.state() == "RUNNING" and job.state("NodeList") == "n[1-3]", job.state())
    job.committed()
    t = time.time()
    healer = subprocess.Popen([BIN / "recycle", "slurm", "heal", job.number], stdout=(lab / "heal.out").open("w"),
                              stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1",
                                                             "DS_ACCELERATOR": "cpu"})
    figures["healed_by_a_step_s"] = until("two that joined", lambda: job.events("joined")[1:])[0]["t"] - t
    job.committed()
    t = time.time()
    slurm("scontrol", "update", "NodeName=n3", "State=DOWN", "Reason=lab")
    figures["node_down_resumed_s"] = job.event("resumed", after=t)["t"] - t
    check("the allocation shrinks", until("shrunk", lambda: job.state("NodeList") == "n[1-2]"))
    healer.wait(LIMIT)
    t, before = time.time(), len(job.events("joined"))
    healed = slurm(str(BIN / "recycle"), "slurm", "heal", job.number)
    other = Job(re.search(r"Submitted batch job (\d+)", healed)[1], lab / "losses")  # type: ignore[index]
    until("a new host", lambda: len(job.events("joined")) > before)
    figures["healed_by_a_job_s"] = time.time() - t
    last = job.committed()
    t = time.time()
    slurm("scancel", "--signal=TERM", job.number)
    until("saved", lambda: "The state after iteration" in job.output)
    figures["saved_s"] = time.time() - t
    saved = int(re.findall(r"The state after iteration (\d+)", job.output)[-1])
    check("saved what was committed", saved >= last, (saved, last))
    until("requeue", lambda: job.state("Restarts") == "1")
    slurm("scontrol", "update", "NodeName=n3", "State=RESUME", check=False)
    first = until("second life", lambda: [one for one in job.events("committed") if one["t"] > t + 1])[0]
    figures["goes_on_after_s"] = first["t"] - t
    check("goes on from the checkpoint", first["iteration"] == saved + 1, (first["iteration"], saved))
    cancel(job, other)
    check("scancel does not requeue", job.state() == "CANCELLED" and "is not requeued" in job.output, job.state())
    return figures


def neighbours(lab: Path) -> Event:
    """Two jobs with consecutive numbers share their nodes."""
    jobs = [submit(lab, f"neighbour{index}", "n4,n5", nproc=1, iterations=10,
                   options=("--oversubscribe", "--exclusive=user")) for index in range(2)]
    for job in jobs:
        until(f"end of job {job.number}", lambda job=job: job.state() not in ("PENDING", "RUNNING", "COMPLETING"))
        check("ended well", job.state() == "COMPLETED", job.output[-3000:])
    check("consecutive", int(jobs[1].number) == int(jobs[0].number) + 1)
    began = [job.events("started")[0]["t"] for job in jobs]
    return {"began_within_s": abs(began[0] - began[1])}


def first_host(lab: Path) -> Event:
    """All processes on the first host are killed; of another job the first node is set DOWN."""
    job = submit(lab, "first", "n1,n2,n3", "--checkpoints", str(lab / "first-ckpt"), "--save-every", "5")
    job.event("started")
    job.committed(12)
    t = kill(ours(1))
    until("end", lambda: job.state() not in ("RUNNING", "COMPLETING"))
    figures: Event = {"killed_ended_s": time.time() - t, "killed_state": job.state()}
    again = submit(lab, "down", "n1,n2,n3", "--checkpoints", str(lab / "first-ckpt"), "--save-every", "5")
    again.event("started")
    again.committed(12)
    t = time.time()
    slurm("scontrol", "update", "NodeName=n1", "State=DOWN", "Reason=lab")
    until("that nobody trains any more", lambda: not ours(1) + ours(2) + ours(3))
    figures |= {"down_ended_s": time.time() - t, "down_state": again.state(), "down_reason": again.state("Reason")}
    slurm("scancel", again.number, check=False)
    slurm("scontrol", "update", "NodeName=n1", "State=RESUME", check=False)
    return figures


def apart(lab: Path) -> Event:
    """Coordinator and srun are outside: the first host is lost as a whole, healed, and the job trains to its end."""
    return _apart(lab, (), {"INTERFACE": CONTROLLER})


def apart_in_a_job(lab: Path) -> Event:
    """The same, and outside is a batch job of its own, on a node that trains nothing."""
    return _apart(lab, ("sbatch", "--wait", "--nodelist=n5", f"--output={lab}/apart/out", "--wrap"), {})


def _apart(lab: Path, batch: Sequence[str], environ: Mapping[str, str]) -> Event:
    folder = lab / "apart"
    folder.mkdir()
    command = [str(ROOT / "scripts/slurm/apart.sh"), str(SCRIPT), "--stages", "2", "--iterations", "300"]
    with (folder / "out").open("w") as output:
        outside = subprocess.Popen(
            [*batch, shlex.join(command)] if batch else command, cwd=folder,
            stdout=subprocess.DEVNULL if batch else output, stderr=subprocess.STDOUT,
            env={**ENVIRON, "NODES": "3", "NPROC": "2", "SALLOC_OPTIONS": "--nodelist=n1,n2,n3",
                 "SRUN_OPTIONS": "--overlap", **environ})
    try:
        job = Job(until("allocation", lambda: re.findall(r"Granted job allocation (\d+)", Job("", folder).output))[0],
                  folder)
        job.event("started")
        job.committed(12)
        t = power_off(1)
        figures: Event = {"resumed_s": first_resumed(job, t)}
        check("trains again in time", figures["resumed_s"] < HEARTBEAT_S + 6, figures)
        check("both of its workers", len(job.events("decided")[0]["out"]) == 2)
        until("that Slurm has noticed", lambda: job.state("NodeList") == "n[2-3]")
        figures["slurm_noticed_s"] = time.time() - t
        check("Slurm keeps the job", job.state() == "RUNNING", job.state())
        job.committed()
        t = time.time()
        healed = slurm(str(BIN / "recycle"), "slurm", "heal", job.number, environ=ENVIRON)
        until("two that joined", lambda: job.events("joined")[1:])
        figures["healed_s"] = time.time() - t
        figures["status"] = outside.wait(LIMIT)
        check("all iterations", figures["status"] == 0 and "300 iterations committed" in job.output,
              job.output[-3000:] + healed)
        until("the allocation's end", lambda: job.state() not in ("RUNNING", "COMPLETING"))
        losses = {event["iteration"]: event["loss"] for event in job.events("committed")}
        figures["equal_bits"] = f"{reference(lab, losses, ['--stages', '2'])} of {len(losses)}"
    finally:
        outside.terminate()
        outside.wait(60)
    power_on(lab, 1)
    return figures


def etcd(lab: Path) -> Event:
    """An allocation without a script, three etcds in it: the host whose coordinator leads is lost; then srun itself."""
    job, token = allocate(lab / "etcd", "n1,n2,n3"), lab / "token"
    token.write_text(secrets.token_hex(16))
    token.chmod(0o600)
    step = ["srun", f"--jobid={job.number}", "--overlap", "--no-kill", "--kill-on-bad-exit=0", "--wait=0",
            "--nodes=3", "--ntasks=3", "--ntasks-per-node=1"]
    hosts = [f"10.79.0.{node}" for node in (1, 2, 3)]
    members = ",".join(f"{host}:2379" for host in hosts)
    commands = [[*step, "bash", "-c", f"exec {ROOT}/scripts/etcd.sh {','.join(hosts)} $SLURM_PROCID"],
                [*step, BIN / "recycle", "run", "--store", f"etcd://{members}", "--token-file", token, "--nproc", "2",
                 "--run-dir", job.run_dir, SCRIPT, "--stages", "2", "--iterations", str(10**6)]]
    with (job.folder / "out").open("w") as output:
        steps = [subprocess.Popen(command, cwd=job.folder, stdout=output, stderr=subprocess.STDOUT, env=ENVIRON,
                                  start_new_session=True) for command in commands]
    try:
        job.event("started")
        job.committed(12)
        leader = int(job.event("leads")["control"].partition(":")[0].rpartition(".")[2])
        t = power_off(leader)
        figures: Event = {"leader": f"n{leader}", "next_leads_s": job.event("leads", after=t)["t"] - t,
                          "resumed_s": first_resumed(job, t)}
        check("trains again in time", figures["resumed_s"] < HEARTBEAT_S + 6, figures)
        until("that Slurm has noticed", lambda: f"n{leader}" not in slurm("scontrol", "show", "hostnames",
                                                                            job.state("NodeList")).split())
        check("Slurm keeps the job", job.state() == "RUNNING", job.state())
        job.committed()
        os.killpg(steps[1].pid, signal.SIGKILL)  # with its shepherd, which would cancel the step: its machine is lost
        figures["trained_without_srun_s"] = trains_on(job, 60.0)
        done = {event["iteration"] for event in job.events("committed")}
        check("no iteration lost", done == set(range(len(done))), sorted(done))
        losses = {event["iteration"]: event["loss"] for event in job.events("committed") if "loss" in event}
        figures["equal_bits"] = f"{reference(lab, losses, ['--stages', '2'])} of {len(losses)}"
    finally:
        cancel(job)
        for process in steps:
            process.terminate()
            process.wait(60)
    power_on(lab, leader)
    return figures


def trains_on(job: Job, limit: float) -> float:
    """Seconds for which iterations are committed, at most ``limit``."""
    began = latest = time.time()
    count = len(job.events("committed"))
    while time.time() < began + limit and time.time() < latest + 30:
        time.sleep(1)
        if (now := len(job.events("committed"))) > count:
            count, latest = now, time.time()
    return latest - began


def time_limit(lab: Path) -> Event:
    """A job reaches its time limit, saves, and is started again."""
    job = submit(lab, "limit", "n4,n5", "--checkpoints", str(lab / "limit-ckpt"), "--save-every", "50", nproc=1,
                 options=("--time=2", "--signal=TERM@60"), REQUEUE="1",
                 RECYCLE_EMERGENCY_CHECKPOINT=str(lab / "limit-ckpt"))
    began = job.event("started")["t"]
    until("SIGTERM", lambda: "The state after iteration" in job.output)
    figures: Event = {"told_after_s": time.time() - began}
    saved = int(re.findall(r"The state after iteration (\d+)", job.output)[-1])
    until("requeue", lambda: job.state("Restarts") == "1")
    t = time.time()
    first = until("second life", lambda: [one for one in job.events("committed") if one["t"] > t])[0]
    figures |= {"goes_on_after_s": time.time() - t}
    check("goes on from the checkpoint", first["iteration"] == saved + 1, (first["iteration"], saved))
    cancel(job)
    return figures


def told(lab: Path) -> Event:
    """What is started in another way: without options, once per worker, on several nodes without srun."""
    bare = subprocess.run(
        ["sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=2", "--nodelist=n4,n5", "--wait",
         f"--output={lab}/bare.out",
         f"--wrap=srun --ntasks=2 --ntasks-per-node=1 {BIN}/recycle run --nproc 1 {SCRIPT} --stages 2 --iterations 3; "
         f"{BIN}/recycle run --nproc 1 {SCRIPT}; "
         f"srun --no-kill --ntasks=4 {BIN}/recycle run {SCRIPT} --stages 2 --iterations 3"],
        check=False, capture_output=True, text=True, cwd=lab, timeout=LIMIT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"})
    text = (lab / "bare.out").read_text()
    check("bare srun", "srun was started without --no-kill" in text, text)
    check("bare sbatch", "the batch script has no `#SBATCH --no-kill`" in text, text)
    check("no srun", "`recycle run` was started on one of them" in text, text)
    check("one per worker", "hosts=[n4/0,n5/1]" in text and text.count("the job has finished") == 6, text)
    return {"status": bare.returncode}


def megatron(lab: Path) -> Event:
    """A Megatron job on two nodes: one of them loses all of its workers, and training comes to its end."""
    job = submit(lab, "megatron", "n4,n5", iterations=60, framework="megatron")
    job.event("started")
    job.committed(10)
    t = kill(ours(5))
    figures = {"resumed_s": job.event("resumed", after=t + 0.5)["t"] - t}
    until("end", lambda: job.state() not in ("RUNNING", "COMPLETING"))
    check("all iterations", "60 iterations committed" in job.output, job.output[-2000:])
    return figures


STORIES = {"told": told, "megatron": megatron, "neighbours": neighbours, "losses": losses, "time_limit": time_limit,
           "first_host": first_host, "apart": apart,
           "apart_in_a_job": apart_in_a_job, "etcd": etcd}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--list", action="store_true", help="name the stories")
    parser.add_argument("stories", nargs="*", choices=[[], *STORIES], help="default: all")
    args = parser.parse_args()
    if args.list or args.folder is None:
        print("\n".join(f"{name:<12} {story.__doc__}" for name, story in STORIES.items()))
        return 0
    report, failed = {}, False
    for name in args.stories or STORIES:
        lab = args.folder / name
        shutil.rmtree(lab, ignore_errors=True)
        lab.mkdir()
        try:
            report[name] = {key: round(value, 2) if isinstance(value, float) else value
                            for key, value in STORIES[name](lab).items()}
            print(f"ok      {name:<12} {json.dumps(report[name])}", flush=True)
        except (StoryFailed, subprocess.SubprocessError) as error:
            failed = True
            print(f"FAILED  {name:<12} {error}", flush=True)
            slurm("scancel", f"--user={os.environ.get('USER', 'root')}", check=False)
    (args.folder / "report.json").write_text(json.dumps(report, indent=1))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
