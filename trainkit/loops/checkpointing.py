"""Checkpointer: capture, save and restore everything that a run needs to continue."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trainkit.data.batch import BatchPlan
from trainkit.data.loader import BatchLoader
from trainkit.errors import UserError
from trainkit.metrics.accumulate import WeightedMeans
from trainkit.optim.lr_schedule import ReferenceBatchSize
from trainkit.optim.optimizer import PhaseOptimizer
from trainkit.optim.precision import Precision
from trainkit.rng import rng_state, seed_everything, set_rng_state
from trainkit.state import TrainState
from trainkit.strategy import Strategy, SupportsShardedState
from trainkit.task import TaskModule

if TYPE_CHECKING:
    from trainkit.checkpoint.async_writer import AsyncWriter
    from trainkit.checkpoint.sharded_save import ShardedWriter
    from trainkit.checkpoint.sharded_state import ShardedState
    from trainkit.checkpoint.store import CheckpointEntry, CheckpointStore


class StatefulCallback(Protocol):
    """The part of a callback that a checkpoint keeps."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore the state."""


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
        """Returns True if the weights are worth saving; collective."""

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
        self._run = run
        self._writer: AsyncWriter | None = None
        self._sharded_writer: ShardedWriter | None = None

    @cached_property
    def store(self) -> CheckpointStore | None:
        """The checkpoints of the run; `None` for a run without a folder. May be set to a store that ranks them."""
        from trainkit.checkpoint.store import CHECKPOINTS, CheckpointStore

        return None if self._run.run_dir is None else CheckpointStore(self._run.run_dir / CHECKPOINTS)

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

        Args:
            reason: Listed with the checkpoint.
            background: Copy the state and write it in a thread; `poll` and `wait` raise its errors.
            sharded: Each rank writes its shard, if the strategy shards the state.
            then: Called on the main rank with the entry, once it is listed.

        Returns:
            The entry on the main rank; `None` in the background, without a folder, or if a loss was not finite, so that
            the weights are not worth saving.

        """
        run, strategy = self._run, self._run.strategy
        if self.store is None or not run.weights_are_finite():
            return None
        self._wait_for_shards()
        shards = self._shards() if sharded else None
        payload = self._payload(shards)
        state = run.state
        labels = {"step": state.step, "epoch": state.epoch, "metrics": run.metrics_of_this_step(), "reason": reason}
        labels["name"] = f"step_{state.step:08d}"
        if shards is None:
            return self._save_on_main(payload, background=background, then=then, labels=labels)
        if not background:
            from trainkit.checkpoint.sharded_save import save_sharded

            return save_sharded(self.store, payload, shards.shards, comm=strategy.comm, then=then, **labels)
        self.wait()
        self._shard_writer(self.store).save(payload, shards.shards, then=then, **labels)
        return None

    def prepare(self, *, sharded: bool = False) -> None:
        """Allocate memory for background saves, so that the first one stalls training no longer than others."""
        if self.store is None:
            return
        shards = self._shards() if sharded else None
        if shards is not None:
            self._shard_writer(self.store).prepare(shards.shards)
            return
        payload = self._task_and_optimizers()
        if self._run.strategy.comm.is_main:
            self._async_writer(self.store).prepare(payload)

    def poll(self) -> bool:
        """Raise the error of a background save that failed, without waiting for the disk.

        Returns True if a sharded save has just become complete. Collective while ranks save shards.
        """
        if self._writer is not None:
            self._writer.check()
        return self._sharded_writer is not None and self._sharded_writer.check()

    def wait(self) -> bool:
        """Wait for a background save, and raise its error if it failed.

        Returns True if ranks were saving shards. Collective while they do.
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
        saved = _saved_by_phase(payload["optimizer"], payload["schedules"], run.phase_optimizers, where=where)
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

    def load_weights(self, payload: dict[str, Any], *, where: str, to_evaluate: bool = False) -> None:
        """Load a checkpoint's parameters and buffers into the task; raises UserError if they are another task's.

        `to_evaluate` loads the weights that the run was validated with, if they differ (an average).
        """
        from trainkit.checkpoint.serialization import check_shapes, check_state_dict_keys

        task, strategy = self._run.task, self._run.strategy
        saved = payload.get("evaluation_weights", payload["task"]) if to_evaluate else payload["task"]
        own = strategy.state_dict(task)
        check_state_dict_keys(own, saved, where)
        check_shapes(own, saved, where)
        strategy.load_state_dict(task, saved)

    def restore_rng(self, payload: dict[str, Any]) -> None:
        """Restore the random generators if the layout of ranks and micro-batches is that of the checkpoint.

        On another layout they get a new seed. Call it last: preparations may draw or change the layout.
        """
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
            "schedules": _by_phase(
                [optimizer.schedule_state() for optimizer in run.phase_optimizers], run.phase_optimizers
            ),
            "spikes": [
                {} if optimizer.spikes is None else optimizer.spikes.state_dict() for optimizer in run.phase_optimizers
            ],
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
        """Return the task's and its optimizers' state, complete on the main rank or with placeholders; collective."""
        run = self._run
        if shards is not None:
            return {"task": shards.task, "optimizer": _by_phase(shards.optimizers, run.phase_optimizers)}
        optimizers = [run.strategy.optimizer_state_dict(run.task, each) for each in run.phase_optimizers]
        return {"task": run.strategy.state_dict(run.task), "optimizer": _by_phase(optimizers, run.phase_optimizers)}

    def _shards(self) -> ShardedState | None:
        strategy, run = self._run.strategy, self._run
        return strategy.shards(run.task, run.phase_optimizers) if isinstance(strategy, SupportsShardedState) else None

    def _layout(self) -> str:
        return f"{type(self._run.strategy).__name__} {self._run.plan}"

    # ---- Writing

    def _save_on_main(
        self,
        payload: dict[str, Any],
        *,
        background: bool,
        then: Callable[[CheckpointEntry], object] | None,
        labels: dict[str, Any],
    ) -> CheckpointEntry | None:
        """Write the payload on the main rank, and raise its UserError on every rank; collective."""
        comm = self._run.strategy.comm
        entry: CheckpointEntry | None = None
        failure: UserError | None = None
        if comm.is_main:
            try:
                entry = self._write(payload, background=background, then=then, labels=labels)
            except UserError as error:
                failure = error
        failure = comm.broadcast_object(failure)
        if failure is not None:
            raise failure
        return entry

    def _write(
        self,
        payload: dict[str, Any],
        *,
        background: bool,
        then: Callable[[CheckpointEntry], object] | None,
        labels: dict[str, Any],
    ) -> CheckpointEntry | None:
        assert self.store is not None
        if self._writer is not None:
            self._writer.wait()
        if background:
            self._async_writer(self.store).save(payload, then=then, **labels)
            return None
        entry = self.store.save(payload, **labels)
        if then is not None:
            then(entry)
        return entry

    def _async_writer(self, store: CheckpointStore) -> AsyncWriter:
        if self._writer is None:
            from trainkit.checkpoint.async_writer import AsyncWriter

            self._writer = AsyncWriter(store)
        return self._writer

    def _shard_writer(self, store: CheckpointStore) -> ShardedWriter:
        if self._sharded_writer is None:
            from trainkit.checkpoint.sharded_save import ShardedWriter

            self._sharded_writer = ShardedWriter(store, self._run.strategy.comm)
        return self._sharded_writer

    def _wait_for_shards(self) -> bool:
        return self._sharded_writer is not None and self._sharded_writer.finish()


def _named(callbacks: Sequence[StatefulCallback]) -> list[tuple[str, StatefulCallback]]:
    """Return the callbacks with their class names, numbered from the second of a class on."""
    seen: dict[str, int] = {}
    named = []
    for callback in callbacks:
        kind = type(callback).__name__
        seen[kind] = seen.get(kind, 0) + 1
        named.append((kind if seen[kind] == 1 else f"{kind}_{seen[kind]}", callback))
    return named


def _by_phase(states: Sequence[Any], phase_optimizers: Sequence[PhaseOptimizer]) -> Any:
    """Return the state of the one optimizer of a task without phases, else the states by the names of the phases."""
    if phase_optimizers[0].phase == "":
        return states[0]
    return {optimizer.phase: state for optimizer, state in zip(phase_optimizers, states, strict=True)}


def _saved_by_phase(
    optimizers: Any, schedules: Any, phase_optimizers: Sequence[PhaseOptimizer], *, where: str
) -> list[tuple[Any, Any]]:
    """Return each optimizer's saved state and schedules; raises UserError if they are of other phases."""
    names = [optimizer.phase for optimizer in phase_optimizers]
    saved = [""] if "param_groups" in optimizers else list(optimizers)
    if sorted(saved) != sorted(names):
        raise UserError(f"{where} was saved {_described(saved)}, and this task is trained {_described(names)}.")
    return [(optimizers, schedules)] if saved == [""] else [(optimizers[name], schedules[name]) for name in names]


def _described(phases: list[str]) -> str:
    return "without phases" if phases == [""] else f"with the phases {', '.join(phases)}"
