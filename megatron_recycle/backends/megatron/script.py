"""Acts of a training script around `forward_backward_func()` that stock would follow and the plugin could not.

The plugin steps inside that function, reads data by place, and knows one model. A script that changes gradients before
`optimizer.step()`, leaves a step out, or comes with another model or iterator would silently train something else: each
is refused at once, by name.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from megatron.core import parallel_state

from megatron_recycle.errors import UnsupportedError


class Script:
    """Watches one worker's script.

    Args:
        models: the stage's, in Megatron's DistributedDataParallel.
        optimized: gives the identities of the stepped objects, which must not change.
        versions: of gradients; they count changes in place.
    """

    def __init__(self, models: Sequence[Any], optimized: Callable[[], Sequence[int]],
                 versions: Callable[[], Sequence[int]]) -> None:
        self._models = tuple(models)
        self._versions = versions
        self._now_optimized = optimized
        self._optimized = optimized()
        self._reading: dict[bool, dict[int, tuple[Any, int]]] = {True: {}, False: {}}
        self._unused: Sequence[int] | None = None
        """Versions of the gradients at the last step, until the script calls `optimizer.step()`."""

    def calls(self, model: Any, data_iterator: Any, forward_only: bool) -> None:
        """Check a call of `forward_backward_func()` by the script. Raises UnsupportedError."""
        models = model if isinstance(model, Sequence) else [model]
        if len(models) != len(self._models) or any(map(operator.is_not, models, self._models)):
            raise UnsupportedError(
                "forward_backward_func() was called with another model than at first: the plugin trains and evaluates "
                "one. To evaluate other parameters (averages of them), copy them in for the evaluation and out again")
        if isinstance(data_iterator, Sequence) and len(data_iterator) != len(models):
            raise UnsupportedError(f"forward_backward_func() got {len(data_iterator)} data iterators for {len(models)} "
                                   "models of this worker: give one for each, as a list, with None for those that read "
                                   "nothing")
        self._check_data(data_iterator, training=not forward_only)
        if forward_only:
            return
        if self._unused is not None:
            raise UnsupportedError(
                "optimizer.step() was left out after the last forward_backward_func(): the plugin has made the step in "
                "there, so that it cannot be. To sum gradients over several calls, give one call all micro-batches")
        if self._now_optimized() != self._optimized:
            raise UnsupportedError("the optimizer's parameters have changed: give it all of them before the first "
                                   "iteration (with a learning rate of 0 while they are to stay)")

    def made_step(self) -> None:
        """Note that the step of the script's iteration is done."""
        self._unused = self._versions()

    def stepped(self) -> None:
        """Note a step, perhaps a repeated one."""
        if self._unused is not None:
            self._unused = self._versions()

    def takes_step(self) -> None:
        """Check a call of `optimizer.step()` by the script. Raises UnsupportedError."""
        versions, self._unused = self._unused, None
        if versions is None:
            raise UnsupportedError("optimizer.step() was called twice, or before forward_backward_func(): the plugin "
                                   "makes one step in each call of that function")
        if versions != self._versions():
            raise UnsupportedError(
                "gradients (main_grad) were changed between forward_backward_func() and optimizer.step(): the plugin "
                "has made the step already. Change them by hooks on the parameters, which see a micro-batch each, or "
                "clip them by their norm (clip_grad)")

    def _check_data(self, data_iterator: Any, training: bool) -> None:
        iterator = unwrapped(data_iterator)
        if iterator is None:
            return
        known, others = self._reading[training], self._reading[not training]
        if id(iterator) in others:
            raise UnsupportedError("training and evaluation use one data iterator: give each of them its own")
        if training and known and id(iterator) not in known:
            raise UnsupportedError(
                "forward_backward_func() got another data iterator than before: data is read by place, so give it one "
                "for the whole training, whose sampler goes on from epoch to epoch, or "
                "megatron_recycle.enable(data=factory) with factory(pipeline) -> iterator")
        before = known.setdefault(id(iterator), (iterator, taken_from(iterator)))[1]
        if taken_from(iterator) != before:
            raise UnsupportedError("the script has taken batches from the data iterator itself, which the plugin would "
                                   "give out again: leave that to forward_step, or do it before the first iteration")


def unwrapped(data_iterator: Any) -> Any:
    """The iterator itself, without the list that Megatron allows. With virtual pipelines the list has one for each of
    the worker's models: here the reading one's, the model's first on the first stage, its last on the last.
    """
    if isinstance(data_iterator, list) and data_iterator:
        first = len(data_iterator) == 1 or parallel_state.is_pipeline_first_stage()
        return data_iterator[0 if first else -1]
    return data_iterator


def taken_from(iterator: Any) -> int:
    """The number of batches taken from a data loader's ``iterator``, which Megatron-LM may have wrapped."""
    return int(getattr(getattr(iterator, "iterable", iterator), "_num_yielded", 0))


def foreign_synchronisation(config: Any, models: Iterable[Any]) -> list[str]:
    """Names of ``config``'s synchronisation functions that are not Megatron's own, and would never be called."""
    own = list(models)
    found = []
    for name in ("no_sync_func", "grad_sync_func", "param_sync_func"):
        value = getattr(config, name, None)
        for function in value if isinstance(value, list) else [value]:
            if function is not None and not any(getattr(function, "__self__", None) is model for model in own):
                found.append(name)
    return found
