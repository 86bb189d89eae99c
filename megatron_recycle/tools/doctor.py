"""`recycle doctor`: is this host fit for a job that survives failures, and the same as the other hosts?

Checks versions, settings, threads, devices, determinism and services of the operating system, and behind ``--`` a
script with its arguments. The last line without a script is a fingerprint of all that peers must share for `reduction:
exact`: run it on every host and compare.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import ipaddress
import json
import os
import platform
import resource
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from packaging.specifiers import SpecifierSet

from megatron_recycle import config, nccl_settings
from megatron_recycle.config import RecycleConfig
from megatron_recycle.environment import SHORTEST_TOKEN, Launched
from megatron_recycle.errors import ConfigError
from megatron_recycle.membership.failure_domains import judge
from megatron_recycle.membership.placement import placement
from megatron_recycle.membership.shards import anew
from megatron_recycle.tools.job_check import Check, check_job
from megatron_recycle.usage import Parser

PACKAGES = ("torch", "ortools", "deepspeed", "megatron-core")
"""Packages whose versions are shown; the first two are needed."""


def add_arguments(parser: Parser) -> None:
    """Add the arguments of `recycle doctor`: the job's own flags, so that its settings are judged."""
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--stages", type=int, help="pipeline stages of the job, to see which hosts it could lose")
    parser.add_argument("--nproc", type=int, default=1, help="with --stages or a script: workers on each host")
    parser.add_argument("--nnodes", type=int, default=1, help="with --stages or a script: hosts")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="with --stages: processes of a worker")
    parser.add_argument("--sharded", action="store_true",
                        help="with --stages: the optimizer is cut into shards (ZeRO-1, distributed optimizer)")
    parser.behind, parser.folded = "command", config.GROUP
    parser.epilog = ("every setting of a job is a flag, too, as --recycle-reduction exact: docs/configuration.md has "
                     f"them all; {parser.epilog}")
    parser.usage = "%(prog)s [options] [-- SCRIPT ARGUMENTS]"
    config.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print all findings; 0 if none is a failure, else 1."""
    try:
        settings = RecycleConfig.resolve(None, args)
        found = [Check("settings", "ok", f"reduction {settings.reduction}, interface {settings.interface}")]
    except ConfigError as error:
        settings, found = RecycleConfig(), [Check("settings", "fail", str(error))]
    for examine in (check_versions, check_system, check_interface, check_name, check_token, check_torch):
        found.extend(examine(settings))
    if args.stages is not None:
        found.extend(check_hosts(settings, args.stages, args.tensor_parallel, args.nproc, args.nnodes, args.sharded))
    if command := args.command:
        found.extend(check_job(command, args.nproc * args.nnodes))
    failed = any(check.state == "fail" for check in found)
    if args.json:
        print(json.dumps({"ok": not failed, "checks": [check._asdict() for check in found]}, indent=1))
    else:
        for check in found:
            print(f"{check.state:<5} {check.name:<14} {check.text}")
    return 1 if failed else 0


def check_versions(settings: RecycleConfig) -> Iterator[Check]:
    """Python and the packages against the ranges that this package declares."""
    yield Check("python", "ok", f"{platform.python_version()} on {platform.machine()}")
    yield from (_version(name, wanted) for name, wanted in _declared().items())


def _declared() -> dict[str, str]:
    """Package -> range of versions, from this package's metadata; no ranges when it is not installed."""
    ranges = dict.fromkeys(PACKAGES, "")
    with suppress(importlib.metadata.PackageNotFoundError):
        for line in importlib.metadata.requires("megatron-recycle") or ():
            text = line.split(";")[0].strip()
            if (name := next((name for name in PACKAGES if text.startswith(name)), "")):
                ranges[name] = text.removeprefix(name).strip()
    return ranges


def _version(name: str, wanted: str) -> Check:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        if name == "torch":
            return Check(name, "fail", "not installed; pip install torch")
        if name == "ortools":
            return Check(name, "warn", "not installed: plans come from the heuristic alone")
        return Check(name, "ok", f"not installed; pip install '{name}{wanted}' adds it")
    if wanted and not SpecifierSet(wanted).contains(version, prereleases=True):
        return Check(name, "warn", f"{version} is outside the tested range {wanted}")
    return Check(name, "ok", version)


def check_system(settings: RecycleConfig) -> Iterator[Check]:
    """Services of the operating system that launcher and detectors need."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Check("cores", "ok", f"{cores} usable")
    try:
        os.close(os.pidfd_open(os.getpid()))
        yield Check("process exits", "ok", "seen at once (pidfd)")
    except (AttributeError, OSError):
        yield Check("process exits", "fail", "this system has no pidfd, without which recycle run starts nothing; it "
                    "takes Linux 5.3 or newer")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    few = 0 <= files < 1024
    hint = "; raise it (ulimit -n 4096): each pair of workers takes a few" if few else ""
    yield Check("open files", "warn" if few else "ok", f"limit {files}{hint}")


def check_interface(settings: RecycleConfig) -> list[Check]:
    """Whether control services can listen on the interface, and on it alone."""
    address = settings.interface
    try:
        family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError as error:
        text = f"cannot listen on {address}: {error}; set interface to an address of this host"
        return [Check("interface", "fail", text)]
    if address in ("0.0.0.0", "::"):
        return [Check("interface", "warn", f"{address} listens everywhere; name the cluster's own network")]
    return [Check("interface", "ok", address)]


def check_name(settings: RecycleConfig) -> list[Check]:
    """Whether other hosts could reach this host by the address of its own name."""
    name = socket.gethostname()
    try:
        found = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    except OSError as error:
        text = f"{name} is no address here ({error.strerror or error}): give --master-addr an address, not this name"
        return [Check("own name", "warn", text)]
    if all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found):
        text = (f"{name} is {', '.join(found)} here (/etc/hosts): with several hosts give --master-addr an address, "
                "not this name")
        return [Check("own name", "warn", text)]
    return [Check("own name", "ok", f"{name} is {', '.join(found)}")]


def check_hosts(settings: RecycleConfig, stages: int, parts: int, nproc: int, nnodes: int,
                sharded: bool = False) -> list[Check]:
    """Workers of each host of a future job, and whether it survives the loss of any single host."""
    try:
        if nnodes < 1:
            raise ConfigError(f"{nnodes} hosts: give 1 or more")
        grid = placement(stages, parts, nproc * nnodes, nproc)
    except ConfigError as error:
        return [Check("placement", "fail", str(error))]
    hosts = grid.hosts(grid.spreads(settings.placement))
    workers = [(host, " ".join(name for name, on in hosts.items() if on == host)) for host in range(nnodes)]
    nodes = {name: f"node {host}" for name, host in hosts.items()}
    counts = {(stage, part): grid.pipelines for stage in range(stages) for part in range(parts)} if sharded else {}
    verdict = judge(nodes, "node 0", guarded=settings.guard == "memory",
                    tables=anew(nodes, counts, settings.state_copies or grid.pipelines), back=settings.guard != "none")
    state = "warn" if verdict.fatal or nnodes == 1 or grid.pipelines == 1 else "ok"
    return [*(Check(f"node {host}", "ok", names) for host, names in workers), Check("placement", state, verdict.text)]


def check_token(settings: RecycleConfig, environ: Mapping[str, str] | None = None) -> list[Check]:
    """Whether the token in the environment, if any, would be accepted."""
    token = Launched.read(environ).token
    if not token:
        return [Check("token", "ok", "RECYCLE_TOKEN is not set: a job on one host, or under Slurm, makes its own")]
    if len(token) < SHORTEST_TOKEN:
        text = f"RECYCLE_TOKEN has {len(token)} characters, and {SHORTEST_TOKEN} is the least: openssl rand -hex 16"
        return [Check("token", "fail", text)]
    return [Check("token", "ok", f"RECYCLE_TOKEN has {len(token)} characters")]


def check_torch(settings: RecycleConfig, environ: Mapping[str, str] | None = None) -> Iterator[Check]:
    """Threads, devices, communication and determinism as torch reports them, and the fingerprint."""
    environ = os.environ if environ is None else environ
    try:
        import torch
    except ImportError as error:
        yield Check("devices", "fail", f"torch cannot be imported: {error}")
        return
    exact = settings.reduction == "exact"
    yield _threads(torch, environ, exact)
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if len(set(names)) > 1:
        yield Check("devices", "warn", f"different kinds on one host: {', '.join(names)}; exact needs one")
    else:
        yield Check("devices", "ok", f"{len(names)} x {names[0]}" if names else "CPU only")
    yield _communication(torch, bool(names))
    yield from (Check("nccl", "fail" if names else "warn", text) for text in nccl_settings.unsafe(environ))
    yield from _determinism(torch, environ, exact, bool(names))
    yield Check("fingerprint", "ok", _fingerprint(torch, environ, names))


def _threads(torch: Any, environ: Mapping[str, str], exact: bool) -> Check:
    threads = torch.get_num_threads()
    if "OMP_NUM_THREADS" in environ:
        return Check("threads", "ok", f"{threads} per worker (OMP_NUM_THREADS={environ['OMP_NUM_THREADS']})")
    hint = "; exact needs the same on all peers" if exact else ""
    text = f"OMP_NUM_THREADS is not set, torch would take {threads}; recycle run sets 1 for its workers{hint}"
    return Check("threads", "warn" if exact else "ok", text)


def _communication(torch: Any, gpu: bool) -> Check:
    if not torch.distributed.is_available():
        return Check("communication", "fail", "this torch is built without torch.distributed")
    if not torch.distributed.is_gloo_available():
        return Check("communication", "fail", "this torch is built without gloo, which recovery needs")
    if gpu and not torch.distributed.is_nccl_available():
        return Check("communication", "warn", "GPUs without NCCL: gloo would carry their traffic")
    return Check("communication", "ok", "gloo, NCCL" if gpu else "gloo")


def _determinism(torch: Any, environ: Mapping[str, str], exact: bool, gpu: bool) -> Iterator[Check]:
    """Settings that change bits from run to run, and a trial: the same work twice."""
    bad = "fail" if exact else "warn"
    if gpu:
        if environ.get("CUBLAS_WORKSPACE_CONFIG") not in (":4096:8", ":16:8"):
            yield Check("determinism", bad,
                        "cuBLAS may choose other algorithms per run; set CUBLAS_WORKSPACE_CONFIG=:4096:8")
        if torch.backends.cudnn.benchmark:
            yield Check("determinism", bad,
                        "cuDNN picks kernels by timing; set torch.backends.cudnn.benchmark = False")
        if not torch.are_deterministic_algorithms_enabled():
            yield Check("determinism", "warn" if exact else "ok",
                        "exact wants torch.use_deterministic_algorithms(True) in the training script")
    same = _same_twice(torch, "cuda" if gpu else "cpu")
    text = "the same layer twice gives the same bits" if same else "the same layer twice gives different bits"
    yield Check("determinism", "ok" if same else bad, text)


def _same_twice(torch: Any, device: str) -> bool:
    """Whether forward and backward of an embedding and a linear layer repeat bit for bit."""

    def once() -> Any:
        generator = torch.Generator().manual_seed(0)
        table = torch.randn(64, 128, generator=generator).to(device).requires_grad_()
        weight = torch.randn(256, 128, generator=generator).to(device).requires_grad_()
        index = torch.randint(64, (512,), generator=generator).to(device)
        torch.nn.functional.linear(table[index], weight).square().mean().backward()
        return torch.cat([table.grad.flatten(), weight.grad.flatten()])

    return bool(torch.equal(once(), once()))


def _fingerprint(torch: Any, environ: Mapping[str, str], devices: list[str]) -> str:
    """Short digest of all that peers must share: libraries, devices, processor features, threads."""
    threads = environ.get("OMP_NUM_THREADS", "1")  # the launcher's default, not this process's count
    processor = torch.backends.cpu.get_cpu_capability()
    facts = {"torch": torch.__version__, "devices": sorted(set(devices)), "processor": processor, "threads": threads,
             "mkl": torch.backends.mkl.is_available(), "mkldnn": torch.backends.mkldnn.is_available()}
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
    return f"{digest} ({facts['torch']}, {processor}, threads {threads}); equal on all peers for exact"
