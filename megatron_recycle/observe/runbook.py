"""Table of the sections of docs/runbook.md that help with a warning, an error or the closing line of a job.

`recycle runbook SECTION` prints a section, also on hosts without access to a web site.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

SECTIONS: Mapping[str, tuple[str, ...]] = {
    "lost-stage": (
        r"has no worker left", r"has lost its last worker", r"would have no worker any more",
        r"nobody who is left has it", r"What the survivors hold", r"survivors save what they hold",
        r"what this worker holds is not saved", r"REGISTERED STATE IS LOST",
        r"all go back to the state after iteration", r"each stage has one worker",
        r"each shard of the optimizer's state has one holder",
    ),
    "last-copy": (
        r"has one worker left", r"without that host the job cannot go on", r"losing one host can end the job",
        r"voids the copies of guard", r"state_copies",
    ),
    "not-started": (
        r"before training began", r"\bthe grid has", r"\bthe grid is too large",
        r"give all workers the same configuration", r"not ready within", r"a tied parameter that stages",
        r"script was started again with", r"cannot join", r"compiles its .* on this machine",
        r"this start waits while there is", r"the coordinator did not start", r"cannot be started",
    ),
    "not-protected": (
        r"is no deepspeed.PipelineModule", r"this job has one pipeline", r"this launcher ends the other workers",
        r"fork of megatron-core without a version", r"none of them trained with the plugin", r"\bpolicy \S+: ",
        r"--no-python starts the program as it is", r"starts none by itself", r"another part of worker",
    ),
    "cannot-go-on": (
        r"cannot work together", r"the recovery has failed", r"no plan for the grid", r"cannot be brought together",
        r"disagree on the verdict", r"which some stage lost before it held it", r"an abort takes more than",
        r"did not abort a group", r"could not be carried out", r"cannot decide what follows", r"speaks of rank",
        r"message is not sent",
        r"cannot tell what it has to", r"cannot read what the coordinator", r"planning failed", r"planning the rest",
    ),
    "checkpoints": (
        r"NO CHECKPOINT", r"no checkpoint of iteration", r"no last checkpoint", r"No checkpoint was written",
        r"the checkpoint .* cannot be read", r"from the checkpoint", r"the checkpoint of iteration",
        r"the job ends after a last checkpoint", r"its part of a checkpoint", r"is saved in",
    ),
    "disk": (
        r"events cannot be written", r"events are written", r"old events cannot be moved",
        r"journal .* cannot be written", r"a plan could not be kept", r"a plan that is in use cannot be read",
        r"events so far cannot be read", r"what was measured before cannot be read", r"what it prints is lost",
        r"cannot be opened on the worker",
    ),
    "refused-connections": (r"refused a connection", r"without this job's token", r"others can read the token"),
    "unreachable": (
        r"cannot be reached", r"connection to the coordinator", r"a decision waits for the store",
        r"this coordinator leads no more", r"out of reach", r"has refused connections", r"has died",
        r"did not say how the job ended", r"no coordinator leads", r"refuses to lead", r"the store takes",
        r"the store has not",
    ),
    "memory": (r"less than one micro-batch needs", r"memory does not limit the plans", r"no memory that this host",
               r"no failure is explained at present"),
    "results": (
        r"change in each forward", r"check_forward", r"were not searched for generators",
        r"each iteration waits for the commit", r"\bchunks 2: ", r"the step of iteration .* is skipped",
        r"gradients %s",
    ),
    "left-out": (
        r"is left out while workers are missing", r"was cut short by a failure", r"eval_batch\(",
        r"are not lent any more", r"a plan that lends layers", r"is left out: the job did that", r"on_event\(\)",
        r"was over when this worker",
    ),
    "slurm": (
        r"Slurm ends the job", r"no `#SBATCH --no-kill`", r"srun was started without", r"is not requeued",
        r"cannot be requeued",
    ),
    "script-failed": (
        r"have failed alike", r"fails on every worker", r"micro-batches were left out within",
        r"training has come to its end, but", r"the script has ended on", r"cannot be trained: ", r"\bhas failed\b",
    ),
}
"""Section -> patterns of its messages. The first section that fits counts."""

ENDED = "job-ended"
"""Section for a closing line that no other section covers."""
_PATTERNS = tuple((name, re.compile("|".join(patterns))) for name, patterns in SECTIONS.items())
_NAMED = re.compile(r"\[recycle runbook [\w-]+\]")


def section(text: str) -> str | None:
    """The section for a message; None: there is none."""
    return next((name for name, pattern in _PATTERNS if pattern.search(text)), None)


def with_section(text: str, otherwise: str | None = None) -> str:
    """``text`` and how to see its section, or the one ``otherwise``; unchanged where there is none, or it names one."""
    name = section(text) or otherwise
    return text if name is None or _NAMED.search(text) else f"{text} [recycle runbook {name}]"
