"""What strategies over torch.distributed share: one process a device, and collectives between them."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined] # torch exports it at run time
from torch.distributed.rendezvous import rendezvous

from trainkit.devices import pick_device
from trainkit.errors import UserError, nearest
from trainkit.metrics.step_output import StepOutput
from trainkit.precision import Precision
from trainkit.task import TaskModule
from trainkit.window import MicroBatch, Window

from .ddp.agreement import broadcast, check_same_model, gather, tensors_of
from .ddp.failure import StoreBoard
from .ddp.whereabouts import Whereabouts
from .group_talk import GroupTalk
from .launcher import RankEnvironment, environment_of_caller, launch_ranks
from .rank_log import log_copied
from .rendezvous import fresh_store
from .shared_buffers import SharedBuffers
from .slurm_ranks import variables_of_task
from .stop_agreement import StopAgreement
from .within_memory import forward_backward_within_memory

T = TypeVar("T")

_LAUNCHERS = ("local", "ray")
_TORCHRUN_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class ProcessGroupStrategy(GroupTalk):
    """One process a device, started here or by torchrun, that talk through a process group.

    Every rank trains a copy of the task on its own samples; subclasses say how gradients are reduced. After
    `forward_backward` every rank has the sum of the ranks' gradients, each weighted by its part of the global batch.

    Args:
        devices: Ranks to start on this machine; "auto" is one for each GPU, or two on the CPU.
        device: `auto`, `cpu` or `cuda`.
        accumulate: Micro-batches of a step on each rank.
        micro_batch_size: Samples on one device at once, at most.
        broadcast_buffers: Whether buffers (batch-norm statistics) are those of rank 0 after every step.
        timeout: Seconds to wait for another rank.
        backend: `auto` (gloo on the CPU, nccl on CUDA), or a backend of torch.distributed.
        launch: Who starts the ranks: `local` (this process, on this machine) or `ray` (a Ray cluster).
        process_group: The ranks that train together, where this process has joined others already; `None`: all ranks.

    """

    def __init__(
        self,
        *,
        devices: int | str = "auto",
        device: str = "auto",
        accumulate: int | None = None,
        micro_batch_size: int | Literal["auto"] | None = None,
        broadcast_buffers: bool = True,
        timeout: float = 1800.0,
        backend: str = "auto",
        launch: str = "local",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if devices != "auto" and (isinstance(devices, bool) or not isinstance(devices, int) or devices < 1):
            raise UserError(f"devices must be 'auto' or a whole number, at least 1, got {devices!r}.")
        if timeout <= 0:
            raise UserError(f"timeout must be above 0 seconds, got {timeout}.")
        if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
            raise UserError(
                f"process_group must be a process group that this process is a member of, got {process_group!r}; only "
                "the ranks that torch.distributed.new_group was given can train in it."
            )
        if launch not in _LAUNCHERS:
            raise UserError(f"launch={launch!r} is unknown.{nearest(launch, _LAUNCHERS)} Choose local or ray.")
        super().__init__(
            device=device,
            accumulate=accumulate,
            micro_batch_size=micro_batch_size,
            process_group=process_group,
            timeout_seconds=float(timeout),
        )
        self.launched_by = launch
        self.devices = devices
        self.backend = backend
        self.broadcast_buffers = broadcast_buffers
        self.log_dir: Path | None = None  # the run's folder, where ranks log what they print
        self._environment: RankEnvironment | None = None  # of a rank that was started here
        self._while_joined: ExitStack | None = None  # what ends with the run of ranks that were started by others
        self._owns_group = False
        self._buffers: SharedBuffers | None = None  # to be sent after every step
        self._weighted_by: dict[str, bool] = {}  # whether a method of the task returns weights of its own
        self.asks_on_host = False
        """Whether ranks on GPUs can ask each other through host memory, which waits for no device."""
        self._whereabouts: Whereabouts | None = None

    # ---- Where the ranks are

    def validate(self) -> None:
        """Raise UserError for more devices than there are."""
        if self.launched_by == "ray":
            return self._validate_on_ray()
        device = pick_device(self._requested_device)
        if device.type == "mps":
            raise UserError(f"{type(self).__name__} runs on cpu or cuda, not on mps; set strategy.device=cpu.")
        count = torch.cuda.device_count() if device.type == "cuda" else 0
        if device.type == "cuda" and self.backend != "gloo" and self.num_ranks() > count and not _is_joining():
            raise UserError(
                f"devices={self.devices}, but torch sees {count} CUDA device{'s' * (count != 1)}; set "
                f"strategy.devices={count}, or strategy.device=cpu."
            )
        if self.backend != "auto" and not dist.is_backend_available(self.backend):
            raise UserError(f"backend={self.backend!r} is not part of this torch build; set strategy.backend=auto.")

    def _validate_on_ray(self) -> None:
        if find_spec("ray") is None:
            raise UserError("launch=ray needs the package ray. Type: pip install 'trainkit[ray]'")
        if self.devices == "auto":
            raise UserError("launch=ray needs to know how many ranks to start in all; set strategy.devices=8.")

    @property
    def starts_ranks(self) -> bool:
        """Whether `launch` would start processes, as this one is not one of the ranks."""
        return self._environment is None and not _is_joining()

    def num_ranks(self) -> int:
        """Return the number of ranks that are started on this machine."""
        if isinstance(self.devices, int):
            return self.devices
        return torch.cuda.device_count() if pick_device(self._requested_device).type == "cuda" else 2

    def name_of_process(self, process: int) -> str:
        """Return what to call a process of this strategy in messages."""
        return f"rank {process}"

    def launch(self, run: Callable[[], T]) -> T:
        """Call `run` on every rank and return what it returned on rank 0 (under torchrun: on this rank)."""
        if _is_joining():
            return self._run_joined(run)
        started = _Started(self, run)
        value: T = self._launch_on_ray(started) if self.launched_by == "ray" else self._launch_here(started)
        return value

    def _launch_here(self, started: _Started) -> Any:
        return launch_ranks(
            started,
            num_ranks=self.num_ranks(),
            enter=started.enter,
            log_dir=self.log_dir,
            signals=self.stop_signals,
            name_of=self.name_of_process,
        )

    def _launch_on_ray(self, started: _Started) -> Any:
        from .ray_launcher import launch_on_ray

        return launch_on_ray(
            started,
            num_ranks=self.num_ranks(),
            enter=started.enter,
            environment=environment_of_caller(self.log_dir),
            signals=self.stop_signals,
            on_gpus=pick_device(self._requested_device).type == "cuda",
        )

    def _run_joined(self, run: Callable[[], T]) -> T:
        with ExitStack() as stack:
            self._while_joined = stack
            try:
                return self._run_or_tell(run)
            finally:
                self._while_joined = None

    def _run_or_tell(self, run: Callable[[], T]) -> T:
        """Run, and if that fails let ranks that wait for this one know why."""
        try:
            return run()
        except BaseException as error:
            self.tell_failure(f"{type(error).__name__}: {error}")
            raise

    def tell_failure(self, why: str) -> None:
        """Let the other ranks know that this one stops."""
        if self._board is not None:
            self._board.publish(f"rank {self.rank} failed in step {max(self._steps - 1, 0)}: {why}")

    def setup(self, precision: Precision) -> None:
        """Join the other ranks and choose this rank's device; collective."""
        kind = pick_device(self._requested_device).type
        if not dist.is_initialized():
            self._join_group(kind)
        self.rank, self.world_size = self._ranks.rank(), self._ranks.size()
        self.device = torch.device("cpu")
        if kind == "cuda":
            local_rank = int(os.environ.get("LOCAL_RANK", dist.get_rank()))
            self.device = torch.device("cuda", local_rank % torch.cuda.device_count())
            torch.cuda.set_device(self.device)
        if self._environment is None:
            self._keep_log()
        self.precision = precision
        precision.setup(self.device)
        self._names, self._weighted_by = [], {}
        self._steps = 0
        if self.world_size > 1:
            on_host = "cpu" in dist.get_backend_config(self.group)
            self.asks_on_host = on_host and kind == "cuda"
            self._stop = StopAgreement(self.group, device=torch.device("cpu") if on_host else self.device)
            self._board = StoreBoard(self.group, token=gather(secrets.token_hex(8), self.group)[0])
            self._whereabouts = Whereabouts(self._board, step=lambda: max(self._steps - 1, 0))

    def _keep_log(self) -> None:
        """Copy what a rank that was started by others prints to its log, in the folder that rank 0 has chosen."""
        self.log_dir = gather(self.log_dir, self._ranks)[0]
        if self.log_dir is not None and self._while_joined is not None:
            self._while_joined.enter_context(log_copied(self.log_dir, rank=self.rank))

    def _join_group(self, kind: str) -> None:
        backend = self.backend
        if backend == "auto":
            backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
        limit = timedelta(seconds=self.timeout_seconds)
        environment = self._environment
        if environment is None:
            shared, rank, world_size = next(rendezvous("env://", timeout=limit))
            fresh = fresh_store(shared, rank=rank, world_size=world_size, limit=limit)
            dist.init_process_group(backend, store=fresh, rank=rank, world_size=world_size, timeout=limit)
        else:
            store = TCPStore(environment.store_host, environment.store_port, is_master=False, timeout=limit)
            rank, world_size = environment.rank, environment.world_size
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)
        self._owns_group = True

    def prepare(self, task: TaskModule) -> None:
        """Leave the task on the device, with rank 0's parameters and buffers on every rank; collective."""
        super().prepare(task)
        with self._waiting("the comparison of models"):
            check_same_model(tensors_of(task), self.group)  # or the broadcast that follows might crash or hang
        with self._waiting("the broadcast of parameters and buffers"):
            broadcast([*task.parameters(), *task.buffers()], self.group)
        self._buffers = SharedBuffers(task) if self.broadcast_buffers else None

    def weights_for_caller(self, task: TaskModule) -> dict[str, Any] | None:
        """Return the trained weights on rank 0 if the caller is in another process."""
        if self._environment is None or self.rank != 0:
            return None
        return {name: tensor.cpu() for name, tensor in self.state_dict(task).items()}

    def teardown(self) -> None:
        """Leave the process group if this strategy joined it; may be called twice."""
        self._stop = self._buffers = None
        if self._whereabouts is not None:
            self._whereabouts.close()
            self._whereabouts = None
        failing = sys.exc_info()[1]
        if failing is not None and self.num_processes > 1:
            # Others may wait for this rank: leaving now would give them a broken connection in place of the reason,
            # and might wait for them. The process is about to end.
            self.tell_failure(f"{type(failing).__name__}: {failing}")
            return
        self._board = None
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
        self._owns_group = False

    # ---- A step

    def forward_backward(self, task: TaskModule, window: Window) -> list[StepOutput]:
        """Leave in every `.grad` the gradient of the weighted mean loss over the whole global batch; collective."""
        self._steps += 1
        if self.fits_memory:
            outputs = forward_backward_within_memory(self, task, window)
        else:
            if not window.micro_batches:
                self.precision.scale(torch.zeros((), device=self.device))  # a scaler must have seen a loss
                self.contribute_nothing()
            outputs = super().forward_backward(task, window)
        if self._buffers is not None:
            with self._waiting(self._after("the broadcast of buffers")):
                broadcast(self._buffers.now(), self.group)
        return outputs

    def contribute_nothing(self) -> None:
        """Take part in the reduction of the ranks that have samples, without any; collective."""
        raise NotImplementedError

    @property
    def _weighted(self) -> bool | None:
        """Whether the step of this phase returns weights of its own; not known before the first."""
        return self._weighted_by.get(self._step_name)

    def finish_gradients(self, outputs: Sequence[StepOutput], window: Window) -> None:
        """Divide by the sum of weights over all ranks where the task gave weights of its own; collective."""
        own = any(output.own_weight for output in outputs)
        if self._weighted is None:
            self._weighted_by[self._step_name] = self.agree(own)
        if outputs and own != self._weighted:
            raise UserError(
                "training_step returned a weight, but did not in the first step; return one always or never."
                if own
                else "training_step returned no weight, but did in the first step; return one always or never."
            )
        if self._weighted:
            self.scale_gradients(self._samples_over_weight(outputs, window))

    def _samples_over_weight(self, outputs: Sequence[StepOutput], window: Window) -> Tensor:
        """Return what makes gradients of sums weighted by samples those of the weighted mean; on the device."""
        undivided = float(self._is_undivided(window.micro_batches, window))
        weights = [self._on_device(output.weight) for output in outputs]
        total = torch.stack(weights).sum() if weights else self._on_device(0.0)
        sums = torch.stack([total, self._on_device(undivided)])
        total, any_undivided = self._reduce(sums, where="the sum of weights")
        factor = torch.where(total > 0, window.num_samples / total, 0.0)  # 0: a window of padding only
        return torch.where(any_undivided > 0, 1.0, factor)

    def _on_device(self, value: float | Tensor) -> Tensor:
        if isinstance(value, Tensor):
            return value.detach().to(self.device, torch.float64)
        return torch.full((), value, dtype=torch.float64, device=self.device)  # a copy would wait for the device

    def _is_undivided(self, micro_batches: Sequence[MicroBatch], window: Window) -> bool:
        """Whether one micro-batch is the whole window: its loss is not weighted at all."""
        return len(micro_batches) == 1 and micro_batches[0].num_samples == window.num_samples


class _Started:
    """What a started rank runs: the strategy's copy of it, then the caller's `run`."""

    def __init__(self, strategy: ProcessGroupStrategy, run: Callable[[], Any]) -> None:
        self.strategy, self.run = strategy, run

    def enter(self, environment: RankEnvironment) -> None:
        """Tell the strategy which rank it is."""
        self.strategy._environment, self.strategy.attempt = environment, environment.attempt

    def __call__(self) -> Any:
        """Run, telling the others of a failure."""
        return self.strategy._run_or_tell(self.run)


def _is_joining() -> bool:
    """Whether this process is one of several ranks already: of torchrun, srun, or a group that was initialized."""
    os.environ.update(variables_of_task(os.environ))
    return dist.is_initialized() or all(name in os.environ for name in _TORCHRUN_VARIABLES)
