"""Values are read by several threads at once, and by forked processes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import megatron_recycle

PACKAGE = Path(megatron_recycle.__file__).parent

TWO_THREADS = """
import sys, threading
from msgspec import defstruct
from megatron_recycle.plan.value import Value

def value(name, *fields):
    return defstruct(name, fields, bases=(Value,), frozen=True, module=__name__)

parts = [value(f"Part{number}", ("numbers", "tuple[int, ...]")) for number in range(100)]
wholes = [value(f"Whole{number}", ("part", part), ("name", "str")) for number, part in enumerate(parts)]
both = threading.Barrier(2)

def read():
    for whole in wholes:
        both.wait()
        found = whole.from_json({"part": {"numbers": [1, 2]}, "name": "first"})
        assert found.part.numbers == (1, 2) and found.to_json()["name"] == "first"

sys.setswitchinterval(1e-6)
threads = [threading.Thread(target=read) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("read")
"""

FORK = """
import os, signal, sys, threading
from msgspec import defstruct
from megatron_recycle.plan.value import Value

begun, forking = threading.Event(), threading.Event()

def pause():
    begun.set()
    forking.wait()
    return int

part = defstruct("Part", [("number", "pause()")], bases=(Value,), frozen=True, module=__name__)
whole = defstruct("Whole", [("part", part), ("name", "str")], bases=(Value,), frozen=True, module=__name__)
data = {"part": {"number": 1}, "name": "first"}
os.register_at_fork(before=forking.set)
sys.setswitchinterval(60)  # the thread goes on only where this one waits
thread = threading.Thread(target=whole.from_json, args=(data,))
thread.start()
begun.wait()
child = os.fork()
if not child:
    signal.alarm(20)
    print(whole.from_json(data).name, flush=True)
    os._exit(0)
thread.join()
sys.exit(os.waitpid(child, 0)[1])
"""


@pytest.mark.parametrize(("program", "printed"), [(TWO_THREADS, "read"), (FORK, "first")], ids=["threads", "fork"])
def test_types_that_one_thread_reads_first_can_be_read_by_all(program: str, printed: str):
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=PACKAGE.parent,
                           timeout=120)
    assert (ended.returncode, ended.stdout.split()) == (0, [printed]), ended.stderr


def test_the_library_reads_in_one_place_only():
    reading = re.compile(r"msgspec\.(convert|json\.[dD]ecode|msgpack)|from msgspec.* import .*(convert|[dD]ecode)")
    found = {str(file.relative_to(PACKAGE)) for file in PACKAGE.rglob("*.py") if reading.search(file.read_text())}
    assert found == {"plan/value.py"}
