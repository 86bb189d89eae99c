"""What SIGTERM to a worker leads to, in a process of its own each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os, signal, threading
from types import SimpleNamespace
from megatron_recycle.runtime.preemption import leave_on_sigterm

asked = threading.Event()
agent = SimpleNamespace(leave=asked.set, leaving=False, ended=None, generation=1, outside=False)
own = lambda number, frame: print("own", flush=True)
{before}
leave_on_sigterm(agent)
{after}
os.kill(os.getpid(), signal.SIGTERM)
print(asked.wait({wait}), agent.handles_sigterm(), flush=True)
if os.fork() == 0:
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.timeout(110)
@pytest.mark.parametrize(("before", "after", "told"), [
    ("", "", "True False\n-15\n"),
    ("signal.signal(signal.SIGTERM, own)", "", "own\nFalse True\nown\n0\n"),
    ("", "signal.signal(signal.SIGTERM, own)", "own\nFalse True\nown\n0\n"),
    ("signal.signal(signal.SIGTERM, signal.SIG_IGN)", "", "False False\n0\n"),
])
def test_a_handler_of_the_scripts_is_all_that_sigterm_leads_to_whenever_it_is_set(before: str, after: str, told: str):
    wait = 60 if told.startswith("True") else 0.2
    command = [sys.executable, "-c", SCRIPT.format(before=before, after=after, wait=wait)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=100, check=True)
    assert done.stdout == told
