"""FSDPStrategy: each rank holds a shard of every parameter, its gradient and its optimizer state."""

from __future__ import annotations

import logging
import math
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from operator import is_not
from typing import Annotated, Any, Literal, TypeVar

import torch
import torch.distributed as dist
from annotated_types import Ge
from annotated_types import Unit as UnitOf
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication

from trainkit.checkpoint.sharded_state import ShardedState, StoredTensor, TensorShard, shard_placeholder
from trainkit.data.batch import MicroBatch, StepBatch
from trainkit.devices import has_streams
from trainkit.distributed.collectives import ProcessGroupCollectives
from trainkit.errors import UserError
from trainkit.files import write_optional
from trainkit.metrics.step_output import StepOutput, read_evaluation_output, read_training_output
from trainkit.model.deferred_init import Record, records_of
from trainkit.optim.chained_optimizer import members
from trainkit.optim.optimizer import PhaseOptimizer
from trainkit.optim.precision import Precision
from trainkit.optim.separable import coupled_by, step_hooks
from trainkit.run_dir.failure import phase_in
from trainkit.settings import check_choice
from trainkit.strategy import PhaseTraining, named_state
from trainkit.task import TaskModule
from trainkit.tree import map_tensors

from ..multiprocess import MultiProcessStrategy
from ..optimizer_shards import NEVER_SHARDED, check_elementwise
from ..reducer.grad_norm import norm_dtype, total_norm
from .parameter_shard import ParameterShard
from .preserved import preserved
from .sharded_muon import MUON, ShardedMuon
from .sharded_task import (
    MIB,
    ShardedTask,
    Unit,
    Units,
    choose_units,
    describe_units,
    has_rows,
    make_mesh,
    measured_units,
)
from .tensor_parallel import TensorParallel
from .tensor_plan import KINDS, TensorPlan, choose_tensor_units, describe_tensor_units, mesh_names
from .unit_order import UnitOrder

logger = logging.getLogger(__name__)

T = TypeVar("T")

OLDEST_FOR_TENSOR_PARALLEL = "2.13"
LOSS_CHECK_INTERVAL = 64  # steps between two comparisons of losses on devices that run behind
REDUCE_DTYPES = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class LockstepCollectives(ProcessGroupCollectives):
    """Collectives of ranks that evaluate together: they stop after the same batch."""

    def should_stop_evaluation(self, requested: bool) -> bool:
        return self.any_rank(requested)


class TensorParallelCollectives(LockstepCollectives):
    """Collectives of ranks of which several read the same samples.

    Sums, metrics and predictions are those of the ranks in `group`, which read different ones; the others are those of
    `all_ranks`.
    """

    def __init__(
        self, all_ranks: ProcessGroupCollectives, group: dist.ProcessGroup, *, step: Callable[[], int]
    ) -> None:
        super().__init__(
            group,
            device=all_ranks.device,
            timeout_seconds=all_ranks.timeout_seconds,
            step=step,
            failure_store=all_ranks.failure_store,
            consensus=all_ranks.consensus,
            process=all_ranks.process,
            num_processes=all_ranks.num_processes,
        )
        self.all_ranks = all_ranks

    def all_gather_object(self, value: T) -> list[T]:
        return self.all_ranks.all_gather_object(value)

    def broadcast_object(self, value: T) -> T:
        return self.all_ranks.broadcast_object(value)

    def barrier(self) -> None:
        self.all_ranks.barrier()

    def any_rank(self, flag: bool) -> bool:
        return self.all_ranks.any_rank(flag)

    def any_rank_on_host(self, flag: bool) -> bool:
        return self.all_ranks.any_rank_on_host(flag)


@dataclass(kw_only=True, eq=False, repr=False)
class FSDPStrategy(PhaseTraining, MultiProcessStrategy):
    """Every rank trains on its samples and holds a shard of the task; a unit is gathered while it runs.

        rank 0   gather a  forward a  gather b  forward b | backward b  reduce b  gather a  backward a  reduce a | step
        rank 1   gather a  forward a  gather b  forward b | backward b  reduce b  gather a  backward a  reduce a | step

    PyTorch's `fully_shard` gathers the parameters and sums the gradients. Each rank updates its shard. Ranks run the
    same units in the same order: one with fewer samples repeats its last batch, whose gradient counts zero.

    Further settings are those of `MultiProcessStrategy`.

    Args:
        accumulate: Micro-batches of a step on each rank; their gradients are summed once, at the end of the last one,
            and take the memory of all parameters until then.
        micro_batch_size: Most samples on one device at once; `auto`: grows while measured memory allows (CUDA).
        units: Modules whose parameters are gathered together: `auto` (repeated blocks), or names, patterns of names
            and classes. An empty list: the task is one unit.
        min_unit_mb: MiB of parameters that make a block a unit, with `units=auto`.
        reshard_after_forward: Free a unit after its forward and gather it again in backward; a number: keep it
            within groups of that many ranks until then.
        prefetch: Units whose parameters are gathered ahead while one runs; `None`: PyTorch's own choice, about one.
        replicate: Groups of ranks that each hold the whole task in shards: parameters are gathered inside a group, and
            gradients summed between groups too.
        tensor_parallel: Ranks that compute a layer together, each with a part of its weights, on the same samples.
        tensor_plan: Layers that they divide: `auto`, or names and patterns of linear layers with `columns`, `rows`,
            `qkv` (columns of queries, keys and values in one layer) or `replicate`.
        reduce_dtype: Dtype in which gradients are sent and summed: their own (`None`), `bf16`, `fp16` or `fp32`.
        offload: `cpu`: shards, their gradients and the optimizer are in host memory (CUDA).

    """

    shards_parameters = True
    supports_scripts = False
    grows_micro_batch = True  # a rank that left a step would leave others waiting for its shards
    collectives = LockstepCollectives

    units: Units = "auto"
    min_unit_mb: Annotated[float, Ge(0), UnitOf("MiB")] = 1.0
    reshard_after_forward: bool | Annotated[int, UnitOf("ranks")] = True
    prefetch: Annotated[int, Ge(1), UnitOf("units")] | None = None
    replicate: Annotated[int, Ge(1), UnitOf("groups")] = 1
    tensor_parallel: Annotated[int, Ge(1), UnitOf("ranks")] = 1
    tensor_plan: TensorPlan = "auto"
    reduce_dtype: Literal["bf16", "fp16", "fp32"] | None = None
    offload: Literal["cpu"] | None = None

    def __post_init__(self, device: str, micro_batch_size: int | Literal["auto"] | None) -> None:
        super().__post_init__(device, micro_batch_size)
        for pattern, kind in {} if self.tensor_plan == "auto" else self.tensor_plan.items():
            check_choice(f"tensor_plan.{pattern}", kind, KINDS)
        self._sharded: ShardedTask | None = None
        self._locals: dict[int, nn.Parameter] = {}  # by the id of the task's parameter
        self._muons: dict[str, ShardedMuon] = {}  # by phase
        self._tried_hooks: dict[str, list[Callable[..., Any]]] = {}  # of optimizers' steps, by phase
        self._last: Any = None  # this rank's most recent batch
        self._records: dict[str, Record] = {}  # of a task that has no values yet
        self._largest_spread = torch.zeros(())  # of a loss between tensor-parallel ranks, as a share
        self._tensor_mesh: DeviceMesh | None = None  # of the ranks that compute layers together
        if self.tensor_parallel > 1:
            self.compile_obstacle = (
                " and tensor_parallel, which looks at the operations of a module in Python. Set trainer.compile=false, "
                "or strategy.tensor_parallel=1."
            )

    # ---- Before and after training

    @property
    def keeps_num_ranks(self) -> bool:
        # Of fewer ranks there may be no groups of the same size.
        return self.replicate > 1 or self.tensor_parallel > 1 or not isinstance(self.reshard_after_forward, bool)

    @property
    def is_replicated(self) -> bool:
        return self.replicate > 1

    @property
    def hands_over(self) -> bool:
        # The state of Muon's matrices is on several ranks; that of divided layers is gathered by several.
        return super().hands_over and not self._muons and self.tensor_parallel == 1

    @property
    def state_part(self) -> tuple[int, int]:
        return self._task.part

    def validate(self, task: TaskModule, precision: Precision) -> str:
        """Return the kind of device of the ranks.

        Raises UserError for unavailable devices, backends or packages, a torch without `fully_shard`, settings that
        the device or the precision does not support, and a `reduce_dtype` that gradients have already.
        """
        device_type = super().validate(task, precision)
        # Without that method gradients are reduced by operations that gloo does not have.
        if not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):
            raise UserError(
                f"strategy=fsdp needs a newer torch, and this is {torch.__version__}. Type: pip install --upgrade "
                "torch, or set strategy=ddp."
            )
        # In 2.8 views of divided activations fail for some sizes; versions in between were not tried.
        if self.tensor_parallel > 1 and torch.__version__ < OLDEST_FOR_TENSOR_PARALLEL:
            raise UserError(
                f"strategy.tensor_parallel needs torch {OLDEST_FOR_TENSOR_PARALLEL}, and this is {torch.__version__}. "
                "Type: pip install --upgrade torch, or set strategy.tensor_parallel=1."
            )
        if self.auto_micro_batch and not has_streams(torch.device(device_type)):
            raise UserError(
                "strategy.micro_batch_size=auto measures the memory of CUDA devices under strategy=fsdp, and this run "
                f"is on {device_type}. Set strategy.micro_batch_size to a number."
            )
        if precision.name == "fp16-mixed" and self.offload is not None:
            raise UserError(
                "strategy.offload=cpu does not support fp16-mixed, whose scaler reads the gradients on the device. Set "
                "trainer.precision=bf16-mixed, or strategy.offload=null."
            )
        if self.offload is not None and not has_streams(torch.device(device_type)):
            raise UserError(
                f"strategy.offload=cpu moves shards from CUDA devices to host memory, and this run is on "
                f"{device_type}. Set strategy.offload=null."
            )
        min_bytes = self.min_unit_mb * MIB
        if self.prefetch is not None and len(choose_units(task, self.units, min_bytes=min_bytes)) == 1:
            raise UserError(
                f"strategy.prefetch={self.prefetch} gathers units ahead, and {type(task).__name__} is one unit with "
                f"strategy.units={self.units} and min_unit_mb={self.min_unit_mb:g}. Set strategy.prefetch=null, or "
                "name units, such as strategy.units=[blocks.*]."
            )
        dtypes = {precision.batch_type or parameter.dtype for parameter in task.parameters() if parameter.requires_grad}
        if dtypes == {REDUCE_DTYPES[self.reduce_dtype]}:
            raise UserError(
                f"strategy.reduce_dtype={self.reduce_dtype} does nothing: the gradients of {type(task).__name__} are "
                f"{self.reduce_dtype} already. Set strategy.reduce_dtype=null."
            )
        return device_type

    def setup(self, precision: Precision) -> None:
        """Join the other ranks and choose this rank's device; collective."""
        super().setup(precision)
        if self.tensor_parallel > 1:
            self._join_tensor_groups()
        world_size, replicate, groups = self.comm.world_size, self.replicate, self.reshard_after_forward
        if replicate > 1 and (world_size % replicate or world_size == replicate):
            allowed = [n for n in range(1, world_size) if world_size % n == 0]
            raise UserError(
                f"replicate={replicate} must divide the {world_size} ranks into groups of at least two; set "
                f"strategy.replicate={' or '.join(map(str, allowed)) or 1}, or strategy=ddp, "
                "where every rank has the whole task."
            )
        shards = world_size // replicate
        if not isinstance(groups, bool) and not (1 < groups < shards and shards % groups == 0):
            divisors = [str(n) for n in range(2, shards) if shards % n == 0]
            raise UserError(
                f"reshard_after_forward={groups} must divide the {shards} ranks into several groups of at least "
                f"two; set true, false{''.join(f', {n}' for n in divisors)}."
            )

    def _join_tensor_groups(self) -> None:
        """Divide the ranks into groups that compute layers together; collective.

        tensor_parallel=2, ranks 0 to 3    layers: 0 with 1, 2 with 3    samples and shards: 0 with 2, 1 with 3
        """
        assert isinstance(self.comm, ProcessGroupCollectives)
        num_ranks, size = self.comm.world_size, self.tensor_parallel
        if num_ranks % size:
            allowed = [n for n in range(1, num_ranks + 1) if num_ranks % n == 0]
            raise UserError(
                f"tensor_parallel={size} must divide the {num_ranks} ranks; set "
                f"strategy.tensor_parallel={' or '.join(map(str, allowed))}, or another strategy.devices."
            )
        grid = [range(first, first + size) for first in range(0, num_ranks, size)]
        group = self._own_groups.new_of_sets(grid, self._all_ranks)
        data_group = self._own_groups.new_of_sets(list(zip(*grid, strict=True)), self._all_ranks)
        assert group is not None and data_group is not None
        self._tensor_mesh = DeviceMesh.from_group(group, self.device.type, mesh_dim_names=mesh_names("tensor"))
        self.comm = TensorParallelCollectives(self.comm, data_group, step=lambda: self._steps)

    def prepare(self, task: TaskModule) -> None:
        """Shard the task, with rank 0's parameters and buffers; collective.

        Of a task that was built in `deferred_init` each rank makes its shards: it is never whole anywhere.
        """
        _check_shardable(task)
        super().prepare(task)  # broadcasts, which must precede the shards: these differ from rank to rank
        units = choose_units(task, self.units, min_bytes=self.min_unit_mb * MIB)
        parallel = self._divide(task, units)
        if parallel is not None:
            units = measured_units((unit.name, unit.module) for unit in units)
        if self.comm.is_main:
            plan = describe_units(
                units,
                num_shards=self.comm.world_size // self.replicate,
                replicate=self.replicate,
                reshard_after_forward=self.reshard_after_forward,
                prefetch=self.prefetch or 1,
            )
            logger.info("fsdp:\n%s", plan)
            if self.log_dir is not None:
                write_optional(self.log_dir / "partition.txt", f"{plan}\n")
        for unit in units:
            _check_one_dtype(unit.name, unit.module, [other.module for other in units if other is not unit])
        mesh = make_mesh(
            self.comm.group, self.device.type, replicate=self.replicate, timeout_seconds=self.timeout_seconds
        )
        # Rank 0's, as each rank has recorded the random numbers of its own constructor.
        records = self.comm.broadcast_object(self._records) if self._records else {}
        order = None
        if self.comm.num_processes > 1:
            order = UnitOrder([unit.name for unit in units], self.comm, self._max_over_ranks)
            if self._watchdog is not None:
                position = order.place  # also for messages about ranks that wait
                # Called in the watchdog's thread, which answers while this one waits in a collective.
                self._watchdog.describe = lambda frames: ", ".join(filter(None, (phase_in(frames), position())))
        self._sharded = ShardedTask(
            task,
            units,
            mesh,
            reshard_after_forward=self.reshard_after_forward,
            prefetch=self.prefetch,
            reduce_dtype=REDUCE_DTYPES[self.reduce_dtype],
            offload=self.offload is not None,
            records=records,
            order=order,
            parallel=parallel,
        )
        self._records, self._tried_hooks = {}, {}
        self._locals = {id(shard.sharded): shard.local for shard in self._sharded.shards}
        self._find_trained(task)  # again, as shards have taken the place of the parameters
        self._last, self._muons = None, {}
        self._largest_spread = torch.zeros((), dtype=torch.float64)

    def _divide(self, task: TaskModule, units: Sequence[Unit]) -> TensorParallel | None:
        """Divide layers over the tensor-parallel ranks."""
        if self._tensor_mesh is None:
            return None
        if self._records:
            raise UserError(
                "strategy.tensor_parallel divides layers that have values, and this task was built without. Set "
                "trainer.deferred_init=false, or strategy.tensor_parallel=1."
            )
        size = self.tensor_parallel
        tensor_units = choose_tensor_units(task, self.tensor_plan, size=size)
        for tensor_unit in list(tensor_units):
            inner = next((unit.name for unit in units if _is_in(unit.module, tensor_unit.module)), None)
            if inner is None:
                continue
            if self.tensor_plan != "auto":
                raise UserError(
                    f"{tensor_unit.name} is computed by tensor-parallel ranks together, and {inner} in it is a unit of "
                    f"its own. Take {inner} out of strategy.units, or the layers of {tensor_unit.name} out of "
                    "strategy.tensor_plan."
                )
            tensor_units.remove(tensor_unit)
        if self.comm.is_main:
            plan = describe_tensor_units(tensor_units, task, size=size)
            logger.info("tensor parallel:\n%s", plan)
            if self.log_dir is not None:
                write_optional(self.log_dir / "tensor_plan.txt", f"{plan}\n")
        return TensorParallel(task, tensor_units, self._tensor_mesh, is_auto=self.tensor_plan == "auto")

    def _move_task(self, task: TaskModule) -> None:
        self._records = records_of(task)
        self.precision.prepare(task)
        moved = partial(_moved, device=self.device)
        # Private: `task.to(device)` refuses meta tensors, and torch has no public call with a function for each tensor.
        task._apply(moved)  # type: ignore[no-untyped-call] # torch does not annotate it

    def prepare_optimizer(self, task: TaskModule, phase_optimizer: PhaseOptimizer) -> None:
        """Let the optimizer update this rank's shards; collective."""
        optimizer = phase_optimizer.optimizer
        # By exact type: a subclass may use matrices otherwise.
        muons = {number: member for number, member in enumerate(members(optimizer)) if type(member) is MUON}
        others = [member for number, member in enumerate(members(optimizer)) if number not in muons]
        check_elementwise(others, "strategy=fsdp", "Muon, or set strategy=ddp")
        if muons and self.tensor_parallel > 1:
            raise UserError(
                "strategy.tensor_parallel divides the matrices that Muon needs as a whole. Use AdamW, or set "
                "strategy.tensor_parallel=1."
            )
        if muons and self.offload is not None:
            raise UserError(
                "strategy.offload=cpu does not support Muon, whose matrices ranks exchange on the devices. Set "
                "strategy.offload=null, or use AdamW."
            )
        self._check_step_hooks(phase_optimizer)
        # By id: equality of tensors is by elements.
        task_ids = {id(parameter) for parameter in task.parameters()}
        for group in optimizer.param_groups:
            if any(id(parameter) not in task_ids for parameter in group["params"]):
                raise UserError(
                    f"the optimizer of {type(task).__name__} has parameters that are not the task's, which "
                    "strategy=fsdp cannot shard; pass self.parameters()."
                )
            for parameter in group["params"]:
                local = self._locals.get(id(parameter))
                if local is not None and parameter in optimizer.state:  # made in advance
                    state = optimizer.state.pop(parameter).items()
                    optimizer.state[local] = {k: v.to_local() if isinstance(v, DTensor) else v for k, v in state}
            group["params"] = [self._locals.get(id(parameter), parameter) for parameter in group["params"]]
        if muons:
            by_local = {id(shard.local): shard for shard in self._task.shards}
            groups = [group for group in optimizer.param_groups if group.get("optimizer", 0) in muons]
            matrices = [by_local[id(parameter)] for group in groups for parameter in group["params"]]
            self._muons[phase_optimizer.phase] = ShardedMuon(muons.values(), matrices, self._task, self.comm)
        # An overflow in one rank's shards must skip the step on all of them.
        comm = self._all_ranks_comm
        phase_optimizer.max_over_ranks = partial(comm.reduce_in_place, op="max", where="the overflow check")

    def retrain(self, task: TaskModule, phase_optimizers: Sequence[PhaseOptimizer]) -> None:
        """Let the optimizers update this rank's shards of the parameters that they have now; collective."""
        super().retrain(task, phase_optimizers)
        for phase_optimizer in phase_optimizers:
            for group in phase_optimizer.optimizer.param_groups:
                local = [self._locals.get(id(parameter), parameter) for parameter in group["params"]]
                if phase_optimizer.phase in self._muons and any(map(is_not, local, group["params"])):
                    raise UserError(
                        "parameters came into the optimizer during the run, and strategy=fsdp divided the matrices of "
                        "Muon before. Give them to the optimizer in configure_optimizers, or set strategy=ddp."
                    )
                group["params"] = local
            phase_optimizer.follow_groups()

    def final_state_dict(self, task: TaskModule) -> dict[str, Any] | None:
        """Return the trained state on rank 0 if the caller is in another process; collective.

        Ranks that another launcher started (torchrun) all have the whole task afterwards.
        """
        if self._environment is None:
            self._make_whole()
            return None
        state = self.state_dict(task)
        return map_tensors(state, Tensor.cpu) if self.comm.is_main else None

    def _release(self) -> None:
        """Leave the task whole if this process is the caller's."""
        # To make the task whole is collective: after an error the other ranks may not come, and this one would wait.
        failing = sys.exc_info()[1]
        if self._environment is None and (failing is None or self.comm.num_processes == 1):
            self._make_whole()
        self._sharded, self._locals, self._muons, self._last = None, {}, {}, None

    # ---- A step

    def begin_phase(self, phase_optimizer: PhaseOptimizer, *, step_name: str) -> None:
        """Train only the phase's parameters in the next `forward_backward`, by the task's method `step_name`."""
        chosen = {id(parameter) for parameter in phase_optimizer.parameters}
        for parameter in self._all_trained:
            # The task has the sharded parameter, and the optimizer that of this rank's elements.
            parameter.requires_grad_(id(self._locals.get(id(parameter), parameter)) in chosen)
        self._trained = [parameter for parameter in self._all_trained if parameter.requires_grad]
        self._step_name = step_name
        self.precision.begin_phase(phase_optimizer.phase)

    def forward_backward(self, task: TaskModule, batch: StepBatch) -> list[StepOutput]:
        """Leave in this rank's shards the gradients of the weighted mean loss over the whole batch; collective.

        A rank with fewer micro-batches than others repeats a batch, with the weight zero.
        """
        sharded, outputs = self._task, []
        where = f"forward and backward of step {self._steps}"
        self._steps += 1
        trained = [shard.sharded.requires_grad for shard in sharded.shards]
        self._begin_buffers()
        with self.comm.waiting(where), sharded.explained(self._step_name), self._in_parallel():
            rounds, reduced = self._num_rounds(batch), [parameter.grad for parameter in sharded.replicated]
            for parameter in sharded.replicated:
                parameter.grad = None  # summed over ranks already: summed again it would count several times
            for index in range(rounds):
                sharded.sync_gradients(index == rounds - 1)
                if index < len(batch.micro_batches):
                    micro_batch = batch.micro_batches[index]
                    self._last = map_tensors(micro_batch.batch, lambda tensor: tensor)  # the step may take from it
                    former = self._watched_gradients(batch)
                    with self.precision.forward():
                        returned = sharded.run(self._step_name, micro_batch.batch)
                    self._check_gradients_kept(task, former, is_first=index == 0)
                    output = read_training_output(
                        returned, micro_batch.num_samples, task, self._step_name, of=batch.num_samples
                    )
                    self._backward(output, micro_batch, batch)
                    outputs.append(output)
                else:
                    self._repeat_last_batch(task)
                sharded.end_of_pass()  # of the backward; that of the forward is in `run`
            self._take_gradients(reduced)
        for shard, was_trained in zip(sharded.shards, trained, strict=True):
            if shard.sharded.requires_grad != was_trained:
                sharded.refuse_unfreezing(shard.name)
        self._normalize_gradients(outputs, batch)
        self._synchronize_buffers()
        self._check_tensor_ranks(outputs)
        # Last, so that no rank updates before all have their gradients: after a loss the step can be taken back.
        self._check_same_gradients()
        return outputs

    def _in_parallel(self) -> AbstractContextManager[Any]:
        # In backward too: there a mask, say, meets the gradient of what it was multiplied with.
        return nullcontext() if self._tensor_mesh is None else implicit_replication()

    def _have_gradients(self) -> list[bool]:
        # Those that are not reduced yet are in the gathered parameters.
        gathered = [shard.gathered for shard in self._task.shards]
        trained = [self._locals.get(id(parameter), parameter) for parameter in self._trained]  # no DTensor is made
        return [weight is not None and weight.grad is not None for weight in (*trained, *gathered)]

    def _num_rounds(self, batch: StepBatch) -> int:
        """Return the largest number of micro-batches of any rank; collective if they may differ."""
        num_micro_batches = len(batch.micro_batches)
        # What decides here is the same on all ranks, so all of them enter the collectives below or none.
        if batch.is_even and batch.num_samples % self.comm.world_size == 0:
            return num_micro_batches
        if self._last is None and self._may_lack_samples(batch):
            first = batch.micro_batches[0].batch if batch.micro_batches else None
            self._last = self._move(self._batch_of_any_rank(first))
        return int(self._max_over_ranks([num_micro_batches])[0])

    def _repeat_last_batch(self, task: TaskModule) -> None:
        """Run the units that other ranks run, without an effect on gradients, buffers, metrics or generators."""
        with preserved(task):
            with self.precision.forward():
                returned = self._task.run(self._step_name, self._last)
            loss = read_training_output(returned, 1, task, self._step_name).loss
            assert loss is not None
            self.precision.scale(loss * 0.0).backward()  # a scaler must have seen a loss

    def _take_gradients(self, reduced: Sequence[Tensor | None]) -> None:
        """Sum the gradients of replicated parameters over ranks, and add the former ones, `reduced`; collective.

        Those of shards are summed already.
        """
        for parameter, former_gradient in zip(self._task.replicated, reduced, strict=True):
            if parameter.grad is not None:
                parameter.grad = self.comm.all_reduce(parameter.grad)
                if former_gradient is not None:
                    parameter.grad += former_gradient
            else:
                parameter.grad = former_gradient
        self._task.reshard()

    def _check_tensor_ranks(self, outputs: Sequence[StepOutput]) -> None:
        """Make the gradients of what is whole on tensor-parallel ranks equal, and compare the losses; collective.

        Raises UserError if the ranks have computed different samples together.
        """
        parallel = self._task.parallel
        if parallel is None:
            return
        of_shards = [shard.local.grad for shard in self._task.shards if shard.division is None]
        gradients = [*of_shards, *(parameter.grad for parameter in self._task.replicated)]
        # Kernels that sum in another order each time would let them drift apart in silence.
        parallel.average([gradient for gradient in gradients if gradient is not None])
        losses = [output.loss.detach().double() for output in outputs if output.loss is not None]
        if losses:
            loss = torch.stack(losses).sum()
            share = parallel.spread(loss) / loss.abs().clamp(min=1e-30)
            self._largest_spread = torch.maximum(self._largest_spread.to(share.device), share.nan_to_num(0.0))
        # Now and then, as it waits for the device.
        if self.device.type != "cpu" and self._steps % LOSS_CHECK_INTERVAL:
            return
        eps = torch.finfo(self.precision.batch_type or torch.float32).eps
        if float(self._largest_spread) > math.sqrt(eps):
            raise UserError(
                "tensor-parallel ranks had other losses, and they train on the same samples: their data or random "
                "transforms differ. Let samples depend only on their index and torch's generator."
            )

    def _check_same_gradients(self) -> None:
        """Raise UserError on all ranks unless all have gradients of the same parameters; collective."""
        present = [shard.local.grad is not None for shard in self._task.shards]
        # The largest digest and, negated, the smallest in one message; the flags themselves only if they differ.
        digest = zlib.crc32(bytes(present))
        largest, smallest = self._max_over_ranks([digest, -digest])
        if largest != -smallest:
            others = self.comm.all_gather_object(present)
            differing = next(index for index, flags in enumerate(zip(*others, strict=True)) if len(set(flags)) > 1)
            raise UserError(
                f"ranks used different parameters in step {self._steps - 1}, so that their gradients were mixed: "
                f"{self._task.shards[differing].name} has a gradient on some of them only. Every rank must use the "
                "same parameters of a unit; otherwise set strategy=ddp."
            )

    def _update(self, phase_optimizer: PhaseOptimizer, norm: Tensor | None) -> None:
        self._check_step_hooks(phase_optimizer)  # in every step, as the user may add hooks at any time
        super()._update(phase_optimizer, norm)

    def _check_step_hooks(self, phase_optimizer: PhaseOptimizer) -> None:
        """Raise UserError for a hook of the optimizer's steps that uses elements together that are on several ranks."""
        optimizer, phase = phase_optimizer.optimizer, phase_optimizer.phase
        optimizers = {optimizer, *members(optimizer)}
        hooks = [hook for member in optimizers for hook in step_hooks(member)]
        hooks = [hook for hook in hooks if not isinstance(getattr(hook, "__self__", None), ShardedMuon)]
        # Set by the user, or a scheduler.
        hooks += [vars(member)["step"] for member in optimizers if "step" in vars(member)]
        if hooks == self._tried_hooks.get(phase, []):  # the trial takes several steps of copies
            return
        self._tried_hooks[phase] = hooks
        shards = {id(shard.local): shard.sharded for shard in self._task.shards}
        groups = [(group, group["params"]) for group in optimizer.param_groups]
        state = optimizer.state
        with self._task.plain():
            optimizer.state = defaultdict(dict)  # its tensors have the shapes of shards, those of the trial do not
            for group, parameters in groups:  # the task's, to which hooks may refer
                group["params"] = [shards.get(id(parameter), parameter) for parameter in parameters]
            try:
                culprit = coupled_by(optimizer, of_elements=True)
            finally:  # or a checkpoint of the failing run would have the trial's state
                optimizer.state = state
                for group, parameters in groups:
                    group["params"] = parameters
        if culprit is not None:
            raise UserError(
                f"{culprit} may use several elements of gradients together, and strategy=fsdp leaves each rank some of "
                "them. To clip gradients type trainer.max_grad_norm=1.0; otherwise set strategy=ddp."
            )

    def _max_over_ranks(self, values: list[int]) -> list[int]:
        # In host memory where that is possible: `tolist` would wait for the device.
        on_host = self.comm.device.type == "cpu" or self.comm.asks_on_host
        tensor = torch.tensor(values, device="cpu" if on_host else self.device)
        return [int(v) for v in self.comm.reduce_in_place(tensor, "max", where="the comparison of steps").tolist()]

    def _scale_gradients(self, factor: float | Tensor) -> None:
        # By the present `requires_grad`, which callbacks may change.
        held = [(shard.sharded, shard.local) for shard in self._task.shards]
        held += [(parameter, parameter) for parameter in self._task.replicated]
        gradients = [local.grad for weight, local in held if weight.requires_grad and local.grad is not None]
        if gradients:  # which are on two devices with `offload`
            # Private: one kernel for all gradients. torch has no public call for that.
            torch._foreach_mul_(gradients, factor if self.offload is None else float(factor))

    def _grad_norm(self, phase_optimizer: PhaseOptimizer) -> Tensor:
        """Return the global 2-norm of the gradients, a scalar where the shards are; collective."""
        divided = {id(shard.local) for shard in self._task.shards if shard.division is not None}
        replicated = {id(parameter) for parameter in self._task.replicated}

        def is_counted(parameter: Tensor) -> bool:  # each element on one rank
            if id(parameter) in replicated:
                return self.comm.is_main
            return self._task.is_first_replica and (self._tensor_rank == 0 or id(parameter) in divided)

        counted = [p.grad for p in phase_optimizer.parameters if p.grad is not None and is_counted(p)]
        local_norm = total_norm(counted, self.device)
        dtype = norm_dtype(phase_optimizer.parameters)  # a rank may have no gradients
        # In float64: the square of a norm in float32 overflows above 2e19.
        norm = self._all_ranks_comm.all_reduce(local_norm.double().square()).sqrt().to(dtype)
        return norm if self.offload is None else norm.cpu()  # or fused kernels on the CPU would read it too early

    @property
    def _all_ranks_comm(self) -> ProcessGroupCollectives:
        return self.comm.all_ranks if isinstance(self.comm, TensorParallelCollectives) else self.comm

    @property
    def _tensor_rank(self) -> int:
        """The number of this rank among those that compute layers together."""
        return 0 if self._tensor_mesh is None else self._tensor_mesh.get_local_rank()

    @property
    def _task(self) -> ShardedTask:
        assert self._sharded is not None, "prepare comes first"
        return self._sharded

    # ---- Evaluation

    def joint_batches(self, task: TaskModule, batches: Iterator[MicroBatch], step_name: str) -> Iterator[MicroBatch]:
        """Yield the batches; a rank without further ones repeats its last until all ranks are done. Collective."""
        last: Any = None
        while True:
            micro_batch = next(batches, None)
            has_batch = micro_batch is not None
            lacks_any = not has_batch and last is None
            # All ranks decide on the same two flags, so that each collective below has all of them.
            any_has, any_lacks = self._max_over_ranks([int(has_batch), int(lacks_any)])
            if not any_has:
                return
            if any_lacks:
                sent = self._batch_of_any_rank(None if micro_batch is None else micro_batch.batch)
                last = sent if last is None else last
            if micro_batch is not None:
                last = micro_batch.batch
                yield micro_batch
                continue
            with preserved(task):  # the repeated batch counts in no metric
                self._evaluate(step_name, last)
            if self.comm.should_stop_evaluation(False):
                return

    def evaluate(
        self, task: TaskModule, micro_batch: MicroBatch, step_name: Literal["validation_step", "test_step"]
    ) -> StepOutput:
        """Return the metrics of one batch of this rank; collective, as parameters are gathered."""
        returned = self._evaluate(step_name, micro_batch.batch)
        return read_evaluation_output(returned, micro_batch.num_samples, task, step_name)

    def predict(self, task: TaskModule, micro_batch: MicroBatch) -> Any:
        """Return the predictions for one batch of this rank; collective, as parameters are gathered."""
        return self._evaluate("predict_step", micro_batch.batch)

    def _evaluate(self, step_name: str, batch: Any) -> Any:
        where = f"an evaluation after step {self._steps}"
        with self.comm.waiting(where), self._task.explained(step_name), self._in_parallel():
            with self.precision.forward():
                returned = self._task.run(step_name, self._move_for_evaluation(batch))
            self._task.end_evaluation()
        return returned

    # ---- Outside of the step

    @contextmanager
    def whole_task(self, task: TaskModule) -> Iterator[TaskModule]:
        """Give every rank all values of the task in the block, and then those that rank 0 has left. Collective."""
        if self._sharded is None:
            yield task
            return
        with (
            self.comm.waiting(self.comm.after("the gathering of the whole task")),
            self._sharded.whole(self._all_ranks),
        ):
            yield task

    # ---- State, full and the same as under every other strategy

    def state_dict(self, task: TaskModule) -> dict[str, Any]:
        return self._task.state_dict(is_main=self.comm.is_main)

    def load_state_dict(self, task: TaskModule, saved: dict[str, Any]) -> None:
        self._task.load_state_dict(saved)

    def optimizer_state_dict(self, task: TaskModule, phase_optimizer: PhaseOptimizer) -> dict[str, Any]:
        saved = self._state_in_shards(phase_optimizer)

        def gather(entry: str, shard: ParameterShard, local: Tensor) -> Tensor:
            full = self._task.full(shard, local)
            # To the host at once, one tensor after the other: the whole state may not fit on the device.
            return full.cpu() if self.comm.is_main else local

        return {**saved, "state": self._mapped_state(phase_optimizer, saved["state"], gather)}

    def load_optimizer_state_dict(
        self, task: TaskModule, phase_optimizer: PhaseOptimizer, saved: dict[str, Any]
    ) -> None:
        """Load the optimizer's full state, of which this rank reads its shards."""

        def local(entry: str, shard: ParameterShard, saved_tensor: Tensor | StoredTensor) -> Tensor:
            return self._task.local_of(shard.sharded, saved_tensor)

        state = self._mapped_state(phase_optimizer, saved["state"], local)
        super().load_optimizer_state_dict(task, phase_optimizer, {**saved, "state": state})
        if phase_optimizer.phase in self._muons:
            self._muons[phase_optimizer.phase].gather_state(phase_optimizer.optimizer.state)

    def _state_in_shards(self, phase_optimizer: PhaseOptimizer) -> dict[str, Any]:
        """Return the optimizer's state with this rank's elements of each tensor; collective."""
        saved = phase_optimizer.optimizer.state_dict()
        if phase_optimizer.phase in self._muons:
            of_matrices = self._muons[phase_optimizer.phase].shard_state(phase_optimizer.optimizer.state)
            by_index = {index: of_matrices.get(id(p), {}) for index, p in enumerate(phase_optimizer.parameters)}
            saved["state"] = {index: {**values, **by_index[index]} for index, values in saved["state"].items()}
        return saved

    def _mapped_state(
        self,
        phase_optimizer: PhaseOptimizer,
        state: dict[int, dict[str, Any]],
        convert: Callable[[str, ParameterShard, Any], Any],
    ) -> dict[int, dict[str, Any]]:
        """Return an optimizer's state with the tensors that have the shape of their parameter converted."""
        tensors = (Tensor, StoredTensor)
        shards = {id(shard.local): shard for shard in self._task.shards}
        mapped: dict[int, dict[str, Any]] = {}
        for index, values in state.items():
            shard = shards.get(id(phase_optimizer.parameters[index]))
            mapped[index] = {
                key: convert(f"{index}.{key}", shard, value)
                if shard is not None and isinstance(value, tensors) and key not in NEVER_SHARDED and value.dim()
                else value
                for key, value in values.items()
            }
        return mapped

    def shards(self, task: TaskModule, phase_optimizers: Sequence[PhaseOptimizer]) -> ShardedState:
        """Return this rank's shards of the parameters and of the optimizers' state; collective."""
        parts: list[TensorShard] = []

        def placeholder(prefix: str, entry: str, shard: ParameterShard, local: Tensor) -> dict[str, Any]:
            name = f"{prefix}{entry}"
            like = torch.empty(shard.shape, dtype=local.dtype, device="meta")
            if shard.division is not None:
                # The elements of a part are in no range of the whole.
                elements = self._task.full(shard, local).flatten()
                number, count = self._task.part
                number, count = number * self.tensor_parallel + self._tensor_rank, count * self.tensor_parallel
                length = -(-len(elements) // count)
                content = elements[number * length : (number + 1) * length]
                if len(content) and self._task.is_first_replica:
                    parts.append(TensorShard(name, content.clone(), number * length, len(elements)))
                return shard_placeholder(name, like)
            # Replicas of the shards have the same elements, and one of them writes these.
            if self._tensor_rank:
                return shard_placeholder(name, like)
            if local.numel() and (self._task.is_first_replica or self.comm.num_processes == 1):
                start = self._task.first_element(shard.sharded)
                parts.append(TensorShard(name, local.detach().reshape(-1), start, like.numel()))
            return shard_placeholder(name, like)

        by_parameter = {id(shard.sharded): shard for shard in self._task.shards}
        state = task.state_dict(keep_vars=True)
        for key, value in state.items():
            shard = by_parameter.get(id(value))
            if shard is not None:
                state[key] = placeholder("task.", shard.name, shard, shard.local)
            elif isinstance(value, Tensor):
                state[key] = value.detach()
        optimizers = []
        for number, phase_optimizer in enumerate(phase_optimizers):
            saved = self._state_in_shards(phase_optimizer)
            convert = partial(placeholder, f"optimizer.{number}.")
            optimizers.append({**saved, "state": self._mapped_state(phase_optimizer, saved["state"], convert)})
        unique = {part.name: part for part in parts}  # a shared parameter has several keys
        return ShardedState(state, optimizers, list(unique.values()))

    def local_state(self, task: TaskModule) -> dict[str, Tensor]:
        """Return this rank's shards of the parameters, and the buffers, by name."""
        return {name: self._locals.get(id(tensor), tensor) for name, tensor in named_state(task).items()}

    def replicated(self, task: TaskModule) -> dict[str, Tensor]:
        """Return the parameters that are not sharded, and the buffers that are made equal, by name."""
        ids = {id(parameter) for parameter in self._task.replicated}
        tensors = super().replicated(task)
        return {n: tensor for n, tensor in tensors.items() if not isinstance(tensor, nn.Parameter) or id(tensor) in ids}

    def _make_whole(self) -> None:
        """Leave the whole task on every rank; collective."""
        if self._sharded is not None:
            self.end_phases()  # first, as the whole parameters take over `requires_grad`
            self._sharded.make_whole()
            self._sharded, self._locals, self._muons = None, {}, {}


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    # Values of meta tensors are made later, by each rank those of its shards.
    return tensor if tensor.is_meta else tensor.to(device)


def _check_shardable(task: nn.Module) -> None:
    """Raise UserError for parameters that cannot be sharded."""
    for name, parameter in task.named_parameters():
        what = ""
        if type(parameter) is not nn.Parameter:
            what = f"is a {type(parameter).__name__}"
        elif not parameter.is_contiguous():
            what = "is not contiguous (channels_last, or a transposed view)"
        elif parameter.is_complex():
            what = "is complex"
        if what:
            raise UserError(
                f"strategy=fsdp cannot shard the parameters of {type(task).__name__}: {name} {what}. Make it an "
                "ordinary tensor on the CPU in __init__, with .contiguous(), or set strategy=ddp."
            )
    for name, module in task.named_modules():
        if getattr(module, "sparse", False) is True:
            raise UserError(
                f"strategy=fsdp cannot shard the sparse gradients of {name}; build it with sparse=False, or set "
                "strategy=ddp."
            )


def _check_one_dtype(name: str, module: nn.Module, others: Sequence[nn.Module]) -> None:
    """Raise UserError if the trained parameters of a unit have several dtypes; `others` are the other units."""
    inside = {id(part) for other in others if other is not module for part in other.modules() if _is_in(other, module)}
    names_by_dtype: dict[torch.dtype, str] = {}
    for path, part in module.named_modules():
        for key, parameter in part._parameters.items() if id(part) not in inside else ():
            if parameter is not None and parameter.requires_grad and has_rows(parameter):
                names_by_dtype.setdefault(parameter.dtype, f"{path}.{key}".lstrip("."))
    if len(names_by_dtype) > 1:
        listed = ", ".join(f"{parameter} is {dtype}" for dtype, parameter in names_by_dtype.items())
        raise UserError(
            f"strategy=fsdp gathers the parameters of a unit together, and the unit {name} has several dtypes: "
            f"{listed}. Set trainer.precision, name the modules of one dtype in strategy.units, or set strategy=ddp."
        )


def _is_in(inner: nn.Module, outer: nn.Module) -> bool:
    return inner is not outer and any(module is inner for module in outer.modules())
