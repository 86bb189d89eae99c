"""What can be asked for, as a line or on the command line, and what makes no sense."""

from __future__ import annotations

import pytest

from megatron_recycle.errors import ConfigError
from megatron_recycle.runtime.phases import Phase
from megatron_recycle.tools.chaos.orders import PHASES, Order, read_script


def test_a_script_is_the_acts_of_the_command_line_one_a_line():
    text = """
    # two at once, then the coordinator
    kill 1:2 0:1.3 --at-iteration 20 --phase backward --nth 1
    freeze 0:0 --for 0.5   # shorter than the heartbeat timeout
    slow 1:0 1.5 --after 2
    coordinator --freeze --for 3
    partition h2 --from h1 --one-way
    """
    assert read_script(text.splitlines(), "x.chaos") == [
        Order("kill", ("1:2", "0:1.3"), 20, "backward", 1),
        Order("freeze", ("0:0",), seconds=0.5),
        Order("slow", ("1:0",), after=2.0, factor=1.5),
        Order("coordinator", frozen=True, seconds=3.0),
        Order("partition", hosts=("h2",), others=("h1",), one_way=True),
    ]


def test_every_phase_can_be_asked_for():
    assert {*PHASES} == {phase.value for phase in Phase}


@pytest.mark.parametrize(("line", "why"), [
    ("kill 12", "pipeline:stage"),
    ("kill", "required"),
    ("maim 1:2", "invalid choice"),
    ("kill 1:2 --phase lunch", "invalid choice"),
    ("kill 1:2 --nth 3", "--phase"),
    ("slow 1:2 0.5", "more than 1"),
    ("slow 1:2 much", "'much'; give a FACTOR"),
    ("slow 1:2", "required: FACTOR"),
    ("coordinator --for 3", "--freeze"),
    ("partition h1 --link --one-way", "both ways"),
    ("kill '1:2", "quotation"),
    ("freeze 0:0 --for -1", "'-1'; give seconds, more than 0"),
    ("freeze 0:0 --for 0", "more than 0"),
    ("freeze 0:0 --for long", "'long'; give"),
    ("kill 0:0 --at-iteration -3", "'-3'; give a whole number, 0 or more"),
    ("coordinator --at-iteration -3", "'-3'"),
    ("kill 0:0 --phase forward --nth -1", "'-1'"),
    ("kill 0:0 --after -1", "'-1'"),
])
def test_what_makes_no_sense_is_refused_with_its_line(line: str, why: str):
    with pytest.raises(ConfigError, match=r"x\.chaos, line 2: .*" + why):
        read_script(["", line], "x.chaos")
