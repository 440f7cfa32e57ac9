"""What a LightningModule sees of a run, and its own hooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainkit.callback import Callback
from trainkit.errors import UserError
from trainkit.interop.lightning_logging import counted_on_all_ranks, numbers_of, recording

if TYPE_CHECKING:
    from trainkit.run import Run

_EVALUATIONS = {"sanity": "validation", "validation": "validation", "test": "test"}


class TrainerView:
    """What a module sees as `self.trainer`: how far the run is."""

    def __init__(self) -> None:
        self.current_epoch = 0
        self.global_step = 0
        self.world_size = 1
        self.global_rank = 0
        self.total_steps: int | None = None
        self.batch = -1
        self.loader = 0

    @property
    def is_global_zero(self) -> bool:
        """Whether this rank is the one that writes."""
        return self.global_rank == 0

    @property
    def estimated_stepping_batches(self) -> int:
        """Optimizer steps of the whole run; raises UserError where the duration does not tell."""
        if self.total_steps is None:
            raise UserError(
                "estimated_stepping_batches is not known; give max_duration in steps, samples, or epochs of data "
                "with a length."
            )
        return self.total_steps

    def next_batch(self) -> int:
        """Return the index of the batch that comes now."""
        self.batch += 1
        return self.batch

    def follow(self, run: Run) -> None:
        """Take over where the run is."""
        self.current_epoch, self.global_step = run.state.epoch, run.state.step
        self.world_size, self.global_rank = run.strategy.comm.world_size, run.strategy.comm.rank
        self.total_steps = run.max_steps

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise NotOffered(
            f"self.trainer.{name} is not offered to a LightningModule that runs as a task; there are current_epoch, "
            "global_step, estimated_stepping_batches, world_size, global_rank and is_global_zero. What else the "
            "module needs can be an argument of its constructor."
        )


class NotOffered(UserError, AttributeError):
    """An attribute of Lightning's Trainer that has no counterpart."""


class LightningHooks(Callback):
    """Calls a module's own hooks at the moments of a run."""

    def __init__(self, module: Any, view: TrainerView) -> None:
        self._module = module
        self._view = view
        self._training_batch = -1

    def on_fit_start(self, run: Run) -> None:
        self._view.follow(run)
        self._module.on_fit_start()
        self._module.on_train_start()

    def on_fit_end(self, run: Run) -> None:
        self._module.on_train_end()
        self._module.on_fit_end()

    def on_epoch_start(self, run: Run) -> None:
        self._view.follow(run)
        self._view.batch = -1
        self._module.on_train_epoch_start()

    def on_step_end(self, run: Run) -> None:
        self._view.global_step = run.state.step

    def on_epoch_end(self, run: Run) -> None:
        if not overrides(self._module, "on_train_epoch_end"):
            return
        with counted_on_all_ranks(run.task, run.strategy, keep_resets=True), recording() as logged:
            self._module.on_train_epoch_end()
            own = numbers_of(logged)
        of_ranks = run.strategy.comm.all_gather_object(own)
        means = {name: _mean([numbers[name] for numbers in of_ranks if name in numbers]) for name in _names(of_ranks)}
        if means:
            run.log({f"train/{name}": value for name, value in means.items()})

    def on_evaluation_start(self, run: Run, stage: str) -> None:
        self._view.follow(run)
        self._training_batch, self._view.batch, self._view.loader = self._view.batch, -1, 0
        if stage in _EVALUATIONS:
            getattr(self._module, f"on_{_EVALUATIONS[stage]}_start")()
            getattr(self._module, f"on_{_EVALUATIONS[stage]}_epoch_start")()

    def on_dataset_end(self, run: Run, stage: str, metrics: dict[str, float]) -> None:
        self._view.batch, self._view.loader = -1, self._view.loader + 1
        hook = f"on_{_EVALUATIONS[stage]}_epoch_end"
        if overrides(self._module, hook):
            with counted_on_all_ranks(run.task, run.strategy, keep_resets=False), recording() as logged:
                getattr(self._module, hook)()
                metrics.update(numbers_of(logged))

    def on_evaluation_end(self, run: Run, stage: str, metrics: dict[str, float]) -> None:
        self._view.batch = self._training_batch
        if stage in _EVALUATIONS:
            getattr(self._module, f"on_{_EVALUATIONS[stage]}_end")()


def overrides(module: Any, hook: str) -> bool:
    """Return whether a user's class defines a hook, and not Lightning alone."""
    owner = next((cls for cls in type(module).__mro__ if hook in vars(cls)), None)
    return owner is not None and not owner.__module__.startswith(("lightning.", "pytorch_lightning."))


def _names(of_ranks: Sequence[Mapping[str, float]]) -> dict[str, None]:
    return dict.fromkeys(name for numbers in of_ranks for name in numbers)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
