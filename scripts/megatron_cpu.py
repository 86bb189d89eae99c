"""Lets megatron-core run on a machine without a GPU, for tests and for trying the scripts out.

megatron-core names CUDA in many places. `install()` makes these mean the CPU: device arguments, random states,
memory counters, streams. It changes torch for the whole process, so it belongs to scripts and tests only; the
plugin itself never loads it. With a GPU there it does nothing.

    recycle run --nproc 6 scripts/megatron_cpu.py PATH/pretrain_gpt.py ARGUMENTS   # Megatron-LM's own script
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import runpy
import sys
from collections import defaultdict
from collections.abc import Mapping
from importlib.machinery import PathFinder
from importlib.metadata import distribution
from importlib.util import find_spec, module_from_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class CudaMeansCpu(TorchFunctionMode):
    """Rewrites `device="cuda"` and `.cuda()`; `.type()` answers with the name that Megatron looks for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and _is_cuda(device):
            kwargs = {**kwargs, "device": "cpu"}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        if func in (torch.Tensor.cuda, torch.Tensor.pin_memory):
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(args[0]).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    if isinstance(device, (str, torch.device)):
        return str(device).startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


class _Stream:
    """A stream on which everything has happened already."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *failure: object) -> None:
        pass

    def wait_stream(self, *arguments: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def is_capturing(self) -> bool:
        return False


def install(*, pretend: bool = False) -> None:
    """Make CUDA mean the CPU in this process.

    Args:
        pretend: also claim that there is a GPU, which Megatron-LM's training scripts insist on.
    """
    if torch.cuda.is_available():
        return
    # Before Megatron is imported: it compiles small functions, which a CPU gains little from.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    import megatron.core.tensor_parallel.random as megatron_random

    # It warns whenever a CPU state changes inside a block for a CUDA state: here they are one.
    logging.getLogger(megatron_random.__name__).setLevel(logging.ERROR)
    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    for name in ("synchronize", "set_device", "empty_cache", "reset_peak_memory_stats"):
        setattr(cuda, name, lambda *arguments: None)  # each its own: torch.compile() has rules for each
    cuda.get_rng_state = lambda *arguments, **keywords: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *arguments, **keywords: torch.set_rng_state(state)
    cuda.manual_seed = torch.default_generator.manual_seed
    cuda.current_stream = lambda *arguments: _Stream()
    random: Any = megatron_random
    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    # Installed for good: there is no block to leave.
    contextlib.ExitStack().enter_context(CudaMeansCpu())
    _load_what_is_cut()
    _keep_what_is_sent()
    _norms_of_sequences()
    if pretend:
        pretend_gpus(cuda)


def _load_what_is_cut() -> None:
    """Let the distributed optimizer load checkpoints, which stock can with Apex and Transformer Engine only: with
    torch's own Adam it asks for the steps of a state that there is only after the first one, writes to views of
    parameters, misses the count of steps among what it has read, and gives all parameters one, each of which adds
    to it."""
    from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE, DistributedOptimizer

    if HAVE_APEX_OR_TE:
        return
    stock, load = DistributedOptimizer.state_dict, DistributedOptimizer.load_state_dict
    put = DistributedOptimizer._set_main_param_and_optimizer_states

    def state_dict(self: Any) -> Any:
        state = self.optimizer.state
        for parameter in (parameter for group in self.optimizer.param_groups for parameter in group["params"]):
            if parameter not in state:
                state[parameter] = {"step": torch.tensor(0.0), "exp_avg": torch.zeros_like(parameter),
                                    "exp_avg_sq": torch.zeros_like(parameter)}
        return stock(self)

    def load_state_dict(self: Any, given: Any) -> None:
        with torch.no_grad():
            load(self, given)
        for state in self.optimizer.state.values():
            state["step"] = torch.tensor(float(given["optimizer"]["param_groups"][0]["step"]))

    def set_states(self: Any, parameter: Any, tensors: Any) -> None:
        group, place = self.model_param_group_index_map[parameter]
        own = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]
        put(self, parameter, {**tensors, "step": own["step"]})

    changed: Any = DistributedOptimizer
    changed.state_dict, changed.load_state_dict = state_dict, load_state_dict
    changed._set_main_param_and_optimizer_states = set_states


def _norms_of_sequences() -> None:
    """Let torch's norms take part in sequence parallelism, as Apex's do: their parameters only need a mark."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    stock: Any = WrappedTorchNorm.__new__

    def made(cls: Any, config: Any, *arguments: Any, **keywords: Any) -> Any:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        norm = stock(cls, plain, *arguments, **keywords)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    wrapped: Any = WrappedTorchNorm
    wrapped.__new__ = made


def _keep_what_is_sent() -> None:
    """Let stock's interleaved schedule compute what it computes on GPUs: with an overlapped exchange it frees an output
    before it is sent, which CUDA's streams keep in order and gloo does not. The next stage would then get whatever is
    in that memory, without an error."""
    from megatron.core.pipeline_parallel import schedules

    stock = schedules.forward_backward_pipelining_with_interleaving

    def interleaved(*, model: Any, **keywords: Any) -> Any:
        schedules.get_model_config(model[0]).deallocate_pipeline_outputs = False
        return stock(model=model, **keywords)

    schedules.forward_backward_pipelining_with_interleaving = interleaved


def pretend_gpus(cuda: Any) -> None:
    """Claim that there are GPUs."""
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 8
    cuda.get_device_capability = lambda *arguments: (8, 0)
    cuda.get_device_properties = lambda *arguments: SimpleNamespace(
        major=8, minor=0, name="cpu", total_memory=1 << 30, multi_processor_count=1)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(cuda, name, lambda *arguments: 0)
    cuda.memory_stats = lambda *arguments: defaultdict(int)
    cuda.mem_get_info = lambda *arguments: (1 << 30, 1 << 30)
    cuda.Stream = cuda.stream = _Stream
    cuda.set_stream = lambda stream: None
    cuda.default_stream = lambda *arguments: _Stream()
    accelerator: Any = torch.accelerator  # a build for GPUs asks it in every step
    accelerator.current_stream = cuda.default_stream


def _borrow_helpers() -> None:
    """The datasets' compiled helpers come from the pip package: a checkout would build them with a C++ compiler."""
    import megatron.core.datasets.utils as datasets

    datasets.compile_helpers = lambda: None
    name = "megatron.core.datasets.helpers_cpp"
    if find_spec(name) is not None:
        return
    folder = distribution("megatron-core").locate_file("megatron/core/datasets")
    spec = PathFinder.find_spec(name, [str(folder)])
    assert spec is not None and spec.loader is not None
    sys.modules[name] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


def main(arguments: list[str]) -> None:
    """Run a script of Megatron-LM, or one that runs it and names it, on the CPU: neither kernels nor helpers are
    compiled."""
    sys.argv = arguments
    sys.path[:0] = [os.path.dirname(os.path.realpath(one)) for one in arguments[:3] if one.endswith(".py")]
    install(pretend=True)
    _borrow_helpers()
    with contextlib.suppress(ImportError):
        import megatron.legacy.fused_kernels as kernels

        kernels.load = lambda arguments: None
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
