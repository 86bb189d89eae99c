"""What can be registered, and what one that comes in takes of it."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from megatron_recycle.errors import ConfigError, RecycleError, UnsupportedError
from megatron_recycle.runtime import registered
from megatron_recycle.runtime.registered import Registered, register

CPU = torch.device("cpu")


class Kept:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        if isinstance(self.state, dict) and self.state.keys() != state.keys():
            raise KeyError("other names")
        self.state = state


def taken(monkeypatch: pytest.MonkeyPatch, giver: Registered, taker: Registered) -> str | None:
    """What keeps ``taker`` from what ``giver`` sends."""
    taker.lacks = True
    monkeypatch.setattr(registered, "receive", lambda comm, source: giver._copy())
    why = taker._take(cast(Any, None), 0, CPU)
    assert taker.lacks == (why is not None)
    return why


def test_averages_of_modules_and_of_the_scripts_own_arrive_with_all_bits(monkeypatch: pytest.MonkeyPatch):
    own, other = (AveragedModel(nn.Linear(3, 2)) for _ in range(2))
    own.update_parameters(nn.Linear(3, 2))
    mine = Kept({"of": [torch.rand(2, dtype=torch.bfloat16), (1, 2.5, "x", None)], 3: True})
    theirs = Kept({"of": [], 3: False})
    assert taken(monkeypatch, Registered({"a": own, "b": mine}), Registered({"a": other, "b": theirs})) is None
    assert all(torch.equal(one, two) for one, two in zip(own.state_dict().values(), other.state_dict().values()))
    assert torch.equal(theirs.state["of"][0], mine.state["of"][0]) and theirs.state["of"][1] == mine.state["of"][1]
    assert theirs.state["of"][0] is not mine.state["of"][0] and theirs.state[3] is True


@pytest.mark.parametrize("state, says", [
    ({"x": {"y": [range(3)]}}, "state_dict()['x']['y'][0] is a builtins.range"),
    ({(1, object): 2}, "a key of state_dict()[1] is a builtins.type"),
    ([torch.zeros(3).to_sparse()], "state_dict()[0] is a tensor of a kind of its own"),
    ({"x": torch.zeros(3, device="meta")}, "meta")])
def test_what_cannot_be_sent_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, state: Any, says: str):
    with pytest.raises(UnsupportedError, match=r"register_state\('ema'\): state_dict\(\)|a key") as error:
        register("ema", Kept(state), {})
    assert says in str(error.value)
    why = taken(monkeypatch, Registered({"ema": Kept(state)}), Registered({"ema": Kept({})}))  # it has become so
    assert why is not None and "'ema' cannot be sent" in why


def test_who_cannot_take_it_says_why_and_the_giver_never_fails(monkeypatch: pytest.MonkeyPatch):
    assert taken(monkeypatch, Registered({"ema": Kept(1)}), Registered({})) == (
        "its script has registered nothing, and its peers' ema (register_state): what is registered must not depend on "
        "when a worker was started")
    why = taken(monkeypatch, Registered({"ema": Kept({"a": 1})}), Registered({"ema": Kept({"b": 1})}))
    assert why == "load_state_dict() of what its script has registered as 'ema' fails with KeyError: 'other names'"
    broken = Kept(1)
    monkeypatch.setattr(broken, "state_dict", lambda: 1 // 0)
    why = taken(monkeypatch, Registered({"ema": broken}), Registered({"ema": Kept(1)}))
    assert why is not None and "its state_dict() fails with ZeroDivisionError" in why


def test_names_are_one_objects_own():
    things: dict[str, Any] = {}
    register("ema", kept := Kept(1), things)
    register("ema", kept, things)
    with pytest.raises(ConfigError, match="another object is registered by that name"):
        register("ema", Kept(1), things)
    with pytest.raises(RecycleError, match="a dict has no state_dict"):
        register("other", {}, things)
    assert things == {"ema": kept}
