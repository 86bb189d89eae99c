#!/usr/bin/env python3
"""Which public configurations start under the plugin, judged by their options alone.

    python scripts/field/matrix.py CHECKOUT                                  # how many, and what keeps the others out
    python scripts/field/matrix.py CHECKOUT --aside transformer_impl         # as if that were no reason
    python scripts/field/matrix.py CHECKOUT --each                           # a line for each of them
    python scripts/field/matrix.py CHECKOUT CHECKOUT ... --table             # the table of docs/compatibility.md

CHECKOUT is one of NVIDIA/Megatron-LM (its own functional tests), deepspeedai/Megatron-DeepSpeed, EleutherAI/gpt-neox or
bigscience-workshop/bigscience. Megatron-LM's arguments go through its own parser and checks, with two pipelines, and
then through the plugin's tables (`backends/megatron/options.py`), as at a job's start; of the others see
`deepspeed_jobs`. Nothing is built or trained. Without a GPU CUDA means the CPU. Some of what is refused is found later
only, when a model is there: this counts none of it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CASES = Path("tests") / "functional_tests" / "test_cases"
SCRIPTS = {"bert": "pretrain_bert.py", "t5": "pretrain_t5.py", "hybrid": "pretrain_mamba.py"}
"""By folder of a case, the script that it is for; of others pretrain_gpt.py."""
PIPELINES = 2
_AS_IT_IS = str.maketrans("", "", "\\${}")
"""What a shell would take away, with names of its variables for their values."""


@dataclass
class Judgement:
    """What comes of one configuration.

    Attributes:
        name: folder and case, or file.
        stages: of its pipelines; 0: it has none, and is no job of this plugin's.
        stock: what the framework itself says against it; empty if it takes it.
        refused: the plugin's refusals, by the option's name or title.
        changed: options that the plugin sets otherwise.
    """

    name: str
    stages: int = 0
    stock: str = ""
    refused: list[str] = field(default_factory=list)
    changed: list[str] = field(default_factory=list)


def words(arguments: Mapping[str, Any]) -> list[str]:
    """A case's ``arguments`` as a command line, as Megatron-LM's own runner makes it."""
    line: list[str] = []
    for name, value in arguments.items():
        if value is True or value == "true":
            line.append(name)
        elif isinstance(value, list):
            line += [name, *(str(one) for one in value)]
        else:
            text = str(value).translate(_AS_IT_IS)
            line += [name, *shlex.split(text.strip("[]") if " " in text else text)]
    return line


def judge(checkout: Path, case: Path) -> Judgement:
    """Judge ``case`` in a process of its own: parsing leaves global state behind."""
    name = str(case.parent.relative_to(checkout / CASES))
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        with os.fdopen(writing, "w") as told:
            try:
                found = _judge(checkout, case, name)
            except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever stock's checks raise
                found = Judgement(name, stock=f"{type(error).__name__}: {error}".splitlines()[0])
            json.dump(vars(found), told)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        text = told.read()
    os.waitpid(child, 0)
    return Judgement(**json.loads(text)) if text else Judgement(name, stock="ended without a word")


def _judge(checkout: Path, case: Path, name: str) -> Judgement:
    from megatron.training.arguments import parse_args, validate_args  # type: ignore[import-not-found]

    from megatron_recycle.backends.megatron.training import check_arguments
    from megatron_recycle.errors import UnsupportedError

    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        given = yaml.safe_load(case.read_text())
        os.environ.update({key: str(value) for key, value in (given.get("ENV_VARS") or {}).items()})
        sys.argv = ["train.py", *words(given["MODEL_ARGS"])]
        os.environ.update(RANK="0", WORLD_SIZE="1")
        arguments = parse_args(ignore_unknown_args=True)
        arguments.world_size = PIPELINES * (arguments.tensor_model_parallel_size * arguments.context_parallel_size
                                            * arguments.pipeline_model_parallel_size)
        arguments.world_size = max(arguments.world_size, arguments.expert_model_parallel_size
                                   * (arguments.expert_tensor_parallel_size or arguments.tensor_model_parallel_size)
                                   * arguments.pipeline_model_parallel_size * PIPELINES)
        found = Judgement(name, arguments.pipeline_model_parallel_size)
        validate_args(arguments, {"tokenizer_type": "GPT2BPETokenizer"})
        found.stages = arguments.pipeline_model_parallel_size
        sys.modules["__main__"] = _script(checkout / SCRIPTS.get(name.split("/")[0], "pretrain_gpt.py"))
        try:
            found.changed = [line.partition(":")[0] for line in check_arguments(arguments)]
        except UnsupportedError as error:
            found.refused = [line[2:].partition(": ")[0] for line in str(error).splitlines() if line.startswith("- ")]
        return found


def _script(path: Path) -> ModuleType:
    """The functions of the script at ``path``, which is not run: it may import what is not installed."""
    module = ModuleType("__main__")
    module.__file__ = str(path)
    for constant in compile(path.read_text(), str(path), "exec").co_consts:
        if isinstance(constant, CodeType):
            setattr(module, constant.co_name, FunctionType(constant, {}))
    return module


def summary(found: Sequence[Judgement]) -> str:
    """How many of these configurations start, by pipelines and without, and what keeps the others out."""
    lines = []
    for title, some in _by_stages(found):
        taken = [one for one in some if not one.stock]
        starts = [one for one in taken if not one.refused]
        lines += [f"{title}: {len(some)}, taken by the framework itself {len(taken)}, start {len(starts)}"]
        reasons = Counter(reason for one in taken for reason in one.refused)
        alone = Counter(one.refused[0] for one in taken if len(one.refused) == 1)
        lines += [f"  {count:4d} refused: {reason} ({alone[reason]} by this alone)"
                  for reason, count in reasons.most_common()]
        lines += [f"  {count:4d} set otherwise: {option}"
                  for option, count in Counter(line for one in taken for line in one.changed).most_common()]
    return "\n".join(lines)


def _by_stages(found: Sequence[Judgement]) -> list[tuple[str, list[Judgement]]]:
    return [("2 stages or more", [one for one in found if one.stages > 1]),
            ("one stage", [one for one in found if one.stages == 1])]


def rows(project: str, found: Sequence[Judgement]) -> list[str]:
    """Of the table for the documentation."""
    made = []
    for title, some in _by_stages(found):
        starts = sum(not one.stock and not one.refused for one in some)
        reasons = Counter(reason for one in some for reason in one.refused or ["the framework"] * bool(one.stock))
        told = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
        made += [f"| {project} | {title} | {len(some)} | **{starts}** | {told} |"] if some else []
    return made


def of_megatron(checkout: Path, only: Sequence[str]) -> list[Judgement]:
    """Judge Megatron-LM's own functional tests."""
    sys.path.insert(0, str(checkout))
    import megatron_cpu

    megatron_cpu.install(pretend=True)
    for name in ("megatron.training.arguments", "megatron_recycle.backends.megatron.training"):
        import_module(name)  # once, for all children
    cases = sorted((checkout / CASES).glob("*/*/model_config.yaml"))
    return [judge(checkout, case) for case in cases
            if "inference" not in case.parent.name and (not only or case.parent.name in only)]


def of_deepspeed(checkout: Path, only: Sequence[str]) -> list[Judgement]:
    """Judge the jobs of a repository whose pipelines are DeepSpeed's."""
    import deepspeed_jobs

    neox = (checkout / "megatron" / "neox_arguments").exists()
    folders = ("examples_deepspeed",) if (checkout / "examples_deepspeed").exists() else (".",)
    found = []
    for name, stages, judged in (deepspeed_jobs.of_gpt_neox(checkout) if neox else
                                 deepspeed_jobs.of_shell_scripts(checkout, folders)):
        if not only or name in only:
            stock, refused = judged() if stages else ("", [])
            found.append(Judgement(name, stages, stock, refused))
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Judge all configurations of checkouts, and print what comes of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, nargs="+", help="Megatron-LM's at the tag of the core that is installed")
    parser.add_argument("--aside", nargs="*", default=(), help="reasons that do not count")
    parser.add_argument("--only", nargs="*", default=(), metavar="CASE", help="names of cases; default: all")
    parser.add_argument("--each", action="store_true", help="print a line for each configuration")
    parser.add_argument("--table", action="store_true", help="print rows of a table")
    chosen = parser.parse_args(argv)
    sys.path[:0] = [str(ROOT / "scripts"), str(ROOT)]
    for checkout in chosen.checkout:
        found = (of_megatron if (checkout / CASES).exists() else of_deepspeed)(checkout, chosen.only)
        for one in found:
            one.refused = [reason for reason in one.refused if reason not in chosen.aside]
            if chosen.each and one.stages:
                verdict = f"stock: {one.stock}" if one.stock else "; ".join(one.refused) or "starts"
                print(f"{one.name} ({one.stages}): {verdict}")
        print("\n".join(rows(checkout.name, found)) if chosen.table else summary(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
