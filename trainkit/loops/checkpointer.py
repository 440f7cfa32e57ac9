"""Checkpointer: saves the state of a run, and restores it under any strategy."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from trainkit.checkpoint.resized_buffers import RESIZED, Shapes, resize_buffers, resized_names, without_custom_loading
from trainkit.distributed.collectives import same_errors
from trainkit.errors import CheckpointError, UserError
from trainkit.optim.lr_schedule import ReferenceBatchSize
from trainkit.optim.optimizer import PhaseOptimizer
from trainkit.optim.optimizer_settings import ResumeOptimizer, difference_text
from trainkit.rng import rng_state, seed_everything, set_rng_state
from trainkit.run import Run, RunCallback
from trainkit.strategy import PlacesRanks, SupportsShardedState

if TYPE_CHECKING:
    from trainkit.checkpoint.background_save import BackgroundSave, CpuSnapshot
    from trainkit.checkpoint.serialization import Labels
    from trainkit.checkpoint.sharded_state import ShardedState
    from trainkit.checkpoint.store import CheckpointEntry, CheckpointStore, Keep, OnSaved

logger = logging.getLogger(__name__)


class Checkpointer:
    """Saves and restores one run, as `RunCheckpoints` documents it."""

    def __init__(self, run: Run, *, resume_optimizer: ResumeOptimizer = "configured") -> None:
        """`resume_optimizer`: the settings of optimizers that count if those that were saved differ."""
        self._run = run
        self._background: BackgroundSave | None = None  # on every rank while they save shards, else on the main one
        self._snapshot: CpuSnapshot | None = None  # what is saved in the background
        self._resume_optimizer = resume_optimizer
        self.store: CheckpointStore | None = None
        if run.run_dir is not None:
            from trainkit.checkpoint.store import CHECKPOINTS, CheckpointStore

            self.store = CheckpointStore(run.run_dir / CHECKPOINTS)
        self._has_warned = False  # of state that is not saved
        self.trainable_only = False
        self.first_buffers: Shapes = {}
        # The hash reads all frozen parameters, so it is computed again only if other parameters are frozen.
        self._frozen: tuple[frozenset[str], dict[str, Any]] = frozenset(), {}  # names, and what is saved of them

    # ---- Saving

    def save(
        self,
        *,
        reason: str,
        background: bool = False,
        sharded: bool = False,
        keep: Keep | None = None,
        then: OnSaved | None = None,
    ) -> CheckpointEntry | None:
        run = self._run
        # Collective: the policy for losses and the comparison of replicas may raise here, before anything is written.
        if self.store is None or not run.weights_are_finite():
            return None
        run.check_folder()
        self._warn_of_unsaved_state()
        with same_errors(run.strategy.comm):
            # One at a time: an earlier save holds the lock of the folder, for which this one would wait until it times
            # out, and the memory of the copies. Its error must not be lost under this one's.
            self.wait()
        with run.optimizers_in_evaluation():  # a resume brings back the weights to train, from the optimizer's state
            return self._save(reason=reason, background=background, sharded=sharded, keep=keep, then=then)

    def _save(
        self, *, reason: str, background: bool, sharded: bool, keep: Keep | None, then: OnSaved | None
    ) -> CheckpointEntry | None:
        run, state = self._run, self._run.state
        assert self.store is not None
        shards = self.shards() if sharded else None
        # On every rank, although the main one alone writes it: gathering the state is collective.
        payload = self.payload(shards)
        name, metrics = f"step_{state.step:08d}", run.metrics_of_this_step()
        labels: Labels = {"name": name, "step": state.step, "epoch": state.epoch, "metrics": metrics, "reason": reason}
        if shards is None:
            return self._save_on_main(payload, background=background, keep=keep, then=then, labels=labels)
        from trainkit.checkpoint.background_save import save_shards

        # Without a background too, as a save that is waited for at once.
        self._background = save_shards(
            self.store,
            payload,
            shards.shards,
            comm=run.strategy.comm,
            snapshot=self._cpu_snapshot() if background else None,
            keep=keep,
            then=then,
            **labels,
        )
        if background:
            return None
        self._background.wait()
        return self._background.entry

    def _warn_of_unsaved_state(self) -> None:
        """Warn once of state that steps leave for the next one where no checkpoint has it."""
        names = self._run.carried_state
        if names and not self._has_warned and self._run.is_main:
            self._has_warned = True
            logger.warning(
                "steps of %s leave state for the next one in %s, which checkpoints do not have: a resumed run begins "
                "without it. Keep tensors in buffers (self.register_buffer), and return the rest from get_extra_state.",
                type(self._run.task).__name__,
                ", ".join(names),
            )

    def prepare(self, *, sharded: bool = False) -> None:
        if self.store is None:
            return
        self.wait()  # the memory may be in use
        shards = self.shards() if sharded else None
        if shards is not None:
            self._cpu_snapshot().reserve({}, shards.shards)
            return
        payload = self._task_and_optimizers()  # collective, so not on the main rank alone
        if self._run.strategy.comm.is_main:
            self._cpu_snapshot().reserve(payload)

    def poll(self) -> bool:
        return self._background is not None and self._background.poll()

    def wait(self) -> bool:
        return self._background is not None and self._background.wait()

    def close(self) -> None:
        try:
            if self._background is not None:
                self._background.close()
        finally:
            if self._snapshot is not None:
                self._snapshot.close()

    # ---- Restoring

    def restore(self, payload: dict[str, Any], *, where: str, is_new: bool = False) -> None:
        from trainkit.checkpoint.sharded_state import in_memory

        run, strategy = self._run, self._run.strategy
        assert run.loader is not None
        for phase_optimizer in run.phase_optimizers:
            phase_optimizer.set_mode(training=False)  # as when the checkpoint was saved
        self.load_weights(payload, where=where)
        saved = _saved_by_phase(payload["optimizer"], payload["schedules"], run.phase_optimizers, where=where)
        for phase_optimizer, (optimizer, schedules) in zip(run.phase_optimizers, saved, strict=True):
            # All phases are checked before any is loaded, so that an error leaves no optimizer half restored.
            phase_optimizer.check_saved(optimizer, schedules, where=where)
        # A rollback restores what this run has saved, and its state is no longer that of a new run.
        problem = next(self._unlike(payload, saved), None) if is_new else None
        if problem is not None:
            raise CheckpointError(f"{where} holds a state that cannot be restored: {problem}.")
        restored = zip(run.phase_optimizers, saved, payload["spikes"], strict=True)
        for phase_optimizer, (optimizer, schedules), spikes in restored:
            state = self._with_settings(phase_optimizer, optimizer, schedules, payload.get("settings", {}))
            strategy.load_optimizer_state_dict(run.task, phase_optimizer, state)
            # Checked again: the schedule that was saved may end before the run does.
            phase_optimizer.settings.check_length(run.max_steps, phase_optimizer.schedules)
            if phase_optimizer.spikes is not None:
                phase_optimizer.spikes.load_state_dict(spikes)
        strategy.load_strategy_state(payload.get("strategy", {}))
        run.precision.load_state_dict(payload["scaler"])
        run.state.load_state_dict(payload["state"])
        run.loader.load_state_dict(payload["loader"])
        saved_items, items = payload.get("num_items"), run.loader.num_items
        if run.is_main and saved_items not in (None, items):
            logger.warning(
                "the training data has %s samples, but had %s when %s was saved: the remaining steps of epoch %d may "
                "follow another order, in which some samples come twice or not at all.",
                "an unknown number of" if items is None else items,
                saved_items,
                where,
                run.state.epoch,
            )
        if run.means is not None:
            # The next log has the samples of all ranks since the last one, as without the resume.
            run.means.load_state_dict(payload.get("means", {}), strategy.comm)
        for name, callback in _named(run.callbacks):
            if name in payload["callbacks"]:  # a callback that was added since starts fresh
                state = payload["callbacks"][name]
                callback.load_state_dict(state if callback.loads_from_disk else in_memory(state))
        run.resumed_from, run.restored_step = where, run.state.step
        if payload.get("batch_size") is not None:
            run.reference_batch_size = ReferenceBatchSize(payload["batch_size"], "the resumed run")

    def _unlike(self, payload: dict[str, Any], saved_by_phase: list[tuple[Any, Any]]) -> Iterator[str]:
        """Yield what in a state of torch or of trainkit is unlike that of this run, which is new."""
        from trainkit.checkpoint.likeness import unlike

        run, phases = self._run, self._run.phase_optimizers
        expected = {
            "state": run.state.state_dict(),
            "rng": [rng_state()] * len(payload["rng"]),  # another machine may have other devices
            "means": {name: [math.inf, math.inf] for name in payload.get("means", {})},  # a metric may be NaN
            "scaler": run.precision.state_dict() if run.precision.scaler is not None and payload["scaler"] else {},
            "spikes": [
                {"seen": [0.0, 0.0]} if isinstance(saved, dict) and saved else {} for saved in payload["spikes"]
            ],
            "callbacks": {
                # The callbacks may have been used in an earlier run, and a best value may be infinite.
                name: {
                    key: math.inf if isinstance(expected, float) else expected
                    for key, expected in callback.state_dict().items()
                }
                for name, callback in _named(run.callbacks)
                if type(callback).__module__.startswith("trainkit.callbacks.") and name in payload["callbacks"]
            },
            # None fits any plain value.
            "num_items": None,
            "num_moments": None,
        }
        yield from unlike(expected, payload, "payload")
        for phase_optimizer, (optimizer, schedules) in zip(phases, saved_by_phase, strict=True):
            settings = payload.get("settings", {})
            settings = settings.get(phase_optimizer.phase, {}) if phase_optimizer.phase else settings
            yield from unlike(dict.fromkeys(settings), settings, "settings")
            yield from phase_optimizer.settings.unlike(optimizer, schedules, saved=settings)
        # Torch loads a state without the moments of a parameter, and starts them again from zero.
        if payload.get("num_moments") not in (None, _num_values(payload["optimizer"], phases)):
            yield "values are missing in the state of the optimizer"

    def _with_settings(
        self, phase_optimizer: PhaseOptimizer, optimizer: dict[str, Any], schedules: list[Any], saved: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the optimizer's state with the settings that count; the schedules are restored. Warns of others."""
        settings = phase_optimizer.settings
        saved = saved.get(phase_optimizer.phase, {}) if phase_optimizer.phase else saved
        differing = settings.differences(saved, schedules)
        if differing and self._run.is_main:
            logger.warning("%s", difference_text(differing, self._resume_optimizer))
        if differing and self._resume_optimizer == "configured":
            return settings.advanced(optimizer, schedules, saved=saved, differing=differing)
        settings.check_schedules(saved)
        phase_optimizer.load_schedule_state(schedules)
        return optimizer

    def load_weights(self, payload: dict[str, Any], *, where: str, to_evaluate: bool = False) -> None:
        from trainkit.checkpoint.frozen_weights import FROZEN, check_frozen, completed
        from trainkit.checkpoint.serialization import check_state_dict, saved_weights

        task, strategy = self._run.task, self._run.strategy
        # keep_vars: without it torch detaches each parameter, which a guarded shard of fsdp refuses.
        saved, task_state = saved_weights(payload, where, to_evaluate=to_evaluate), task.state_dict(keep_vars=True)
        if payload.get(FROZEN):
            saved = completed(saved, payload[FROZEN], task_state)
        # A rollback may go back to a step before they were resized.
        unchanged = [
            name for name, shape in self.first_buffers.items() if shape == getattr(saved.get(name), "shape", None)
        ]
        resize_buffers(task, saved, [*payload.get(RESIZED, ()), *unchanged], strategy.device)
        task_state = task.state_dict(keep_vars=True)
        check_state_dict(without_custom_loading(task, task_state), without_custom_loading(task, saved), where)
        if payload.get(FROZEN):
            with same_errors(strategy.comm):
                # All ranks gather the frozen parameters, and one hashes them: its error must end them all.
                state = strategy.state_dict(task)
                if strategy.comm.is_main:
                    check_frozen(payload[FROZEN], state, where)
        try:
            strategy.load_state_dict(task, saved)
        # Errors of the device and of collectives are passed on: the checkpoint is to blame for what does not fit only.
        except RuntimeError as error:
            if not str(error).startswith("Error(s) in loading state_dict"):  # torch's, of keys and shapes
                raise
            raise CheckpointError(f"{where} does not fit the task under {type(strategy).__name__}: {error}") from error

    def restore_rng(self, payload: dict[str, Any]) -> None:
        run, strategy = self._run, self._run.strategy
        states = payload["rng"]
        if len(states) == strategy.comm.num_processes and payload["layout"] == self._layout():
            set_rng_state(states[strategy.comm.process], strategy.devices_of_rank)
        else:
            # More than any number of ranks, so that no two pairs of step and rank get the same seed.
            seed_everything(run.seed + 1_000_003 * run.state.step + strategy.comm.rank)

    # ---- What is saved

    def payload(self, shards: ShardedState | None = None) -> dict[str, Any]:
        run, strategy = self._run, self._run.strategy
        assert run.loader is not None
        task_and_optimizers = self._task_and_optimizers(shards)
        optimizers = task_and_optimizers["optimizer"]
        payload = {
            **task_and_optimizers,
            "settings": _by_phase(
                [optimizer.settings.record() for optimizer in run.phase_optimizers], run.phase_optimizers
            ),
            "num_moments": None if shards is not None else _num_values(optimizers, run.phase_optimizers),
            "schedules": _by_phase(
                [optimizer.schedule_state() for optimizer in run.phase_optimizers], run.phase_optimizers
            ),
            "spikes": [
                {} if optimizer.spikes is None else optimizer.spikes.state_dict() for optimizer in run.phase_optimizers
            ],
            "strategy": strategy.strategy_state(),
            "scaler": {} if run.precision.scaler is None else run.precision.state_dict(),
            "state": run.state.state_dict(),
            "loader": run.loader.state_dict(run.state.position),
            # Of every rank, for a resume on the same layout.
            "rng": strategy.comm.all_gather_object(rng_state(strategy.devices_of_rank)),
            "layout": self._layout(),
            "batch_size": None if run.plan is None else run.plan.batch_size,
            "num_items": run.loader.num_items,
            "means": {} if run.means is None else run.means.state_dict(strategy.comm),
            "callbacks": {name: callback.state_dict() for name, callback in _named(run.callbacks)},
            "config": run.config,
            "task_class": f"{type(run.task).__module__}.{type(run.task).__qualname__}",
        }
        # The state is complete on the main rank only.
        if self.first_buffers and run.is_main:
            payload[RESIZED] = resized_names(payload["task"], self.first_buffers, run.task)
        # Last, so that callbacks see all of the payload and may add to it.
        run.emit("on_save", payload)
        return payload

    def check_savable(self) -> None:
        from trainkit.checkpoint.serialization import PayloadVisitor

        run = self._run
        if self.store is None:
            return
        assert run.loader is not None
        # `state_dict` would gather and copy tensors. Of the values of the task only these, which its code makes, may be
        # of a kind that cannot be saved.
        extra = {
            f"{name}._extra_state" if name else "_extra_state": module.get_extra_state()
            for name, module in run.task.named_modules()
            if type(module).get_extra_state is not nn.Module.get_extra_state
        }
        phases = run.phase_optimizers
        groups = [
            {
                "param_groups": [
                    {k: v for k, v in group.items() if k != "params"} for group in optimizer.optimizer.param_groups
                ]
            }
            for optimizer in phases
        ]
        states = {
            "task": extra,
            "optimizer": _by_phase(groups, phases),
            "schedules": _by_phase([optimizer.schedule_state() for optimizer in phases], phases),
            "loader": run.loader.first_state(),
            "callbacks": {name: callback.state_dict() for name, callback in _named(run.callbacks)},
        }
        PayloadVisitor(lambda tensor, path: tensor).convert(states)  # raises for the first value that is not plain

    def _task_and_optimizers(self, shards: ShardedState | None = None) -> dict[str, Any]:
        """Return the task's and its optimizers' state, complete on the main rank or with placeholders; collective."""
        run = self._run
        if shards is not None:
            return {"task": shards.task, "optimizer": _by_phase(shards.optimizers, run.phase_optimizers)}
        optimizers = [run.strategy.optimizer_state_dict(run.task, optimizer) for optimizer in run.phase_optimizers]
        state = {"task": run.strategy.state_dict(run.task), "optimizer": _by_phase(optimizers, run.phase_optimizers)}
        if self.trainable_only and run.is_main:
            from trainkit.checkpoint.frozen_weights import FROZEN, frozen_names, record_of, without

            names = frozen_names(run.task)
            if names != self._frozen[0]:
                self._frozen = names, record_of(state["task"], names)
            state |= {"task": without(state["task"], names), FROZEN: self._frozen[1]}
        return state

    def shards(self) -> ShardedState | None:
        strategy, run = self._run.strategy, self._run
        return strategy.shards(run.task, run.phase_optimizers) if isinstance(strategy, SupportsShardedState) else None

    def _layout(self) -> str:
        strategy = self._run.strategy
        # A rank that moved computes other samples, for which its random numbers were not drawn.
        places = f" {strategy.places()}" if isinstance(strategy, PlacesRanks) else ""
        # The same seed gives other numbers on another kind of device.
        kinds = [device.type for device in strategy.devices_of_rank]
        return f"{type(strategy).__name__} {self._run.plan!r}{places} on {' '.join(kinds)}"

    def _save_on_main(
        self, payload: dict[str, Any], *, background: bool, keep: Keep | None, then: OnSaved | None, labels: Labels
    ) -> CheckpointEntry | None:
        """Write the payload on the main rank, and raise its UserError on every rank; collective."""
        assert self.store is not None
        comm, entry = self._run.strategy.comm, None
        # The other ranks wait here for the main one.
        with same_errors(comm):
            if comm.is_main and background:
                from trainkit.checkpoint.background_save import save_copy

                snapshot = self._cpu_snapshot()
                self._background = save_copy(self.store, payload, snapshot, keep=keep, then=then, **labels)
            elif comm.is_main:
                entry = self.store.save(payload, keep=keep, **labels)
                if then is not None:
                    then(entry)
        return entry

    def _cpu_snapshot(self) -> CpuSnapshot:
        if self._snapshot is None:
            from trainkit.checkpoint.background_save import CpuSnapshot

            self._snapshot = CpuSnapshot()
        return self._snapshot


def _named(callbacks: Sequence[RunCallback]) -> list[tuple[str, RunCallback]]:
    """Return the callbacks with their class names, numbered from the second of a class on."""
    seen: Counter[str] = Counter()
    named = []
    for callback in callbacks:
        kind = type(callback).__name__
        seen[kind] += 1
        named.append((kind if seen[kind] == 1 else f"{kind}_{seen[kind]}", callback))
    return named


def _by_phase(states: Sequence[Any], phase_optimizers: Sequence[PhaseOptimizer]) -> Any:
    """Return the state of the one optimizer of a task without phases, else the states by the names of the phases."""
    if phase_optimizers[0].phase == "":
        return states[0]
    return {optimizer.phase: state for optimizer, state in zip(phase_optimizers, states, strict=True)}


def _num_values(optimizers: Any, phase_optimizers: Sequence[PhaseOptimizer]) -> int:
    """Return the number of values of parameters, such as moments, in the saved state of optimizers."""
    states = [optimizers[optimizer.phase] if optimizer.phase else optimizers for optimizer in phase_optimizers]
    return sum(len(values) for state in states for values in state["state"].values())


def _saved_by_phase(
    optimizers: Any, schedules: Any, phase_optimizers: Sequence[PhaseOptimizer], *, where: str
) -> list[tuple[Any, Any]]:
    """Return each optimizer's saved state and schedules; raises UserError if they are of other phases."""
    names = [optimizer.phase for optimizer in phase_optimizers]
    # The state of a task without phases is that of its optimizer, with the keys of torch.
    saved = [""] if "param_groups" in optimizers else list(optimizers)
    if sorted(saved) != sorted(names):
        raise UserError(f"{where} was saved {_described(saved)}, and this task is trained {_described(names)}.")
    return [(optimizers, schedules)] if saved == [""] else [(optimizers[name], schedules[name]) for name in names]


def _described(phases: list[str]) -> str:
    return "without phases" if phases == [""] else f"with the phases {', '.join(phases)}"
