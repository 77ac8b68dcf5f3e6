"""The engine that plays DeepSpeed's part in plain PyTorch. Runs in rank processes only (imports torch).

Data parallelism is an all-reduce of the gradients where accumulation ends (`gradients` says why not DDP), low precision
is a cast model with fp32 masters, and the methods are those that training scripts, Transformers, Accelerate and
Lightning call. Whatever else DeepSpeed's engine has raises `MemberNotPlayed`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dsdoctor.runs.plain import optimizers, precision, process, release, schedules, settings
from dsdoctor.runs.plain.data import PlainLoader
from dsdoctor.runs.plain.errors import MemberNotPlayed, NotPlayed
from dsdoctor.runs.plain.gradients import Gradients
from dsdoctor.runs.plain.members import deepspeed_members
from dsdoctor.runs.plain.queries import Queries
from dsdoctor.runs.plain.scaler import loss_scale
from dsdoctor.runs.plain.states import States
from dsdoctor.runs.plain.stepping import PlainOptimizer


class PlainEngine(Queries, States, nn.Module):
    """Wraps the user's model as `module`; see `dsdoctor.runs.plain.initialize` for the arguments.

    `notes` lists what of the config or the script was changed or left out to make this run possible.
    """

    _backward_runs: ClassVar[bool] = False
    """Whether some engine's `backward` runs: its graph may pass through the model of another engine."""

    def __init__(
        self,
        model: nn.Module,
        config: dict[str, Any],
        *,
        args: Any = None,
        optimizer: Any = None,
        model_parameters: Any = None,
        training_data: Any = None,
        lr_scheduler: Any = None,
        mpu: Any = None,
        collate_fn: Any = None,
        zero_stage: int = 1,
    ) -> None:
        super().__init__()
        _refuse(model, mpu)
        place = process.join()
        self.config = config
        self.device = place.device
        self.local_rank, self.global_rank, self.world_size = place.local_rank, place.rank, place.world_size
        self.dp_world_size = place.world_size
        self.settings = settings.read(config, place.world_size)
        self.notes: list[str] = [*self.settings.notes, *place.notes]
        if hasattr(args, "local_rank"):
            args.local_rank = place.local_rank
        self.global_steps = self.global_samples = self.micro_steps = self.skipped_steps = 0
        self._boundary: bool | None = None
        self._in_step = self._in_no_sync = False
        self._scaled = self._step_applied = False
        self._backwards = 0
        self.collate_fn = collate_fn
        self.mpu = mpu
        precision.prepare(model, self.settings, place.device)
        self.module = model
        self.training_dataloader = self.deepspeed_io(training_data) if training_data else None
        self._build_optimizer(optimizer, model_parameters)
        if self.optimizer is not None and release.begins_with_an_empty_step(self.settings.precision, zero_stage):
            self.optimizer.empty_step()
        self._build_scheduler(lr_scheduler)
        self._gradients = Gradients(self._trained(), self.settings)

    # What is built at the start

    def _build_optimizer(self, client: Any, model_parameters: Any) -> None:
        self.basic_optimizer: Optimizer | None = None
        self.optimizer: PlainOptimizer | None = None
        # A generator can be read once only.
        parameters = list(self.module.parameters() if model_parameters is None else model_parameters)
        if client is not None:
            basic = optimizers.from_client(client, parameters)
        elif self.settings.optimizer is not None:
            options = self.settings.optimizer_params
            basic = optimizers.from_config(self.settings.optimizer, parameters, options, self.notes)
        else:
            return
        self.basic_optimizer = basic
        self.optimizer = PlainOptimizer(basic, loss_scale(self.settings), self.settings.clipping, self.device)

    def _build_scheduler(self, client: Any) -> None:
        self.lr_scheduler: Any = None
        if self.basic_optimizer is None:
            return
        if client is not None:
            self.lr_scheduler = client(self.basic_optimizer) if callable(client) else client
        elif self.settings.scheduler is not None:
            options = self.settings.scheduler_params
            self.lr_scheduler = schedules.from_config(
                self.settings.scheduler, self.basic_optimizer, options, self.notes
            )

    def _trained(self) -> list[Tensor]:
        if self.optimizer is not None:
            return [pair.parameter for pair in self.optimizer.pairs]
        return [p for p in self.module.parameters() if p.requires_grad]

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> PlainLoader:
        """A loader over this rank's share of the dataset; `route` eval or predict does not shuffle."""
        return PlainLoader(
            dataset,
            batch_size=batch_size or self.settings.micro_batch,
            rank=self.global_rank,
            world_size=self.dp_world_size,
            shuffle=route not in ("eval", "predict"),
            sampler=data_sampler,
            collate_fn=collate_fn or self.collate_fn,
            pin_memory=pin_memory,
            workers=num_local_io_workers,
            drop_last=self.settings.drop_last,
        )

    # Forward, backward, step

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the model, under autocast where the config asks for it."""
        if self.settings.cast_inputs:
            inputs = precision.cast_inputs(inputs)
        autocast = self.settings.autocast
        with torch.autocast(self.device.type, autocast) if autocast else nullcontext():
            output = self.module(*inputs, **kwargs)
        self._await_backward(output)
        return output

    def _await_backward(self, output: Any) -> None:
        """A `loss.backward()` of the script's own skips `backward`'s division by the accumulation steps: do it here."""

        def share(grad: Tensor) -> Tensor:
            self._backward_prologue()
            return grad if PlainEngine._backward_runs else grad / self.settings.accumulation

        for tensor in torch.utils._pytree.tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(share)

    def _backward_prologue(self) -> None:
        """A gradient has come to what `forward` returned; DeepSpeed's engine has a method of this name for it."""

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **ignored: Any) -> Tensor:
        """Backward of the loss shared over the accumulation steps and scaled; returns the shared, unscaled loss.

        Raises:
            AssertionError: the loss is not a scalar that was computed from the model.
        """
        _assert_loss(loss)
        shared = loss / self.settings.accumulation if scale_wrt_gas else loss
        PlainEngine._backward_runs = True
        try:
            (shared * self.cur_scale).backward(retain_graph=retain_graph)
        finally:
            PlainEngine._backward_runs = False
        self._scaled = True
        self._backwards += 1
        self._gradients.after_backward(boundary=self.is_gradient_accumulation_boundary() and not self._in_no_sync)
        return shared

    def scale(self, loss: Tensor) -> Tensor:
        """The loss times the loss scale, for a `backward()` of the script's own."""
        _assert_loss(loss)
        self._scaled = True
        return loss * self.cur_scale

    @property
    def cur_scale(self) -> float:
        return 1.0 if self.optimizer is None else self.optimizer.cur_scale

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """End a micro-step; where accumulation ends, average, step and schedule.

        Raises:
            AssertionError: there is no optimizer, or it is called inside `no_sync`.
            RuntimeError: fp16 gradients came from a backward that was never scaled.
        """
        assert not self._in_no_sync, "engine.step() inside engine.no_sync()"
        assert self.optimizer is not None, "engine.step() needs an optimizer, and initialize was given none"
        self._step_applied = False
        self._in_step = True
        try:
            if self.is_gradient_accumulation_boundary():
                self._take_step(self.optimizer, lr_kwargs)
        finally:
            self._in_step = False
        self.micro_steps += 1

    def _take_step(self, optimizer: PlainOptimizer, lr_kwargs: dict[str, Any] | None) -> None:
        if self.cur_scale != 1 and self._gradients.any() and not self._scaled:
            raise RuntimeError(
                "Loss scaling is required for this configuration, but backward() was called directly: "
                "use engine.backward(loss), or engine.scale(loss).backward()."
            )
        self._gradients.reduce()
        optimizer.step()
        self.zero_grad()
        if optimizer.overflow:
            self.skipped_steps += 1
        elif self.lr_scheduler is not None:
            self._advance_schedule(lr_kwargs or {})
        self._step_applied = not optimizer.overflow
        self.global_steps += 1
        managed = self.settings.managed_accumulation
        micro_steps = self.settings.accumulation if managed else self._backwards
        self.global_samples += self.settings.train_batch // self.settings.accumulation * micro_steps
        self._scaled = False
        self._backwards = 0

    def _advance_schedule(self, lr_kwargs: dict[str, Any]) -> None:
        try:
            self.lr_scheduler.step(**lr_kwargs)
        except TypeError:
            # Megatron's schedules count samples.
            self.lr_scheduler.step(self.settings.train_batch)

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether this micro-step ends accumulation."""
        if self._boundary is not None:
            return self._boundary
        if not self.settings.managed_accumulation:
            return self._in_step
        return (self.micro_steps + 1) % self.settings.accumulation == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Take the decision away from the micro-step counter."""
        self._boundary = is_boundary

    def allreduce_gradients(self, bucket_size: int | None = None) -> None:
        """Average the gradients over the ranks, if accumulation ends here."""
        if self.is_gradient_accumulation_boundary():
            self._gradients.reduce()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward without averaging over the ranks."""
        assert not self._in_no_sync, "engine.no_sync() inside engine.no_sync()"
        self._in_no_sync = True
        try:
            yield
        finally:
            self._in_no_sync = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients of the model."""
        self._gradients.clear()
        for parameter in self.module.parameters():
            parameter.grad = None

    def was_step_applied(self) -> bool:
        """Whether the last `step` changed the weights."""
        return self._step_applied

    def get_global_grad_norm(self) -> Tensor | None:
        """L2 norm of the last step's gradients: unscaled, before clipping; infinite for a skipped step."""
        return None if self.optimizer is None else self.optimizer._global_grad_norm

    def get_lr(self) -> list[Any]:
        return self._of_groups("lr")

    def get_mom(self) -> list[Any]:
        return self._of_groups("momentum" if self.settings.optimizer in ("SGD", "RMSprop") else "betas")

    def _of_groups(self, name: str) -> list[Any]:
        return [] if self.optimizer is None else [group.get(name, 0.0) for group in self.optimizer.param_groups]

    # The module behind the engine

    def train(self, mode: bool = True) -> Any:
        """Put the model, not the engine, into training mode; returns nothing, as DeepSpeed's."""
        self.module.train(mode)

    def eval(self) -> Any:
        self.module.train(False)

    def compile(self, backend: Any = "inductor", compile_kwargs: dict[str, Any] | None = None, **ignored: Any) -> None:
        """Compile the model in place."""
        self.module.compile(backend=backend, **(compile_kwargs or {}))

    def destroy(self) -> None:
        """Nothing is held that must be let go."""

    def __getattr__(self, name: str) -> Any:
        """Attributes of the model pass through; what only DeepSpeed's engine has says so.

        Raises:
            MemberNotPlayed: an attribute of DeepSpeed's engine that is not played here.
        """
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is not None and hasattr(module, name):
                return getattr(module, name)
        if name in deepspeed_members():
            raise MemberNotPlayed(f"engine.{name} has no plain counterpart")
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")


def _assert_loss(loss: Any) -> None:
    good = isinstance(loss, Tensor) and loss.numel() == 1 and loss.grad_fn is not None
    assert good, "loss must be a scalar tensor that was computed from the model's parameters"


def _refuse(model: nn.Module, mpu: Any) -> None:
    if any(kind.__name__ == "PipelineModule" for kind in type(model).__mro__):
        raise NotPlayed("a pipeline (PipelineModule) cannot be run without DeepSpeed")
    for name in ("get_tensor_model_parallel_world_size", "get_model_parallel_world_size"):
        size = getattr(mpu, name, None)
        if size is not None and size() > 1:
            raise NotPlayed("model parallelism (an mpu with more than one model-parallel rank) is not played")
