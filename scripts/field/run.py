"""Trains with scripts that nobody here wrote, unchanged, and kills a worker in each kind of moment.

    python scripts/field/run.py KIND CHECKOUT [--needs FOLDER] [--moments forward save] [--folder runs/field]

KIND names the script (`SCRIPTS`), CHECKOUT its repository's folder at the commit that stands there or near it (see
README.md). Prints a line for each run, and ends with 1 unless every run ends well with the losses of the
undisturbed one, bit for bit (`reduction: exact`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
WORKERS = 4
"""Two pipelines of two stages; DeepSpeed numbers workers stage by stage."""


@dataclass(frozen=True)
class Script:
    """A script of a repository.

    Attributes:
        repository: on GitHub.
        commit: that it was tried with.
        path: in the repository.
        moments: where it can be killed: (rank, how often it is there before, since training began).
    """

    repository: str
    commit: str
    path: str
    moments: Mapping[str, tuple[int, int]]


SCRIPTS = {
    "deepspeed-examples": Script(
        "deepspeedai/DeepSpeedExamples", "45b4b7156c8794a3452a5a7d03dbd8d797068569",
        "training/pipeline_parallelism/train.py", {"forward": (3, 10), "log": (0, 3), "comeback": (3, 6)}),
    "gpt-neox": Script(
        "EleutherAI/gpt-neox", "ea7aefd8f8e183256992d9fede4d7c71a46d67a5", "train.py",
        {"forward": (3, 22), "barrier": (2, 2), "save": (0, 2), "evaluation": (1, 2), "log": (0, 9),
         "comeback": (3, 6)}),
    "megatron-deepspeed": Script(
        "deepspeedai/Megatron-DeepSpeed", "4efb479d5317ce9b86096b9d8e3e8030b0b5263b", "pretrain_gpt.py",
        {"forward": (2, 22), "barrier": (1, 2), "save": (0, 2), "evaluation": (2, 2), "log": (3, 5),
         "comeback": (2, 6)}),
}


@dataclass(frozen=True)
class Run:
    """What came of one: exit status, the log, each rank's losses, and the files of its newest checkpoint."""

    status: int
    seconds: float
    log: Path
    losses: Mapping[int, Sequence[str]]
    checkpoint: Sequence[str]


def run(kind: str, checkout: Path, folder: Path, needs: Path | None, fault: str, limit: float) -> Run:
    """Train once in ``folder``, in which the prepared files are."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "FIELD_KIND": kind, "FIELD_CHECKOUT": str(checkout), "FIELD_RECORD": str(folder / "losses"),
        "FIELD_FAULT": fault, "RECYCLE_REDUCTION": "exact",
        "RECYCLE_MAX_RESTARTS": str(int(fault.startswith("comeback"))),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(needs or ""), os.environ.get("PYTHONPATH", "")]))}
    arguments = json.loads((folder.parent / "arguments.json").read_text())
    for file in folder.parent.iterdir():
        if file.is_file() and not (folder / file.name).exists():
            (folder / file.name).symlink_to(file)
    log, begin = folder / "log", time.monotonic()
    command = [str(Path(sys.executable).with_name("recycle")), "run", "--nproc", str(WORKERS), str(HERE / "script.py"),
               str(checkout / SCRIPTS[kind].path), *arguments]
    with log.open("w") as output:
        try:
            status = subprocess.run(command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT,
                                    timeout=limit, check=False).returncode
        except subprocess.TimeoutExpired:
            status = 124
    losses = {int(path.name.partition(".")[0]): path.read_text().splitlines()
              for path in sorted((folder / "losses").glob("*.jsonl"))}  # of a rank the last one that was started
    saved = folder / "checkpoints"
    newest = saved / (saved / "latest").read_text() if (saved / "latest").exists() else saved
    return Run(status, time.monotonic() - begin, log, losses, sorted(path.name for path in newest.glob("*")))


def verdict(found: Run, undisturbed: Run, victim: int | None) -> str:
    """What is wrong with ``found``; nothing if all is well. ``victim``: who is gone; None: it has come back."""
    if found.status:
        return f"exit status {found.status}: {found.log}"
    for rank, lines in undisturbed.losses.items():
        own = found.losses.get(rank, [])
        if rank == victim and len(own) == len(lines):
            return f"rank {rank} was not killed"
        wrong = [line for line, right in zip(own, lines) if line != right]
        if wrong or (rank != victim and len(own) != len(lines)):
            return f"rank {rank} has {len(own)} losses of {len(lines)}, of which {len(wrong)} differ: {wrong[:2]}"
    if found.checkpoint != undisturbed.checkpoint:
        return f"the newest checkpoint has the files {found.checkpoint}"
    return ""


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=SCRIPTS)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--needs", type=Path, help="folder with the packages that the script needs")
    parser.add_argument("--moments", nargs="*", help="default: all of the script's")
    parser.add_argument("--folder", type=Path, default=Path("runs/field"))
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for each run")
    options = parser.parse_args()
    script, checkout = SCRIPTS[options.kind], options.checkout.resolve()
    needs = options.needs.resolve() if options.needs else None
    folder = (options.folder / f"{options.kind}-{time.strftime('%H%M%S')}").resolve()
    folder.mkdir(parents=True)
    path = {"PYTHONPATH": str(needs)} if needs else {}
    made = subprocess.run([sys.executable, str(HERE / "prepare.py"), options.kind, str(checkout), str(folder)],
                          env={**os.environ, "DS_ACCELERATOR": "cpu", **path}, capture_output=True, text=True,
                          check=False)
    if made.returncode:
        print(made.stderr, file=sys.stderr)
        return 2
    print(f"{script.repository} {script.path} (tried with commit {script.commit[:12]})", flush=True)
    undisturbed = run(options.kind, checkout, folder / "undisturbed", needs, "", options.limit)
    lines = undisturbed.losses.get(0, ["nothing"])
    print(f"{'undisturbed':12} status {undisturbed.status}, {undisturbed.seconds:.0f} s, {len(lines)} losses, the last "
          f"{lines[-1]}", flush=True)
    bad = bool(undisturbed.status)
    for moment in options.moments or script.moments:
        rank, count = script.moments[moment]
        found = run(options.kind, checkout, folder / moment, needs, f"{moment}:{rank}:{count}", options.limit)
        wrong = verdict(found, undisturbed, None if moment == "comeback" else rank)
        events = [line for path in (folder / moment).glob("runs/*/events.jsonl") for line in path.open()]
        if not wrong and moment == "comeback" and not any('"joined"' in line for line in events):
            wrong = "nobody came back"
        bad = bad or bool(wrong)
        print(f"{moment:12} rank {rank} killed, {found.seconds:.0f} s: {wrong or 'all losses are equal, bit for bit'}",
              flush=True)
    return int(bad)


if __name__ == "__main__":
    raise SystemExit(main())
