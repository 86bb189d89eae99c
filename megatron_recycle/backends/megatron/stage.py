"""One stage of a Megatron model with its optimizer, as the runtime sees it.

Forward and backward are core's own `forward_step` and `backward_step`; the step is Megatron's optimizer's own. The
runtime provides only the results of collectives: reduced gradients are where Megatron looks for them (`main_grad`), and
the norm is the verdict's. The arithmetic is stock's, operation by operation.
"""

from __future__ import annotations

import copy
import math
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from struct import Struct
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer.clip_grads import l2_norm_impl, multi_tensor_applier, multi_tensor_scale_impl
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel.schedules import backward_step, deallocate_output_tensor, forward_step
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared
from megatron.core.utils import get_attr_wrapped_model, get_model_config, get_model_type
from torch import nn

from megatron_recycle.backends.hidden_state import HiddenState
from megatron_recycle.backends.megatron.chunks import Chunks
from megatron_recycle.backends.megatron.data import read_from
from megatron_recycle.backends.megatron.distributed import Distributed
from megatron_recycle.backends.megatron.groups import TensorGroup
from megatron_recycle.backends.megatron.lent_layers import BlockLayers
from megatron_recycle.backends.megatron.main_grads import MainGrads
from megatron_recycle.backends.megatron.mtp_losses import Predictions
from megatron_recycle.backends.megatron.rates import SET_BY_LOOP, SET_BY_STEP, Rates
from megatron_recycle.backends.megatron.scaling import Scaling
from megatron_recycle.backends.megatron.script import Script
from megatron_recycle.backends.megatron.support import single_optimizers
from megatron_recycle.backends.megatron.version import release
from megatron_recycle.errors import UnsupportedError, VerificationError
from megatron_recycle.membership import Verdict
from megatron_recycle.runtime.comm.handles import Groups
from megatron_recycle.runtime.compute.data import Batch
from megatron_recycle.runtime.compute.optimizer_state import OptimizerState
from megatron_recycle.runtime.compute.sharded_optimizer import ShardedOptimizer
from megatron_recycle.runtime.stage import Averaging, Chunk, Forward, Tie, fingerprint

_KEYS = 4  # values that a loss function may report; each is one number, or a sum and its divisor

_NUMBERS = Struct("2d")
_NAMES_THE_MODEL = release() < (0, 17)
"""Whether core's backward takes the model type (to recognise T5)."""
CLIPS_BY_TENSORS = getattr(clip_grads, "multi_tensor_scale_tensor_impl", None) is not None
"""Whether the norm and the clip coefficient are fp32 tensors: since 0.17, where Transformer Engine can multiply by
one."""
ForwardStep = Callable[[Any, Any], Any]
"""The user's function: (data iterator, model) -> (output, loss function)."""


class MegatronStage:
    """The runtime's view of one stage (`runtime.stage.Stage`).

    Args:
        models: the stage, in Megatron's DistributedDataParallel, whose own reduction is disabled; several with virtual
            pipelines.
        optimizer: of this stage; its `step()` no longer steps, since the runtime decides when.
        microbatches: nominal micro-batches of a pipeline.
        settings: of the training loop, which all workers must have alike.
        lends: layers that each neighbour may run; 0: none, by the user's choice.
        v_shaped: whether the models are the two chunks of a V (`vshape`).
    """

    def __init__(self, models: Sequence[Any], optimizer: MegatronOptimizer, microbatches: int,
                 settings: Mapping[str, Any] | None = None, lends: int = 0, v_shaped: bool = False) -> None:
        self.settings = settings or {}
        self.forward_step: ForwardStep
        self.result: tuple[Any, ...] = (True, None, None)
        """The result of `optimizer.step()`: success, gradient norm, number of zeros (None: not counted)."""
        self._chunks = Chunks(models, v_shaped)
        self.module = self._chunks.module
        self._config = get_model_config(models[0])
        self.microbatches = microbatches
        """Per pipeline, in the iteration to be trained."""
        self._predictions = Predictions(self._config)
        self.report_width = 1 + 2 * (_KEYS + self._predictions.most) + 1
        """Tokens, the values, and a 1; all zeros for a micro-batch that is left out."""
        self._keys: dict[str, list[tuple[str, int]]] = {}
        self._hidden = HiddenState(self.module)
        self._coefficient = 1.0
        self.passed = 0.0, 0.0, torch.zeros(0, self.report_width, dtype=torch.float64)
        """Gradient norm, zeros and reports of a past iteration that the script passes over."""
        self.parameters: Sequence[nn.Parameter] = self._chunks.parameters
        if not self.parameters:
            raise UnsupportedError("this stage has no parameters to train: let each stage have some, by another number "
                                   "of stages or other layers frozen")
        self.device = self.parameters[0].device
        self.gradient_dtype: torch.dtype | None = self._gradient_dtype()
        self.partial = self._find_partial()
        # With average_in_collective too: NCCL averages so.
        self.averaging: Averaging = "tokens" if self._config.calculate_per_token_loss else "before"
        self.tied_stages: tuple[tuple[int, ...], ...] = ()
        self.ties: Sequence[Tie] = ()
        if not v_shaped:
            self._find_ties()
        self._tensor_group = TensorGroup(self.module)
        self.chunks: Sequence[Chunk] = [Chunk(module, BlockLayers(
            get_attr_wrapped_model(model, "pre_process", return_model_obj=True), lends, self.gradient_dtype,
            self._tensor_group.adopt) if lends else None)
            for model, module in zip(models, self._chunks.modules, strict=True)]
        # DDP's hooks would move each new gradient to main_grad at once, out of the runtime's sight.
        for model in models:
            model.param_to_bucket_group.clear()
        self._single, = single_optimizers(optimizer)
        self._limit = float(self._single.config.clip_grad)
        self.distributed = Distributed(self._single) if isinstance(self._single, DistributedOptimizer) else None
        """The optimizer, if its state is cut into shards."""
        self.shards: ShardedOptimizer | None = None if self.distributed is None else self.distributed.shards
        self.scaling = Scaling(self._single)
        self._take_over(optimizer)
        self._state = OptimizerState(self.module, self._single.optimizer, self._masters(), own=SET_BY_LOOP)
        self._state.train(self._optimized())
        self._main_grads = MainGrads(models, self.parameters)
        self.script = Script(models, self._steps, self._main_grads.versions)
        self.rates = Rates(self._single.optimizer)
        self.model = f"{fingerprint(self.parameters)}, optimizer {type(self._single.optimizer).__name__}"

    def look(self) -> bool:
        """Keep the parameters with places for gradients in Megatron, even while frozen, as its optimizer does. Drop the
        gradients of the last step."""
        self._main_grads.forget()
        self._limit = float(self._single.config.clip_grad)
        if self.shards is None:
            for parameter in self._single.get_parameters():
                parameter.grad = None
        return False

    def running_chunk(self, chunk: int) -> AbstractContextManager[None]:
        return self._chunks.running(chunk)

    def forward(self, inputs: tuple[torch.Tensor, ...] | None, batch: Batch | None) -> Forward:
        if not self._chunks.model.training:
            return self._forward(inputs, batch)
        return self._hidden.unchanged(lambda: self._forward(inputs, batch), self._chunks.now)

    def _forward(self, inputs: tuple[torch.Tensor, ...] | None, batch: Batch | None) -> Forward:
        last = self._chunks.computes_loss
        given = None if inputs is None else inputs[0]
        communicated = _operations()
        reports: list[Any] = []
        self._predictions.begin()
        output, tokens = forward_step(
            self.forward_step, read_from(batch), self._chunks.model,
            self.microbatches, given, reports, self._config, cp_group_size=1, vp_stage=self._chunks.vp_stage,
            is_last_stage=last)
        if communicated != _operations() and parallel_state.get_data_parallel_world_size() > 1:
            raise UnsupportedError("forward_step or the loss function communicates in Megatron's data- or "
                                   "model-parallel group, whose other members are not there: a micro-batch may run "
                                   "anywhere. Return (sum of losses, number of tokens, {name: value}) of it alone")
        if last:
            report = self._report(reports[0], float(tokens), self._predictions.take())
            return Forward((given, output), (), torch.tensor(_mean(report[1:3])), report, (output,))
        sent = output.detach()
        if torch.is_grad_enabled():
            deallocate_output_tensor(output, self._config.deallocate_pipeline_outputs)
        return Forward((given, output), (sent,), None, roots=(output,))

    def backward(self, forward: Forward, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        given, output = forward.saved
        if given is None and not output.requires_grad:
            return []  # the layers of this part are frozen; other workers run the rest
        kind = (get_model_type(self._chunks.model),) if _NAMES_THE_MODEL else ()
        for_inputs = backward_step(given, output, gradients[0] if gradients else None, *kind, self._config)
        if given is None:
            return []
        return [torch.zeros_like(given) if for_inputs is None else for_inputs]

    def norm_square(self, gradients: Sequence[torch.Tensor]) -> float:
        counted = self._counted(gradients)
        if not counted:
            return 0.0
        overflow = torch.zeros(1, dtype=torch.int, device=self.device)
        norm, _ = multi_tensor_applier(l2_norm_impl, overflow, [counted], False)
        if self._chunks.models[0].ddp_config.check_for_nan_in_grad and not math.isfinite(norm.item()):
            raise VerificationError(
                f"the norm of this stage's gradient is {norm.item()}: look at the data and the learning rate, or train "
                "on with --no-check-for-nan-in-loss-and-grad (check_for_nan_in_grad of DistributedDataParallelConfig)")
        return self.scaling.share((norm**2.0).item(), counted)

    def zeros(self, gradients: Sequence[torch.Tensor]) -> float:
        if not self.counts_zeros:
            return 0.0
        counted = self._counted(gradients)
        return float(sum(gradient.numel() - int(torch.count_nonzero(gradient)) for gradient in counted))

    def told(self, norm: Any, zeros: Any, left_out: bool) -> tuple[Any, ...]:
        """The result of `optimizer.step()`; ``left_out``: the step was left out after an overflow."""
        return (False, None, None) if left_out else (True, norm, zeros if self.counts_zeros else None)

    @property
    def counts_zeros(self) -> bool:
        """Whether Megatron is to log how many gradients are zero."""
        return bool(self._single.config.log_num_zeros_in_grad)

    def _counted(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients that count in statistics of the whole model: no second copies of another stage's or part's."""
        gradient_of = dict(zip(self.parameters, gradients, strict=True))
        # In the optimizer's order, as stock: the order decides the last bits. Parameters may have nothing in a shard.
        return self.scaling.unscaled([
            gradient_of[parameter].float() for parameter in self._optimized()
            if param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter)
            and gradient_of[parameter].numel()])

    def norm(self, norm_squares: Sequence[float]) -> float:
        """The global gradient norm as Megatron logs it and clips by."""
        total = torch.zeros(1)
        for value in norm_squares:
            total += value
        return total.pow(0.5).item() if CLIPS_BY_TENSORS else total.item() ** 0.5

    def coefficient(self, norm_squares: Sequence[float], weight: float) -> float:
        """Stock's clipping: a NaN norm clips nothing. Returns NaN to leave the step out, after an overflow with a loss
        scale."""
        if self.scaling.any_overflow(norm_squares):
            return math.nan
        limit = self._limit
        norm: Any = self.norm(norm_squares)
        clip = float(limit / ((torch.tensor(norm) if CLIPS_BY_TENSORS else norm) + 1.0e-6)) if limit > 0 else 1.0
        return clip if clip < 1.0 else 1.0

    def step(self, gradients: Sequence[torch.Tensor], coefficient: float) -> None:
        self.scaling.overflowed = math.isnan(coefficient)
        if self.scaling.overflowed:
            with self.rates.of_next_step():
                self.scaling.leave_out(self.rates.steps)
        elif self.shards is not None:
            self.shards.load(gradients, coefficient * self.scaling.factor)
            with self.rates.of_next_step():
                self.shards.step()
            self.scaling.stepped()
        else:
            self._main_grads.show(gradients)
            self._coefficient = coefficient
            with self.rates.of_next_step():
                self._stock_step()
        for parameter in self.parameters:
            parameter.grad = None  # Megatron points it to main_grad; the next backward must not add to that
        self.script.stepped()

    def state(self) -> dict[str, torch.Tensor]:
        return self._state.tensors()

    def fixed(self) -> dict[str, torch.Tensor]:
        return self._state.fixed()

    def load_state(self, tensors: Mapping[str, torch.Tensor], counters: Any) -> None:
        self.rates.expect(counters["next"])
        self._state.load(tensors, counters["optimizer"])
        self._set_own(counters)

    def reset_state(self, names: Collection[str]) -> None:
        self._state.reset(names)


    @property
    def references(self) -> dict[str, Any]:
        """Rates are noted when an iteration begins (see `rates`)."""
        return {"micro-batches": self.microbatches, "clip_grad": self._single.config.clip_grad}

    def refer(self, references: Mapping[str, Any]) -> None:
        self.microbatches, self._single.config.clip_grad = references["micro-batches"], references["clip_grad"]

    @property
    def may_guess_wrong(self) -> bool:
        return self._limit > 0 or self.scaling.scales

    def counters(self) -> Any:
        return {"optimizer": self._state.counters(), "steps": self.rates.steps, "keys": copy.deepcopy(self._keys),
                "next": self.rates.told(), "scaling": self.scaling.counters()}

    def set_counters(self, counters: Any) -> None:
        self._state.set_counters(counters["optimizer"], only=SET_BY_STEP)
        self._set_own(counters)

    def _set_own(self, counters: Any) -> None:
        self.rates.steps = counters["steps"]
        self.scaling.set_counters(counters["scaling"])
        self._keys = {**counters["keys"], **self._keys}  # a joiner has not run a loss function yet

    def summary(self, verdict: Verdict, reports: torch.Tensor) -> bytes:
        # Stock reports have this type.
        used = 1 + 2 * len(self._keys.get(_kind(True), ())) if parallel_state.is_pipeline_last_stage() else 0
        columns = torch.cat([reports[:, 1:used], reports[:, -1:]], dim=1) if used else reports[:0, -1:]
        left_out = self.scaling.any_overflow(verdict.norm_squares)
        norm = math.nan if left_out else self.norm(verdict.norm_squares)
        return _NUMBERS.pack(norm, verdict.zeros) + columns.float().numpy().tobytes()

    def recall(self, summary: bytes) -> None:
        norm, zeros = _NUMBERS.unpack_from(summary)
        columns = torch.tensor(array("f", summary[_NUMBERS.size:]), dtype=torch.float64)
        columns = columns.view(-1, 1 + 2 * len(self._keys.get(_kind(True), ())))
        reports = torch.zeros(len(columns), self.report_width, dtype=torch.float64)
        reports[:, 1:columns.shape[1]], reports[:, -1] = columns[:, :-1], columns[:, -1]
        self.passed = norm, zeros, reports

    def regroup(self, groups: Groups) -> None:
        """Switch tensor-parallel layers, the only ones to compute in a group of Megatron's (see `groups`)."""
        if groups.siblings is not None:
            self._tensor_group.use(groups.siblings.group)

    def reports(self, table: torch.Tensor, forward_only: bool) -> list[dict[str, torch.Tensor]]:
        """The reports of Megatron's loss functions, from (micro-batches, report_width): one dict per micro-batch that
        has run; NaN where none has."""
        keys = self._keys.get(_kind(not forward_only)) or self._keys.get(_kind(True), [])
        rows = [row for row in table.tolist() if row[-1]] or [[math.nan] * self.report_width]
        found = [{key: torch.tensor(row[1 + 2 * index:1 + 2 * index + size], dtype=torch.float, device=self.device)
                  for index, (key, size) in enumerate(keys)} for row in rows]
        self._predictions.show(found, self.microbatches, not forward_only)
        return found

    def _report(self, values: Any, tokens: float, more: Mapping[Any, float]) -> tuple[float, ...]:
        if not isinstance(values, Mapping):
            raise UnsupportedError(f"the loss function reports a {type(values).__name__}: let it return (loss, {{name: "
                                   "value}) or (sum of losses, number of tokens, {name: value})")
        numbers_of = {key: torch.as_tensor(value).flatten().tolist() for key, value in {**values, **more}.items()}
        keys = [(key, len(numbers)) for key, numbers in numbers_of.items()]
        if len(values) > _KEYS or any(size not in (1, 2) for _, size in keys):
            raise UnsupportedError(f"the loss function reports {dict(keys)}; at most {_KEYS} values of one or two "
                                   "numbers each are supported")
        kind = _kind(torch.is_grad_enabled())
        before = self._keys.setdefault(kind, keys)
        if keys != before:
            raise UnsupportedError(f"the loss function reports {dict(keys)} of one micro-batch and {dict(before)} of "
                                   "another: let it report the same values for all of them")
        numbers = [tokens]
        for value in numbers_of.values():
            numbers += [*value, 0.0][:2]
        return (*numbers, *[0.0] * (self.report_width - 1 - len(numbers)), 1.0)

    def _gradient_dtype(self) -> torch.dtype:
        kinds = {parameter.main_grad.dtype for parameter in self.parameters}
        if len(kinds) > 1:
            raise UnsupportedError(f"gradients of one stage are summed in different types ({kinds}); set "
                                   "grad_reduce_in_fp32 (--accumulate-allreduce-grads-in-fp32)")
        return kinds.pop()

    def _find_partial(self) -> list[nn.Parameter]:
        """As stock: parameters with partial gradients on each tensor-parallel part."""
        config, trained = self._config, set(map(id, self.parameters))
        return [parameter for model in self._chunks.models for name, parameter in model.module.named_parameters()
                if id(parameter) in trained and (
                    (config.sequence_parallel and getattr(parameter, "sequence_parallel", False))
                    or (config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)))]

    def _find_ties(self) -> None:
        """Find tied embeddings: in the first chunk of the first stage, and in the output layer of the last stage's last
        chunk, which has another copy of the embedding with multi-token prediction."""
        last = parallel_state.get_pipeline_model_parallel_world_size() - 1
        stage = parallel_state.get_pipeline_model_parallel_rank()
        model = self._chunks.models[0 if stage == 0 else -1]
        part = get_attr_wrapped_model(model, "pre_process", return_model_obj=True)
        shared = part.share_embeddings_and_output_weights or getattr(self._config, "mtp_num_layers", None)
        if not shared or not last:  # with one stage they are one tensor
            return
        self.tied_stages = ((0, last),)
        weight = part.shared_embedding_or_output_weight() if stage in (0, last) else None
        if hasattr(weight, "main_grad"):  # not if it is frozen
            self.ties = [Tie(weight, (0, last))]

    def _optimized(self) -> list[nn.Parameter]:
        """The model's parameters in the optimizer's order, also where the optimizer steps fp32 copies."""
        if self.distributed is not None:
            return self.distributed.parameters
        own = {id(getattr(parameter, "main_param", parameter)): parameter for parameter in self.parameters}
        return [own[id(parameter)] for parameter in self._single.get_parameters()]

    def _masters(self) -> dict[nn.Parameter, nn.Parameter]:
        """The fp32 copies that the optimizer steps in place of 16-bit parameters."""
        if self.distributed is not None:
            return {}
        optimized = set(map(id, self._single.get_parameters()))
        copies = {parameter: getattr(parameter, "main_param", parameter) for parameter in self.parameters}
        return {parameter: master for parameter, master in copies.items()
                if master is not parameter and id(master) in optimized}

    def _steps(self) -> list[int]:
        """The identities of the stepped parameters; with shards, which come and go, the number of groups."""
        if self.distributed is not None:
            return [len(self._single.param_groups)]
        return [id(parameter) for parameter in self._single.get_parameters()]

    def _take_over(self, optimizer: MegatronOptimizer) -> None:
        stock: Callable[[], Any] = optimizer.step
        self._stock_step = stock
        # Its step asks no other ranks for norm and zeros. A NaN norm clips nothing.
        for part in (optimizer, self._single):
            part.get_grad_norm = part.count_zeros = lambda: math.nan
            part.has_grad_norm_group = lambda name: False  # multi-token prediction's own norm is refused where wanted
        self._single.clip_grad_norm = lambda limit: math.nan
        stock_end: Callable[[], bool] = self._single.step_with_ready_grads

        def step_with_ready_grads() -> bool:
            self._clip()
            return stock_end()

        self._single.step_with_ready_grads = step_with_ready_grads
        optimizer.step = self._single.step = self._hand_out

    def _hand_out(self) -> tuple[Any, ...]:
        self.script.takes_step()
        return self.result

    def _clip(self) -> None:
        """As stock: scale the gradients that the optimizer steps with, fp32 copies where the reduced ones have 16 bits,
        by stock's kernel."""
        if self._coefficient == 1.0:
            return
        gradients = [parameter.grad for parameter in self._single.get_parameters() if parameter.grad is not None]
        overflow = torch.zeros(1, dtype=torch.int, device=self.device)
        multi_tensor_applier(multi_tensor_scale_impl, overflow, [gradients, gradients], self._coefficient)


def _operations() -> int:
    """Operations so far in Megatron's group for data and model parallelism: a single group, without other members (see
    `groups`)."""
    return int(parallel_state.get_data_parallel_group()._get_sequence_number_for_group())


def _kind(training: bool) -> str:
    return "training" if training else "evaluation"


def _mean(value: Sequence[float]) -> float:
    """A reported value as one number; ``value`` is (number, 0) or (sum, count)."""
    return value[0] / value[1] if value[1] else value[0]
