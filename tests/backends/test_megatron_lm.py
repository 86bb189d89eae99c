"""`pretrain_gpt.py` of NVIDIA/Megatron-LM itself, on the CPU; MEGATRON_LM names a checkout of the core's version."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from megatron_recycle.control.ports import listen
from tests.nccl_rules.rules import Rules

ROOT = Path(__file__).resolve().parents[2]
PATCHES = {(0, 16): "core_v0.16.1", (0, 17): "core_v0.16.1", (0, 18): "core_v0.18.2", (0, 19): "core_v0.18.2"}
"""By version, the tag in the name of the patch that applies to it."""
NEEDED = ("megatron.core", "six", "regex", "yaml", "triton")
ITERATIONS = 6
LIMIT = 300
"""Seconds after which a job counts as hung; alone on two cores one takes 15 to 40."""
ARGUMENTS = f"""--pipeline-model-parallel-size 2 --num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 32
    --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 16 --train-iters {ITERATIONS} --lr 1e-3
    --min-lr 1e-4 --lr-decay-style cosine --tokenizer-type NullTokenizer --vocab-size 255 --distributed-backend gloo
    --transformer-impl local --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion
    --no-bias-dropout-fusion --no-persist-layer-norm --no-rope-fusion --use-cpu-initialization --eval-iters 1
    --eval-interval 3 --log-interval 1 --attention-backend unfused --distributed-timeout-minutes 2 --num-workers 0
    --split 98,1,1 --attention-dropout 0 --hidden-dropout 0""".split()

UNWRITTEN = {"3", "validation loss at iteration 3"}
"""Lines that one which writes them, and is killed after its third iteration, may have been about to write."""
FIRST: list[str] = []
"""A script that runs all others, and its arguments (tests/te)."""
SHARDED = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather", "--bf16")

pytestmark = [
    pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(3 * LIMIT),
    pytest.mark.skipif("MEGATRON_LM" not in os.environ,
                       reason="MEGATRON_LM does not name a checkout of NVIDIA/Megatron-LM"),
    pytest.mark.skipif(any(find_spec(name.split(".")[0]) is None for name in NEEDED),
                       reason=f"Megatron-LM's scripts need {', '.join(NEEDED)}")]


@pytest.fixture(scope="module")
def checkout() -> Path:
    return Path(os.environ["MEGATRON_LM"])


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """This test's own source in Megatron's indexed format, one document per line; the path without its endings."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = tmp_path_factory.mktemp("data") / "text_document"
    builder = IndexedDatasetBuilder(str(prefix) + ".bin", dtype=numpy.uint16)
    for line in 20 * Path(__file__).read_bytes().splitlines(keepends=True):
        builder.add_item(torch.frombuffer(bytearray(line), dtype=torch.uint8).to(torch.int32))
        builder.end_document()
    builder.finalize(str(prefix) + ".idx")
    return prefix


def start(launcher: Sequence[str], checkout: Path, arguments: Sequence[str],
          through: Sequence[str] = ()) -> subprocess.Popen[str]:
    """``through``: a script that runs Megatron-LM's."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCHDYNAMO_DISABLE": "1",
               "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    under_rules = "megatron_recycle.cli" in launcher and Rules.of_all() is not None
    over = [str(ROOT / "tests" / "nccl_rules" / "script.py"), "megatron"] if under_rules else []
    command = [sys.executable, "-W", "ignore", "-m", *launcher, *over, *FIRST,
               str(ROOT / "scripts" / "megatron_cpu.py"), *through, str(checkout / "pretrain_gpt.py"), *ARGUMENTS,
               *arguments]
    return subprocess.Popen(command, env=environ, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def stock(checkout: Path, *arguments: str, processes: int = 4, through: Sequence[str] = ()) -> str:
    """What a run without the plugin prints."""
    launcher = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(processes))
    return ended(start(launcher, checkout, arguments, through))


def recycled(folder: Path, checkout: Path, *arguments: str, kill: tuple[str, int] | None = None,
             processes: int = 4, chaos: Path | None = None, through: Sequence[str] = ()) -> str:
    """What the workers of a run under `recycle run` print; ``kill``: a process, and the iteration after which."""
    hurting = () if chaos is None else ("--chaos", str(chaos))
    launcher = ("megatron_recycle.cli", "run", "--nproc", str(processes), "--run-dir", str(folder), *hurting)
    job = start(launcher, checkout, arguments, through)
    try:
        if kill is not None:
            _kill(folder / "events.jsonl", *kill)
        (folder / "screen.txt").write_text(ended(job))
    finally:
        job.kill()
    return "".join(path.read_text() for path in sorted(folder.glob("worker-*.log")))


def ended(job: subprocess.Popen[str], status: int = 0) -> str:
    try:
        printed = job.communicate(timeout=LIMIT)[0]
    finally:
        job.kill()
    assert job.returncode == status, printed[-4000:]
    return printed


def _kill(events: Path, worker: str, after: int) -> None:
    limit = time.monotonic() + LIMIT
    while time.monotonic() < limit:
        seen = [json.loads(line) for line in events.read_text().splitlines()] if events.exists() else []
        if any(event["event"] == "committed" and event["iteration"] == after for event in seen):
            pids = next(event["pids"] for event in seen if event["event"] == "started")
            os.kill(pids[worker], signal.SIGKILL)
            return
        time.sleep(0.02)
    raise AssertionError(f"iteration {after} was not committed in time")


def come_back(folder: Path, checkout: Path, worker: str, after: int, *arguments: str, processes: int,
              forever: Sequence[str] = ("--mock-data", "--train-iters", "100000"), through: Sequence[str] = ()) -> str:
    """A job whose ``worker`` is killed after iteration ``after`` and started again, until it has trained with the
    others for 10 iterations; what the workers print. Peers compare all they hold in every iteration."""
    launcher = ("megatron_recycle.cli", "run", "--nproc", str(processes), "--run-dir", str(folder),
                "--show", "none")  # nobody reads its screen before it ends
    job = start(launcher, checkout, (*forever, *arguments), through)
    events = folder / "events.jsonl"
    try:
        _kill(events, worker, after)
        joined = _wait(events, job, lambda event: event["event"] == "joined" and event["worker"] == worker)
        last = joined["iteration"] + 10
        _wait(events, job, lambda event: event["event"] == "committed" and event["iteration"] == last)
        job.send_signal(signal.SIGINT)
        job.communicate(timeout=LIMIT)
    finally:
        job.kill()
    told = [json.loads(line) for line in events.read_text().splitlines()]
    assert [event["worker"] for event in told if event["event"] == "suspected"] == [worker]  # and nobody else
    return "".join(path.read_text() for path in sorted(folder.glob("worker-*.log")))


def _wait(events: Path, job: subprocess.Popen[str], wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    limit = time.monotonic() + LIMIT
    while time.monotonic() < limit and job.poll() is None:
        for line in events.read_text().splitlines(keepends=True):
            if line.endswith("\n") and wanted(event := json.loads(line)):
                return event
        time.sleep(0.1)
    raise AssertionError(f"waited in vain; the job has {'ended' if job.poll() is not None else 'not ended'}")


def losses(printed: str) -> dict[str, tuple[float, float]]:
    """Iteration -> (loss, gradient norm), and "validation" lines -> (loss, perplexity)."""
    found = {match[1]: (float(match[2]), float(match[3])) for match in re.finditer(
        r" iteration +(\d+)/.* lm loss: (\S+) \|.* grad norm: (\S+) \|", printed)}
    found |= {match[1]: (float(match[2]), float(match[3])) for match in re.finditer(
        r"(validation loss at .*?) \| lm loss value: (\S+) \| lm loss PPL: (\S+) \|", printed)}
    return found


def patch() -> Path:
    from megatron_recycle.backends.megatron.version import release

    return ROOT / "patches" / f"megatron-lm-{PATCHES[release()[:2]]}.patch"


def test_the_patch_applies(checkout):
    subprocess.run(["git", "apply", "--check", str(patch())], cwd=checkout, check=True)


def consumed(printed: str) -> list[tuple[int, int]]:
    """(iteration, samples consumed) of every log line."""
    lines = re.findall(r" iteration +(\d+)/.*?consumed samples: +(\d+)", printed)
    return [(int(iteration), int(samples)) for iteration, samples in lines]


def test_the_unchanged_script_trains_as_without_the_plugin(checkout, text, tmp_path):
    options = ("--data-path", str(text), "--overlap-grad-reduce")
    expected = losses(stock(checkout, *options))
    assert len(expected) == ITERATIONS + 4
    printed = recycled(tmp_path, checkout, *options)
    for option in ("rerun_mode validate_results", "overlap_grad_reduce"):  # which is set here, and the default
        assert printed.count(f"{option} is off under recycle") == 1
    found = losses(printed)
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert found[key] == pytest.approx(values, rel=1e-5), key  # sums for the log are in another order
    assert printed.count("| live: 4/4 | rerouted: 0 |") == ITERATIONS
    assert consumed(printed) == [(iteration, 16 * iteration) for iteration in range(1, ITERATIONS + 1)]


def test_the_last_rank_killed_leaves_the_same_numbers(checkout, text, tmp_path, monkeypatch):
    # Dropout on: it comes from Megatron's own generators. Waiting for each other's norms and not, it is the same.
    options = ("--data-path", str(text), "--attention-dropout", "0.1", "--hidden-dropout", "0.1",
               "--timing-log-level", "2", "--timing-log-option", "all", "--logging-level", "20",
               "--exit-duration-in-mins", "60", "--exit-signal-handler",  # they ask all ranks in each iteration
               "--log-timers-to-tensorboard", "--log-num-zeros-in-grad", "--log-throughput",
               "--log-memory-interval", "1")
    monkeypatch.setenv("RECYCLE_REDUCTION", "exact")
    calm = losses(recycled(tmp_path / "calm", checkout, *options))
    monkeypatch.setenv("RECYCLE_STEP", "staggered")
    printed = recycled(tmp_path / "killed", checkout, *options, kill=("1:1", 2))
    found = losses(printed)
    assert {*calm} - {*found} <= UNWRITTEN
    assert found == {key: calm[key] for key in found}
    assert "| live: 3/4 | rerouted: 4 |" in printed
    # The user sees what the log has, whoever writes it, and nothing twice.
    assert losses((tmp_path / "killed" / "screen.txt").read_text()) == found
    told = sorted(consumed(printed))  # of two workers
    assert told == [(iteration, 16 * iteration) for iteration, _ in told] and told[-1][0] == ITERATIONS
    # The victim wrote the times too; now another worker does.
    assert printed.count("times across ranks (ms):") >= ITERATIONS
    assert "rank  3:" in printed and "rank  2:" in printed


@pytest.mark.night
@pytest.mark.parametrize("more", [(), SHARDED])
def test_layers_are_lent_after_a_worker_is_killed_and_the_numbers_are_the_same(more, checkout, text, tmp_path,
                                                                               monkeypatch):
    """The job finds by itself which, with costs that do not depend on how busy the machine is."""
    for name, value in {"REDUCTION": "exact", "LEND": "auto", "COSTS": "200,220,180", "PLANNER_BUDGET": "0.5",
                        "HORIZON": "1e6"}.items():
        monkeypatch.setenv(f"RECYCLE_{name}", value)
    options = ("--data-path", str(text), "--attention-dropout", "0.1", "--hidden-dropout", "0.1", "--num-layers", "8",
               "--train-iters", "60", "--eval-interval", "30", *more)
    calm = losses(recycled(tmp_path / "calm", checkout, *options))
    found = losses(recycled(tmp_path / "killed", checkout, *options, kill=("1:1", 2)))
    assert {*calm} - {*found} <= {"3", "4"}
    assert found == {key: calm[key] for key in found}
    told = [json.loads(line) for line in (tmp_path / "killed" / "events.jsonl").read_text().splitlines()]
    lends = [event["digest"] for event in told if "lending" in event]
    assert lends and lends[-1] in [event["digest"] for event in told if event["event"] == "adopted"]


def test_a_tensor_parallel_process_killed_leaves_the_numbers_of_a_run_without_the_plugin(checkout, text, tmp_path):
    options = ("--data-path", str(text), "--tensor-model-parallel-size", "2", "--calculate-per-token-loss")
    expected = losses(stock(checkout, *options, processes=8))
    printed = recycled(tmp_path, checkout, *options, kill=("0:1.0", 2), processes=8)
    found = losses(printed)
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert found[key] == pytest.approx(values, rel=1e-4), key
    assert "| live: 3/4 | rerouted: 4 |" in printed
    assert "this one (0:1.1) has no work" in printed


INTERLEAVED = ("--num-virtual-stages-per-pipeline-rank", "2")


@pytest.mark.night
@pytest.mark.parametrize(("kind", "more"), [("torch", ()), ("torch_dist", SHARDED)])
def test_virtual_pipelines_train_through_a_failure_as_stock_which_goes_on_from_their_checkpoint(
        kind, more, checkout, text, tmp_path, monkeypatch):
    monkeypatch.setenv("RECYCLE_REDUCTION", "exact")
    options = ("--data-path", str(text), "--ckpt-format", kind, *INTERLEAVED, *more)
    expected, saved = losses(stock(checkout, *options)), tmp_path / "checkpoints"
    script = tmp_path / "script.chaos"
    script.write_text("kill 1:1 --at-iteration 2 --phase backward\n")
    printed = recycled(tmp_path / "killed", checkout, *options, "--save", str(saved), "--save-interval", "4",
                       chaos=script)
    assert "overlap_p2p_comm is off under recycle" in printed and "| live: 3/4 |" in printed
    found = losses(printed)
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert found[key] == pytest.approx(values, rel=1e-3 if more else 1e-4), key  # a digit of a norm in 16 bits
    (saved / "latest_checkpointed_iteration.txt").write_text("4")
    found = losses(stock(checkout, *options, "--load", str(saved)))
    for iteration in "56":
        assert found[iteration][1] == pytest.approx(expected[iteration][1], rel=1e-4)


@pytest.mark.night
@pytest.mark.parametrize("more", [(), ("--untie-embeddings-and-output-weights", *SHARDED)], ids=["tied", "shards"])
def test_a_v_goes_on_from_a_checkpoint_of_stages_in_one_piece_through_a_failure_and_stock_from_its_own(
        more, checkout, text, tmp_path, monkeypatch):
    monkeypatch.setenv("RECYCLE_REDUCTION", "exact")
    by_parameter = ("--dist-ckpt-optim-fully-reshardable",) if more else ()
    options = ("--data-path", str(text), "--ckpt-format", "torch_dist", "--save-interval", "2", *more, *by_parameter)
    flat, saved = tmp_path / "flat", tmp_path / "saved"
    expected = losses(recycled(tmp_path / "calm", checkout, *options, "--save", str(flat)))
    (flat / "latest_checkpointed_iteration.txt").write_text("2")
    monkeypatch.setenv("RECYCLE_CHUNKS", "2")
    script = tmp_path / "script.chaos"
    script.write_text("kill 1:1 --at-iteration 2 --phase backward\n")
    printed = recycled(tmp_path / "killed", checkout, *options, "--load", str(flat), "--save", str(saved), chaos=script)
    assert "| live: 3/4 |" in printed
    found = losses(printed)
    assert "3" in found and "6" in found and "1" not in found
    for key in found:  # Megatron's second loss after a checkpoint is a mean of two
        assert found[key][1] == pytest.approx(expected[key][1], rel=1e-4), key
    (saved / "latest_checkpointed_iteration.txt").write_text("4")
    found = losses(stock(checkout, *options, "--load", str(saved)))
    for iteration in "56":
        assert found[iteration][1] == pytest.approx(expected[iteration][1], rel=1e-4)


@pytest.mark.parametrize(("kind", "more"), [
    ("torch", ()), ("torch_dist", ()),
    *[pytest.param(*case, marks=pytest.mark.night) for case in [
        ("torch", SHARDED), ("torch_dist", SHARDED),
        ("torch_dist", (*SHARDED, "--dist-ckpt-optim-fully-reshardable")),
        ("torch_dist", (*SHARDED, "--dist-ckpt-optim-fully-reshardable",
                        "--distrib-optim-fully-reshardable-mem-efficient"))]]])
def test_checkpoints_of_a_job_with_a_worker_missing_are_the_undisturbed_jobs_and_stock_goes_on(
        kind, more, checkout, text, tmp_path, monkeypatch):
    monkeypatch.setenv("RECYCLE_REDUCTION", "exact")
    options = ("--data-path", str(text), "--ckpt-format", kind, *more)
    saves = (*options, "--save-interval", "2")
    calm, saved = tmp_path / "calm-checkpoints", tmp_path / "checkpoints"
    expected = losses(recycled(tmp_path / "calm", checkout, *saves, "--save", str(calm)))
    # 0:1 would write all of its stage, and 1:0 gives the checkpoint its name once 0:0 is gone.
    script = tmp_path / "script.chaos"
    script.write_text("kill 0:1 --at-iteration 1 --phase save\nkill 0:0 --at-iteration 3 --phase saved\n")
    printed = recycled(tmp_path / "killed", checkout, *saves, "--save", str(saved), chaos=script)
    for iteration in (2, 4, 6):
        assert f"successfully saved checkpoint from iteration {iteration:7d}" in printed
    assert "| live: 2/4 |" in printed
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == "6"
    assert not list(saved.glob(".*")), "tries"
    for iteration in (4, 6):
        one, other = (loaded(folder / f"iter_{iteration:07d}", kind) for folder in (calm, saved))
        assert differing(one, other) == []
    (saved / "latest_checkpointed_iteration.txt").write_text("4")
    found = losses(stock(checkout, *options, "--load", str(saved)))
    for iteration in "56":
        # Not the loss: Megatron's first line after a restart leaves its sum to the second.
        assert found[iteration][1] == pytest.approx(expected[iteration][1], rel=1e-4)


def test_checkpoints_that_are_written_beside_training_are_whole_or_given_up(checkout, text, tmp_path, monkeypatch):
    """A worker dies while that of iteration 4 is written, or right after; the others write the next one."""
    monkeypatch.setenv("RECYCLE_REDUCTION", "exact")
    options = ("--data-path", str(text), "--ckpt-format", "torch_dist", "--save-interval", "2", "--async-save",
               "--use-persistent-ckpt-worker")
    calm, saved = tmp_path / "calm-checkpoints", tmp_path / "checkpoints"
    recycled(tmp_path / "calm", checkout, *options, "--save", str(calm))
    script = tmp_path / "script.chaos"
    script.write_text("kill 1:1 --at-iteration 4 --phase forward\n")
    printed = recycled(tmp_path / "killed", checkout, *options, "--save", str(saved), chaos=script)
    assert printed.count("scheduled an async checkpoint save") == 3 and "| live: 3/4 |" in printed
    assert (saved / "latest_checkpointed_iteration.txt").read_text() == "6"
    names = {path.name for path in saved.iterdir()} - {"latest_checkpointed_iteration.txt"}
    assert ("iter_0000004" in names) != ("the checkpoint of iteration 4, which was being written" in printed)
    assert names - {"iter_0000004"} == {"iter_0000002", "iter_0000006"}, "and no tries"
    for name in names:
        one, other = (loaded(folder / name, "torch_dist") for folder in (calm, saved))
        assert one.keys() == other.keys() and not [key for key in one if not alike(one[key], other[key])]


@pytest.mark.parametrize(("options", "copies"), [
    (("--ckpt-format", "torch"), 2),
    *(pytest.param(("--ckpt-format", *options), copies, marks=pytest.mark.night) for options, copies in [
        (("torch_dist", "--async-save", "--use-persistent-ckpt-worker"), 2),
        (("torch", *SHARDED), 2), (("torch", *SHARDED), 1), (("torch_dist", *SHARDED), 2),
        (("torch_dist", *SHARDED), 1), (("torch_dist", *SHARDED, "--dist-ckpt-optim-fully-reshardable"), 2),
        (("torch", *INTERLEAVED), 2), (("torch_dist", *SHARDED, *INTERLEAVED), 1)])])
def test_a_stage_whose_last_worker_is_lost_comes_back_from_the_newest_checkpoint_in_the_same_job(
        options, copies, checkout, text, tmp_path, monkeypatch):
    """The loops of those that are left go on where they are; the iterations since the checkpoint are made again, with
    the rates that they had, and the process that comes for the stage goes through its own loop. With one copy of each
    shard of the distributed optimizer one failure is enough, and who is left of the stage loads both."""
    monkeypatch.setenv("RECYCLE_REDUCTION", "exact")
    monkeypatch.setenv("RECYCLE_STATE_COPIES", str(copies))
    options = ("--data-path", str(text), *options, "--save-interval", "2", "--attention-dropout", "0.1")
    calm, saved = tmp_path / "calm-checkpoints", tmp_path / "checkpoints"
    expected = losses(recycled(tmp_path / "calm", checkout, *options, "--save", str(calm)))
    script = tmp_path / "script.chaos"
    script.write_text("kill 0:1 --at-iteration 1 --phase forward\n" * (copies > 1)
                      + "kill 1:1 --at-iteration 5 --phase backward\n")
    printed = recycled(tmp_path / "killed", checkout, *options, "--save", str(saved), chaos=script)
    told = [json.loads(line) for line in (tmp_path / "killed" / "events.jsonl").read_text().splitlines()]
    (back,) = [event for event in told if event["event"] == "restored"]
    assert ("shards" in back) == (copies == 1)
    assert (back["stages"], back["from"]) == ([1], {"1": "checkpoint"}) and back["iteration"] == 3
    found = losses(printed)
    assert found["6"] == expected["6"] and found == {key: expected[key] for key in found}
    kind = options[3]
    assert differing(*(loaded(folder / "iter_0000006", kind) for folder in (calm, saved))) == []


@pytest.mark.parametrize("kind, cut", [
    ("torch", "mp_rank_00_001/*.pt"), pytest.param("torch_dist", "*.distcp", marks=pytest.mark.night)])
def test_a_host_with_the_last_copies_of_a_stage_is_lost_and_the_other_goes_on_from_the_checkpoint(
        kind, cut, checkout, text, tmp_path, monkeypatch):
    """On one pipeline in the place of two, with the same batch: losses agree to rounding. The newest checkpoint was cut
    off meanwhile, so that it is the one before."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(checkout), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("LOSES", "3 5")  # both copies of stage 1 are on the second host
    monkeypatch.setenv("CUTS", str(tmp_path / "saved" / "iter_0000004" / cut))
    for name, value in {"TOKEN": "a token of two hosts", "PLACEMENT": "framework", "GUARD": "none"}.items():
        monkeypatch.setenv(f"RECYCLE_{name}", value)
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    saved = ("--save", str(tmp_path / "saved"), "--load", str(tmp_path / "saved"))
    options = ("--data-path", str(text), "--ckpt-format", kind, "--save-interval", "2", *saved)
    hosts = [start(("megatron_recycle.cli", "run", "--nproc", "2", "--nnodes", "2", "--node-rank", str(node),
                    "--master-addr", "127.0.0.1", "--master-port", str(port), "--run-dir", str(tmp_path / "run"),
                    "--job-restarts", "1"), checkout, options, [str(Path(__file__).with_name("lost_host_gpt.py"))])
             for node in (1, 0)]
    try:
        told = ended(hosts[1])
    finally:
        for host in hosts:
            host.kill()
            host.wait()
    assert "restart 1 of 1: the script starts again with 2 workers (1 pipeline, 8 micro-batches of each)" in told
    assert f"goes on from the checkpoint 2 in {tmp_path}/saved, since newer ones (4) cannot be read" in told
    (before,) = (tmp_path / "run").glob("before-*")
    first, second = (
        {event["iteration"]: event["loss"] for event in map(json.loads, (folder / "events.jsonl").open())
         if event["event"] == "committed"} for folder in (before, tmp_path / "run"))
    assert sorted(first) == [0, 1, 2, 3, 4] and sorted(second) == [0, 1, 2, 3]  # counted from the checkpoint on
    assert [second[0], second[2]] == pytest.approx([first[2], first[4]], rel=1e-5)


def loaded(place: Path, kind: str) -> dict[str, Any]:
    """All that a checkpoint holds, but for arguments of the run."""
    if kind == "torch":
        found = {str(path.relative_to(place)): torch.load(path, weights_only=False)
                 for path in sorted(place.rglob("*.pt"))}
        for one in found.values():
            one.pop("args", None)  # not in what the distributed optimizer has of its own
        return found
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(place)
    state: dict[str, Any] = {
        name: torch.empty(of.size, dtype=of.properties.dtype) for name, of in reader.read_metadata()
        .state_dict_metadata.items() if isinstance(of, TensorStorageMetadata)}
    load(state, storage_reader=reader, no_dist=True)
    from megatron.core.dist_checkpointing import load_common_state_dict

    common = load_common_state_dict(str(place))
    del common["args"]
    return {**state, "common": common}


@pytest.mark.parametrize("more", [(), pytest.param(SHARDED, marks=pytest.mark.night)])
def test_a_sample_that_nobody_can_read_leaves_a_last_checkpoint_from_which_stock_goes_on(more, checkout, tmp_path,
                                                                                        monkeypatch):
    monkeypatch.setenv("RECYCLE_REDUCTION", "exact")
    calm = tmp_path / "calm-checkpoints"
    printed = recycled(tmp_path / "calm", checkout, "--mock-data", "--save", str(calm), "--save-interval", "3",
                       "--ckpt-format", "torch", *more)
    monkeypatch.setenv("CORRUPT", "53")  # read in the iteration after the third
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(checkout), os.environ.get("PYTHONPATH", "")]))
    for kind in ("torch", "torch_dist"):
        saved, folder = tmp_path / f"{kind}-checkpoints", tmp_path / kind
        options = ("--mock-data", "--ckpt-format", kind, *more)
        launcher = ("megatron_recycle.cli", "run", "--nproc", "4", "--run-dir", str(folder))
        screen = ended(start(launcher, checkout, (*options, "--save", str(saved), "--save-interval", "100"),
                             [str(Path(__file__).with_name("corrupt_gpt.py"))]), 1)
        assert "of iteration 3 fails on every worker: ValueError: sample 53 is corrupt" in screen
        assert f"The state after iteration 2 is saved in {saved}/iter_0000003." in screen
        assert (saved / "latest_checkpointed_iteration.txt").read_text() == "3"
        again = stock(checkout, *options, "--load", str(saved))
        assert consumed(again) == [(4, 64), (5, 80), (6, 96)]
        assert rates(again) == rates(printed)[3:]
        expected, found = losses(printed), losses(again)
        for iteration in "456":  # not the loss, as above
            assert found[iteration][1] == pytest.approx(expected[iteration][1], rel=1e-4)
    for part in (f"iter_0000003/mp_rank_00_00{stage}/model_optim_rng.pt" for stage in range(2)):
        one, other = (torch.load(path / part, weights_only=False) for path in (calm, tmp_path / "torch-checkpoints"))
        arguments, others = vars(one.pop("args")), vars(other.pop("args"))
        differ = {name for name, value in arguments.items() if others[name] != value}
        assert differ <= {"save", "save_interval", "rank", "local_rank"}
        assert alike(one, other)


def rates(printed: str) -> list[str]:
    """The learning rate of every log line."""
    return re.findall(r" iteration +\d+/.*?learning rate: (\S+)", printed)


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """The names of what two checkpoints hold differently; of the distributed optimizer's buckets by their shapes, since
    stock leaves what pads them as it finds it in memory."""
    shapes = [{name: value.shape if ".gbuf_idx_" in name else value for name, value in of.items()}
              for of in (one, other)]
    return sorted(name for name in one.keys() | other.keys()
                  if not all(name in of for of in shapes) or not alike(shapes[0][name], shapes[1][name]))


def alike(one: Any, other: Any) -> bool:
    """Whether all that two checkpoints hold is the same, to the bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(alike(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    return bool(numpy.array_equal(one, other)) if isinstance(one, numpy.ndarray) else bool(one == other)


@pytest.fixture
def comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RECYCLE_MAX_RESTARTS", "2")
    monkeypatch.setenv("RECYCLE_VERIFY_EVERY", "1")
    monkeypatch.setenv("RECYCLE_REDUCTION", "exact")


@pytest.mark.parametrize(("processes", "worker", "options"), [
    (6, "1:1", ("--pipeline-model-parallel-size", "3", "--num-layers", "3", "--eval-iters", "0")),
    (8, "1:1.1", ("--tensor-model-parallel-size", "2"))])
def test_a_worker_that_is_told_of_the_data_by_others_comes_back(processes, worker, options, checkout, tmp_path,
                                                                comes_back):
    """A middle stage, and a tensor-parallel part that reads no data: they learn that there is some by a broadcast."""
    come_back(tmp_path, checkout, worker, 3, *options, processes=processes)


@pytest.fixture
def rampup(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Batches of 8 samples, and of 16 from iteration 4 on, up to so many samples."""
    def up_to(samples: int) -> None:
        options, at = ARGUMENTS[:], ARGUMENTS.index("--train-iters")
        options[at:at + 2] = ["--train-samples", str(samples), "--rampup-batch-size", "8", "8", "32"]
        monkeypatch.setattr(sys.modules[__name__], "ARGUMENTS", options)

    return up_to


def test_a_worker_killed_where_the_batch_grows_leaves_the_same_numbers(rampup, checkout, tmp_path, monkeypatch):
    rampup(32 + 4 * 16)
    expected = losses(stock(checkout, "--mock-data"))
    monkeypatch.setenv("RECYCLE_REDUCTION", "exact")
    found = losses(recycled(tmp_path, checkout, "--mock-data", kill=("0:0", 3)))
    assert found.keys() == expected.keys() and len(expected) >= 8
    for key, values in expected.items():
        assert found[key] == pytest.approx(values, rel=1e-5), key


def test_a_worker_comes_back_after_the_batch_has_grown(rampup, checkout, tmp_path, comes_back):
    rampup(10**7)
    told = consumed(come_back(tmp_path, checkout, "1:1", 2, processes=4, forever=()))
    assert told and all(samples == 8 * min(iteration, 4) + 16 * max(0, iteration - 4) for iteration, samples in told)


@pytest.mark.parametrize(("kind", "more"), [("torch", ()), ("torch_dist", ("--use-checkpoint-args",))])
def test_a_worker_comes_back_to_where_the_job_is_and_not_to_its_newest_checkpoint(kind, more, checkout, tmp_path,
                                                                                  comes_back):
    saved = tmp_path / "checkpoints"
    options = ("--save", str(saved), "--load", str(saved), "--save-interval", "4", "--ckpt-format", kind,
               "--override-opt_param-scheduler", *more)
    first = recycled(tmp_path / "first", checkout, "--mock-data", *options)  # the next one goes on from its checkpoint
    begun = max(iteration for iteration, _ in consumed(first))
    printed = come_back(tmp_path / "second", checkout, "1:1", begun + 6, *options, processes=4)
    told = consumed(printed)
    assert told and all(samples == 16 * iteration for iteration, samples in told)
    newest = int((saved / "latest_checkpointed_iteration.txt").read_text())
    assert newest > begun + 8  # with the one that came back


def test_the_patched_script_has_the_flag_and_without_it_is_as_before(checkout, tmp_path):
    patched = tmp_path / "Megatron-LM"
    shutil.copytree(checkout, patched, ignore=shutil.ignore_patterns(".git", "docs", "tests", "examples"))
    subprocess.run(["git", "apply", str(patch())], cwd=patched, check=True)
    expected = stock(checkout, "--mock-data")
    assert losses(stock(patched, "--mock-data")) == losses(expected)
    printed = stock(patched, "--mock-data", "--recycle", "--recycle-reduction", "exact")
    assert printed.count("| live: 4/4 | rerouted: 0 |") == ITERATIONS
    assert losses(printed).keys() == losses(expected).keys()


@pytest.mark.night
@pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_the_curves_go_on_when_the_last_rank_dies_with_each_step_once(checkout, tmp_path):
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    recycled(tmp_path / "run", checkout, "--mock-data", "--tensorboard-dir", str(tmp_path / "board"), kill=("1:1", 2))
    rows: dict[str, dict[int, float]] = {}
    for file in (tmp_path / "board").iterdir():
        for event in LegacyEventFileLoader(str(file)).Load():
            for value in event.summary.value:
                of = rows.setdefault(value.tag, {})
                if "validation" not in value.tag:  # which stock writes twice at the end
                    assert event.step not in of, f"{value.tag} of step {event.step} is there twice"
                of[event.step] = value.simple_value
    wanted = list(range(1, ITERATIONS + 1))
    assert sorted(rows["lm loss"]) == sorted(rows["grad-norm"])
    assert sorted({3, *rows["lm loss"]}) == wanted  # the third the victim may have been about to write
    live = rows["Recycle/live_workers"]
    assert live[1] == 4.0 and live[ITERATIONS] == 3.0
