"""A stage's parameters and their torch optimizer state, by name: everything that a step changes.

The name of a tensor is ``KEY NAME``. NAME is the parameter's in the module; KEY is ``parameter`` for the parameter
itself, ``master`` for the fp32 copy that is stepped in its place, and else the optimizer's own (``exp_avg``). Every
tensor of one NAME that is stepped element by element has the parameter's shape, so that a part of a stage's state, held
by some workers only, is a range of the flat layout of its parameters, the same for all keys.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from megatron_recycle.errors import TransferError
from megatron_recycle.runtime.compute.edits import copied
from megatron_recycle.runtime.compute.module_tree import ModuleTree

PARAMETER, MASTER, BUFFER = "parameter", "master", "buffer"
_NO_MASTERS: Mapping[nn.Parameter, nn.Parameter] = {}
_NOTHING: Mapping[str, Any] = {}
_CANNOT = "a worker cannot come back to this job"


class Optimizer(Protocol):
    """A torch optimizer, or a wrapper that shows its state."""

    @property
    def state(self) -> Any: ...

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...


class OptimizerState:
    """Reads, loads and resets this state, whichever framework has built the optimizer.

    Args:
        module: the stage's part of the model; its parameters may be frozen, added and replaced later.
        optimizer: steps them.
        masters: fp32 copies that it steps in place of 16-bit parameters.
        own: keys of parameter groups that every worker's script sets for itself; they are not part of the state.

    Attributes:
        trained: the parameters that get gradients, by name.
    """

    def __init__(self, module: nn.Module, optimizer: Optimizer,
                 masters: Mapping[nn.Parameter, nn.Parameter] = _NO_MASTERS, own: Collection[str] = ()) -> None:
        self._module = module
        self._tree = ModuleTree(module)
        self._optimizer = optimizer
        self._masters = masters
        self._own = {"params", *own}
        self.trained: Mapping[str, nn.Parameter] = {}

    def parameters(self) -> Mapping[str, nn.Parameter]:
        """All parameters of the module, trained and frozen, by name."""
        return self._tree.parts.parameters

    def train(self, parameters: Iterable[nn.Parameter]) -> None:
        """From now on only ``parameters`` get gradients."""
        name_of = {id(parameter): name for name, parameter in self.parameters().items()}
        self.trained = {name_of[id(parameter)]: parameter for parameter in parameters}

    # ---- tensors

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that a step changes. They share the parameters' memory, and the versions that count writes to
        it."""
        return self._of(self.trained)

    def fixed(self) -> dict[str, torch.Tensor]:
        """Tensors that a step does not change but results depend on: parameters that are not trained, with their
        earlier optimizer state, and buffers."""
        trained = set(map(id, self.trained.values()))
        frozen = {name: parameter for name, parameter in self.parameters().items() if id(parameter) not in trained}
        return {**self._of(frozen), **{f"{BUFFER} {name}": value for name, value in self._module.named_buffers()}}

    def reset(self, names: Collection[str]) -> None:
        """Drop all `tensors` but these names: optimizers make their state at the first step."""
        self._drop(names, self.trained)

    def load(self, tensors: Mapping[str, torch.Tensor], counters: Any) -> None:
        """Load a peer's state: its `tensors` and `fixed` as ``tensors``, and its `counters`.

        Raises TransferError if this process has built another model or optimizer.
        """
        named = self.parameters()
        if not set(counters["trained"]) <= set(named):
            raise TransferError("the job trains parameters by now that the model which this worker has built has not: "
                                f"{_CANNOT}")
        # The giver's last trained parameters; this worker's own frozen ones are determined before it trains.
        self.trained = {name: named[name] for name in counters["trained"]}
        self._drop(tensors.keys(), named)
        own = {**self.tensors(), **self.fixed()}
        with torch.no_grad():
            for name, tensor in tensors.items():
                key, of = name.split(" ", 1)
                if name in own:
                    own[name].copy_(tensor)
                elif of in named and key not in (PARAMETER, MASTER, BUFFER):  # made at the first step
                    self._optimizer.state[self._stepped(named[of])][key] = tensor.clone()
                else:
                    raise TransferError(f"the job's model has a {name} by now, which the one that this worker has "
                                        f"built has not: {_CANNOT}")
        self.set_counters(counters)

    def _stepped(self, parameter: nn.Parameter) -> nn.Parameter:
        """The tensor that the optimizer steps in place of ``parameter``."""
        return self._masters.get(parameter, parameter) if self._masters else parameter

    def _of(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
        tensors = {f"{PARAMETER} {name}": parameter.detach() for name, parameter in parameters.items()}
        stepped = parameters
        if self._masters:
            stepped = {name: self._stepped(parameter) for name, parameter in parameters.items()}
            tensors.update({f"{MASTER} {name}": master.detach() for name, master in stepped.items()
                            if master is not parameters[name]})
        states = self._optimizer.state
        for name, parameter in stepped.items():
            for key, value in states.get(parameter, _NOTHING).items():
                if isinstance(value, torch.Tensor):
                    tensors[f"{key} {name}"] = value
        return tensors

    def _drop(self, names: Collection[str], parameters: Mapping[str, nn.Parameter]) -> None:
        """Drop the optimizer's tensors of ``parameters`` that are not among ``names``."""
        states = self._optimizer.state
        for name, parameter in parameters.items():
            stepped = self._stepped(parameter)
            kept = states.get(stepped, {})
            for key in [key for key, value in kept.items()
                        if isinstance(value, torch.Tensor) and f"{key} {name}" not in names]:
                del kept[key]
            # Optimizers make their state where there is none at all; numbers are restored with the counters.
            if not any(isinstance(value, torch.Tensor) for value in kept.values()):
                states.pop(stepped, None)

    # ---- counters

    def counters(self) -> dict[str, Any]:
        """A copy of the rest that a step changes: the optimizer's numbers for each parameter or group of parameters;
        and the names of the trained parameters."""
        states, masters, numbers = self._optimizer.state, self._masters, {}
        for name, parameter in self.parameters().items():
            stepped = masters.get(parameter, parameter) if masters else parameter
            own = {key: value for key, value in states.get(stepped, _NOTHING).items()
                   if not isinstance(value, torch.Tensor)}
            if own:
                numbers[name] = own
        groups = [{key: value for key, value in group.items() if key not in self._own}
                  for group in self._optimizer.param_groups]
        return copied({"numbers": numbers, "groups": groups, "trained": list(self.trained)})

    def set_counters(self, counters: Any, only: Collection[str] | None = None) -> None:
        """Restore `counters`; of the groups only the keys ``only``, if given.

        Raises TransferError if there are other groups.
        """
        counters = copied(counters)
        groups = self._optimizer.param_groups
        if len(counters["groups"]) != len(groups):
            raise TransferError(f"the job's optimizer has {len(counters['groups'])} parameter groups by now, the one "
                                f"that this worker has built {len(groups)}: {_CANNOT}")
        named = self.parameters()
        for name, numbers in counters["numbers"].items():
            if name in named:
                self._optimizer.state[self._stepped(named[name])].update(numbers)
        for group, values in zip(groups, counters["groups"], strict=True):
            group.update({key: value for key, value in values.items() if only is None or key in only})
