"""A script that fails is told before anything waits for its threads, in a process of its own each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os, sys, threading
from megatron_recycle.runtime.script_end import ScriptEnd

over = threading.Event()
def told(error):
    print("told", repr(error), flush=True)
    over.set()

inside = threading.Event()
end = ScriptEnd(told, lambda: print("settled", flush=True), lambda: not inside.is_set())
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


@pytest.mark.timeout(110)
@pytest.mark.parametrize(("body", "told", "status"), [
    ("os._exit(0)", "settled\n", 0),
    ("os._exit(3)", "told SystemExit(3)\nsettled\n", 3),
    ("try:\n    raise KeyError('x')\nexcept KeyError:\n    os._exit(3)", "told KeyError('x')\nsettled\n", 3),
    ("inside.set()\nos._exit(0)", "", 0),
    ("inside.set()\nos._exit(3)", "", 3),
    ("end._ended = lambda: 1 / 0\nos._exit(0)", "", 0),
])
def test_a_script_that_ends_its_process_by_hand_settles_first_unless_it_is_in_an_iteration(body, told, status):
    assert run(body) == (told, status)


@pytest.mark.timeout(110)
def test_a_forked_child_that_ends_so_says_nothing():
    """As the processes of data loaders, and of multiprocessing, do."""
    body = """import multiprocessing
child = multiprocessing.get_context("fork").Process(target=print, args=("child",))
child.start()
child.join(40)
if os.fork() == 0:
    os._exit(7)
print(child.exitcode, os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
over.set()
"""
    assert run(body) == ("child\n0 7\n", 0)
