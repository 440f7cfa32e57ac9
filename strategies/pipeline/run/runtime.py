"""Runtime of a rank: carries out the actions of its schedule for one step batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.devices import generator_state, set_generator_state
from trainkit.distributed.collectives import gather
from trainkit.metrics.step_output import StepOutput
from trainkit.rng import python_rng_state, set_python_rng_state
from trainkit.tree import map_tensors, tensors_in

from ..plan.schedules import AHEAD, BACKWARD, FORWARD, Action, Span
from ..plan.stage import StageGraph, Transfer
from ..trace.graph import Signature, Step, signature
from .communication import DeviceChannel, Lane, OutputBroadcast, PendingReceive, StageChannel
from .mesh import PipelineErrors, PipelineMesh
from .stage_executor import Shapes, StageExecutor, TraceMismatchError

FIRST_TAG = 1 << 8
"""Lower tags are reserved for other uses of the group."""

Around = Callable[[int], AbstractContextManager[Any]]
ReadLoss = Callable[[int, Any], Tensor]
Inputs = list[tuple[Transfer, Tensor]]


class PipelineRuntime:
    """Carries out the actions of one rank; the mesh must be joined."""

    def __init__(self, mesh: PipelineMesh, *, device: torch.device, errors: PipelineErrors):
        self.waited_seconds = 0.0
        """Seconds of waiting for other stages, over all training steps."""
        self.errors = errors
        self.spans: list[Span] = []
        """Actions of the last step, in seconds from its start, without waiting."""
        self._began = 0.0  # clock time of the start of the last step
        self._group, self._stage = mesh.stage_group, mesh.stage
        self._channel = StageChannel(mesh.stage_group, rank=mesh.stage, device=device)
        self._outputs = OutputBroadcast(mesh.stage_group, rank=mesh.stage, device=device)
        self._device = device

    def connect(self, lanes: Mapping[Lane, dist.ProcessGroup]) -> None:
        """Send the tensors of these lanes from device to device, and others through host memory."""
        self._channel.close()
        self._channel = DeviceChannel(self._group, rank=self._stage, device=self._device, lanes=lanes)

    def close(self) -> None:
        """End threads; may be called twice."""
        self._channel.close()

    def train(
        self,
        executor: StageExecutor,
        step: Step,
        batches: Sequence[Any],
        *,
        actions: Sequence[Sequence[Action]],
        read_loss: ReadLoss,
        around: Around | None = None,
    ) -> None:
        """Add the gradients of all micro-batches to those of this rank's parameters. Collective over the stages.

        `actions` are those of each rank. `around(index)` returns a context for each action of this rank, such as a
        session that reduces gradients. `read_loss(micro_batch, returned)` returns the scalar from which backward
        starts, in the last stage. Every stage passes the same batches and actions.
        """
        self._carry_out(executor, step, batches, actions, read_loss=read_loss, around=around)
        # What is not computation is waiting: for messages in actions, and for sends at the end.
        busy = sum(span.end - span.start for span in self.spans)
        self.waited_seconds += perf_counter() - self._began - busy

    @torch.no_grad()
    def forward(self, executor: StageExecutor, step: Step, batch: Any) -> list[Any]:
        """Return the step's result in a list on the last stage, `[]` on the others. Collective over the stages."""
        actions: list[list[Action]] = [[] for _ in range(self._group.size())]
        # Not one stage for each rank: an evaluation follows the parameters, and may return to an earlier rank.
        for stage_graph in executor.stage_graphs:
            actions[stage_graph.rank].append(Action(FORWARD, stage_graph.index, 0))
        return list(self._carry_out(executor, step, [batch], actions).values())

    def broadcast_outputs(self, outputs: list[StepOutput], executor: StageExecutor, key: str) -> list[StepOutput]:
        """Return the outputs of the last stage; `key` names a sequence of outputs with the same names and types.

        Collective over the stages.
        """
        source = executor.stage_graphs[-1].rank  # which alone has run the step to its end
        return self._outputs.broadcast(outputs, source=source, key=key)

    def timeline(self) -> list[list[Span]]:
        """Return the spans of every stage in the last step, on one clock from its first start. Collective."""
        # `perf_counter` is comparable between processes of one machine only.
        answers = gather((self._began, self.spans), self._group)
        # From the first action: before it the caller makes the batch's buffers ready, and no rank is idle.
        first = min((began + span.start for began, spans in answers for span in spans), default=0.0)
        return [
            [Span(span.action, span.start + began - first, span.end + began - first) for span in spans]
            for began, spans in answers
        ]

    def _carry_out(
        self,
        executor: StageExecutor,
        step: Step,
        batches: Sequence[Any],
        actions: Sequence[Sequence[Action]],
        *,
        read_loss: ReadLoss | None = None,
        around: Around | None = None,
    ) -> dict[int, Any]:
        # Torch's generator advances equally on all stages here; inside of the block each stage draws other numbers.
        seed = int(torch.randint(2**62, ()).item())
        run = StepRun(self._channel, executor, step, batches, seed, read_loss, actions)
        self.spans = []
        self._began = begin = perf_counter()
        with preserve_generators(self._device), executor.interceptor.installed():
            rank_actions = actions[self._stage]
            for index, action in enumerate(rank_actions):
                for later in rank_actions[index : index + 1 + AHEAD]:
                    if not run.post(later):
                        break  # or a later message would be received in place of an earlier one
                with around(index) if around is not None else nullcontext():
                    try:  # inside `around`, whose message would say less
                        start = run.carry_out(action)
                    except Exception as error:
                        self.errors.explain(error, where=action.place())
                        raise
                self.spans.append(Span(action, start - begin, perf_counter() - begin))
        # Not after an error: a rank that is gone receives nothing, and the wait would end with the timeout only.
        self._channel.finish()
        return run.returned


@contextmanager
def preserve_generators(device: torch.device) -> Iterator[None]:
    """Restore the random generators at the end: stages draw different numbers, but must have the same state."""
    torch_state = torch.get_rng_state()
    # Of one device: the executor seeds only that of this rank.
    device_state = generator_state(device)
    python_state = python_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        if device_state is not None:
            set_generator_state(device, device_state)
        set_python_rng_state(python_state)


@dataclass(slots=True)
class StepRun:
    """Execution of one step batch on one rank."""

    channel: StageChannel
    executor: StageExecutor
    step: Step
    batches: Sequence[Any]
    seed: int
    read_loss: ReadLoss | None
    actions: Sequence[Sequence[Action]] = ()
    """Actions of every rank, from which follows what a rank that sends a message has received."""
    tensors: list[list[Tensor]] = field(init=False)
    """Tensors of each batch; they are the first values of its step."""
    signatures: list[Signature] = field(init=False)
    returned: dict[int, Any] = field(default_factory=dict)
    _in_flight: dict[tuple[int, int], tuple[Inputs, dict[int, Tensor], Tensor | None]] = field(default_factory=dict)
    """Inputs, outputs and loss of each stage and micro-batch between its forward and its backward."""
    _pending: dict[Action, list[tuple[Transfer, PendingReceive]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tensors = [list(tensors_in(batch)) for batch in self.batches]
        self.signatures = [signature(tensors) for tensors in self.tensors]

    def post(self, action: Action) -> bool:
        """Start receiving the inputs of an action once; return False if their shapes are unknown."""
        if action in self._pending:  # a second receive would take the message of the next micro-batch
            return True
        stage_graph = self.executor.stage_graphs[action.stage]
        shapes = self.executor.shapes.get((stage_graph.index, self.signatures[action.micro_batch]))
        if shapes is None:  # the header that tells them is read when it is the action's turn
            return False
        if action.kind == FORWARD:
            transfers = stage_graph.receives
        else:
            # In the order of `sends`, on which the sum of gradients depends in its last bits.
            transfers = [transfer for transfer in stage_graph.sends if transfer.differentiable]
        self._pending[action] = [(transfer, self._expect(transfer, action.kind, shapes)) for transfer in transfers]
        return True

    def carry_out(self, action: Action) -> float:
        """Run an action, and return the time at which all its inputs were there."""
        try:
            return self._forward(action) if action.kind == FORWARD else self._backward(action)
        except TraceMismatchError as error:
            raise TraceMismatchError(f"{action.place()}: {error}") from None

    def _expect(self, transfer: Transfer, kind: str, shapes: Shapes) -> PendingReceive:
        other = transfer.source if kind == FORWARD else transfer.destination
        shape, dtype = shapes[transfer.value], self.executor.graph.values[transfer.value].dtype
        assert shape is not None  # a header has the shapes of all values that earlier stages have made
        source = self.executor.stage_graphs[other].rank
        expect = self.channel.expect if kind == FORWARD else self.channel.expect_gradient
        lane = lane_of(self.executor, transfer, kind)
        return expect(shape, dtype, source=source, tag=self._tag(transfer, kind), lane=lane)

    def _received_from(self, stage: int, action: Action) -> None:
        """Drop what was sent to the rank of `stage` for actions before that by which it has answered now."""
        rank = self.executor.stage_graphs[stage].rank
        if not self.actions:
            return
        # A rank keeps to the order of its actions: all that it needed for earlier ones has arrived.
        answer = Action(action.kind, stage, action.micro_batch)
        self.channel.release(to=rank, begun=self.actions[rank][: self.actions[rank].index(answer) + 1])

    def _send(self, tensor: Tensor, transfer: Transfer, action: Action) -> None:
        if tensor.requires_grad and not transfer.differentiable:
            nodes = self.executor.graph.nodes
            maker = next(node for node in nodes if any(output.value == transfer.value for output in node.outputs))
            raise TraceMismatchError(
                f"{maker} made a tensor that needs a gradient, and made one that needs none in the traced step. Freeze "
                "parameters, and detach tensors, for the whole run or not at all, or train with strategy=ddp."
            )
        to = self.executor.stage_graphs[transfer.destination].rank
        user = Action(FORWARD, transfer.destination, action.micro_batch)
        lane = lane_of(self.executor, transfer, FORWARD)
        sent = tensor.detach()  # for a stage on this rank too, or its backward would run through this one's graph
        if self.executor.may_be_written(tensor):
            sent = sent.clone()  # or the next micro-batch could write to it before it is sent
        self.channel.send(sent, to=to, tag=self._tag(transfer, FORWARD), user=user, lane=lane)

    def _tag(self, transfer: Transfer, kind: str) -> int:
        """Return a tag for each value and direction; within one tag, micro-batches keep their order."""
        # Values, destinations and directions are the digits of one number, so that no two transfers share a tag.
        way = (transfer.destination * 2 + (kind == BACKWARD)) * len(self.executor.graph.values)
        return FIRST_TAG + way + transfer.value

    # -- Forward

    def _forward(self, action: Action) -> float:
        stage_graph = self.executor.stage_graphs[action.stage]
        batch, tensors = self._batch_of_stage(action.micro_batch)
        key = (stage_graph.index, self.signatures[action.micro_batch])
        # Stages see the same batches in the same order, so that neighbours agree on when a header is sent.
        is_new = key not in self.executor.shapes
        if is_new:
            self.executor.shapes[key] = self._receive_shapes(stage_graph, action)
        shapes = self.executor.shapes[key]
        self.post(action)
        received, inputs = self._open_inputs(action, stage_graph, tensors)
        start = perf_counter()
        # The same in every stage, and another one for each micro-batch: primes keep the seeds of a step apart.
        seed = (self.seed * 1_000_003 + action.micro_batch * 7_919) % 2**63
        returned, values = self.executor.run(stage_graph, self.step, batch, received=received, shapes=shapes, seed=seed)
        if is_new:  # only after the run, which finds the shapes of what this stage makes
            self._send_shapes(stage_graph, shapes)
        for transfer in stage_graph.sends:
            self._send(values[transfer.value], transfer, action)
        loss = None
        if stage_graph.is_last:
            if self.read_loss is None:
                self.returned[action.micro_batch] = returned
            else:
                loss = self.read_loss(action.micro_batch, returned)
        if self.read_loss is not None:  # an evaluation has no backward that would free these
            outputs = {sent.value: values[sent.value] for sent in stage_graph.sends if sent.differentiable}
            self._in_flight[action.stage, action.micro_batch] = inputs, outputs, loss
        return start

    def _batch_of_stage(self, micro_batch: int) -> tuple[Any, list[Tensor]]:
        """Return the batch for one stage, and its tensors.

        The step may change the batch, which other stages on this rank must not see.
        """
        batch = self.batches[micro_batch]
        if not self.executor.shares_ranks:
            return batch, self.tensors[micro_batch]
        # Containers are new in any case; tensors are copied only if the step was seen to write to them.
        stage_batch = map_tensors(batch, Tensor.clone if self.executor.writes_batch else lambda tensor: tensor)
        return stage_batch, list(tensors_in(stage_batch))

    def _open_inputs(
        self, action: Action, stage_graph: StageGraph, tensors: list[Tensor]
    ) -> tuple[dict[int, Tensor], Inputs]:
        received = dict(enumerate(tensors))
        inputs: Inputs = []
        for transfer, pending in self._pending.pop(action):
            tensor = pending.open(_description(action, transfer.source))
            self._received_from(transfer.source, action)
            received[transfer.value] = tensor
            if transfer.differentiable and self.read_loss is not None:
                tensor.requires_grad_()  # a leaf, whose `.grad` is what goes back to the sender
                inputs.append((transfer, tensor))
                if transfer.value in stage_graph.cloned:
                    received[transfer.value] = tensor.clone()  # a leaf must not be written in place
        return received, inputs

    def _receive_shapes(self, stage_graph: StageGraph, action: Action) -> Shapes:
        """Return the shapes that earlier stages know for a batch with a new signature."""
        shapes: Shapes = [None] * len(self.executor.graph.values)
        if stage_graph.index > 0:
            # From the stage before, also for values of earlier ones: each stage adds its shapes and passes all on.
            source = self.executor.stage_graphs[stage_graph.index - 1].rank
            what = _description(action, stage_graph.index - 1)
            header = self.channel.receive_header(source=source, tag=stage_graph.index, what=what)
            for value, shape in header.items():
                shapes[value] = shape
        return shapes

    def _send_shapes(self, stage_graph: StageGraph, shapes: Shapes) -> None:
        if not stage_graph.is_last:
            header = {value: shape for value, shape in enumerate(shapes) if shape is not None}
            following = self.executor.stage_graphs[stage_graph.index + 1]
            self.channel.send_header(header, to=following.rank, tag=following.index)

    # -- Backward

    def _backward(self, action: Action) -> float:
        inputs, outputs, loss = self._in_flight.pop((action.stage, action.micro_batch))
        gradients: dict[int, Tensor] = {}
        for transfer, pending in self._pending.pop(action):
            gradient = pending.open_gradient(_description(action, transfer.destination))
            self._received_from(transfer.destination, action)
            if gradient is not None:
                # Not in place: from a stage on this rank it is the `.grad` of that stage's input.
                partial_sum = gradients.get(transfer.value)
                gradients[transfer.value] = gradient if partial_sum is None else partial_sum + gradient
        start = perf_counter()
        roots: list[Tensor] = [] if loss is None else [loss]
        root_gradients: list[Tensor | None] = [None] * len(roots)
        for value, gradient in gradients.items():
            if outputs[value].requires_grad:  # unless it was detached for this batch alone
                roots.append(outputs[value])
                root_gradients.append(gradient)
        # One backward for all outputs: a second one would find the part of the graph that they share freed.
        if roots:
            torch.autograd.backward(roots, root_gradients)
        for transfer, tensor in inputs:
            to, tag = self.executor.stage_graphs[transfer.source].rank, self._tag(transfer, BACKWARD)
            user = Action(BACKWARD, transfer.source, action.micro_batch)
            lane = lane_of(self.executor, transfer, BACKWARD)
            # A missing gradient is sent too, as the other stage has posted a receive for it.
            self.channel.send_gradient(tensor.grad, of=tensor, to=to, tag=tag, user=user, lane=lane)
        return start


def lane_of(executor: StageExecutor, transfer: Transfer, kind: str) -> Lane:
    """Return the lane of a transfer, or of its gradient, which goes back."""
    source, destination = transfer.source, transfer.destination
    if kind == BACKWARD:
        source, destination = destination, source
    stages = executor.stage_graphs
    return Lane(source, destination, kind, (stages[source].rank, stages[destination].rank))


def lanes_of(executor: StageExecutor) -> set[Lane]:
    """Return the lanes between different ranks of a training step."""
    transfers = [transfer for stage_graph in executor.stage_graphs for transfer in stage_graph.sends]
    lanes = {lane_of(executor, transfer, FORWARD) for transfer in transfers}
    lanes |= {lane_of(executor, transfer, BACKWARD) for transfer in transfers if transfer.differentiable}
    # Within a rank tensors are passed on without a message, and a group of one rank twice cannot be made.
    return {lane for lane in lanes if lane.ranks[0] != lane.ranks[1]}


def _description(action: Action, other: int) -> str:
    tensors = "activations" if action.kind == FORWARD else "gradients"
    return f"the {tensors} of micro-batch {action.micro_batch} from stage {other}"
