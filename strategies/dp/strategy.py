"""The strategy `dp`: one process drives several devices; the first is the master."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from trainkit.data.batch import BatchPlan, MicroBatch, StepBatch
from trainkit.devices import accelerators, has_streams, indexed, is_asynchronous, pick, synchronize, widest_float
from trainkit.distributed.collectives import Collectives
from trainkit.errors import UserError
from trainkit.metrics.step_output import StepOutput, read_evaluation_output, read_training_output
from trainkit.metrics.sync import fresh_copy, metrics_in, outermost_metrics
from trainkit.optim.precision import Precision
from trainkit.profiling import NO_COMMUNICATION, Overlap
from trainkit.strategy import PhaseTraining, loss_weight
from trainkit.task import TaskModule
from trainkit.tree import concatenate, to_device

from .parallel_apply import ParallelApply
from .replica_state import ReplicaState
from .replicate import replicate, scatter

WARM_UP_STEPS = 2  # the first shows whether replicas draw random numbers, the second starts threads
MEASURED_STEPS = 3  # few, because the devices are synchronized in each of them
_NOTHING = nullcontext()
ReadOutput = Callable[[Any, int, TaskModule, str], StepOutput]
logger = logging.getLogger(__name__)


class TransferTimer:
    """Times named phases during a few steps after the warm-up, and while overlap is measured.

    A measured step waits for its devices where a phase begins and ends; other steps cost nothing.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = [device for device in dict.fromkeys(devices) if is_asynchronous(device)]
        self._step = 0
        self._started: float | None = None  # of a measured step
        self._seconds: dict[str, float] = {}
        self._total_seconds = 0.0
        self._measured_steps = 0
        self._overlap_since: tuple[int, float] | None = None  # measured steps, seconds of phases

    def phase(self, name: str) -> AbstractContextManager[Any]:
        """Return a context whose seconds are added to `name` in a measured step."""
        # One shared context: steps that are not measured make no object and no device sync.
        return _NOTHING if self._started is None else self._measured(name)

    def start_step(self) -> None:
        """Start a step, measured or not."""
        is_early = WARM_UP_STEPS <= self._step < WARM_UP_STEPS + MEASURED_STEPS
        if is_early or self._overlap_since is not None:
            self._started = self._now()

    def end_step(self) -> bool:
        """End a step; return whether it was the last of the measured steps after the warm-up."""
        if self._started is not None:
            self._total_seconds += self._now() - self._started
            self._measured_steps += 1
            self._started = None
        self._step += 1
        return self._step == WARM_UP_STEPS + MEASURED_STEPS

    def percentages(self) -> dict[str, float]:
        """Return the percentage of measured time that each phase took."""
        total = max(self._total_seconds, 1e-9)  # no division by zero without a measured step
        return {name: 100 * seconds / total for name, seconds in self._seconds.items()}

    def start_overlap(self) -> None:
        """Measure every step from now on."""
        self._overlap_since = self._measured_steps, sum(self._seconds.values())

    def stop_overlap(self) -> Overlap | None:
        """Return the seconds of all phases, none of them hidden; `None` if no step was measured."""
        first_step, seconds_before = self._overlap_since or (self._measured_steps, 0.0)
        self._overlap_since = None
        steps = self._measured_steps - first_step
        if not steps:
            return None
        communication = (sum(self._seconds.values()) - seconds_before) / steps
        return Overlap(communication, communication, steps, note="scatter, replicate, gather and sum")

    @contextmanager
    def _measured(self, name: str) -> Iterator[None]:
        started = self._now()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - started

    def _now(self) -> float:
        for device in self._devices:
            # Without it the clock would show when copies were started, not when they ended.
            synchronize(device)
        return time.perf_counter()


@dataclass(frozen=True)
class ReplicaBatchPlan(BatchPlan):
    """A global batch split into micro-batches, of which `num_devices` are computed at once."""

    num_devices: int = 1

    @property
    def num_backwards(self) -> int:
        return -(-self.micro_batches // self.num_devices)

    def __str__(self) -> str:
        rounds = self.num_backwards
        return (
            f"global batch {self.batch_size} = {self.world_size} rank x {rounds} round{'s' * (rounds > 1)} x "
            f"{self.num_devices} devices x {self.micro_batch_size} samples"
        )


class DataParallelStrategy(PhaseTraining):
    """One process and a thread for each device; the first device is the master.

        master     scatter  replicate  forward 0           gather  loss  backward 0   sum  step
        device 1                       forward 1                         backward 1

    Each micro-batch goes to one replica, which runs the task's training_step on it. The master sums the weighted losses
    and runs one backward, which sums the gradients on the master. There is one rank, which reads all samples.

    Replicas share the process's random generators; those that draw random numbers take turns, so that a run is
    reproducible. Of buffers and other attributes that a step changes, those of replica 0 are kept.

    Args:
        devices: A list such as [cuda:0, cuda:1] or [cpu, cpu], a number of devices, or "auto": all GPUs, or two
            replicas on the CPU. A device may be named twice.
        accumulate: Rounds of a step, in each of which every device takes a micro-batch.
        micro_batch_size: Samples on one device at once, at most; `auto` halves it whenever it does not fit into memory.

    """

    supports_auto_micro_batch = True
    compile_obstacle = (
        ", which makes the task's replicas again in every step. Set trainer.compile=false, or strategy=ddp."
    )

    def __init__(
        self,
        *,
        devices: int | str | Sequence[str] = "auto",
        accumulate: int | None = None,
        micro_batch_size: int | Literal["auto"] | None = None,
    ) -> None:
        super().__init__(accumulate=accumulate, micro_batch_size=micro_batch_size)
        self._requested_devices = _checked(devices)
        self._num_rounds = self.num_micro_batches  # of a step; in each every device takes a micro-batch
        self._threads: ParallelApply | None = None
        self._timer = TransferTimer([])
        self._metrics: list[dict[int, nn.Module]] | None = None  # of each replica but the first
        self._state = ReplicaState()

    # ---- Devices

    @cached_property
    def devices(self) -> list[torch.device]:
        """The replicas' devices, the master first; raises UserError for a missing one."""
        requested = self._requested_devices
        names = requested if isinstance(requested, tuple) else _counted(requested)
        devices = [indexed(pick(name)) for name in names]
        if len({device.type for device in devices}) > 1:
            raise UserError(
                f"devices={[str(device) for device in devices]} are of different kinds; name devices of one kind, "
                "such as strategy.devices=[cuda:0,cuda:1] or strategy.devices=[cpu,cpu]."
            )
        return devices

    @property
    def devices_of_rank(self) -> list[torch.device]:
        return list(dict.fromkeys(self.devices))

    @property
    def supports_scripts(self) -> bool:  # type: ignore[override] # one device has the task itself
        return len(self.devices) == 1

    def validate(self, task: TaskModule, precision: Precision) -> str:
        return self.devices[0].type

    def setup(self, precision: Precision) -> None:
        """Make the first device the master and prepare a thread for each of the others."""
        self.device = self.devices[0]
        self.precision = precision
        precision.setup(self.device)
        # One rank: the collectives of one process do nothing, with any number of devices.
        self.comm = Collectives(num_devices=len(set(self.devices)))
        # Micro-batch i of a round is for device i, so a step has a multiple of the devices where the batch allows it.
        self.micro_batches_at_once = len(self.devices)
        self.num_micro_batches = len(self.devices) * self._num_rounds
        self._threads = ParallelApply(self.devices)
        self._timer = TransferTimer(self.devices)
        # A strategy may be set up again with another task, whose steps begin their counts from zero.
        self._metrics, self._state = None, ReplicaState()

    def teardown(self) -> None:
        """End the threads; may be called twice."""
        super().teardown()
        if self._threads is not None:
            self._threads.close()
            self._threads = None

    # ---- Data

    def plan(self, batch_size: int, *, even: bool = True) -> ReplicaBatchPlan:
        """Return the split of a global batch; raises UserError if it should be `even` and cannot be."""
        count = len(self.devices)
        round_size = super().plan(batch_size, even=even).micro_batch_size if self.accumulate else batch_size
        # Rounded up, so that a round never needs more micro-batches than there are devices.
        size = -(-round_size // count)
        if self.micro_batch_size is not None:
            size = min(size, self.micro_batch_size)
        return ReplicaBatchPlan(batch_size, self.comm.world_size, -(-batch_size // size), size, count)

    def step_batches(self, batches: Iterator[StepBatch], *, pin_memory: bool) -> Iterator[StepBatch]:
        """Return the batches; with several devices micro-batches are moved when they are scattered."""
        # Moving to the master first would copy the shards of the other devices twice.
        return super().step_batches(batches, pin_memory=pin_memory) if len(set(self.devices)) == 1 else batches

    # ---- A step

    def forward_backward(self, task: TaskModule, batch: StepBatch) -> list[StepOutput]:
        """Leave in every `.grad` the gradient of the weighted mean loss over the whole global batch."""
        self._timer.start_step()
        outputs: list[StepOutput] = []
        for start in range(0, len(batch.micro_batches), len(self.devices)):
            shards = batch.micro_batches[start : start + len(self.devices)]
            outputs += self._forward_backward_round(task, shards, batch)
        if len(self.devices) > 1:
            # A replica's copy of a frozen parameter is not connected to the task's: the gradient would be lost.
            self._check_untrained()
        self._normalize_gradients(outputs, batch)
        # Once in a run.
        if self._timer.end_step():
            self._warn_of_transfers()
        return outputs

    def _forward_backward_round(
        self, task: TaskModule, shards: Sequence[MicroBatch], batch: StepBatch
    ) -> list[StepOutput]:
        """Add the gradients of the shards, one for each device."""
        # Private: the counter tells of a change in place without a copy and a comparison of every parameter.
        versions = [parameter._version for parameter in self._trained] if len(shards) > 1 else []
        shapes = _shapes_of_saved_buffers(task) if versions else {}
        read = partial(read_training_output, of=batch.num_samples)
        former = self._watched_gradients(batch)
        outputs = self._on_replicas(task, shards, self._step_name, read, state=self._state)
        self._check_gradients_kept(task, former, is_first=shards[0] is batch.micro_batches[0])
        if versions:
            self._check_unchanged(task, versions)
            self._check_shapes(task, shapes)
        with self._timer.phase("gather"):
            outputs = [self._gathered(output) for output in outputs]
            losses = []
            for output, shard in zip(outputs, shards, strict=True):
                assert output.loss is not None
                losses.append(output.loss * loss_weight(output, shard, batch))
                # Outputs live until they are logged; without the graph its memory is freed after backward.
                output.loss = output.loss.detach()
            # One backward for all replicas, in which autograd runs the devices at once.
            total = torch.stack(losses).sum()
        self.precision.scale(total).backward()
        return outputs

    def _check_unchanged(self, task: TaskModule, versions: Sequence[int]) -> None:
        """Raise UserError if the step changed a trained parameter, of which some replicas share the memory."""
        for parameter, version in zip(self._trained, versions, strict=True):
            if parameter._version != version:
                name = next(name for name, other in task.named_parameters() if other is parameter)
                raise UserError(
                    f"{type(task).__name__}.{self._step_name} changes {name}, a trained parameter, which each replica "
                    "would change from its own samples. Let the gradient change it, or change it in a callback's "
                    "on_step_end; as a plain loop does it, it runs with strategy=single and one micro-batch."
                )

    def _check_shapes(self, task: TaskModule, shapes: Mapping[str, torch.Size]) -> None:
        """Raise UserError if the step changed the shape of a buffer: it has what one replica did with its shard."""
        for name, shape in _shapes_of_saved_buffers(task).items():
            if shape != shapes.get(name, shape):
                raise UserError(
                    f"{type(task).__name__}.{self._step_name} changes the shape of {name}, a buffer, from "
                    f"{tuple(shapes[name])} to {tuple(shape)} with the samples of one replica; those of the others "
                    "would be lost. Change it in a callback's on_step_end, register it with persistent=False if it is "
                    "the same whatever the samples, or set strategy=single."
                )

    def _on_replicas(
        self,
        task: TaskModule,
        shards: Sequence[MicroBatch],
        step_name: str,
        read: ReadOutput | None = None,
        *,
        state: ReplicaState | None = None,
    ) -> list[Any]:
        """Return the result of the step on each device, as returned by the task or by `read`."""
        assert self._threads is not None
        devices = self.devices[: len(shards)]
        with self._timer.phase("scatter"):
            moved = [self._scattered(shard, device) for shard, device in zip(shards, devices, strict=True)]
        with self._timer.phase("replicate"):
            # Again in every round: the optimizer has changed the parameters, and backward has freed the copies' graph.
            replicas = replicate(task, devices, phase=self._timer.phase, kept=self._metrics_of_replicas(task))

        def run(replica: TaskModule, shard: MicroBatch) -> Any:
            # Entered here, as autocast belongs to a thread.
            with self.precision.forward():
                returned = getattr(replica, step_name)(shard.batch)
            return returned if read is None else read(returned, shard.num_samples, replica, step_name)

        calls = [partial(run, replica, shard) for replica, shard in zip(replicas, moved, strict=True)]
        with nullcontext() if state is None or len(calls) == 1 else state.merged(task, replicas, step_name):
            return self._threads.run(calls, kind=step_name)

    def _scattered(self, shard: MicroBatch, device: torch.device) -> MicroBatch:
        # The batch is on the CPU already, in the right dtype.
        if device.type == "cpu" and self.precision.batch_type is None:
            return shard
        return MicroBatch(to_device(shard.batch, device, dtype=self.precision.batch_type), shard.num_samples)

    def _gathered(self, output: StepOutput) -> StepOutput:
        """Return the output with its loss and weight on the master; metrics are moved when logged."""
        loss = None if output.loss is None else output.loss.to(self.device)
        weight = output.weight
        if isinstance(weight, Tensor):
            # An integer weight divided by an integer would be rounded to float32 in every precision.
            weight = weight.to(self.device, widest_float(self.device))
        return StepOutput(loss, weight, output.metrics, output.own_weight, output.objects)

    @property
    def bytes_a_step(self) -> int:
        """Bytes of parameters and gradients that are copied between devices in one round."""
        away = sum(device != self.devices[0] for device in self.devices)
        return (
            2 * away * sum(parameter.nbytes for parameter in self._all_trained)
        )  # parameters to a replica, and gradients back

    def start_overlap_profile(self) -> None:
        """Time the copies between devices in every step from now on."""
        if len(self.devices) > 1:
            self._timer.start_overlap()

    def stop_overlap_profile(self, steps: int) -> Overlap | None:
        """Stop measuring, and return the seconds of copies between devices, none of them hidden."""
        overlap = self._timer.stop_overlap()
        return NO_COMMUNICATION if len(self.devices) == 1 else overlap

    @property
    def waited_seconds(self) -> float | None:
        """None: one process drives all devices."""
        return None

    def _warn_of_transfers(self) -> None:
        percentages = self._timer.percentages()
        logger.warning(
            "dp spent %.0f %% of steps %d to %d on transfers through the master (%s), and all replicas share one "
            "Python process. strategy=ddp trains to the same weights with a process for each device: it moves only "
            "gradients, while backward runs, and is usually faster.",
            sum(percentages.values()),
            WARM_UP_STEPS + 1,
            WARM_UP_STEPS + MEASURED_STEPS,
            ", ".join(f"{name} {percentage:.0f} %" for name, percentage in percentages.items()),
        )

    # ---- Evaluation

    def metric_modules(self, task: TaskModule) -> list[nn.Module]:
        """Return the modules with metric states in the task and in its replicas."""
        copies = [copy for metrics in self._metrics_of_replicas(task) for copy in metrics.values()]
        return [*metrics_in(task), *(holder for copy in copies for holder in metrics_in(copy))]

    def _metrics_of_replicas(self, task: TaskModule) -> list[dict[int, nn.Module]]:
        """Return for each further device the metric objects of its replica, which accumulate until they are reset."""
        # Made once: new ones in each batch would lose what they have accumulated.
        if self._metrics is None:
            self._metrics = [
                # By id, as `replicate` finds them. One for each replica: metrics are updated from several threads.
                {id(metric): fresh_copy(metric).to(device) for metric in outermost_metrics(task)}
                for device in self.devices[1:]
            ]
        return self._metrics

    def evaluate(
        self, task: TaskModule, micro_batch: MicroBatch, step_name: Literal["validation_step", "test_step"]
    ) -> StepOutput:
        """Return the metrics of one batch, each a weighted mean over its shards."""
        outputs = self._on_replicas(task, self._split(micro_batch), step_name, read_evaluation_output)
        return outputs[0] if len(outputs) == 1 else self._mean([self._gathered(output) for output in outputs])

    def predict(self, task: TaskModule, micro_batch: MicroBatch) -> Any:
        """Return the predictions for one batch, gathered on the master."""
        outputs = self._on_replicas(task, self._split(micro_batch), "predict_step")
        return concatenate([to_device(output, self.device) for output in outputs])

    def _split(self, micro_batch: MicroBatch) -> list[MicroBatch]:
        shards = scatter(micro_batch.batch, micro_batch.num_samples, num_shards=len(self.devices))
        return [MicroBatch(batch, num_samples) for batch, num_samples in shards]

    def _mean(self, outputs: Sequence[StepOutput]) -> StepOutput:
        sums: dict[str, Any] = {}
        weights: dict[str, float | Tensor] = {}
        for output in outputs:
            losses = {} if output.loss is None else {"loss": output.loss}
            for name, value in to_device({**losses, **output.metrics}, self.device).items():
                sums[name] = sums.get(name, 0) + value * output.weight
                # By metric: a shard may return some of them only.
                weights[name] = weights.get(name, 0) + output.weight
        named = {name: total / _not_zero(weights[name]) for name, total in sums.items()}
        weight = sum(output.weight for output in outputs)
        objects = [update for output in outputs for update in output.objects]
        return StepOutput(named.pop("loss", None), weight, named, any(output.own_weight for output in outputs), objects)


def _shapes_of_saved_buffers(task: TaskModule) -> dict[str, torch.Size]:
    """Return the shapes of the buffers that a state dict has; others are caches, whose shape may change."""
    return {
        f"{prefix}.{name}".removeprefix("."): buffer.shape
        for prefix, module in task.named_modules()
        # Private tables: no public call tells which buffers a state dict leaves out.
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }


def _not_zero(weight: float | Tensor) -> float | Tensor:
    """Return the weight, or 1 if it is zero: the sum that it divides is then zero as well."""
    return torch.where(weight == 0, 1.0, weight) if isinstance(weight, Tensor) else weight or 1.0


def _checked(devices: Any) -> int | tuple[str, ...] | None:
    """Return the number or the names of devices, `None` for "auto"."""
    if devices == "auto":
        return None
    if isinstance(devices, int) and not isinstance(devices, bool) and devices >= 1:
        return devices
    if isinstance(devices, Sequence) and not isinstance(devices, str) and len(devices):
        return tuple(str(device) for device in devices)
    raise UserError(
        f"devices must be 'auto', a number of devices or a list of them, got {devices!r}; write strategy.devices=2 or "
        "strategy.devices=[cuda:0,cuda:1]."
    )


def _counted(count: int | None) -> list[str]:
    """Return the names of the first `count` GPUs, by default of all, or of replicas on the CPU without any GPU."""
    gpus = [device for device in accelerators() if has_streams(device)]
    available = len(gpus)
    if available == 0:
        return ["cpu"] * (count or 2)
    count = count or available
    if count > available:
        raise UserError(
            f"devices={count}, but torch sees {available} {gpus[0].type.upper()} device{'s' * (available != 1)}; set "
            f"strategy.devices={available}, or name a device more than once: "
            f"strategy.devices=[{','.join([str(gpus[0])] * count)}]."
        )
    return [str(device) for device in gpus[:count]]
