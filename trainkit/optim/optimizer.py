"""The optimizer of a task, its schedules, clipping and what happens to a step that is not finite."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, Adagrad, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from trainkit.errors import UserError, nearest
from trainkit.model.transforms import matches
from trainkit.optim.lr_schedule import LRSchedule
from trainkit.optim.nonfinite import SpikeDetector
from trainkit.optim.phase import Phase, check_disjoint, check_phases
from trainkit.optim.precision import Precision
from trainkit.task import TaskModule, has_phases

_NORMS: tuple[type[nn.Module], ...] = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)
SPLIT_FROM = "split_from"
"""The setting of a group made here that says which one it was part of, and shares the learning rate with."""
_OF_GROUPS = ("base_lrs", "_last_lr", "lr_lambdas", "min_lrs", "max_lrs")
"""Where schedulers of torch keep one value for each group of parameters."""


def split_weight_decay_groups(
    optimizer: Optimizer, schedules: Sequence[LRSchedule], task: nn.Module, rules: Sequence[str]
) -> None:
    """Move the parameters that a rule fits into groups without weight decay, at the end of the optimizer's groups.

    A rule is `bias`, `norm` (all parameters of normalisation layers), `embedding`, or a pattern of parameters' or
    modules' names. Raises UserError for a pattern that fits none of the optimizer's parameters.
    """
    groups = optimizer.param_groups
    ours = {id(parameter) for group in groups for parameter in group["params"]}
    chosen: set[int] = set()
    for rule in rules:
        fitting = _fitting(task, rule)
        if not fitting & ours and rule not in ("bias", "norm", "embedding"):
            raise UserError(f"no_weight_decay: {rule!r} fits none of the optimizer's parameters.")
        chosen |= fitting
    count = len(groups)
    for index in range(count):
        group = groups[index]
        exempt = [parameter for parameter in group["params"] if id(parameter) in chosen]
        if not group.get("weight_decay") or not exempt:
            continue
        kept = [parameter for parameter in group["params"] if id(parameter) not in chosen]
        if not kept:
            group["weight_decay"] = 0.0
            continue
        group["params"] = kept
        optimizer.add_param_group({**group, "params": exempt, "weight_decay": 0.0, SPLIT_FROM: index})
        for scheduler in _all([schedule.scheduler for schedule in schedules]):
            for name in _OF_GROUPS:
                values = getattr(scheduler, name, None)
                if isinstance(values, list) and len(values) >= count:
                    values.append(values[index])


def _fitting(task: nn.Module, rule: str) -> set[int]:
    if rule == "bias":
        return {id(p) for name, p in task.named_parameters() if name.rpartition(".")[2] == "bias"}
    by_kind: dict[str, tuple[type[nn.Module], ...]] = {"norm": _NORMS, "embedding": (nn.Embedding,)}
    kinds = by_kind.get(rule)
    if kinds is not None:
        return {id(p) for module in task.modules() if _is_one(module, kinds) for p in module.parameters(recurse=False)}
    return {id(parameter) for name, parameter in task.named_parameters() if matches(name, rule)}


def _is_one(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    return isinstance(module, kinds) or (nn.LayerNorm in kinds and type(module).__name__.endswith("Norm"))


def _all(schedulers: Sequence[Any]) -> list[Any]:
    """Return schedulers and those that they are made of."""
    found: list[Any] = []
    for scheduler in schedulers:
        found += [scheduler, *_all(getattr(scheduler, "_schedulers", ()))]
    return found


Moment = Literal["step", "epoch", "metric"]
_MOMENTS: tuple[Moment, ...] = ("step", "epoch", "metric")
_FUSED_DEVICES = {SGD: ("cpu", "cuda"), Adam: ("cpu", "cuda"), AdamW: ("cpu", "cuda"), Adagrad: ("cpu",)}


@dataclass(frozen=True)
class GradientClipping:
    """Limits of the gradient: its global norm, or each element's value."""

    norm: float | None = None
    value: float | None = None

    def __post_init__(self) -> None:
        for name, limit in (("norm", self.norm), ("value", self.value)):
            if limit is not None and not limit > 0:
                raise UserError(f"max_grad_{name} must be positive, got {limit}; leave it out to not clip.")
        if self.norm is not None and self.value is not None:
            raise UserError("max_grad_norm and max_grad_value exclude each other; set one of them.")

    @property
    def limits(self) -> bool:
        """Whether a gradient may be changed; a norm of infinity is only told."""
        return self.value is not None or (self.norm is not None and math.isfinite(self.norm))


class PhaseOptimizer:
    """The optimizer with its schedules, as the loop and the strategies drive it."""

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
        self.phase = "" if phase is None else phase.name
        self.step_name = "training_step" if phase is None else phase.step_name
        self.every = 1 if phase is None else phase.every
        self.optimizer = optimizer
        self.schedules = schedules
        self.clip = clip
        self.skip_nonfinite = skip
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.skipped_steps: Tensor | None = None
        self.skipped: Tensor | None = None
        """Whether the last step changed nothing, a scalar on the device; `None` where every step counts."""
        self.skipped_on_host: bool | None = None
        """The same where the host knows it without waiting: on the CPU, or as the optimizer cannot skip by itself."""
        self.spikes: SpikeDetector | None = None
        self.pre_clip_hooks: list[Callable[[], None]] = []
        """Called in every step with the whole gradients in place, before they are clipped."""
        self._plain_step = _plain_step_of(optimizer)
        self._scaler = precision.scaler_of(self.phase)
        self._schedules_of = {when: [one for one in schedules if one.every == when] for when in _MOMENTS}

    def skip_spikes(self, factor: float) -> None:
        """Skip steps whose gradient norm is `factor` times the average, or not finite."""
        if self._scaler is not None:
            raise UserError(
                "skip_grad_norm_factor does not go with fp16-mixed, whose scaler decides by itself which steps are "
                "skipped; set trainer.precision=bf16-mixed, or leave trainer.skip_grad_norm_factor out."
            )
        self.skip_nonfinite, self.spikes = True, SpikeDetector(factor)

    def gradients(self) -> list[Tensor]:
        """Return the gradients that are there, in the optimizer's order."""
        return [parameter.grad for parameter in self.parameters if parameter.grad is not None]

    def unscale(self) -> None:
        """Remove the scaler's factor from the gradients, and call the hooks on them."""
        if self._scaler is not None:
            self._scaler.unscale_(self.optimizer)
        for hook in self.pre_clip_hooks:
            hook()

    def clip_by_norm(self, norm: Tensor) -> None:
        """Scale all gradients so that their global norm, which is `norm` now, keeps the limit."""
        assert self.clip.norm is not None
        torch.nn.utils.clip_grads_with_norm_(self.parameters, self.clip.norm, norm)

    def clip_by_value(self) -> None:
        """Limit each gradient element."""
        assert self.clip.value is not None
        torch.nn.utils.clip_grad_value_(self.parameters, self.clip.value)

    def update(self, *, norm: Tensor | None) -> None:
        """Step the optimizer; with `skip_nonfinite` a step whose norm is not finite, or a spike, changes nothing."""
        if self._scaler is not None:
            self._scaler.step(self.optimizer)
            self._scaler.update()
            if self.skip_nonfinite and norm is not None:
                self.skipped = ~torch.isfinite(norm)
                self.skipped_on_host = _if_on_host(self.skipped)
        elif self.skip_nonfinite:
            assert norm is not None
            self._update_if_finite(norm)
        elif self._plain_step is None or _is_watched(self.optimizer):
            self.optimizer.step()
        else:
            self._plain_step(self.optimizer)

    def zero_grad(self) -> None:
        """Leave every parameter without a gradient."""
        for parameter in self.parameters:
            parameter.grad = None

    def step_schedules(self, when: Moment, metrics: Mapping[str, float] | None = None) -> None:
        """Step the schedules of a moment; raises UserError if one follows a metric that `metrics` lack."""
        for schedule in self._schedules_of[when]:
            if schedule.metric is None:
                schedule.scheduler.step()
                continue
            if metrics is None or schedule.metric not in metrics:
                known = metrics or {}
                raise UserError(
                    f"a schedule follows the metric {schedule.metric!r}, which validation did not give."
                    f"{nearest(schedule.metric, known)} There are: {', '.join(sorted(known)) or 'none'}."
                )
            schedule.scheduler.step(metrics[schedule.metric])  # type: ignore[arg-type] # ReduceLROnPlateau's own signature

    def learning_rates(self) -> list[float]:
        """Return the learning rate of each parameter group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups if "lr" in group]

    def initial_learning_rates(self) -> list[float]:
        """Return the learning rate of each parameter group as it was set, before any schedule changed it."""
        groups = self.optimizer.param_groups
        return [float(group.get("initial_lr", group["lr"])) for group in groups if "lr" in group]

    def check_saved(self, optimizer: Mapping[str, Any], schedules: Sequence[Any], *, where: str) -> None:
        """Raise UserError if a checkpoint's optimizer or schedules are not of this kind."""
        own = [_group_signature(group) for group in self.optimizer.param_groups]
        saved = [_group_signature(group) for group in optimizer["param_groups"]]
        if len(own) != len(saved) or not all(map(_fits, saved, own)):
            raise UserError(
                f"{where} was saved with another optimizer: its parameter groups are {_described(saved)}, those of "
                f"this run {_described(own)}. Use the same configure_optimizers to go on with it."
            )
        if len(schedules) != len(self.schedules):
            raise UserError(
                f"{where} was saved with {len(schedules)} learning-rate schedules, and this run has "
                f"{len(self.schedules)}. Use the same configure_optimizers to go on with it."
            )

    def schedule_state(self) -> list[dict[str, Any]]:
        """Return what a checkpoint keeps of the schedules."""
        return [schedule.scheduler.state_dict() for schedule in self.schedules]

    def load_schedule_state(self, saved: list[dict[str, Any]]) -> None:
        """Go on where the schedules ended."""
        for schedule, state in zip(self.schedules, saved, strict=True):
            schedule.scheduler.load_state_dict(state)

    def _update_if_finite(self, norm: Tensor) -> None:
        bad = ~torch.isfinite(norm) if self.spikes is None else self.spikes.is_spike(norm)
        self.skipped, found = bad, bad.to(torch.float32)
        self.skipped_steps = found if self.skipped_steps is None else self.skipped_steps + found
        if getattr(self.optimizer, "_step_supports_amp_scaling", False):
            # Fused kernels look at the flag on the device and write nothing when it is set.
            self.optimizer.found_inf = found  # type: ignore[attr-defined]
            self.optimizer.step()
            self.skipped_on_host = _if_on_host(bad)
            return
        # Waits for the device: without a fused kernel no optimizer can skip by itself.
        self.skipped_on_host = bool(found)
        if not self.skipped_on_host:
            self.optimizer.step()


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
    """Return the optimizer of a task, or of each of its phases; raises UserError for what cannot be trained with."""
    if next(iter(task.parameters()), None) is None:
        raise UserError(
            f"{type(task).__name__} has no parameters to train; make layers attributes of the task "
            "(lists of them in nn.ModuleList)."
        )
    if not has_phases(task):
        returned = _ask(task, "configure_optimizers", total_steps)
        split_weight_decay_groups(*_read(returned, task), task, no_weight_decay)
        return [_one(returned, task, None, clip=clip, precision=precision, fused=fused, skip=skip)]
    phase_optimizers = []
    for phase in check_phases(_ask(task, "configure_phases", total_steps), task):
        own = phase.max_grad_norm is not None or phase.max_grad_value is not None
        limits = GradientClipping(phase.max_grad_norm, phase.max_grad_value) if own else clip
        split_weight_decay_groups(*_read(phase.optimizer, task), task, no_weight_decay)
        phase_optimizers.append(
            _one(phase.optimizer, task, phase, clip=limits, precision=precision, fused=fused, skip=skip)
        )
    check_disjoint(phase_optimizers, task)
    return phase_optimizers


def _if_on_host(flag: Tensor) -> bool | None:
    """Return a flag that lies in the host's memory, where there is no device to wait for; `None` for any other."""
    return bool(flag) if flag.device.type == "cpu" else None


def _ask(task: TaskModule, method: str, total_steps: int | None) -> Any:
    """Return what a task declares, telling it the number of steps if it asks for that."""
    declare = getattr(task, method)
    asked = inspect.signature(declare).parameters.get("total_steps")
    if asked is not None and asked.default is asked.empty and total_steps is None:
        raise UserError(
            f"{type(task).__name__}.{method} asks for total_steps, which max_duration does not tell; "
            "give max_duration in steps, samples, or epochs of data with a length."
        )
    try:
        return declare() if asked is None else declare(total_steps=total_steps)
    except ValueError as error:
        if "empty parameter list" not in str(error):
            raise
        raise UserError(f"the optimizer of {type(task).__name__} has no parameters; pass self.parameters().") from None


def _one(
    returned: Any,
    task: TaskModule,
    phase: Phase | None,
    *,
    clip: GradientClipping,
    precision: Precision,
    fused: bool,
    skip: bool,
) -> PhaseOptimizer:
    """Return one optimizer with its schedules, checked."""
    optimizer, schedules = _read(returned, task)
    if isinstance(optimizer, LBFGS):
        raise UserError(
            "LBFGS evaluates the loss several times in one step, which the training loop does not offer; "
            "use another optimizer, such as torch.optim.AdamW."
        )
    owned = {id(parameter) for parameter in task.parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not parameters:
        raise UserError(f"the optimizer of {type(task).__name__} has no parameters; pass self.parameters().")
    if not any(id(parameter) in owned for parameter in parameters):
        raise UserError(
            f"the optimizer of {type(task).__name__} has none of the task's own parameters; pass self.parameters(), "
            "and make sub-modules attributes of the task (lists of them in nn.ModuleList)."
        )
    if fused:
        use_fused_kernel(optimizer, task)
    _fill_momentum(optimizer)
    return PhaseOptimizer(optimizer, schedules, clip=clip, precision=precision, skip=skip, phase=phase)


def _group_signature(group: Mapping[str, Any]) -> tuple[int, frozenset[str]]:
    """Return the number of parameters of a group, and the names of its settings."""
    return len(group["params"]), frozenset(name for name in group if name not in ("params", "fused", "foreach"))


def _fits(saved: tuple[int, frozenset[str]], own: tuple[int, frozenset[str]]) -> bool:
    """Return whether a group fits a saved one: another version of torch may know more settings, or fewer, not both."""
    return saved[0] == own[0] and (saved[1] <= own[1] or own[1] <= saved[1])


def _described(groups: list[tuple[int, frozenset[str]]]) -> str:
    return "; ".join(f"{count} parameters with {', '.join(sorted(settings))}" for count, settings in groups)


def use_fused_kernel(optimizer: Optimizer, task: nn.Module) -> bool:
    """Switch a new optimizer to torch's fused kernel where it has one; return whether it did.

    The user's own `fused=` or `foreach=` is kept; subclasses, sparse gradients, other devices and SGD with dampening,
    whose first step is unlike the others, are left alone.
    """
    devices = _FUSED_DEVICES.get(type(optimizer), ())
    if not devices or optimizer.state:
        return False
    for group in optimizer.param_groups:
        chosen = group.get("fused") is not None or group.get("foreach") is not None
        if chosen or group.get("differentiable") or group.get("capturable"):
            return False
        if group.get("momentum") and group.get("dampening"):
            return False
        if not all(p.device.type in devices and p.is_floating_point() for p in group["params"]):
            return False
    if any(getattr(module, "sparse", False) for module in task.modules()):
        return False
    for group in optimizer.param_groups:
        group["fused"] = True
    optimizer.defaults["fused"] = True
    # What the constructors set with fused=True: the kernel takes found_inf and grad_scale.
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    return True


def _plain_step_of(optimizer: Optimizer) -> Callable[[Optimizer], Any] | None:
    """Return an optimizer's step without what torch wraps around it; `None` where something else wraps it too.

    Torch wraps each step to call hooks and to name it to the profiler, which costs a small task a twentieth of its
    step, whether anybody looks or not.
    """
    step = type(optimizer).step
    wrapped: Callable[[Optimizer], Any] | None = getattr(step, "__wrapped__", None)
    return wrapped if getattr(step, "hooked", False) and "step" not in vars(optimizer) else None


def _is_watched(optimizer: Optimizer) -> bool:
    """Return whether a hook or a profiler looks at the optimizer's steps."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_pre_hooks
        or _global_optimizer_post_hooks
        or torch.autograd._profiler_enabled()  # type: ignore[attr-defined] # torch's own modules use it from there
    )


def _fill_momentum(optimizer: Optimizer) -> None:
    """Have the buffers that fused SGD makes in its first step.

    The kernel leaves them unwritten if that step is skipped, and fails if a parameter's first gradient comes later.
    A buffer of zeros takes the first gradient as it is.
    """
    if type(optimizer) is not SGD:
        return
    for group in optimizer.param_groups:
        if group["momentum"] and not group["dampening"] and group["fused"]:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def _read(returned: Any, task: TaskModule) -> tuple[Optimizer, list[LRSchedule]]:
    name = f"{type(task).__name__}.configure_optimizers"
    if isinstance(returned, Optimizer):
        return returned, []
    if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], Optimizer)):
        raise UserError(
            f"{name} returned {type(returned).__name__}; return an optimizer, or (optimizer, schedule): "
            "return torch.optim.AdamW(self.parameters(), lr=1e-3)."
        )
    optimizer, rest = returned
    schedules = []
    for item in rest if isinstance(rest, (list, tuple)) else [rest]:
        schedule = LRSchedule(item) if isinstance(item, LRScheduler) else item
        if not isinstance(schedule, LRSchedule):
            raise UserError(f"{name} returned {type(item).__name__} as a schedule; give an LRScheduler or a Schedule.")
        if schedule.scheduler.optimizer is not optimizer:
            raise UserError(
                f"the schedule that {name} returned was made for another optimizer; make it from the one you return."
            )
        schedules.append(schedule)
    return optimizer, schedules
