"""MultiProcessStrategy: one process per device over torch.distributed, and what `micro_batch_size=auto` adds to a step.

    rank 0    forward  backward  forward  backward |  reduce  | gradients are NaN: any_rank | all raise OutOfMemoryError
    rank 1    forward  out of memory   NaN as gradient        | gradients are NaN: any_rank | all raise OutOfMemoryError

With `micro_batch_size=auto` gradients are accumulated until every micro-batch is done, and then reduced, so no rank is
inside a reduction when another one runs out of memory. That rank contributes gradients of NaN, which inform the others
on the CPU, without a collective in other steps; a loss that is NaN by itself costs one more collective. On GPUs reading
a gradient would be a device sync: there ranks exchange a flag through host memory in every step, during the reduction.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import InitVar, dataclass, field
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import torch
import torch.distributed as dist
from annotated_types import Ge, Gt, Unit
from torch import Tensor, nn
from torch.distributed import Store  # type: ignore[attr-defined] # torch exports them at run time

from trainkit.data.batch import StepBatch
from trainkit.devices import (
    backend_of,
    count,
    enter,
    free_cached,
    has_streams,
    is_out_of_memory,
    kind_of,
    of_rank,
    pick,
)
from trainkit.distributed.collectives import ProcessGroupCollectives, broadcast, check_same_model, gather, tensors_of
from trainkit.distributed.failure_store import RankWatchdog
from trainkit.distributed.launcher import RankEnvironment, environment_of_caller, join_store, launch_ranks
from trainkit.distributed.rank_log import log_copied
from trainkit.distributed.rank_loss import OnRankLoss, Recovery, SavedStep
from trainkit.distributed.rendezvous import fresh_store, store_of_environment, variables_of_task
from trainkit.errors import UserError
from trainkit.metrics.step_output import StepOutput, read_training_output
from trainkit.optim.precision import Precision
from trainkit.profiling import NO_COMMUNICATION, Overlap
from trainkit.run_dir.failure import phase_in
from trainkit.settings import check_arguments, check_choice
from trainkit.strategy import Strategy, has_full_gradients
from trainkit.task import TaskModule
from trainkit.tree import map_tensors, to_device

from .gradient_sum import GradientSum, SumAfterBackward
from .merged_buffers import MergedBuffers
from .shared_flag import SharedFlag
from .transports.hosts import OwnGroups

T = TypeVar("T")

_MERGED = "merged_buffers"  # in the state of the strategy
_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


# Not compared by its fields: a strategy is hashed by its identity, and its fields are tensors and groups too.
@dataclass(kw_only=True, eq=False, repr=False)
class MultiProcessStrategy(Strategy):
    """One process for each device, started here or by torchrun.

    Every rank trains a copy of the task on its own samples. After `forward_backward` every rank has the sum of the
    ranks' gradients, each weighted by its fraction of the global batch; `reduce_gradients` sums them. With
    `broadcast_buffers` buffers are made equal after every step: batch-norm statistics are those of rank 0.

    A subclass that is a dataclass declares its own settings as fields; those of all bases are checked together.

    Args:
        devices: Ranks to start on this machine; `auto`: one for each GPU, or two on the CPU.
        device: `auto`, `cpu`, `cuda`, or a device such as `cuda:1` for a single rank.
        accumulate: Micro-batches of a step on each rank.
        micro_batch_size: Most samples on one device at once; `auto`: halved on out-of-memory.
        broadcast_buffers: Broadcast rank 0's buffers (batch-norm statistics) after every step.
        timeout_seconds: Seconds to wait for another rank.
        backend: `auto` (gloo on the CPU, nccl on CUDA), or a backend of torch.distributed.
        launcher: `local` (ranks are processes on this machine) or `ray` (actors of a Ray cluster).
        on_rank_loss: After the death of a rank: `stop` ends the run, `replace` starts as many ranks again, `continue`
            as many as have survived, until a SIGUSR2 to the launcher starts all; `auto`: `replace`, for ranks that the
            local launcher has started.
        max_rank_losses: Losses in a row without a new step, after which the run ends.
        process_group: The ranks that train together if this process is a rank already; `None`: all ranks.

    """

    collectives: ClassVar[type[ProcessGroupCollectives]] = ProcessGroupCollectives
    """The class of `comm`."""

    devices: int | str = "auto"
    device: InitVar[str] = "auto"  # the attribute is the device itself
    accumulate: Annotated[int, Ge(1)] | None = None
    micro_batch_size: InitVar[Annotated[int, Ge(1)] | Literal["auto"] | None] = None
    broadcast_buffers: bool = True
    timeout_seconds: Annotated[float, Gt(0), Unit("seconds")] = 1800.0
    backend: str = "auto"
    launcher: str = "local"
    on_rank_loss: OnRankLoss = "auto"
    max_rank_losses: Annotated[int, Ge(1)] = 3
    process_group: dist.ProcessGroup | None = None

    comm: ProcessGroupCollectives = field(init=False)  # from `setup` on
    gradients: GradientSum = field(init=False)
    """How gradients are summed over the ranks; by default by `reduce_gradients`."""

    def __post_init__(self, device: str, micro_batch_size: int | Literal["auto"] | None) -> None:
        devices, group = self.devices, self.process_group
        if devices != "auto" and (isinstance(devices, bool) or not isinstance(devices, int) or devices < 1):
            raise UserError(f"devices must be 'auto' or a whole number, at least 1, got {devices!r}.")
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise UserError(
                f"process_group must be a process group of which this process is a member, got {group!r}; only "
                "the ranks passed to torch.distributed.new_group can train in it."
            )
        check_choice("launcher", self.launcher, ("local", "ray"))
        if self.on_rank_loss in ("continue", "replace") and self.launcher == "ray":
            raise UserError(
                f"on_rank_loss={self.on_rank_loss} is for ranks of the local launcher: launcher=ray starts lost ranks "
                "again from the last checkpoint anyway. Set strategy.on_rank_loss=stop."
            )
        check_arguments(type(self), vars(self))
        if self.on_rank_loss == "continue" and self.keeps_num_ranks:
            raise UserError(
                f"{type(self).__name__} divides the task over all of its ranks, so that fewer cannot go on. Set "
                "strategy.on_rank_loss=replace."
            )
        super().__init__(device=device, accumulate=self.accumulate, micro_batch_size=micro_batch_size)
        self._environment: RankEnvironment | None = None  # of a rank that was started here
        self._while_joined: ExitStack | None = None  # closed at the end of a run whose ranks torchrun started
        self._owns_group = False
        self._own_groups = OwnGroups(timedelta(seconds=self.timeout_seconds))
        self._buffers: MergedBuffers | None = None  # made equal after every step
        self._merged_names: Sequence[str] = ()  # of the buffers that a resumed run has merged
        self._weighted_by: dict[str, bool] = {}  # name of a step method -> it returns weights
        self._watchdog: RankWatchdog | None = None
        self._stop_flag: SharedFlag | None = None
        self._steps = 0  # started by this rank
        self.gradients = SumAfterBackward(self.reduce_gradients)

    # ---- Ranks

    def validate(self, task: TaskModule, precision: Precision) -> str:
        """Return the kind of device of the ranks.

        Raises UserError for unavailable devices, backends or packages, and for parameters that are sharded already.
        """
        # Not imported here, which takes as long as torch itself: a task that has a DTensor has imported it.
        kinds = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
        for name, parameter in task.named_parameters():
            if isinstance(parameter, kinds):
                raise UserError(
                    f"the parameter {name} of {type(task).__name__} is a DTensor, which {type(self).__name__} cannot "
                    "train: strategies of several processes distribute ordinary tensors. Build it as one in __init__; "
                    "strategy=fsdp shards it over the ranks."
                )
        kind = self._device_kind()
        if self.launcher == "ray":
            if find_spec("ray") is None:
                raise UserError("launcher=ray needs the package ray. Type: pip install 'trainkit-torch[ray]'")
            if self.devices == "auto":
                raise UserError("launcher=ray needs the total number of ranks; set strategy.devices=8.")
            return kind
        if kind != "cpu" and not has_streams(torch.device(kind)):
            raise UserError(f"{type(self).__name__} runs on cpu or cuda, not on {kind}; set strategy.device=cpu.")
        num_devices, device = count(kind), pick(self._requested_device)
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if _is_joining() else self.num_ranks()
        may_share = kind == "cpu" or self.backend == "gloo"  # NCCL refuses two ranks on one device
        per_rank = self._devices_per_rank()
        if device.index is not None and local_ranks > 1 and not may_share:
            raise UserError(
                f"device={device} is one device for {local_ranks} ranks; set strategy.device={kind}, or start one rank "
                "on this machine."
            )
        if local_ranks * per_rank > num_devices and not may_share and (per_rank > 1 or not _is_joining()):
            layout = f"devices={local_ranks}" + f" with {per_rank} devices each" * (per_rank > 1)
            raise UserError(
                f"{layout}, but torch sees {num_devices} {kind.upper()} "
                f"device{'s' * (num_devices != 1)}; set strategy.devices={max(num_devices // per_rank, 1)}, or "
                "strategy.device=cpu."
            )
        if self.on_rank_loss in ("continue", "replace") and _is_joining():
            raise UserError(
                f"on_rank_loss={self.on_rank_loss} is for ranks that trainkit starts, and these were started by "
                "torchrun or srun, which end the others too. Set strategy.on_rank_loss=stop, and let torchrun start "
                "them again: torchrun --max-restarts=3 ... resume=auto."
            )
        if self.backend != "auto" and not dist.is_backend_available(self.backend):
            raise UserError(f"backend={self.backend!r} is not part of this torch build; set strategy.backend=auto.")
        return kind

    @property
    def starts_ranks(self) -> bool:
        """True if `launch` starts processes because this one is not a rank."""
        return self._environment is None and not _is_joining()

    def num_ranks(self) -> int:
        """Return the number of ranks to start on this machine."""
        if isinstance(self.devices, int):
            return self.devices
        device = pick(self._requested_device)
        if device.type == "cpu":
            return 2
        return max(count(device.type) // self._devices_per_rank(), 1) if device.index is None else 1

    @property
    def keeps_num_ranks(self) -> bool:
        """True if the task cannot be trained on fewer ranks."""
        return False

    @property
    def is_replicated(self) -> bool:
        """True if several ranks train each part of the task."""
        return False

    @property
    def hands_over(self) -> bool:
        # A collective of NCCL that waits for a dead rank does not return.
        on_gloo = self.backend == "gloo" or (self.backend == "auto" and self._device_kind() == "cpu")
        # Buffers of their own are lost with their ranks.
        return self.is_replicated and self.broadcast_buffers and on_gloo and has_full_gradients(self)

    def _devices_per_rank(self) -> int:
        return 1

    def rank_name(self, process: int) -> str:
        """Return the name of a process in messages."""
        return f"rank {process}"

    def launch(self, run: Callable[[], T], *, repeats: bool = False) -> T:
        """Call `run` on every rank and return its value on rank 0 (under torchrun: on this rank).

        `repeats` allows to call it again after the loss of a rank.
        """
        if _is_joining():  # every process of torchrun calls `launch`, so there is nobody else to start them
            with ExitStack() as self._while_joined:
                self._while_joined.callback(setattr, self, "_while_joined", None)
                return self._run_or_publish(run)
        saved = partial(self._saved, after=self._last_number())
        launch: Callable[..., T] = partial(launch_ranks, log_dir=self.log_dir, name_of=self.rank_name)
        if self.launcher == "ray":
            from trainkit.distributed.ray_launcher import launch_on_ray

            on_gpus = self._device_kind() != "cpu"
            environment = environment_of_caller(self.log_dir)
            launch = partial(launch_on_ray, environment=environment, on_gpus=on_gpus, saved=saved)
        elif repeats and self.on_rank_loss != "stop":
            recovery = Recovery(
                keeps_ranks=self.on_rank_loss != "continue",
                hands_over=self.hands_over,
                max_losses=self.max_rank_losses,
                saved=saved,
            )
            launch = partial(launch, recovery=recovery)
        run = partial(self._run_or_publish, run)
        return launch(run, num_ranks=self.num_ranks(), enter=self._enter, signals=self.stop_signals)

    def _last_number(self) -> int:
        """Return the number of the last checkpoint of an earlier run in this folder, or of steps that are repeated."""
        if self.log_dir is None or not self.log_dir.exists():  # then the import would only cost time
            return 0
        from trainkit.run_dir.resume_auto import last_number

        return last_number(self.log_dir)

    def _saved(self, *, after: int) -> SavedStep | None:
        """Return the latest complete checkpoint of this run, whose number in the run folder is above `after`."""
        from trainkit.run_dir.resume_auto import latest_complete

        entry = None if self.log_dir is None else latest_complete(self.log_dir)
        return None if entry is None or entry.number <= after else SavedStep(entry.step, entry.path)

    def _device_kind(self) -> str:
        """Return the kind of device of the ranks; a Ray cluster may have GPUs that the caller lacks."""
        if self.launcher == "ray" and (kind := kind_of(self._requested_device)) != "auto":
            return kind
        return pick(self._requested_device).type

    def _enter(self, environment: RankEnvironment) -> None:
        """Become the rank of the environment; called first in a started process."""
        self._environment, self.attempt, self.handover = environment, environment.attempt, environment.handover
        self.restart_from = None if environment.checkpoint is None else Path(environment.checkpoint)

    def _run_or_publish(self, run: Callable[[], T]) -> T:
        """Run; publish an error for the ranks that wait for this one."""
        try:
            return run()
        except BaseException as error:  # also SystemExit and KeyboardInterrupt end this rank
            self.publish_failure(f"{type(error).__name__}: {error}")
            raise

    def publish_failure(self, why: str) -> None:
        """Tell the other ranks that this one stops."""
        # Before `setup` and with one rank there is nobody to tell.
        if isinstance(self.comm, ProcessGroupCollectives) and self.comm.failure_store is not None:
            message = f"rank {self.comm.rank} failed in step {max(self._steps - 1, 0)}: {why}"
            self.comm.failure_store.publish(message)
            self.gradients.fail(message)

    def setup(self, precision: Precision) -> None:
        """Join the other ranks and choose this rank's device; collective."""
        self.device = self._own_device()
        # Before the group is joined: its communicators, and what is unpickled, take memory on the current device.
        enter(self.device)
        if not dist.is_initialized():
            self._join_group(self.device.type)
        if self._environment is None:
            # Each process of torchrun may have chosen another folder: all use that of rank 0.
            self.log_dir = gather(self.log_dir, self._all_ranks)[0]
            if self.log_dir is not None and self._while_joined is not None:
                self._while_joined.enter_context(log_copied(self.log_dir, rank=self._all_ranks.rank()))
        self.precision = precision
        precision.setup(self.device)
        self._steps, self._weighted_by = 0, {}
        self.comm = self.collectives.join(
            self._all_ranks, device=self.device, timeout_seconds=self.timeout_seconds, step=lambda: self._steps
        )
        if self.comm.consensus is not None:
            self._stop_flag = SharedFlag(self.comm)
            self.comm.consensus.any_rank = self._stop_flag.any_rank  # cheaper than a collective
        store = self.comm.failure_store
        if store is not None:
            store.asks_who_is_silent = self.handover is None
            self._watchdog = RankWatchdog(store, step=lambda: max(self._steps - 1, 0), describe=phase_in)

    def _own_device(self) -> torch.device:
        device = pick(self._requested_device)
        if not has_streams(device) or device.index is not None:
            return device
        # LOCAL_RANK is set by every launcher; a user's own process group may lack it.
        rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))
        local_rank = int(os.environ.get("LOCAL_RANK", str(rank)))
        return of_rank(device.type, local_rank * self._devices_per_rank())

    @property
    def _all_ranks(self) -> dist.ProcessGroup:
        """The group of all ranks of the run."""
        group = self.process_group or dist.group.WORLD
        assert group is not None
        return group

    def _join_group(self, kind: str) -> None:
        backend = backend_of(kind) if self.backend == "auto" else self.backend
        limit = timedelta(seconds=self.timeout_seconds)
        environment = self._environment
        store: Store
        if environment is None:
            store, rank, world_size = store_of_environment(limit)
            # torchrun keeps its store when it starts ranks again: there are keys of dead ranks in it.
            store = fresh_store(store, rank=rank, world_size=world_size, limit=limit)
        else:
            host, port, token = environment.store_host, environment.store_port, environment.store_token
            store = join_store(host, port, token, limit=limit)
            rank, world_size = environment.rank, environment.world_size
        # Without `device_id`: NCCL would make each later group by a split of the communicator of all ranks, which waits
        # for ranks that are not in it and do not call.
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
        self._owns_group = True  # a group that the user has made is left to the user

    def prepare(self, task: TaskModule) -> None:
        """Leave the task on the device, with rank 0's parameters and buffers on every rank; collective."""
        super().prepare(task)
        with self.comm.waiting("the comparison of models"):
            check_same_model(tensors_of(task), self._all_ranks)  # or the broadcast might crash or hang
        with self.comm.waiting("the broadcast of parameters and buffers"):
            tensors = [tensor for tensor in (*task.parameters(), *task.buffers()) if not tensor.is_meta]
            broadcast(tensors, self._all_ranks)
        self._merged_names = ()
        self._buffers = MergedBuffers(task) if self.broadcast_buffers else None

    def strategy_state(self) -> dict[str, Any]:
        """Return which buffers are merged; collective."""
        local_names = [] if self._buffers is None else self._buffers.merged_names()
        names = set().union(*self.comm.all_gather_object(local_names))  # stages of a pipeline have different ones
        return {_MERGED: dict.fromkeys(sorted(names), True)} if names else {}

    def load_strategy_state(self, saved: Mapping[str, Any]) -> None:
        """Merge the buffers that the resumed run has merged."""
        self._merged_names = list(saved.get(_MERGED, ()))
        if self._buffers is not None:
            self._buffers.remember(self._merged_names)

    def replicated(self, task: TaskModule) -> dict[str, Tensor]:
        """Return all parameters, and the buffers that are made equal, by name; raises UserError if that failed."""
        tensors: dict[str, Tensor] = {**dict(task.named_parameters())}
        if self._buffers is not None:
            self._buffers.check(type(self).__name__)
            tensors |= self._buffers.named()
        return tensors

    def final_state_dict(self, task: TaskModule) -> dict[str, Any] | None:
        """Return the trained state on rank 0 if the caller is in another process; collective."""
        self.gradients.finish()
        if self._environment is None or self.comm.rank != 0:
            return None
        state: dict[str, Any] = map_tensors(self.state_dict(task), Tensor.cpu)  # extra state may be anything
        return state

    def teardown(self) -> None:
        """Leave the process groups that this strategy joined or made; may be called twice."""
        super().teardown()
        error = sys.exc_info()[1]  # `teardown` is called in a `finally`
        leaves_others = error is not None and self.comm.num_processes > 1
        if leaves_others:
            # If this rank left now, ranks that wait for it would report a broken connection instead of the reason, and
            # destroying the group could block. The process is about to end.
            self.publish_failure(f"{type(error).__name__}: {error}")
        # First the threads and memory that use the group, then the group.
        self._release()
        self.gradients.close()
        self._buffers = None
        if self._watchdog is not None:
            self._watchdog.close()
            self._watchdog = None
        if self._stop_flag is not None:
            self._stop_flag.close()
            self._stop_flag = None
        if isinstance(self.comm, ProcessGroupCollectives):
            self.comm.consensus = None
        if leaves_others:
            self._own_groups.leave(destroy=False)
            return
        if isinstance(self.comm, ProcessGroupCollectives):
            self.comm.failure_store = None
        self._own_groups.leave()
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
        self._owns_group = False

    def _release(self) -> None:
        """Release what only this kind of strategy holds, before `teardown` leaves the groups; may be called twice."""

    # ---- A step

    def forward_backward(self, task: TaskModule, batch: StepBatch) -> list[StepOutput]:
        """Leave in every `.grad` the gradient of the weighted mean loss over the whole global batch; collective."""
        self._steps += 1
        self._begin_buffers()
        if self.auto_micro_batch:
            outputs = self._forward_backward_or_oom(task, batch)
        else:
            if not batch.micro_batches:
                self._join_without_samples()
            outputs = super().forward_backward(task, batch)
        self._check_untrained()
        self._synchronize_buffers()
        return outputs

    def _is_plain_step(self, batch: StepBatch) -> bool:
        return False  # a bucket or a shard would take the gradient for that of the step

    def _begin_buffers(self) -> None:
        """Keep what the step may change in buffers that are merged at its end."""
        if self._buffers is not None and self.comm.world_size > 1:
            self._buffers.begin_step()

    def _synchronize_buffers(self) -> None:
        """Make the buffers equal on all ranks, if that is asked for; collective."""
        if self._buffers is not None:
            with self.comm.waiting(self.comm.after("the broadcast of buffers")):
                self._buffers.synchronize(self.comm, strategy=type(self).__name__)

    def reduce_gradients(self) -> None:
        """Leave in every `.grad` the sum over ranks, after a step's last backward; collective.

        A rank without samples has no gradients and contributes zeros.
        """
        # In the order of `_trained`, which is the same on all ranks.
        for parameter in self._trained:
            local_gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            parameter.grad = self.comm.all_reduce(local_gradient)

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return a context in which a backward adds to this rank's gradients only; nothing is reduced."""
        return self.gradients.no_sync()

    def _synced(self) -> AbstractContextManager[Any]:
        return self.gradients.session()

    def _join_without_samples(self) -> None:
        """Join the reduction of the other ranks on a rank without samples; collective."""
        self.precision.scale(torch.zeros((), device=self.device))  # a scaler must have seen a loss
        self.gradients.reduce_zeros()

    def _forward_backward_or_oom(self, task: TaskModule, batch: StepBatch) -> list[StepOutput]:
        """Leave the reduced gradients of the batch, or raise torch.OutOfMemoryError on all ranks if one runs out of it.

        Collective. A device sync unless the ranks share host memory.
        """
        outputs: list[StepOutput] = []
        reason: str | None = None
        step = self._step_of(task)
        try:
            for micro_batch in batch.micro_batches:
                with self.no_sync():
                    former = self._watched_gradients(batch)
                    with self.precision.forward():
                        returned = step(micro_batch.batch)
                    self._check_gradients_kept(task, former, is_first=not outputs)
                    output = read_training_output(returned, micro_batch.num_samples, task, of=batch.num_samples)
                    self._backward(output, micro_batch, batch)
                outputs.append(output)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            # Only its text: the traceback of the error holds the frames, and so the activations.
            reason = str(error)
        parameters = [parameter for parameter in task.parameters() if parameter.requires_grad]
        if reason is not None:
            outputs.clear()
            for parameter in parameters:
                parameter.grad = None
            free_cached(self.device)
            with self.no_sync():  # by a backward, so that gradient hooks run
                for parameter in parameters:  # memory is short: with all of them there would be a second set
                    torch.autograd.backward(parameter, torch.full_like(parameter, torch.nan))
        # Every rank is here with nothing left to allocate, so none leaves the others alone in the reduction.
        if batch.micro_batches:
            with self._synced():
                pass
        else:
            self._join_without_samples()
        is_oom = reason is not None
        if self.comm.num_processes > 1 and self.comm.asks_on_host:
            is_oom = self.comm.any_rank_on_host(is_oom)
        elif self.comm.num_processes > 1:
            # Reduced gradients are NaN on all ranks or on none, so all of them make the second collective.
            is_oom = _has_nan_gradients(parameters) and self.comm.any_rank(is_oom)
        if is_oom:
            raise torch.OutOfMemoryError(reason or "on another rank")
        self._normalize_gradients(outputs, batch)
        return outputs

    @property
    def _weighted(self) -> bool | None:
        """True if the step of this phase returns weights; None before the first step."""
        return self._weighted_by.get(self._step_name)

    def _normalize_gradients(self, outputs: Sequence[StepOutput], batch: StepBatch) -> None:
        """Divide by the sum of weights over all ranks if the task returned weights; collective."""
        has_weights = any(output.own_weight for output in outputs)
        # Once: in later steps all ranks know if there is a collective for the weights, also those without samples.
        if self._weighted is None:
            self._weighted_by[self._step_name] = self.comm.any_rank(has_weights)
        if outputs and has_weights != self._weighted:
            returned, did = ("a weight", "did not") if has_weights else ("no weight", "did")
            raise UserError(
                f"training_step returned {returned}, but {did} in the first step; return one always or never."
            )
        if self._weighted:
            self._scale_gradients(self._samples_over_weight(outputs, batch))

    def _samples_over_weight(self, outputs: Sequence[StepOutput], batch: StepBatch) -> Tensor:
        """Return the factor that divides gradients by the sum of weights instead of samples; a scalar on the device."""
        # One rank may have the whole global batch as its only micro-batch: the factor must be 1 on the others too.
        undivided = self._on_device(float(self._is_undivided(batch)))
        weights = [self._on_device(output.weight) for output in outputs]
        total = torch.stack(weights).sum() if weights else self._on_device(0.0)
        sums = torch.stack([total, undivided])
        total, any_undivided = self.comm.reduce_in_place(sums, where="the sum of weights")
        factor = torch.where(total > 0, batch.num_samples / total, 0.0)  # 0 for a batch of padding only
        return torch.where(any_undivided > 0, 1.0, factor)

    def _may_lack_samples(self, batch: StepBatch) -> bool:
        """Return True on every rank if some rank may have no samples of this global batch."""
        return batch.num_samples < self.comm.world_size or not batch.is_even

    def _batch_of_any_rank(self, local_batch: Any | None) -> Any:
        """Return this rank's batch, or in host memory that of another rank if it has none; collective."""
        # From host memory: a pickled tensor names its device, which another rank may not have.
        batches = self.comm.all_gather_object(
            None if local_batch is None else to_device(local_batch, torch.device("cpu"))
        )
        return next(batch for batch in batches if batch is not None) if local_batch is None else local_batch

    def _on_device(self, value: float | Tensor) -> Tensor:
        if isinstance(value, Tensor):
            return value.detach().to(self.device, torch.float64)
        return torch.full((), value, dtype=torch.float64, device=self.device)  # a copy would be a device sync

    def _is_undivided(self, batch: StepBatch) -> bool:
        """Return True if one micro-batch is the whole global batch: its loss is not weighted."""
        return len(batch.micro_batches) == 1 and batch.micro_batches[0].num_samples == batch.num_samples

    # ---- Profiles

    @property
    def waited_seconds(self) -> float | None:
        """Seconds that this rank has waited for the sums of gradients after backward; `None` if unknown."""
        return self.gradients.waited_seconds

    def start_overlap_profile(self) -> None:
        """Start to measure how much of the sums of gradients backward hides."""
        self.gradients.start_overlap_profile()

    def stop_overlap_profile(self, steps: int) -> Overlap | None:
        """Stop measuring and return the means over `steps`; `None` if unknown."""
        overlap = self.gradients.stop_overlap_profile(steps)
        return NO_COMMUNICATION if overlap is None and self.comm.num_processes == 1 else overlap


def _has_nan_gradients(parameters: Sequence[nn.Parameter]) -> bool:
    """Return True if the reduced gradients are NaN; the same on every rank, as the gradients are."""
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and gradient.numel() and not gradient.is_sparse:
            return bool(torch.isnan(gradient[(0,) * gradient.dim()]))  # in any memory format
    return False


def _is_joining() -> bool:
    """Return True if this process is a rank already: of torchrun, srun, or an initialized process group."""
    # Written where torch's rendezvous reads them; they are empty if RANK is set.
    os.environ.update(variables_of_task(os.environ))
    return dist.is_initialized() or all(name in os.environ for name in _TORCHRUN_VARIABLES)
