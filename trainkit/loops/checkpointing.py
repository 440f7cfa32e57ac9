"""Checkpointer: capture, save and restore everything that a run needs to continue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from trainkit.checkpoint.async_writer import AsyncWriter
from trainkit.checkpoint.serialization import check_shapes, check_state_dict_keys
from trainkit.checkpoint.sharded_save import ShardedWriter, save_sharded
from trainkit.checkpoint.shards import ShardedState
from trainkit.checkpoint.store import CHECKPOINTS, CheckpointEntry, CheckpointStore
from trainkit.data.batch import BatchPlan
from trainkit.data.loader import BatchLoader
from trainkit.errors import UserError
from trainkit.metrics.accumulate import WeightedMeans
from trainkit.optim.lr_schedule import ReferenceBatchSize
from trainkit.optim.optimizer import PhaseOptimizer
from trainkit.optim.phase import by_phase, saved_by_phase
from trainkit.optim.precision import Precision
from trainkit.rng import rng_state, seed_everything, set_rng_state
from trainkit.state import TrainState
from trainkit.strategy import Strategy, SupportsShardedState
from trainkit.task import TaskModule


class StatefulCallback(Protocol):
    """A callback, as far as checkpoints are concerned."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of it."""

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore that."""


class CheckpointedRun(Protocol):
    """The parts of a Run that a checkpoint captures."""

    task: TaskModule
    strategy: Strategy
    precision: Precision
    seed: int
    run_dir: Path | None
    config: str
    state: TrainState
    loader: BatchLoader | None
    plan: BatchPlan | None
    phase_optimizers: Sequence[PhaseOptimizer]
    means: WeightedMeans | None
    reference_batch_size: ReferenceBatchSize | None
    resumed_from: str | None

    @property
    def weights_are_finite(self) -> Callable[[], bool]:
        """Returns whether the weights are worth saving; collective."""

    @property
    def callbacks(self) -> Sequence[StatefulCallback]:
        """The callbacks whose state is saved."""

    def metrics_of_this_step(self) -> dict[str, float]:
        """Return the metrics that were measured with the present weights."""

    def emit(self, hook: str, *arguments: Any) -> None:
        """Call the callbacks' methods of a hook."""


class Checkpointer:
    """Saves and restores one run; its methods are collective unless they say otherwise."""

    def __init__(self, run: CheckpointedRun) -> None:
        self.store = None if run.run_dir is None else CheckpointStore(run.run_dir / CHECKPOINTS)
        """Where checkpoints are listed; `None` for a run without a folder."""
        self._run = run
        self._writer: AsyncWriter | None = None
        self._sharded_writer: ShardedWriter | None = None

    # ---- Saving

    def save(
        self,
        *,
        reason: str,
        background: bool = False,
        sharded: bool = False,
        then: Callable[[CheckpointEntry], object] | None = None,
    ) -> CheckpointEntry | None:
        """Write a checkpoint of the present state; collective.

        With `background` the state is copied and a thread writes it; `poll` and `wait` raise its errors. With
        `sharded` each rank writes its shard, where the strategy shards the state. `then` is called on the main rank
        with the entry, once it is listed.

        Returns the entry on the main rank; `None` in the background, without a folder, or when a loss was not finite,
        so that the weights are not worth saving.
        """
        run, strategy = self._run, self._run.strategy
        if self.store is None or not run.weights_are_finite():
            return None
        self._wait_for_shards()
        shards = self._shards() if sharded else None
        payload = self._payload(shards)
        if shards is not None and background:
            self.wait()
            self._sharded_writer = self._sharded_writer or ShardedWriter(self.store, strategy.comm)
            self._sharded_writer.save(payload, shards.pieces, then=then, **self._labels(reason))
            return None
        if shards is not None:
            return save_sharded(
                self.store, payload, shards.pieces, together=strategy.comm, then=then, **self._labels(reason)
            )
        entry: CheckpointEntry | None = None
        failure: UserError | None = None
        if strategy.comm.is_main:
            try:
                entry = self._write(payload, reason=reason, background=background, then=then)
            except UserError as error:
                failure = error
        failure = strategy.comm.broadcast_object(failure)
        if failure is not None:
            raise failure
        return entry

    def prepare(self, *, sharded: bool = False) -> None:
        """Allocate memory for background saves, so that the first one stalls training no longer than others."""
        if self.store is None:
            return
        run = self._run
        shards = self._shards() if sharded else None
        if shards is not None:
            self._sharded_writer = self._sharded_writer or ShardedWriter(self.store, run.strategy.comm)
            self._sharded_writer.prepare(shards.pieces)
            return
        payload = self._task_and_optimizers()
        if run.strategy.comm.is_main:
            self._writer = self._writer or AsyncWriter(self.store)
            self._writer.prepare(payload)

    def poll(self) -> bool:
        """Raise the error of a background save that failed, without waiting for the disk.

        Returns whether a sharded save has just become complete. Collective while ranks save shards.
        """
        if self._writer is not None:
            self._writer.check()
        return self._sharded_writer is not None and self._sharded_writer.check()

    def wait(self) -> bool:
        """Wait for a background save, and raise its error if it failed.

        Returns whether ranks have saved shards. Collective while ranks save shards.
        """
        if self._writer is not None:
            self._writer.wait()
        return self._wait_for_shards()

    def close(self) -> None:
        """Wait for background saves and end their threads; may be called twice, and is not collective."""
        try:
            if self._writer is not None:
                self._writer.close()
        finally:
            if self._sharded_writer is not None:
                self._sharded_writer.close()

    # ---- Restoring

    def restore(self, payload: dict[str, Any], *, where: str) -> None:
        """Restore the run from a checkpoint that any strategy wrote; collective.

        Random generators continue exactly on the layout that was saved, and from a new seed on another. Raises
        UserError if the checkpoint is another task's.
        """
        run, strategy = self._run, self._run.strategy
        assert run.loader is not None
        self.load_weights(payload, where=where)
        saved = saved_by_phase(payload["optimizer"], payload["schedules"], run.phase_optimizers, where=where)
        for phase_optimizer, (optimizer, schedules) in zip(run.phase_optimizers, saved, strict=True):
            phase_optimizer.check_saved(optimizer, schedules, where=where)
            strategy.load_optimizer_state_dict(run.task, phase_optimizer, optimizer)
            phase_optimizer.load_schedule_state(schedules)
        for phase_optimizer, spikes in zip(run.phase_optimizers, payload.get("spikes", []), strict=False):
            if phase_optimizer.spikes is not None:
                phase_optimizer.spikes.load_state_dict(spikes)
        strategy.load_strategy_state(payload.get("strategy", {}))
        run.precision.load_state_dict(payload["scaler"])
        run.state.load_state_dict(payload["state"])
        run.loader.load_state_dict(payload["loader"])
        if run.means is not None:
            run.means.load_state_dict(payload.get("means", {}), strategy.comm)
        for name, callback in _named(run.callbacks):
            if name in payload["callbacks"]:
                callback.load_state_dict(payload["callbacks"][name])
        run.resumed_from = where
        if payload.get("batch_size") is not None:
            run.reference_batch_size = ReferenceBatchSize(payload["batch_size"], "the resumed run")
        self._restore_rng(payload)

    def load_weights(self, payload: dict[str, Any], *, where: str, to_evaluate: bool = False) -> None:
        """Load a checkpoint's parameters and buffers into the task; raises UserError if they are another task's.

        `to_evaluate` takes the weights that the run was validated with, where they differ (an average).
        """
        task, strategy = self._run.task, self._run.strategy
        saved = payload.get("evaluation_weights", payload["task"]) if to_evaluate else payload["task"]
        own = strategy.state_dict(task)
        check_state_dict_keys(own, saved, where)
        check_shapes(own, saved, where)
        strategy.load_state_dict(task, saved)

    def _restore_rng(self, payload: dict[str, Any]) -> None:
        run, strategy = self._run, self._run.strategy
        states = payload["rng"]
        if len(states) == strategy.comm.num_processes and payload["layout"] == self._layout():
            set_rng_state(states[strategy.comm.process])
        else:
            seed_everything(run.seed + 1_000_003 * run.state.step + strategy.comm.rank)

    # ---- What is saved

    def _payload(self, shards: ShardedState | None) -> dict[str, Any]:
        run, strategy = self._run, self._run.strategy
        assert run.loader is not None
        payload = {
            **self._task_and_optimizers(shards),
            "schedules": by_phase([part.schedule_state() for part in run.phase_optimizers], run.phase_optimizers),
            "spikes": [{} if part.spikes is None else part.spikes.state_dict() for part in run.phase_optimizers],
            "strategy": strategy.strategy_state(),
            "scaler": run.precision.state_dict(),
            "state": run.state.state_dict(),
            "loader": run.loader.state_dict(run.state.position),
            "rng": strategy.comm.all_gather_object(rng_state()),
            "layout": self._layout(),
            "batch_size": None if run.plan is None else run.plan.batch_size,
            "means": {} if run.means is None else run.means.state_dict(strategy.comm),
            "callbacks": {name: callback.state_dict() for name, callback in _named(run.callbacks)},
            "config": run.config,
            "task_class": f"{type(run.task).__module__}.{type(run.task).__qualname__}",
        }
        run.emit("on_save", payload)
        return payload

    def _task_and_optimizers(self, shards: ShardedState | None = None) -> dict[str, Any]:
        """Return the state of the task and its optimizers: the shards, or complete on the main rank; collective."""
        run = self._run
        if shards is None:
            parts = [run.strategy.optimizer_state_dict(run.task, part) for part in run.phase_optimizers]
            shards = ShardedState(run.strategy.state_dict(run.task), parts)
        return {"task": shards.task, "optimizer": by_phase(shards.optimizers, run.phase_optimizers)}

    def _labels(self, reason: str) -> dict[str, Any]:
        """Return the keywords under which a checkpoint of the present state is listed."""
        state = self._run.state
        labels = {"step": state.step, "epoch": state.epoch, "metrics": self._run.metrics_of_this_step()}
        return {"name": f"step_{state.step:08d}", **labels, "reason": reason}

    def _shards(self) -> ShardedState | None:
        strategy, run = self._run.strategy, self._run
        return strategy.shards(run.task, run.phase_optimizers) if isinstance(strategy, SupportsShardedState) else None

    def _layout(self) -> str:
        return f"{type(self._run.strategy).__name__} {self._run.plan}"

    # ---- Writing

    def _write(
        self,
        payload: dict[str, Any],
        *,
        reason: str,
        background: bool,
        then: Callable[[CheckpointEntry], object] | None,
    ) -> CheckpointEntry | None:
        assert self.store is not None
        if self._writer is not None:
            self._writer.wait()
        if background:
            self._writer = self._writer or AsyncWriter(self.store)
            self._writer.save(payload, then=then, **self._labels(reason))
            return None
        entry = self.store.save(payload, **self._labels(reason))
        if then is not None:
            then(entry)
        return entry

    def _wait_for_shards(self) -> bool:
        return self._sharded_writer is not None and self._sharded_writer.finish()


def _named(callbacks: Sequence[StatefulCallback]) -> list[tuple[str, StatefulCallback]]:
    """Return the callbacks with names that tell several of one class apart."""
    seen: dict[str, int] = {}
    named = []
    for callback in callbacks:
        kind = type(callback).__name__
        seen[kind] = seen.get(kind, 0) + 1
        named.append((kind if seen[kind] == 1 else f"{kind}_{seen[kind]}", callback))
    return named
