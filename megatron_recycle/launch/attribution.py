"""Why a worker's process has failed, as its host shows: the kernel's out-of-memory killer, GPU errors, links that went
down, full disks. With it the GPU's name, and the command that takes a broken node out of Slurm.

All of it is read from /proc, /sys and the kernel's log (GPU memory errors from `nvidia-smi`, where that is installed),
in a thread of its own, after the failure was reported: recovery does not wait for it. Unreadable sources are skipped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import re
import shlex
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_recycle.launch.devices import visible

log = logging.getLogger(__name__)

_SETTLE = 0.5
"""Seconds after a process' end until the kernel has logged its cause."""
_GPU_LIMIT = 15.0
"""Seconds that `nvidia-smi` may take: with a broken GPU it may never answer."""
_FULL = 64 << 20
"""Bytes left on a disk that counts as full."""
_KEPT_LINES = 200
_XIDS: Mapping[int, str] = {
    13: "the program's own error, or a broken GPU", 31: "an address that the program does not have",
    43: "stopped, by an error of the program", 45: "stopped after an error before", 48: "a memory error that cannot be "
    "corrected", 62: "its microcontroller halted", 63: "a memory row was remapped",
    64: "a memory row could not be remapped", 74: "an NVLink error", 79: "it has fallen off the bus",
    92: "too many memory errors that were corrected", 94: "a memory error that was contained",
    95: "a memory error that was not contained", 119: "its system processor does not answer",
    120: "its system processor failed", 121: "a C2C link error", 140: "a memory error that was not recovered"}
"""NVIDIA's common GPU error numbers (Xid)."""
_OF_PROGRAMS = (13, 31, 43, 45)
"""Errors that a program may cause on a healthy GPU."""
_XID = re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)")
_KILLED = re.compile(r"[Oo]ut of memory: Killed process (\d+)")
_DOWN = re.compile(r"(?:\b(\S+): )?(?:NIC )?[Ll]ink (?:is )?[Dd]own\b")
_BROKEN = re.compile(r"Machine Check Exception|Hardware Error|EDAC .*\bUE\b|I/O error, dev \S+", re.IGNORECASE)


@dataclass(frozen=True)
class Gpu:
    """A GPU of this host: its UUID and its PCI address, ``0000:3b:00``."""

    uuid: str
    pci: str

    def __str__(self) -> str:
        return f"{self.uuid} (PCI {self.pci})"


@dataclass(frozen=True)
class Counters:
    """One host at one moment: kills by the out-of-memory killer in each cgroup around this process, links by their name
    and whether they are up, and how often each went down."""

    kills: Mapping[str, int]
    up: Mapping[str, bool]
    downs: Mapping[str, int]


@dataclass(frozen=True)
class Look:
    """Changes on a host between two looks, and the kernel's log meanwhile."""

    before: Counters
    now: Counters
    lines: Sequence[str]


@dataclass(frozen=True)
class Explanation:
    """``causes``, each a line; the ``gpu`` of the worker; ``repair`` takes the node out of service if it is broken."""

    causes: tuple[str, ...]
    gpu: str = ""
    repair: str = ""


class Host:
    """A host's evidence of failures.

    Args:
        root: the file system, for tests.
        environ: of the job's processes: which GPUs they see, and whether Slurm has started them.
        folders: that the workers write to.
    """

    def __init__(self, environ: Mapping[str, str], folders: Sequence[Path] = (), root: Path = Path("/")) -> None:
        self._root = root
        self._environ = environ
        self._folders = tuple(dict.fromkeys([*folders, Path(environ.get("TMPDIR") or "/tmp"), Path("/dev/shm")]))
        self._before = self.counters()
        self._log: int | None = None
        with contextlib.suppress(OSError):
            self._log = os.open(root / "dev" / "kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            os.lseek(self._log, 0, os.SEEK_END)

    def counters(self) -> Counters:
        """The current counters."""
        up, downs = {}, {}
        for card in _children(self._root / "sys" / "class" / "net"):
            if (card / "device").exists():  # a real one
                up[card.name] = _text(card / "operstate") != "down"
                downs[card.name] = _number(card / "carrier_down_count")
        for card in _children(self._root / "sys" / "class" / "infiniband"):
            for port in _children(card / "ports"):
                name = f"{card.name} port {port.name}"
                up[name] = "ACTIVE" in _text(port / "state")
                downs[name] = _number(port / "counters" / "link_downed")
        return Counters(dict(self._kills()), up, downs)

    def look(self) -> Look:
        """Changes since the last look."""
        before, self._before = self._before, self.counters()
        return Look(before, self._before, self._logged())

    def explain(self, look: Look, local_rank: int, pid: int, killed: bool) -> Explanation:
        """The reasons why the process ``pid`` on the device ``local_rank`` may have failed, or was ``killed``."""
        gpu = self.gpu(local_rank)
        broken = [*_gpu_errors(look, gpu), *_links(look), *_machine(look)]
        kills = _out_of_memory(look, pid) if killed else ()
        return Explanation((*kills, *broken, *self._disks()), str(gpu or ""),
                           _drain(self._environ, broken, gpu) if broken else "")

    def gpu(self, local_rank: int) -> Gpu | None:
        """The GPU of a process, as CUDA_VISIBLE_DEVICES and the order of the PCI bus name it; None: there is none."""
        gpus = sorted(self._gpus(), key=lambda gpu: gpu.pci)
        if (named := visible(self._environ)) is not None:
            if local_rank >= len(named):
                return None
            name = named[local_rank]
            return next((gpu for number, gpu in enumerate(gpus)
                         if name == str(number) or gpu.uuid.startswith(name)), None)
        return gpus[local_rank] if local_rank < len(gpus) else None

    def _gpus(self) -> Iterator[Gpu]:
        for folder in _children(self._root / "proc" / "driver" / "nvidia" / "gpus"):
            if (match := re.search(r"GPU UUID:\s*(\S+)", _text(folder / "information"))) is not None:
                yield Gpu(match[1], folder.name.rpartition(".")[0].lower() or folder.name.lower())

    def _kills(self) -> Iterator[tuple[str, int]]:
        """Kills in this process's cgroup and its ancestors, up to the root; version 2 or 1."""
        for line in _text(self._root / "proc" / "self" / "cgroup").splitlines():
            _, controllers, path = (*line.split(":", 2), "", "")[:3]
            if controllers not in ("", "memory"):
                continue
            top, file = ("sys/fs/cgroup", "memory.events") if not controllers else (
                "sys/fs/cgroup/memory", "memory.oom_control")
            parts = [part for part in path.split("/") if part and part != ".."]
            for length in range(len(parts), -1, -1):
                found = re.search(r"^oom_kill (\d+)", _text(self._root.joinpath(top, *parts[:length], file)), re.M)
                if found is not None:
                    yield "/" + "/".join(parts[:length]), int(found[1])

    def _disks(self) -> Iterator[str]:
        for folder in self._folders:
            with contextlib.suppress(OSError):
                stats = os.statvfs(folder)
                left, whole = stats.f_bavail * stats.f_frsize, stats.f_blocks * stats.f_frsize
                if whole and left < min(_FULL, whole / 20):
                    yield f"the disk of {folder} is full ({left >> 20} MiB left)"
                elif stats.f_files and not stats.f_favail:
                    yield f"the disk of {folder} has no room for another file (inodes)"

    def _logged(self) -> list[str]:
        """The kernel's lines since the last look, the latest ones."""
        found: list[str] = []
        while self._log is not None:
            try:
                record = os.read(self._log, 8192)
            except BrokenPipeError:  # older lines were written over
                continue
            except OSError:  # there is no more, or no right to read it
                break
            if not record:
                break
            found.append(record.decode(errors="replace").partition(";")[2].partition("\n")[0])
        return found[-_KEPT_LINES:]


class Attribution:
    """Explains failures, one after the other in a thread of its own.

    Args:
        tell: gets (rank, pid, explanation) in that thread, where a cause was found.
    """

    def __init__(self, host: Host, tell: Callable[[int, int, Explanation], None], settle: float = _SETTLE) -> None:
        self._host = host
        self._tell = tell
        self._settle = settle
        self._queue: queue.SimpleQueue[tuple[int, int, int, bool]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def failed(self, rank: int, local_rank: int, pid: int, killed: bool) -> None:
        """Queue a process that has just failed, or was killed. Does not wait."""
        self._queue.put((rank, local_rank, pid, killed))
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="recycle-attribution", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no more threads on this host: the next failure tries again
                log.warning("recycle: no failure is explained at present: %s", error)
            else:
                self._thread = thread

    def _run(self) -> None:
        while True:
            failures = [self._queue.get()]
            time.sleep(self._settle)
            with contextlib.suppress(queue.Empty):
                while True:  # the host's current state may explain all of them
                    failures.append(self._queue.get_nowait())
            try:
                self._explain(failures)
            except Exception:  # the next ones may be explained all the same
                log.exception("recycle: the failure of rank %s cannot be explained",
                              ", ".join(str(rank) for rank, *_ in failures))

    def _explain(self, failures: Sequence[tuple[int, int, int, bool]]) -> None:
        look = self._host.look()
        for rank, local_rank, pid, killed in failures:
            found = self._host.explain(look, local_rank, pid, killed)
            if found.causes:
                self._tell(rank, pid, found)


def _out_of_memory(look: Look, pid: int) -> Iterator[str]:
    killed = [match[1] for line in look.lines if (match := _KILLED.search(line)) is not None]
    grown = [(path, count - look.before.kills.get(path, count)) for path, count in look.now.kills.items()
             if count > look.before.kills.get(path, count)]
    if str(pid) in killed:
        yield f"the kernel's out-of-memory killer has killed pid {pid} (kernel log)"
    elif grown:
        path, more = grown[0]
        yield (f"the kernel's out-of-memory killer has killed {more} process{'es' * (more > 1)} in the cgroup {path} "
               "(memory.events)")
    elif killed:
        yield f"the kernel's out-of-memory killer has killed pid {', '.join(killed[:4])} (kernel log)"


def _gpu_errors(look: Look, gpu: Gpu | None) -> Iterator[str]:
    """GPU errors that the kernel has logged of this GPU, without memory errors and those that a program may cause."""
    found = dict.fromkeys((match[1].lower(), int(match[2])) for line in look.lines
                          if (match := _XID.search(line)) is not None)
    for pci, number in found:
        if number in _OF_PROGRAMS or (gpu is not None and gpu.pci not in pci):
            continue
        name = gpu.uuid if gpu is not None else f"at PCI {pci}"
        yield f"GPU {name}: Xid {number}, {_XIDS.get(number, 'see the list of NVIDIA')}"
    if gpu is not None and (errors := _memory_errors(gpu)):
        yield f"GPU {gpu.uuid}: {errors} memory errors that cannot be corrected (ECC) since the driver was loaded"


def _links(look: Look) -> Iterator[str]:
    for name, up in look.now.up.items():
        if not up and look.before.up.get(name, up):
            yield f"the link of {name} is down"
        elif (more := look.now.downs[name] - look.before.downs.get(name, look.now.downs[name])) > 0:
            yield f"the link of {name} went down {more} times and is up again"
    for name in dict.fromkeys(match[1] or "a card" for line in look.lines
                              if (match := _DOWN.search(line)) is not None):
        if name.rstrip(":") not in look.now.up:
            yield f"the link of {name} went down (kernel log)"


def _machine(look: Look) -> Iterator[str]:
    """Errors of the machine that the kernel has logged, the first of them."""
    for line in [line for line in look.lines if _BROKEN.search(line)][:1]:
        yield f"the kernel reports: {line[:160]}"


def _drain(environ: Mapping[str, str], causes: Sequence[str], gpu: Gpu | None) -> str:
    """The command that keeps Slurm from using this node again; empty without Slurm."""
    if not environ.get("SLURM_JOB_ID"):
        return ""
    node = environ.get("SLURMD_NODENAME") or socket.gethostname().partition(".")[0]
    reason = causes[0] if gpu is None or gpu.uuid in causes[0] else f"{causes[0]} ({gpu.uuid})"
    return f"scontrol update nodename={shlex.quote(node)} state=drain reason={shlex.quote(reason[:120])}"


def _memory_errors(gpu: Gpu) -> int:
    """Memory errors of a GPU, as `nvidia-smi` counts them; 0 where it is missing or does not answer."""
    if (program := shutil.which("nvidia-smi")) is None:
        return 0
    command = [program, f"--id={gpu.uuid}", "--query-gpu=ecc.errors.uncorrected.volatile.total",
               "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GPU_LIMIT, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    text = done.stdout.strip()
    return int(text) if text.isdecimal() else 0


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except (OSError, ValueError):
        return ""


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if text.isdecimal() else 0
