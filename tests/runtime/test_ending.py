"""A script that fails is told before anything waits for its threads, in a process of its own each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys, threading
from megatron_recycle.runtime.ending import ScriptEnd

over = threading.Event()
def told(error):
    print("told", repr(error), flush=True)
    over.set()

end = ScriptEnd(told)
threading.Thread(target=lambda: over.wait(60)).start()  # a prefetcher that nobody ends
def call(error):
    with end.call():
        if error:
            raise error
{body}
over.set()
"""


def run(body: str) -> tuple[str, int]:
    done = subprocess.run([sys.executable, "-c", SCRIPT.format(body=body)], capture_output=True, text=True, cwd=ROOT,
                          timeout=50, check=False)
    return done.stdout, done.returncode


@pytest.mark.timeout(110)
def test_a_script_that_raises_while_a_thread_of_its_own_lives_is_told_at_once():
    assert run("raise KeyError('x')") == ("told KeyError('x')\n", 1)


@pytest.mark.timeout(110)
def test_a_script_that_handles_the_engine_s_error_and_leaves_its_loop_has_failed_too():
    handled = "try:\n    call(ValueError('sample 31'))\nexcept ValueError:\n    pass\n"
    assert run(handled + "over.set()") == ("told ValueError('sample 31')\n", 0)
    assert run(handled + "call(None)") == ("", 0), "it went on, and the next call was well"


@pytest.mark.timeout(110)
def test_a_process_that_it_forks_then_to_write_a_checkpoint_tells_nothing():
    body = """import multiprocessing
def told_and_forks(error, before=told):
    child = multiprocessing.get_context("fork").Process(target=print, args=("child",))
    child.start()
    child.join(40)
    before(child.exitcode)
end._failed = told_and_forks
raise KeyError('x')
"""
    assert run(body) == ("child\ntold 0\n", 1)


@pytest.mark.timeout(110)
def test_a_script_that_ends_well_tells_nothing():
    assert run("call(None)") == ("", 0)
