"""State that a forward leaves in the model, which would make results depend on where micro-batches run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from megatron_recycle.errors import UnsupportedError
from megatron_recycle.observe.log import get_logger

_FORWARDS = 3  # forwards that must change an attribute before a warning: a cached value changes only once
_SIMPLE = (bool, int, float, complex, str, torch.Tensor)
_FRAMEWORKS = ("torch", "deepspeed", "megatron")
_OWN = {"training", "_parameters", "_buffers", "_modules"}


def statistics(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The parts of ``module`` of known types with running statistics, by name."""
    kinds = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
    return [(name, part) for name, part in module.named_modules()
            if isinstance(part, kinds) and part.track_running_stats]


class HiddenState:
    """Watches the changes that forwards of ``model`` make in it.

    A changed buffer is always refused: a buffer is state by definition. A number, text or tensor attribute of a module
    may be state (a count of calls) or only a value for later reading (the last loss). If each of the first forwards of
    a chunk changes it, one line says so.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = list(model.named_modules())
        self._buffers = [module._buffers for _, module in self._modules]
        self._looked: Counter[int] = Counter()
        self._changing: dict[int, set[str]] = {}

    def unchanged(self, forward: Callable[[], Any], chunk: int = 0) -> Any:
        """Run ``forward()`` of this chunk of the model. Raises UnsupportedError naming the buffers that it changed."""
        before = self._versions()
        attributes = self._attributes() if self._looked[chunk] < _FORWARDS else None
        result = forward()
        if not all(was is buffer and version == own for (was, version), (buffer, own)
                   in zip_longest(before, self._versions(), fillvalue=(None, 0))):
            raise UnsupportedError(
                f"these buffers change in forward: {', '.join(self._changed(before))}. What a micro-batch leaves in "
                "them would depend on where it runs; keep such state out of the model, or train without the plugin")
        if attributes is not None:
            self._compare(attributes, chunk)
        return result

    def _versions(self) -> list[tuple[torch.Tensor, int]]:
        return [(buffer, buffer._version) for buffers in self._buffers if buffers
                for buffer in buffers.values() if buffer is not None]

    def _changed(self, before: list[tuple[torch.Tensor, int]]) -> list[str]:
        known = {(id(buffer), version) for buffer, version in before}
        return sorted(f"{name}.{key}".lstrip(".") for name, module in self._modules
                      for key, buffer in module._buffers.items()
                      if buffer is not None and (id(buffer), buffer._version) not in known) or ["one that is gone"]

    def _compare(self, before: dict[str, Any], chunk: int) -> None:
        now = self._attributes()
        changed = {name for name, value in now.items() if before.get(name) != value}
        each = self._changing[chunk] = changed & self._changing.get(chunk, changed)
        self._looked[chunk] += 1
        if self._looked[chunk] == _FORWARDS and each:
            get_logger().warning(
                "megatron-recycle: these attributes change in each forward: %s. What a micro-batch finds there depends "
                "on which others ran before it on the same worker. If results depend on it, they differ once "
                "micro-batches are re-routed: make it a function of the input", ", ".join(sorted(each)))

    def _attributes(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, module in self._modules:
            if type(module).__module__.partition(".")[0] in _FRAMEWORKS:
                continue  # DeepSpeed's PipelineModule counts forwards for a refused option (seed_layers)
            for key, value in vars(module).items():
                if key in _OWN or not isinstance(value, _SIMPLE):
                    continue
                if not isinstance(value, torch.Tensor):
                    found[f"{name}.{key}".lstrip(".")] = (type(value), repr(value))
                elif value.grad_fn is None:  # a tensor with a graph belongs to this forward
                    found[f"{name}.{key}".lstrip(".")] = (id(value), value._version)
        return found
