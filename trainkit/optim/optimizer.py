"""PhaseOptimizer: an optimizer with its schedules, clipping, loss scaler, skipped steps and spikes."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from trainkit.devices import is_cuda
from trainkit.errors import CheckpointError, UserError, check_monitored, raising_module
from trainkit.model.transforms import matches
from trainkit.optim.chained_optimizer import ChainedOptimizer, members
from trainkit.optim.lr_schedule import LRSchedule
from trainkit.optim.optimizer_settings import OptimizerSettings
from trainkit.optim.phase import Phase, check_phases
from trainkit.optim.precision import Precision
from trainkit.optim.saved_state import state_problem
from trainkit.task import TaskModule, has_phases

# Private: torch has no public base class of all batch and instance normalisations.
_NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
SPLIT_FROM = "split_from"
"""Key of a parameter group without weight decay: the index of the group that it was split from."""
_OF_GROUPS = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs")
"""Attributes of torch's schedulers with one value for each parameter group."""
Moment = Literal["step", "epoch", "metric"]
_MOMENTS: tuple[Moment, ...] = ("step", "epoch", "metric")
WARM_UP_STEPS = 20
"""Steps whose gradient norms are averaged before any is called a spike."""
MEMORY_STEPS = 100
"""Approximate number of steps of the running average of gradient norms."""
_HAS_FUSED_ON_CUDA = {SGD: True, Adam: True, AdamW: True, Adagrad: False}  # all have it on the CPU


@dataclass(frozen=True)
class GradientClipping:
    """Limits of the gradient: its global norm, or each element's value."""

    norm: float | None = None
    value: float | None = None

    def __post_init__(self) -> None:
        if self.norm is not None and self.value is not None:
            raise UserError("max_grad_norm and max_grad_value exclude each other; set one of them.")

    @property
    def limits(self) -> bool:
        """True if a gradient may be changed; a norm of infinity is only logged."""
        return self.value is not None or (self.norm is not None and math.isfinite(self.norm))


class SpikeDetector:
    """Compares each step's gradient norm with the running average of the steps before; nothing waits for the device.

    A norm above `factor` times the average is a spike. It is that of the whole task, so all ranks and stages get the
    same result without a collective.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self._seen: Tensor | None = None  # (2,): number of steps, average norm

    def is_spike(self, norm: Tensor) -> Tensor:
        """Return True for a norm that is a spike or not finite, as a scalar on the device; average any other."""
        seen = self._seen
        if seen is None or seen.device != norm.device:
            seen = torch.zeros(2, device=norm.device) if seen is None else seen.to(norm.device)
        count, average = seen[0], seen[1]
        # Tensor arithmetic without branches: reading a value would wait for the device in every step.
        spike = (count >= WARM_UP_STEPS) & (norm > self.factor * average)
        skipped = spike | ~torch.isfinite(norm)
        grown = count + 1
        # A plain mean at first, which weights all steps equally, and then an exponential average.
        nearer = average + (norm - average) / grown.clamp(max=MEMORY_STEPS)
        # A spike or an infinite norm must not raise the average, or the next spikes would pass.
        self._seen = torch.where(skipped, seen, torch.stack([grown, nearer.to(seen.dtype)]))
        return skipped

    def state_dict(self) -> dict[str, list[float]]:
        """Return the state to save; waits for the device."""
        return {} if self._seen is None else {"seen": self._seen.tolist()}

    def load_state_dict(self, saved: dict[str, list[float]]) -> None:
        """Restore a saved state."""
        self._seen = torch.tensor(saved["seen"]) if "seen" in saved else None


class PhaseOptimizer:
    """The optimizer of a task, or of one of its phases, as loops and strategies drive it."""

    def __init__(
        self,
        optimizer: Optimizer,
        schedules: Sequence[LRSchedule],
        *,
        clip: GradientClipping,
        precision: Precision,
        skip: bool,
        phase: Phase | None = None,
    ) -> None:
        self.phase, self.step_name, self.every = "", "training_step", 1
        if phase is not None:
            self.phase, self.step_name, self.every = phase.name, phase.step_name, phase.every
        self.optimizer, self.schedules = optimizer, schedules
        self.settings = OptimizerSettings(optimizer, schedules)
        self.clip, self.skip_nonfinite = clip, skip
        self._is_chained = isinstance(optimizer, ChainedOptimizer)
        self._follow([group["params"] for group in optimizer.param_groups])
        self._shapes = [parameter.shape for parameter in self.parameters]  # a strategy may shard the parameters
        self.skipped_steps: Tensor | None = None
        """The number of skipped steps, a scalar on the device; `None` if no step can be skipped."""
        self.skipped: Tensor | None = None
        """True if the last step was skipped, a scalar on the device; `None` if no step can be skipped."""
        self.skipped_on_host: bool | None = None
        """The same on the host, if it is known without waiting: on the CPU, or without a fused kernel."""
        self.spikes: SpikeDetector | None = None
        self.pre_clip_hooks: list[Callable[[], None]] = []
        """Called in every step with the complete gradients in place, before they are clipped."""
        self.max_over_ranks: Callable[[Tensor], Tensor] | None = None
        """Returns the largest value of any rank, if ranks hold different gradients: what one skips, all skip."""
        self.has_mode = any(map(_has_mode, members(optimizer)))
        """True if the optimizer trains other weights than those to evaluate with, such as a schedule-free one."""
        self.set_mode(training=True)
        self.needs_closure = isinstance(optimizer, LBFGS)
        """True if a step evaluates the loss several times, by `closure`."""
        self.closure: Callable[[], Tensor] | None = None
        self._plain_step = _plain_step_of(optimizer)
        self._scaler = precision.scaler_of(self.phase)
        self._schedules_of = {when: [schedule for schedule in schedules if schedule.every == when] for when in _MOMENTS}
        self._check_evaluations()

    def check_step(self) -> None:
        """Raise UserError for an optimizer other than LBFGS whose step must be given a closure.

        Some take the gradients that are there for the first evaluation, and others ask for it again.
        """
        for optimizer in members(self.optimizer):
            step = inspect.signature(type(optimizer).step).parameters
            if not self.needs_closure and "closure" in step and step["closure"].default is inspect.Parameter.empty:
                raise UserError(
                    f"{type(optimizer).__name__}.step must be given a closure, which trainkit gives torch.optim.LBFGS "
                    "only. Make its evaluations in a phase with manual = True (control.backward, a change of the "
                    "weights, control.backward again, control.step), and give the phase the optimizer that makes the "
                    "update."
                )

    def _check_evaluations(self) -> None:
        """Raise UserError if a step has several evaluations, and a setting would change or skip one of them."""
        settings = {
            "max_grad_norm=null": self.clip.limits and self.clip.norm is not None,
            "max_grad_value=null": self.clip.value is not None,
            "trainer.on_nonfinite=raise": self.skip_nonfinite and self.spikes is None,
            "trainer.skip_grad_norm_factor=null": self.spikes is not None,
            "trainer.precision=bf16-mixed": self._scaler is not None,
        }
        remedy = " ".join(setting for setting, is_needed in settings.items() if is_needed)
        if self.needs_closure and remedy:
            raise UserError(
                f"LBFGS compares several evaluations of a loss and its gradients in one step, so that none of them can "
                f"be clipped, scaled or skipped. Set {remedy}, or use another optimizer, such as torch.optim.AdamW."
            )

    def skip_spikes(self, factor: float) -> None:
        """Skip steps whose gradient norm is `factor` times the average, or not finite."""
        if self._scaler is not None:
            raise UserError(
                "skip_grad_norm_factor does not work with fp16-mixed, whose scaler decides which steps are skipped; "
                "set trainer.precision=bf16-mixed, or trainer.skip_grad_norm_factor=null."
            )
        self.skip_nonfinite, self.spikes = True, SpikeDetector(factor)
        self._check_evaluations()

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The optimizer's present parameters, to which a run may add."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def set_mode(self, *, training: bool) -> None:
        """Leave in the parameters the weights to train, or those to evaluate with, of an optimizer that has both."""
        self.is_training = training
        for member in filter(_has_mode, members(self.optimizer)) if self.has_mode else ():
            getattr(member, "train" if training else "eval")()
            # Made by a look into the defaultdict; on a stage of a pipeline they would hide those of other stages.
            for parameter in [parameter for parameter, state in member.state.items() if not state]:
                del member.state[parameter]

    def follow_groups(self) -> bool:
        """Return True if parameters have come into the optimizer or left it since the last call.

        Raises UserError for parameters that the optimizer would not step.
        """
        if self._is_chained:
            self.optimizer.check_members()  # type: ignore[attr-defined]
        groups = [group["params"] for group in self.optimizer.param_groups]
        # By `id`, as `==` compares the values of tensors; in C, as this is done in every step.
        if [[*map(id, group)] for group in groups] == self._followed:
            return False
        self._follow(groups)
        _fill_momentum(self.optimizer)
        return True

    def _follow(self, groups: Sequence[Sequence[nn.Parameter]]) -> None:
        self._groups = [*map(list, groups)]  # alive, or a new parameter could get the `id` of one that is gone
        self._followed = [[*map(id, group)] for group in groups]

    def gradients(self) -> list[Tensor]:
        """Return the gradients that are not None, in the optimizer's order; of sparse ones the summed rows."""
        present = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        return [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in present]

    def unscale(self) -> None:
        """Remove the scaler's factor from the gradients, and call the hooks; collective with `max_over_ranks`."""
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
            if self.max_over_ranks is not None:
                flags = self._scaler._per_optimizer_states[id(self.optimizer)]["found_inf_per_device"]
                # All ranks take part, also one without gradients or even parameters, or the others wait for it forever.
                devices = [*flags, *(parameter.device for parameter in self.parameters)]
                device = devices[0] if devices else torch.device("cpu")
                worst = sum(flags.values(), start=torch.zeros((), device=device))
                flags.clear()
                flags[device] = self.max_over_ranks(worst)
        # After the factor is gone: hooks see the gradients that a run in fp32 has.
        for hook in self.pre_clip_hooks:
            hook()

    def clip_by_norm(self, norm: Tensor) -> None:
        """Scale all gradients so that their global norm, now `norm`, is at most the limit."""
        assert self.clip.norm is not None
        torch.nn.utils.clip_grads_with_norm_(self.parameters, self.clip.norm, norm)

    def clip_by_value(self) -> None:
        """Clip each gradient element."""
        assert self.clip.value is not None
        for parameter in self.parameters:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.coalesce()  # an element may be a sum
        gradients = self.gradients()
        if gradients:
            # Private: one kernel for all gradients. torch's clip_grad_value_ calls it too, but not for sparse values.
            torch._foreach_clamp_min_(gradients, -self.clip.value)
            torch._foreach_clamp_max_(gradients, self.clip.value)

    def update(self, *, norm: Tensor | None) -> None:
        """Step the optimizer; with `skip_nonfinite` a step whose norm is not finite or a spike changes nothing."""
        if self._scaler is not None:
            self._scaler.step(self.optimizer)
            # Torch's flags of the devices, which decide whether the step is made; `update` forgets them.
            flags = self._scaler._per_optimizer_states[id(self.optimizer)]["found_inf_per_device"].values()
            device = next(iter(flags)).device  # a rank with few shards may have no parameters
            self._count(torch.stack([flag.to(device) for flag in flags]).sum() > 0)
            self._scaler.update()
        elif self.skip_nonfinite:
            assert norm is not None
            self._update_if_finite(norm)
        elif self.closure is not None:
            self.optimizer.step(self.closure)  # type: ignore[arg-type] # torch's closures return numbers
        elif self._plain_step is None or _is_watched(self.optimizer):
            self.optimizer.step()
        else:
            # Nothing hooks the step, so torch's wrapper would only cost time.
            self._plain_step(self.optimizer)

    def measured(self) -> dict[str, float]:
        """Return the number of skipped steps and the scale of fp16, if there are any; waits for the device."""
        measured = {} if self.skipped_steps is None else {"skipped_steps": float(self.skipped_steps)}
        return measured if self._scaler is None else {**measured, "loss_scale": self._scaler.get_scale()}

    def zero_grad(self) -> None:
        """Leave every parameter without a gradient."""
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                # Freed, not zeroed: memory is lower, and the next backward assigns where it would add.
                parameter.grad = None

    def step_schedules(self, when: Moment, metrics: Mapping[str, float] | None = None) -> None:
        """Step the schedules of a moment; raises UserError if one follows a metric that is not in `metrics`."""
        for schedule in self._schedules_of[when]:
            try:
                if schedule.metric is None:
                    schedule.scheduler.step()
                    continue
                self.check_monitored(metrics or {})
                assert metrics is not None
                schedule.scheduler.step(metrics[schedule.metric])  # type: ignore[arg-type] # ReduceLROnPlateau's own signature
            except (ValueError, TypeError, LookupError) as error:
                # An error of the user's own schedule keeps its type and traceback.
                if not raising_module(error).startswith("torch.optim"):
                    raise
                raise UserError(
                    f"the schedule {type(schedule.scheduler).__name__} cannot make another step: {error} Make it in "
                    "configure_optimizers for the length of the run; in a resumed run, set "
                    "trainer.resume_optimizer=configured."
                ) from error

    def check_monitored(self, metrics: Iterable[str]) -> None:
        """Raise UserError if a schedule follows a metric that is not in `metrics`."""
        for schedule in self._schedules_of["metric"]:
            if schedule.metric is not None:
                check_monitored(f"a schedule follows the metric {schedule.metric!r}, which", schedule.metric, metrics)

    def initial_learning_rates(self) -> list[float]:
        """Return the learning rate of each parameter group as it was set, before any schedule changed it."""
        groups = self.optimizer.param_groups
        return [float(group.get("initial_lr", group["lr"])) for group in groups if "lr" in group]

    def check_saved(self, optimizer: Mapping[str, Any], schedules: Sequence[Any], *, where: str) -> None:
        """Raise UserError if a checkpoint has other parameter groups, schedules, or shapes of the state."""
        groups = [_group_signature(group) for group in self.optimizer.param_groups]
        saved = [_group_signature(group) for group in optimizer["param_groups"]]
        if len(groups) != len(saved) or not all(map(_fits, saved, groups)):
            raise UserError(
                f"{where} was saved with another optimizer: its parameter groups are {_described(saved)}, those of "
                f"this run {_described(groups)}. Use the same configure_optimizers to resume it; a group that "
                "add_param_group added during the run must be made there."
            )
        if len(schedules) != len(self.schedules):
            raise UserError(
                f"{where} was saved with {len(schedules)} learning-rate schedules, and this run has "
                f"{len(self.schedules)}. Use the same configure_optimizers to resume it."
            )
        added = [parameter.shape for parameter in self.parameters[len(self._shapes) :]]
        problem = state_problem(self.optimizer, [*self._shapes, *added], optimizer)
        if problem is not None:
            raise CheckpointError(
                f"{where} holds a state that {type(self.optimizer).__name__} cannot continue from: {problem}. Use the "
                "same configure_optimizers to resume it, or resume from an earlier checkpoint."
            )

    def schedule_state(self) -> list[dict[str, Any]]:
        """Return the state of the schedules to save."""
        return [schedule.scheduler.state_dict() for schedule in self.schedules]

    def load_schedule_state(self, saved: list[dict[str, Any]]) -> None:
        """Restore the saved state of the schedules."""
        for schedule, state in zip(self.schedules, saved, strict=True):
            schedule.scheduler.load_state_dict(state)

    def _update_if_finite(self, norm: Tensor) -> None:
        bad = ~torch.isfinite(norm) if self.spikes is None else self.spikes.is_spike(norm)
        flag = self._count(bad)
        # Private: torch marks optimizers with a fused kernel by this attribute only, for GradScaler.
        if getattr(self.optimizer, "_step_supports_amp_scaling", False):
            # Fused kernels read the flag on the device and write nothing if it is set.
            self.optimizer.found_inf = flag  # type: ignore[attr-defined]
            self.optimizer.step()
            return
        # Waits for the device: only fused kernels skip by themselves.
        self.skipped_on_host = bool(flag)
        if not self.skipped_on_host:
            self.optimizer.step()

    def _count(self, skipped: Tensor) -> Tensor:
        """Note on the device whether a step is skipped; return the flag as a number."""
        number = skipped.to(torch.float32)
        self.skipped, self.skipped_on_host = skipped, _if_on_host(skipped)
        self.skipped_steps = number if self.skipped_steps is None else self.skipped_steps + number
        return number


def configure_optimizers(
    task: TaskModule,
    *,
    clip: GradientClipping,
    precision: Precision,
    total_steps: int | None,
    fused: bool,
    skip: bool,
    no_weight_decay: Sequence[str] = (),
) -> list[PhaseOptimizer]:
    """Return the optimizer of a task, or of each of its phases; raises UserError for one that cannot train it."""
    if next(iter(task.parameters()), None) is None:
        raise UserError(
            f"{type(task).__name__} has no parameters to train; make layers attributes of the task "
            "(lists of them in nn.ModuleList)."
        )

    def prepared(returned: Any, phase: Phase | None) -> PhaseOptimizer:
        limits = clip
        if phase is not None and (phase.max_grad_norm is not None or phase.max_grad_value is not None):
            limits = GradientClipping(phase.max_grad_norm, phase.max_grad_value)
        optimizer, schedules = _prepared(task, returned, fused=fused, no_weight_decay=no_weight_decay)
        return PhaseOptimizer(optimizer, schedules, clip=limits, precision=precision, skip=skip, phase=phase)

    if not has_phases(task):
        return [prepared(_configured(task, "configure_optimizers", total_steps), None)]
    phases = check_phases(_configured(task, "configure_phases", total_steps), task)
    phase_optimizers = [prepared(phase.optimizer, phase) for phase in phases]
    _check_disjoint(phase_optimizers, task)
    return phase_optimizers


def _check_disjoint(phase_optimizers: Sequence[PhaseOptimizer], task: nn.Module) -> None:
    """Raise UserError if a parameter is trained by two phases."""
    names = {id(parameter): name for name, parameter in task.named_parameters()}
    owner: dict[int, str] = {}
    for phase_optimizer in phase_optimizers:
        for parameter in phase_optimizer.parameters:
            first = owner.setdefault(id(parameter), phase_optimizer.phase)
            if first != phase_optimizer.phase:
                raise UserError(
                    f"the parameter {names.get(id(parameter), '?')} is trained by the phases {first!r} and "
                    f"{phase_optimizer.phase!r} of {type(task).__name__}; a parameter belongs to one. "
                    "Add up the losses in one phase to train shared layers."
                )


def _if_on_host(flag: Tensor) -> bool | None:
    """Return the value of a flag in host memory; `None` for one on a device, which would have to be waited for."""
    return bool(flag) if flag.device.type == "cpu" else None


def _configured(task: TaskModule, method: str, total_steps: int | None) -> Any:
    """Return the result of a task's configure method, which is passed `total_steps` if it has that parameter."""
    declare = getattr(task, method)
    parameter = inspect.signature(declare).parameters.get("total_steps")
    if parameter is not None and parameter.default is parameter.empty and total_steps is None:
        raise UserError(
            f"{type(task).__name__}.{method} asks for total_steps, which max_duration does not determine; "
            "set max_duration in steps, samples, or epochs of data with a length."
        )
    try:
        return declare() if parameter is None else declare(total_steps=total_steps)
    except (TypeError, ValueError) as error:
        if "empty parameter list" in str(error):
            optimizer_name = f"the optimizer of {type(task).__name__}"
            raise UserError(f"{optimizer_name} has no parameters; pass self.parameters().") from None
        if isinstance(error, UserError) or not raising_module(error).startswith("torch.optim"):
            raise
        # torch's messages end with the value (`Invalid learning rate: -1`), which shows the setting that it came from.
        refused = str(error).rpartition(": ")[2]
        arguments = {f"task.{name}": vars(task).get(name) for name in inspect.signature(type(task)).parameters}
        for name, value in list(arguments.items()):
            if isinstance(value, partial):  # of a node with `_partial_`
                arguments |= {f"{name}.{key}": argument for key, argument in value.keywords.items()}
        is_text = isinstance(error, TypeError)  # where a number is needed; the message does not have the value
        keys = [
            key for key, value in arguments.items() if (isinstance(value, str) if is_text else str(value) == refused)
        ]
        names = f" of {' or '.join(keys)}" if keys else ""
        raise UserError(f"{type(task).__name__}.{method}: {error}. Set a valid value{names}.") from error


def _prepared(
    task: TaskModule, returned: Any, *, fused: bool, no_weight_decay: Sequence[str]
) -> tuple[Optimizer, list[LRSchedule]]:
    """Return an optimizer and its schedules, checked and with the groups and kernels that were asked for."""
    optimizer, schedules = _read(returned, task)
    # By id: tensors have no equality that is one truth value.
    owned = {id(parameter) for parameter in task.parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not parameters:
        raise UserError(f"the optimizer of {type(task).__name__} has no parameters; pass self.parameters().")
    if not any(id(parameter) in owned for parameter in parameters):
        raise UserError(
            f"the optimizer of {type(task).__name__} has none of the task's parameters; pass self.parameters(), "
            "and make sub-modules attributes of the task (lists of them in nn.ModuleList)."
        )
    _check_fused_sgd(optimizer)
    split_weight_decay_groups(optimizer, schedules, task, no_weight_decay)
    if fused:
        _use_fused_kernel(optimizer, task)
    _fill_momentum(optimizer)
    return optimizer, schedules


def _group_signature(group: Mapping[str, Any]) -> tuple[int, frozenset[str]]:
    """Return the number of parameters of a group and the names of its settings."""
    return len(group["params"]), frozenset(name for name in group if name not in ("params", "fused", "foreach"))


def _fits(saved: tuple[int, frozenset[str]], present: tuple[int, frozenset[str]]) -> bool:
    """Return True if a group matches a saved one; another torch version may have more settings or fewer, not both."""
    return saved[0] == present[0] and (saved[1] <= present[1] or present[1] <= saved[1])


def _described(groups: list[tuple[int, frozenset[str]]]) -> str:
    return "; ".join(f"{count} parameters with {', '.join(sorted(settings))}" for count, settings in groups)


def _check_fused_sgd(optimizer: Optimizer) -> None:
    """Raise UserError for a fused SGD in 16 bits on the CPU, which leaves most elements as they are."""
    for member in members(optimizer):
        fused = [group for group in member.param_groups if group.get("fused")]
        if isinstance(member, SGD) and any(map(_has_16_bits_on_cpu, fused)):
            raise UserError(
                f"{type(member).__name__}(fused=True) has parameters of 16 bits on the CPU, of which torch's fused "
                "kernel updates only a few elements (PyTorch's issue 191763); remove fused=True, or train in fp32."
            )


def _has_16_bits_on_cpu(group: Mapping[str, Any]) -> bool:
    return any(p.device.type == "cpu" and p.itemsize == 2 for p in group["params"])


def _use_fused_kernel(optimizer: Optimizer, task: nn.Module) -> None:
    """Switch a new optimizer to torch's fused kernel if it has one.

    Not switched: an optimizer with `fused=` or `foreach=`, subclasses, sparse gradients, other devices, SGD with
    dampening, whose first step differs from the others, and SGD in 16 bits on the CPU, whose kernel updates few of the
    elements (PyTorch's issue 191763).
    """
    on_cuda = _HAS_FUSED_ON_CUDA.get(type(optimizer))
    if on_cuda is None or optimizer.state or any(getattr(module, "sparse", False) for module in task.modules()):
        return
    for group in optimizer.param_groups:
        chosen = group.get("fused") is not None or group.get("foreach") is not None
        if chosen or group.get("differentiable") or group.get("capturable"):
            return
        if group.get("momentum") and group.get("dampening"):
            return
        devices = {p.device for p in group["params"]}
        if not all(device.type == "cpu" or (on_cuda and is_cuda(device)) for device in devices):
            return
        if not all(p.is_floating_point() for p in group["params"]):
            return
        if type(optimizer) is SGD and _has_16_bits_on_cpu(group):
            return
    for group in optimizer.param_groups:
        group["fused"] = True
    # A group that is added during the run takes its settings from the defaults.
    optimizer.defaults["fused"] = True
    # What the constructors set with fused=True: the kernel takes found_inf and grad_scale.
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]


def _plain_step_of(optimizer: Optimizer) -> Callable[[Optimizer], Any] | None:
    """Return an optimizer's step without torch's wrapper; `None` if something else wraps it too.

    The wrapper calls hooks and the profiler, and costs a small task a twentieth of its step without any.
    """
    step = type(optimizer).step
    # torch sets both attributes; a step on the object is that of a scheduler or the user.
    wrapped: Callable[[Optimizer], Any] | None = getattr(step, "__wrapped__", None)
    return wrapped if getattr(step, "hooked", False) and "step" not in vars(optimizer) else None


def _has_mode(optimizer: Optimizer) -> bool:
    return callable(getattr(optimizer, "train", None)) and callable(getattr(optimizer, "eval", None))


def _is_watched(optimizer: Optimizer) -> bool:
    """Return True if a hook or the profiler follows the optimizer's steps."""
    # Private: torch lists the hooks of an optimizer, and those of all optimizers, nowhere else.
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
        or torch.autograd._profiler_enabled()  # type: ignore[attr-defined] # torch's own modules use it from there
    )


def _fill_momentum(optimizer: Optimizer) -> None:
    """Create the buffers that fused SGD would create in its first step.

    The kernel leaves them unwritten if that step is skipped, and fails if a parameter's first gradient comes later.
    A buffer of zeros takes the first gradient as it is.
    """
    if type(optimizer) is not SGD:
        return
    for group in optimizer.param_groups:
        if group["momentum"] and not group["dampening"] and group["fused"]:
            for parameter in group["params"]:
                # A present buffer stays: the function is called again when groups change.
                optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


def _read(returned: Any, task: TaskModule) -> tuple[Optimizer, list[LRSchedule]]:
    name = f"{type(task).__name__}.configure_optimizers"
    if isinstance(returned, Optimizer):
        return returned, []
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], Optimizer)):
        remedy = "return torch.optim.AdamW(self.parameters(), lr=1e-3)"
        if isinstance(returned, (list, tuple, Mapping)):  # the forms that Lightning reads
            remedy = (
                "return optimizer, LRSchedule(scheduler, every='epoch'). Several optimizers are phases of "
                "configure_phases, or of one loss a trainkit.optim.chained_optimizer.ChainedOptimizer"
            )
        raise UserError(
            f"{name} returned {type(returned).__name__}; return an optimizer, or (optimizer, schedule): {remedy}."
        )
    optimizer, rest = returned
    schedules = []
    for item in rest if isinstance(rest, (list, tuple)) else [rest]:
        schedule = LRSchedule(item) if isinstance(item, LRScheduler) else item
        if not isinstance(schedule, LRSchedule):
            raise UserError(
                f"{name} returned {type(item).__name__} as a schedule; return an LRScheduler or an LRSchedule."
            )
        if schedule.scheduler.optimizer is not optimizer:
            raise UserError(
                f"the schedule that {name} returned is of another optimizer; create it from the returned one."
            )
        schedules.append(schedule)
    return optimizer, schedules


def split_weight_decay_groups(
    optimizer: Optimizer, schedules: Sequence[LRSchedule], task: nn.Module, rules: Sequence[str]
) -> None:
    """Move the parameters that match a rule into groups without weight decay, after the optimizer's other groups.

    A rule is `bias`, `norm` (all parameters of normalisation layers), `embedding`, or a pattern of parameters' or
    modules' names. Raises UserError for a pattern that matches none of the optimizer's parameters.
    """
    groups = optimizer.param_groups
    trained = {id(parameter) for group in groups for parameter in group["params"]}
    chosen: set[int] = set()
    for rule in rules:
        matching = _matching(task, rule)
        if not matching & trained and rule not in ("bias", "norm", "embedding"):
            raise UserError(f"no_weight_decay: {rule!r} matches none of the optimizer's parameters.")
        chosen |= matching
    count = len(groups)  # the loop appends groups, which it must not split again
    for index, group in enumerate(groups[:count]):
        exempt = [parameter for parameter in group["params"] if id(parameter) in chosen]
        if not group.get("weight_decay") or not exempt:
            continue
        if len(exempt) == len(group["params"]):
            group["weight_decay"] = 0.0
            continue
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in chosen]
        optimizer.add_param_group({**group, "params": exempt, "weight_decay": 0.0, SPLIT_FROM: index})
        # Schedulers took one value for each group when they were made, and would miss or mix those of the new group.
        for scheduler in _with_inner(schedule.scheduler for schedule in schedules):
            for name in _OF_GROUPS:
                values = getattr(scheduler, name, None)
                if isinstance(values, list) and len(values) >= count:
                    values.append(values[index])


def _matching(task: nn.Module, rule: str) -> set[int]:
    if rule == "bias":
        return {id(p) for name, p in task.named_parameters() if name.rpartition(".")[2] == "bias"}
    if rule == "norm":
        # By name too: models bring their own RMSNorm.
        layers = [m for m in task.modules() if isinstance(m, _NORMS) or type(m).__name__.endswith("Norm")]
    elif rule == "embedding":
        layers = [module for module in task.modules() if isinstance(module, nn.Embedding)]
    else:
        return {id(parameter) for name, parameter in task.named_parameters() if matches(name, rule)}
    return {id(parameter) for layer in layers for parameter in layer.parameters(recurse=False)}


def _with_inner(schedulers: Iterable[Any]) -> Iterator[Any]:
    """Yield schedulers and the schedulers inside them."""
    for scheduler in schedulers:
        yield scheduler
        yield from _with_inner(getattr(scheduler, "_schedulers", ()))  # of SequentialLR and ChainedScheduler
