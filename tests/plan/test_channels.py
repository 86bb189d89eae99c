"""What one message says of others."""

from __future__ import annotations

import pytest

from megatron_recycle.plan import Costs, Grid, Message, Problem, Worker, channels, read_by
from megatron_recycle.planner import quick


@pytest.mark.parametrize("failed", [(), (Worker(1, 1),), (Worker(0, 2), Worker(1, 1))], ids=str)
def test_a_gradient_has_been_read_when_an_activation_made_after_it_arrives(failed):
    plan = quick(Problem(Grid(3, (6, 6, 6)), Costs.uniform(3, 20, 22, 18), failed=failed))
    talk, kept = channels(plan), []
    for me in plan.workers:
        answered = {message: gone for message, gone in read_by(plan, me).items() if message.kind == "F"}
        sent = {message: to for (source, to), messages in talk.items() if source == me for message in messages}
        for activation, gradients in answered.items():
            sender = next(source for (source, to), messages in talk.items() if to == me and activation in messages)
            order = [Message(*action) for action in plan.actions(sender)]
            for gradient in gradients:
                assert sent[gradient] == sender and order.index(gradient) < order.index(activation)
        let_go = [gradient for gradients in answered.values() for gradient in gradients]
        assert len(let_go) == len(set(let_go))
        kept.append(sum(message.kind == "B" for message in sent) - len(let_go))
    # What stays is of the end of an iteration, when no activation follows any more.
    assert max(kept) <= 2 * plan.problem.grid.stages * (1 + len(failed))
