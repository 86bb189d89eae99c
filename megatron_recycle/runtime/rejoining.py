"""The rejoin of a worker whose stage is closed for an iteration, after a failure that has lost some of it elsewhere.

Its script may have left the iteration: no action of it is run here again, and its step stays. The other workers go on
with it, and read messages that this worker has kept; then all commit it.
"""

from __future__ import annotations

from megatron_recycle.plan import passes_on
from megatron_recycle.runtime.attempt import opened
from megatron_recycle.runtime.lent.loans import acceptable
from megatron_recycle.runtime.site import Site
from megatron_recycle.runtime.stepper import Stepper


def rejoin(site: Site, stepper: Stepper) -> None:
    """Send again the messages that others are still to read, and take part in the commit. Raises GenerationOver."""
    standing, generation = stepper.standing, stepper.current.get()
    standing.rejoin()
    iteration = standing.iteration
    program, kept = generation.program_of(iteration), stepper.kept[iteration]
    if iteration + 1 not in stepper.kept:  # the next iteration may have been under way, and begins anew
        site.meters.memory.give_up()
    shared = opened(site, generation, iteration, standing.attempt)
    for action in program.actions:
        sent = passes_on(program.plan, site.place.me, action)
        if sent is not None:
            generation.transport.send(sent[1], kept.log[action].back())
    shared.agreement.check(iteration)
    shared.losses.wait()
    offer = standing.promises.new(site.agent.offer)
    offer = acceptable(offer, site.trainable.neighbours, site.agent, site.place.me)
    stepper.commit_again(generation.groups, standing.promises.promise(iteration, offer), program.number)
