"""Masters that Transformer Engine's Adam keeps inside of it, on paper."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_recycle.backends.megatron.master_weights import MASTER, masters_of, remainder, upper, whole

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False, max_value=2.0**126, min_value=-2.0**126)


@given(st.lists(FINITE, min_size=1, max_size=20))
def test_a_master_is_made_again_of_its_two_halves(values: list[float]) -> None:
    master = torch.tensor(values, dtype=torch.float32)
    assert whole(upper(master), remainder(master)).view(torch.int32).tolist() == master.view(torch.int32).tolist()


def test_ties_go_up_as_in_the_kernel_and_all_else_as_in_torch() -> None:
    bits = torch.arange(0x3F80_0000, 0x3F82_0000, dtype=torch.int64).to(torch.int32)
    master = bits.view(torch.float32)
    ties = bits & 0xFFFF == 0x8000
    assert torch.equal(upper(master)[~ties], master.bfloat16()[~ties])
    assert torch.equal(upper(master)[ties].view(torch.int16), ((bits[ties] >> 16) + 1).to(torch.int16))


@pytest.mark.parametrize("remainders", [True, False])
def test_the_inner_optimizer_has_none_any_more_and_a_view_of_it_has(remainders: bool) -> None:
    kinds = {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.float32, MASTER: torch.float32}
    inner: Any = SimpleNamespace(name_to_dtype_map=kinds, master_weights=True, use_decoupled_grad=True,
                                 store_param_remainders=remainders, _scales={}, state={})
    master = torch.tensor([1.00390625, -3.14159, 2.0**-20])
    part = upper(master) if remainders else master.bfloat16()
    held = {"exp_avg": torch.ones(3, dtype=torch.bfloat16), MASTER: remainder(master) if remainders else master}
    masters = masters_of(inner)
    assert not (inner.master_weights or inner.use_decoupled_grad or inner.store_param_remainders)
    assert torch.equal(masters.taken(part, held), master) and MASTER not in held
    assert torch.equal(masters.rounded(master, torch.bfloat16).bfloat16(), part)
    shown, state = masters.shown(part, master, held)
    assert shown is part and state is not None
    assert torch.equal(state[MASTER], remainder(master) if remainders else master)
    view = SimpleNamespace()
    masters.show(view)
    assert view.master_weights and view.use_decoupled_grad and view.store_param_remainders == remainders

    own = torch.zeros(3)
    inner.state[own] = {"exp_avg": torch.zeros(3, dtype=torch.bfloat16), "exp_avg_sq": masters.zeros("exp_avg_sq", own)}
    masters.set(own, part, {"param": state[MASTER], "exp_avg": torch.full((3,), 0.5), "exp_avg_sq": torch.ones(3)})
    assert torch.equal(own, master) and inner.state[own]["exp_avg"].tolist() == [0.5] * 3
    assert masters.zeros("exp_avg", own).dtype == torch.bfloat16
