"""A worker's memory budget: bytes kept besides activations, and bytes left for them (promise P7)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from megatron_recycle.membership.protocol import Profiled
from megatron_recycle.observe.log import get_logger
from megatron_recycle.plan import Piece, Plan, Worker, of_place, pieces, results_in
from megatron_recycle.plan.replay import peak
from megatron_recycle.runtime.comm.sharded_reduction import Cuts, at_once
from megatron_recycle.runtime.compute.device import Device, LogBytes
from megatron_recycle.runtime.compute.memory import Held, nbytes
from megatron_recycle.runtime.compute.sharding_cost import Bytes, described
from megatron_recycle.runtime.generation import Generation
from megatron_recycle.runtime.site import Site

_USABLE = 0.9
"""Share of a GPU's free memory that is promised to activations; the allocator loses some between its blocks."""
_MIB, _GIB = 2**20, 2**30
_FIRST = ("0:0", "0:0.0")
"""Names of the process that logs on behalf of all."""


class KeptBytes(NamedTuple):
    """Bytes that a worker uses besides its micro-batches. ``spare``: not in use most of the time; ``log``: messages
    and sums that are kept until an iteration is committed; ``host``: those of them beside the device, in the host's
    memory."""

    state: int
    undo: int
    gradient: int
    sums: int
    spare: int
    log: int = 0
    host: int = 0

    @property
    def on_device(self) -> int:
        return sum(self) - self.host


class Budget(NamedTuple):
    """The measurements for the planner: bytes that a micro-batch holds in each of the stage's chunks (``held``), the
    measured peak and the plan's own number, bytes used otherwise, and bytes left for activations."""

    held: Sequence[Held]
    peak: int
    planned: int
    kept: KeptBytes
    room: int | None

    def told(self) -> Profiled:
        """The message to the coordinator: "before_b" of ``held`` is the stage's first chunk's, "before_b/1" its
        second's."""
        held = {of_place(name, chunk): size for chunk, each in enumerate(self.held)
                for name, size in each._asdict().items()}
        return Profiled({**held, "peak": self.peak, "planned": self.planned}, self.kept._asdict(), self.room)


def sum_buffers(sums: Sequence[Piece]) -> int:
    """Number of flat buffers for the sums of these pieces: one for a single block, two for a run of them (the block
    that is being summed lies apart); one where nothing is kept apart."""
    return sum(1 if first == last else 2 for _, first, last in sums) or 1


def kept_bytes(state: Iterable[torch.Tensor], undo: int, gradient: int, sums: Sequence[Piece], peers: int,
               messages: int, communicators: int = 0, on_the_way: int | None = None) -> KeptBytes:
    """Bytes that a worker uses besides its micro-batches, without the ``log``.

    Args:
        state: parameters and optimizer state.
        undo: bytes of the copy to undo a step.
        gradient: bytes of one flat gradient.
        sums: the pieces that this worker keeps sums of; none with the fast reduction.
        peers: live workers of this stage.
        messages: bytes of the receives that are posted ahead, and of other data on its way; a plan's needs beyond the
            usual ones are in its caps.
        communicators: bytes of those in use: the next generation's are made before they are given back.
        on_the_way: bytes that a reduction sends and takes in; None: its slice of all workers' pieces, if it is exact.
    """
    buffers = sum_buffers(sums)
    if on_the_way is None:
        on_the_way = gradient * -(-(buffers + 1) // peers) if sums else 0
    spare = on_the_way + (gradient if sums else 0)  # a peer's death adds another block
    return KeptBytes(nbytes(state), undo, gradient, buffers * gradient, spare + messages + communicators)


def room_on(device: Device, limit: float | None, kept: KeptBytes, held: int) -> int | None:
    """Bytes that a worker has for activations; None if neither ``limit`` nor the device says.

    Args:
        device: the activations' device.
        limit: GiB that the worker may use in all; None: all of the device.
        kept: bytes in other use.
        held: bytes of activations right now.
    """
    if limit is not None:
        return max(0, int(limit * _GIB) - kept.on_device)
    room = device.room()
    return None if room is None else max(0, int(_USABLE * room) + held - kept.spare - kept.log)


def announce(site: Site, generation: Generation) -> None:
    """Log at the start the bytes that are kept for undo and commit."""
    kept = _kept(site, generation, 0)
    text = f"{kept.gradient / _MIB:.1f} MiB of reduced gradient until each commit"
    if site.exact:
        text += f", {kept.sums / _MIB:.1f} MiB of gradients summed apart for the exact reduction"
    shards = site.stage.shards
    if shards is not None:
        masters = nbytes(master for shard in shards.held for master in shards.masters(shard))
        text += (f", shards {', '.join(map(str, shards.held))} of {shards.count} of its stage's optimizer state "
                 f"({masters / _MIB:.1f} MiB in fp32, and what the optimizer keeps of it)")
    if site.config.step == "staggered" and shards is not None:
        text += ", and a copy of what a step changes of these shards, to undo it"
    elif site.config.step == "staggered":
        parameters = nbytes(site.trainable.layout.parameters)
        text += f", and a copy of parameters ({parameters / _MIB:.1f} MiB) and optimizer state to undo a step"
    get_logger().info("megatron-recycle: worker %s keeps %s", site.place.me, text)
    if shards is not None and shards.parameters and site.place.name in _FIRST:
        each = Bytes(shards.parameters[0].element_size(), site.trainable.layout.dtype.itemsize, shards.state_bytes)
        copies = max(site.config.state_copies or shards.count, shards.least)
        get_logger().info("megatron-recycle: the optimizer in shards takes %s",
                          described(each, copies, shards.count, site.config.step == "staggered"))


def profile(site: Site, generation: Generation, undo: int) -> Budget:
    """The measurements so far. ``undo``: bytes of the copy to undo a step."""
    memory, me, plan = site.meters.memory, site.place.me, generation.plan
    each = [memory.held(chunk) for chunk in plan.problem.place_of]  # only this worker's stage counts
    weighed = replace(plan.problem, before_b=tuple(held.before_b for held in each),
                      after_b=tuple(held.after_b for held in each))
    kept = _kept(site, generation, undo)
    return Budget([memory.held(chunk) for chunk in range(len(site.place.chunks))], memory.peak,
                  peak(replace(plan, problem=weighed, crossings={}), me), kept,
                  room_on(site.meters.device, site.config.memory, kept, memory.now))


def announce_profile(me: Worker, found: Budget) -> None:
    """Log what `profile` found."""
    room, before, after = found.room, [one.before_b for one in found.held], [one.after_b for one in found.held]
    if room is not None and room < sum(map(max, before, after)):
        get_logger().warning(
            "megatron-recycle: worker %s has %.2f MiB left for activations, less than one micro-batch needs; plans "
            "take no notice of memory then: give more by `memory`, or make micro-batches smaller", me, room / _MIB)
    get_logger().info(
        "megatron-recycle: worker %s: a micro-batch holds %s MiB from its forward to its backward, and %s MiB from "
        "there to its weight gradient; at most %.2f MiB were held at a time, the plan says %.2f%s; messages and sums "
        "that are kept until each commit take %.3f GiB%s (keep_messages)", me,
        _mib(before), _mib(after), found.peak / _MIB, found.planned / _MIB,
        "" if room is None else f", {room / _MIB:.2f} are there", found.kept.log / _GIB,
        f" on the device and {found.kept.host / _GIB:.3f} GiB of pinned host memory" if found.kept.host else "")


def _mib(sizes: Iterable[int]) -> str:
    """Sizes in MiB, one for each of the stage's chunks."""
    return " + ".join(f"{size / _MIB:.2f}" for size in sizes)


def _kept(site: Site, generation: Generation, undo: int) -> KeptBytes:
    me, plan = site.place.me, generation.plan
    exact = site.exact
    gradient = site.trainable.layout.numel * site.trainable.layout.dtype.itemsize
    shards = site.stage.shards
    of_shards = [] if shards is None else [
        tensor for shard in shards.held for tensor in shards.tensors(shard).values()]
    kept = kept_bytes([*site.stage.state().values(), *of_shards], undo, gradient,
                      max((pieces(plan, chunk)[me] for chunk in site.place.chunks), key=sum_buffers) if exact else (),
                      len(plan.problem.live(me.stage)),
                      plan.problem.receives(me.stage) * site.meters.memory.message + site.meters.memory.gathered,
                      site.meters.communicators,
                      _on_the_way(site, plan, generation.cuts))
    log = _log(site, plan, kept.sums)
    kept = kept._replace(log=log.device, host=log.host)
    if shards is not None:  # only the reduced gradient's elements in them
        length = sum(shards.length(shard) for shard in shards.held)
        kept = kept._replace(gradient=length * site.trainable.layout.dtype.itemsize)
    return kept


def _log(site: Site, plan: Plan, sums: int) -> LogBytes:
    """Bytes of the messages and sums that are kept until an iteration is committed, with those of the next iteration
    where a stage goes on once it is closed. ``sums``: bytes of one iteration's."""
    if not site.keeps_attempts:
        return LogBytes(0, 0)
    me, goes_on = site.place.me, site.config.step == "staggered" and site.closes
    made = sum(results_in(plan, me, action) is not None for action in plan.actions(me))
    messages = site.meters.device.log_bytes([site.meters.memory.message] * made * (2 if goes_on else 1))
    # The next iteration has sums of its own. A reduction that would change the sums, or adds those of lent layers to
    # them, works on a copy.
    twice = goes_on or not site.exact or plan.crossings
    return messages._replace(device=messages.device + (sums if twice else 0))


def _on_the_way(site: Site, plan: Plan, cuts: Cuts | None) -> int | None:
    """Bytes that a reduction of shards takes for a time. These are the transfers under way at once (others' pieces in
    the shards that this worker speaks for, and its own pieces in all others), and the slices that it folds or receives,
    before they lie as they are kept. None without shards."""
    me, shards, layout = site.place.me, site.stage.shards, site.trainable.layout
    if shards is None or cuts is None:
        return None
    each = [pieces(plan, chunk) for chunk in plan.problem.chunks_of[me.stage]] if site.exact else []
    of = {worker: max((len(runs[worker]) for runs in each), default=1) for worker in plan.problem.live(me.stage)}
    kind = layout.dtype if site.exact else cuts.wire or layout.dtype
    length = sum(shards.length(shard) for shard in cuts.spoken_for(me))
    others = sum(number for worker, number in of.items() if worker != me)
    moving = kind.itemsize * (others * length + of.get(me, 0) * (layout.numel - length))
    return min(2 * at_once(layout), moving) + kind.itemsize * sum(map(shards.length, shards.held))
