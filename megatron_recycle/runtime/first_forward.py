"""The check of first forwards: a chunk's first forward on a worker runs twice, with the same seeds, and must give the
same bits.

Otherwise a micro-batch's results depend on when and where it runs: its layers draw from an unknown generator, or follow
the clock, other threads, or a count of their calls. One failure then changes all numbers, without a sign of it.

The first run serves the comparison only: its results are dropped, so that it needs no more memory than one run. Its
lasting effects (generators, tables, compiled code) stay, as in any worker that has run a micro-batch before. If the
second run differs, a third one shows whether the first was an exception for that reason. A fourth one, traced by module
like the third, shows which layer differs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_map_only

from megatron_recycle.errors import UnsupportedError
from megatron_recycle.membership import Standing
from megatron_recycle.observe.log import get_logger
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.compute.data import Batch, digest
from megatron_recycle.runtime.site import Site
from megatron_recycle.runtime.stage import Forward
from megatron_recycle.runtime.worker_extension import Meeting, WorkerExtension

_TWICE = "first forward"
"""Name of this work, which has limits of its own: it takes several forwards' time."""
_PLAIN = (bool, int, float, complex, str)

Inputs = tuple[torch.Tensor, ...] | None
Run = Callable[[Inputs, Batch | None, bool], Forward]
"""(inputs, data, whether it is metered) -> a forward, with the random numbers of its place."""


def first_forward(site: Site, groups: Groups, chunk: int, run: Run, inputs: Inputs, batch: Batch | None) -> Forward:
    """The first forward of the stage's ``chunk``, after an earlier run that gave the same bits.

    Raises GenerationOver; with `exact` UnsupportedError, which names the layer, if the bits differ.
    """
    def make(metered: bool) -> Forward:
        given, data = tree_map_only(torch.Tensor, _copied, (inputs, batch))  # a layer may write to its inputs
        return run(given, data, metered)

    left = _Left(site.stage.module)
    with site.phases.working(_TWICE):
        before = _outcome(make(False))
        left.remember()
        site.framework.generators.adopt("the model", site.stage.module)  # the run may have made some
    made = make(True)
    now = _outcome(made)
    if any(_on_any_part(site, groups, now != before)):
        del made  # there is room for one
        with site.phases.working(_TWICE):
            made = _once_more(site, groups, lambda: make(False), now)
    left.put_back()
    site.unchecked.discard(chunk)
    return made


class FirstForwards(WorkerExtension):
    """All parts of a worker run a forward twice if any of them has to: a part may be new, or a failure may have
    interrupted its own check."""

    def settle(self, meeting: Meeting) -> None:
        _agree(meeting.site, meeting.groups)

    def renew(self, site: Site, standing: Standing, groups: Groups) -> None:
        _agree(site, groups)


def _agree(site: Site, groups: Groups) -> None:
    if groups.siblings is not None:
        every = range(len(site.place.chunks))
        found = _on_any_part(site, groups, *(chunk in site.unchecked for chunk in every))
        site.unchecked.update(chunk for chunk in every if found[chunk])


def _on_any_part(site: Site, groups: Groups, *flags: bool) -> list[bool]:
    """Which of ``flags`` are set on a part of this worker. Raises GenerationOver."""
    if groups.siblings is None:
        return [*flags]
    found = torch.tensor(flags, dtype=torch.float32, device=site.stage.device)
    with groups.counting("the first forward"):
        groups.siblings.sum(found).wait()
    return [number > 0 for number in found.tolist()]


def _once_more(site: Site, groups: Groups, run: Callable[[], Forward], second: int) -> Forward:
    """A forward with the same bits as the one before it, or about which the user is warned. ``second``: the outcome of
    the last run, which differs from the first's. Raises UnsupportedError, GenerationOver."""
    names = {id(module): name for name, module in site.stage.module.named_modules()}
    with _followed(names) as events:
        made = run()
    third = _outcome(made)
    if not any(_on_any_part(site, groups, third != second)):
        return made  # only the first run differed
    del made
    with _followed(names) as others:
        made = run()
    if third != second or _outcome(made) != third:
        _complain(site, _culprit(events, others))
    return made


def _complain(site: Site, layer: str) -> None:
    text = (f"the same micro-batch, run twice with the same random seeds, has given different outputs on worker "
            f"{site.place.name}, because of {layer}. It draws random numbers from a generator that is out of sight, or "
            "depends on something else that changes: time, threads, a count of its calls, kernels that are not "
            "deterministic (`recycle doctor`). So what a micro-batch gives depends on when and where it runs, and "
            "after a failure all numbers are others. Draw from torch's, Python's or numpy's global generators, which "
            "are set for each micro-batch, or keep the generator as an attribute of the layer")
    if site.exact:
        raise UnsupportedError(f"{text}. Without reduction exact this is a warning, and check_forward false leaves the "
                               "check out")
    get_logger().warning("megatron-recycle: %s (check_forward false leaves this check out)", text)


def _outcome(forward: Forward) -> int:
    """A checksum of the bits of a forward's results."""
    return digest((forward.outputs, () if forward.loss is None else forward.loss, forward.report))


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


class _Left:
    """Traces of forwards in ``module``: numbers, texts and tensors that are attributes, and buffers. Repeated runs of
    the first forward must leave them as one run does."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = list(module.modules())
        self._before = [_marks(each) for each in self._modules]
        self._kept: list[tuple[dict[str, Any], str, Any, torch.Tensor | None]] = []

    def remember(self) -> None:
        """Record the traces of the first run."""
        for module, before in zip(self._modules, self._before, strict=True):
            # A batch norm's statistics do not show that they are written to; its count does.
            wrote = _marks(module) != before
            self._kept += [(held, name, value, value.detach().clone() if isinstance(value, torch.Tensor) else None)
                           for held, name, value in _simple(module) if wrote or not isinstance(value, torch.Tensor)]

    def put_back(self) -> None:
        """Put back the recorded traces, after the last run."""
        for held, name, value, copy in self._kept:
            now = held.get(name)
            if copy is None and isinstance(now, _PLAIN):
                held[name] = value
            elif copy is not None and now is value:
                held[name] = copy  # not copied in place: the graph of the run that counts may need it


def _simple(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """The holder, name and value of each number, text and tensor of ``module``, but for tensors with a graph, which
    belong to a forward."""
    for held in (vars(module), module._buffers):
        for name, value in held.items():
            tensor = isinstance(value, torch.Tensor)
            if isinstance(value, _PLAIN) or (tensor and not value.requires_grad and not value.is_inference()):
                yield held, name, value


def _marks(module: nn.Module) -> list[tuple[str, int, int]]:
    """Marks of ``module``'s tensors, which change when a tensor is written to."""
    return [(name, id(value), value._version) for _, name, value in _simple(module) if isinstance(value, torch.Tensor)]


class _Event(NamedTuple):
    """Tensors that enter a module, or leave it.

    Attributes:
        layer: the module that has made them: the enclosing one, or the module itself.
        module: the module.
        out: whether they leave it.
        bits: their checksum.
    """

    layer: str
    module: str
    out: bool
    bits: int


@contextmanager
def _followed(names: Mapping[int, str]) -> Iterator[list[_Event]]:
    """A block in which this thread's modules, with ``names`` by their `id`, are traced; gives the events."""
    found: list[_Event] = []
    inside: list[str] = []
    thread = threading.get_ident()

    def begins(module: nn.Module, given: Any) -> None:
        if threading.get_ident() == thread and not torch.compiler.is_compiling():
            name = _name(module, names)
            found.append(_Event(inside[-1] if inside else _AROUND, name, False, _bits(given)))
            inside.append(name)

    def ends(module: nn.Module, given: Any, made: Any) -> None:
        if threading.get_ident() == thread and not torch.compiler.is_compiling():
            name = _name(module, names)
            while inside and inside.pop() != name:
                pass  # left by an error that an enclosing layer has handled
            found.append(_Event(name, name, True, _bits(made)))

    hooks = register_module_forward_pre_hook(begins), register_module_forward_hook(ends)
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


_AROUND = "the code around the model (a function among its layers, the loss function, forward_step)"


def _name(module: nn.Module, names: Mapping[int, str]) -> str:
    kind = type(module).__name__
    return f"layer {names[id(module)]} ({kind})" if names.get(id(module)) else f"the code of {kind}"


def _bits(tree: Any) -> int:
    with suppress(Exception):  # tensors of odd kinds
        return digest(tree)
    return 0


def _culprit(one: Sequence[_Event], other: Sequence[_Event]) -> str:
    """The first layer, in words, in which two runs differ."""
    behind = ""
    for mine, others in zip_longest(one, other):
        if mine != others:
            first = mine or others
            return first.layer + (f", behind {behind}" if behind and not first.out else "")
        behind = mine.module if mine.out else behind
    return _AROUND + (f", behind {behind}" if behind else "")
