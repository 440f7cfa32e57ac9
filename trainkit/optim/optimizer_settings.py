"""OptimizerSettings: what `configure_optimizers` set, and which of it counts in a resumed run."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from trainkit.checkpoint.likeness import REQUIRED, unlike
from trainkit.errors import CheckpointError, UserError
from trainkit.optim.lr_schedule import LRSchedule

ResumeOptimizer = Literal["configured", "saved"]
"""The settings that count in a resumed run."""
_PLATEAU_STATE = ("best", "num_bad_epochs", "cooldown_counter", "last_epoch")
_KERNELS = ("params", "fused", "foreach")  # of this run, whatever the saved one had
# `base_lrs` repeat the rates of the groups, which are compared already.
_COUNTERS = ("base_lrs", *_PLATEAU_STATE)
_CLOSE = 1e-9  # relative difference of two computations of one learning rate
_DIFFERENCES_SHOWN = 8
_MOST_STEPS = 10**8  # of a schedule; they take some minutes


class OptimizerSettings:
    """The settings of an optimizer's groups and schedules, as they were made; nothing of them changes in training."""

    def __init__(self, optimizer: Optimizer, schedules: Sequence[LRSchedule]) -> None:
        self._optimizer = optimizer
        self._schedulers: list[Any] = [schedule.scheduler for schedule in schedules]
        # Copies, as torch's schedulers change the groups in place, and their `state_dict` returns their own lists.
        self._groups = [_copied(_without(group, ("params",))) for group in optimizer.param_groups]
        self._schedules = [_copied(scheduler.state_dict()) for scheduler in self._schedulers]

    def record(self) -> dict[str, Any]:
        """Return the settings by their places, to be saved."""
        record: dict[str, Any] = {}
        for index, group in enumerate(self._groups):
            # A scheduler has changed the learning rate already, and left the one that was set.
            settings = {**group, "lr": group.get("initial_lr", group.get("lr"))}
            record.update(_settings(_without(settings, (*_KERNELS, "initial_lr")), f"param_groups[{index}]"))
        for index, (scheduler, state) in enumerate(zip(self._schedulers, self._schedules, strict=True)):
            record[f"schedules[{index}]"] = type(scheduler).__name__
            record.update(_settings(state, f"schedules[{index}]"))
        return record

    def unlike(
        self, optimizer: Mapping[str, Any], schedules: Sequence[Any], *, saved: Mapping[str, Any]
    ) -> Iterator[str]:
        """Yield what in the saved groups and schedules cannot take the place of the present ones."""
        names = {path.split(".")[1].partition("[")[0] for path in saved if path.startswith("param_groups")}
        # Most schedulers of torch add it to the groups, as the rate that they start from.
        names |= {"initial_lr"} if "schedules[0]" in saved else set()
        groups = [
            {"params": [*range(len(group["params"]))], **_settings_of(_without(group, _KERNELS))}
            for group in self._optimizer.param_groups
        ]
        yield from unlike({"state": {}, "param_groups": groups}, optimizer, "optimizer", required=names | REQUIRED)
        for path, value in saved.items():  # no callback changes a switch
            number, _, key = path.removeprefix("param_groups[").partition("].")
            group = optimizer["param_groups"][int(number)] if number.isdigit() else {key: value}
            if isinstance(value, bool) and group.get(key) is not value:
                yield f"optimizer.{path} is not {value}, as when it was saved"
        states = []
        for index, scheduler in enumerate(self._schedulers):
            # The state of a custom scheduler may hold anything; functions are not in a checkpoint.
            kind = type(scheduler)
            is_torchs = kind.__module__.startswith("torch.optim.") and saved.get(f"schedules[{index}]") == kind.__name__
            states.append(_without(scheduler.state_dict(), ("lr_lambdas",)) if is_torchs else {})
        yield from unlike(states, schedules, "schedules")

    def differences(self, saved: Mapping[str, Any], schedules: Sequence[Mapping[str, Any]]) -> dict[str, str]:
        """Return what differs from a saved record and the saved state of the schedules: its place, and both values."""
        record = self.record()
        differing = {
            path: f"{saved[path]!r} saved, {value!r} now"
            for path, value in record.items()
            if path in saved and saved[path] != value
        }
        # A function is known by its results only, and another rate of a group explains other results already.
        for index, (scheduler, state) in enumerate(zip(self._schedulers, schedules, strict=False)):
            if isinstance(scheduler, LambdaLR) and not differing and (change := _change_of(scheduler, state)):
                differing[f"schedules[{index}].lr_lambda"] = change
        return differing

    def check_schedules(self, saved: Mapping[str, Any]) -> None:
        """Raise UserError if a schedule of another class than now was saved: its state means nothing to this one."""
        for index, scheduler in enumerate(self._schedulers):
            name, path = type(scheduler).__name__, f"schedules[{index}]"
            if saved.get(path, name) != name:
                raise UserError(
                    f"the checkpoint was saved with the schedule {saved[path]}, and configure_optimizers makes "
                    f"{name} now; set trainer.resume_optimizer=configured to continue with it."
                )

    def advanced(
        self,
        optimizer: Mapping[str, Any],
        schedules: Sequence[Mapping[str, Any]],
        *,
        saved: Mapping[str, Any],
        differing: Mapping[str, str],
    ) -> dict[str, Any]:
        """Return a saved state of the optimizer with the present settings; the schedules are as far as the saved ones.

        Without a difference in a learning rate or a schedule, their saved state is kept, and so are settings that
        callbacks have changed.
        """
        groups = self._optimizer.param_groups
        # Of `betas[0]`, the setting that the group has.
        keys = {path.rpartition(".")[2].partition("[")[0] for path in differing if path.startswith("param_groups")}
        restarts = bool(self._schedulers) and ("lr" in keys or any(path.startswith("sched") for path in differing))
        # Groups before schedules: many schedules compute a rate from the one in the group.
        for group, settings in zip(groups, self._groups, strict=True):
            group.update(_copied(settings))
        if restarts:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that no optimizer step came before
                for scheduler, fresh, state in zip(self._schedulers, self._schedules, schedules, strict=True):
                    scheduler.load_state_dict(_copied(fresh))
                    _advance(scheduler, state)
        else:
            for scheduler, state in zip(self._schedulers, schedules, strict=True):
                scheduler.load_state_dict(state)
        made = []
        for index, (group, old) in enumerate(zip(groups, optimizer["param_groups"], strict=True)):
            settings = _without(group, ("params",)) if restarts else {key: group[key] for key in keys if key in group}
            first = saved.get(f"param_groups[{index}].lr")
            if restarts and any(isinstance(scheduler, ReduceLROnPlateau) for scheduler in self._schedulers) and first:
                # The reductions so far: the schedule does not count them, only the rate of the group shows them.
                settings["lr"] = settings["lr"] * old["lr"] / first
            made.append({**old, **settings})
        return {**optimizer, "param_groups": made}

    def check_length(self, max_steps: int | None, schedules: Sequence[LRSchedule]) -> None:
        """Raise UserError for a OneCycleLR that ends before the run: torch would raise in the middle of it."""
        for schedule in schedules:
            total = getattr(schedule.scheduler, "total_steps", None)
            if schedule.every == "step" and isinstance(total, int) and max_steps is not None and max_steps > total:
                raise UserError(
                    f"the schedule {type(schedule.scheduler).__name__} ends after {total:,} steps, and the run after "
                    f"{max_steps:,}. Make it in configure_optimizers(self, total_steps) with these total_steps; in a "
                    "resumed run, set trainer.resume_optimizer=configured too."
                )


def difference_text(differing: Mapping[str, str], chosen: ResumeOptimizer) -> str:
    """Return a warning that lists what differs, what counts and how to choose."""
    lines = [f"  {path}: {values}" for path, values in differing.items()][:_DIFFERENCES_SHOWN]
    more = len(differing) - len(lines)
    counts = {
        "configured": "The values of now count, with the saved moments; a schedule is as far as the saved one. "
        "To continue with those that were saved: trainer.resume_optimizer=saved",
        "saved": "Those that were saved count, except for functions, which no checkpoint holds. "
        "To continue with those of now: trainer.resume_optimizer=configured",
    }
    shown = "\n".join([*lines, *([f"  and {more} more"] if more else [])])
    return f"configure_optimizers makes other settings than in the run that was saved:\n{shown}\n{counts[chosen]}"


def _advance(scheduler: Any, saved: Mapping[str, Any]) -> None:
    """Step a new schedule as often as the saved one; one that follows a metric gets its counters."""
    if isinstance(scheduler, ReduceLROnPlateau):
        scheduler.load_state_dict({key: saved[key] for key in _PLATEAU_STATE if key in saved})
        return
    while "last_epoch" not in saved and saved.get("_schedulers"):  # ChainedScheduler
        saved = saved["_schedulers"][0]
    if "last_epoch" not in saved:
        raise UserError(
            f"the schedule {type(scheduler).__name__} saves no last_epoch, so it cannot continue with other settings; "
            "set trainer.resume_optimizer=saved, or add last_epoch to its state_dict."
        )
    # From the file: an altered number must end in an error, not in hours of steps.
    if saved["last_epoch"] > _MOST_STEPS:
        raise CheckpointError(f"the schedule {type(scheduler).__name__} was saved after {saved['last_epoch']:,} steps.")
    for _ in range(saved["last_epoch"]):  # not at once: most of torch's compute a rate from the one before
        scheduler.step()


def _change_of(scheduler: LambdaLR, saved: Mapping[str, Any]) -> str:
    """Return the rates that the schedule's functions gave and give at the saved step; empty if they are the same."""
    rates = saved.get("_last_lr", [])
    pairs = zip(saved.get("base_lrs", scheduler.base_lrs), scheduler.lr_lambdas, strict=True)
    present = [float(rate) * factor(saved["last_epoch"]) for rate, factor in pairs]
    for old, new in zip(map(float, rates), present, strict=False):
        if abs(old - new) > _CLOSE * max(abs(old), abs(new)):
            return f"a learning rate of {old:.6g} saved, {new:.6g} now, at step {saved['last_epoch']}"
    return ""


def _settings(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the plain values in a group or in a scheduler's state, with their places."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            # Torch keeps counters under private names, and a callable object of `lr_lambdas` its settings.
            if key not in _COUNTERS and (not str(key).startswith("_") or key == "_schedulers" or "lambdas" in path):
                yield from _settings(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _settings(item, f"{path}[{index}]")
    elif isinstance(value, Tensor):
        if value.numel() == 1:
            yield path, value.item()
    elif value is None or isinstance(value, (bool, int, float, str)):
        yield path, value


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if isinstance(value, (bool, int, float, str, tuple))}


def _copied(value: Any) -> Any:
    """Return the value with its own containers and tensors; other objects are shared."""
    if isinstance(value, Tensor):
        return value.clone()
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    return {key: _copied(item) for key, item in value.items()} if type(value) is dict else value


def _without(group: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in keys}
