"""Runtime of a rank: carries out the actions of its schedule for one step batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from trainkit.distributed.collectives import gather
from trainkit.metrics.step_output import StepOutput
from trainkit.rng import python_rng_state, set_python_rng_state

from .communication import OutputBroadcast, PendingReceive, StageChannel
from .graph import Signature, Step, signature
from .mesh import PipelineErrors, PipelineMesh
from .schedules import BACKWARD, FORWARD, Action, Span
from .stage import StageGraph, Transfer
from .stage_executor import Shapes, StageExecutor, TraceMismatchError

AHEAD = 2
"""Receives are posted so many actions before they are needed, so that messages travel while others compute."""
Around = Callable[[int], AbstractContextManager[Any]]


class PipelineRuntime:
    """Carries out the actions of one rank."""

    def __init__(self, mesh: PipelineMesh, *, device: torch.device, errors: PipelineErrors):
        self.waited_seconds = 0.0
        """Seconds of waiting for other stages, over all training steps."""
        self.began = 0.0
        """Clock time at which the last step began."""
        self.errors = errors
        """Where errors of this rank are published."""
        self.spans: list[Span] = []
        """Actions of the last step, in seconds from its start, without waiting."""
        self._group = mesh.stage_group
        self._stage = mesh.stage
        self._channel = StageChannel(mesh.stage_group, rank=mesh.stage, device=device)
        self._outputs = OutputBroadcast(mesh.stage_group, rank=mesh.stage, device=device)
        self._device = device

    def train(
        self,
        executor: StageExecutor,
        step: Step,
        batches: Sequence[Any],
        *,
        actions: Iterable[Action],
        read_loss: ReadLoss,
        around: Around | None = None,
    ) -> None:
        """Add to the gradients of this rank's parameters those of all micro-batches.

        `around(index)` gives a context for each action, such as a session that reduces gradients.
        `read_loss(micro_batch, returned)` gives the scalar that backward starts from, in the last stage. Every rank
        of the pipeline calls this with the same batches and its own actions of one schedule.
        """
        seed = _draw_seed()  # before the state of the generators is kept, so that the next step draws another
        with preserve_generators(self._device):
            run = StepRun(self._channel, self._device, executor, step, batches, seed, read_loss)
            self._carry_out(run, actions, around)
        busy = sum(span.end - span.start for span in self.spans)
        self.waited_seconds += perf_counter() - self.began - busy

    @torch.no_grad()
    def forward(
        self, executor: StageExecutor, step: Step, batches: Sequence[Any], *, actions: Iterable[Action]
    ) -> dict[int, Any]:
        """Return the results of the step by micro-batch, on the rank of the last stage; elsewhere nothing."""
        seed = _draw_seed()  # before the state of the generators is kept, so that the next step draws another
        with preserve_generators(self._device):
            run = StepRun(self._channel, self._device, executor, step, batches, seed, None)
            self._carry_out(run, actions)
        return run.returned

    def broadcast_outputs(self, outputs: list[StepOutput], executor: StageExecutor, key: str) -> list[StepOutput]:
        """Return the outputs of the last stage, which alone gives any; collective over the stages.

        `key` names a sequence of outputs with the same names and types.
        """
        source = executor.stage_graphs[-1].rank
        return self._outputs.broadcast(outputs, source=source, key=key)

    def timeline(self) -> list[list[Span]]:
        """Return the spans of every stage in the last step, on one clock from its first start. Collective."""
        answers = gather((self.began, self.spans), self._group)
        first = min(began for began, _ in answers)
        return [
            [Span(span.action, span.start + began - first, span.end + began - first) for span in spans]
            for began, spans in answers
        ]

    def _carry_out(self, run: StepRun, actions: Iterable[Action], around: Around | None = None) -> None:
        todo = list(actions)
        self.spans = []
        self.began = begin = perf_counter()
        with run.executor.interceptor.installed():
            for index, action in enumerate(todo):
                for later in todo[index : index + 1 + AHEAD]:
                    if not run.post(later):
                        break  # or a later message would be received in place of an earlier one
                with around(index) if around is not None else nullcontext():
                    try:  # inside of `around`, which would tell the others less
                        start = run.carry_out(action)
                    except Exception as error:
                        self.errors.explain(error, where=action.place())
                        raise
                self.spans.append(Span(action, start - begin, perf_counter() - begin))
        self._channel.finish()


def _draw_seed() -> int:
    """Return a seed from torch's generator, which advances equally on all stages."""
    return int(torch.randint(2**62, ()).item())


@contextmanager
def preserve_generators(device: torch.device) -> Iterator[None]:
    """Restore the random generators at the end: each stage draws differently, and ranks must stay in step."""
    torch_state = torch.get_rng_state()
    cuda_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    python_state = python_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state, device)
        set_python_rng_state(python_state)


ReadLoss = Callable[[int, Any], Tensor]
HEADERS = 1 << 8
"""Tags below are kept for other uses of the group."""


@dataclass(slots=True)
class _InFlight:
    """State of a micro-batch between its forward and its backward in one stage."""

    inputs: list[tuple[Transfer, Tensor]]
    outputs: dict[int, Tensor]
    loss: Tensor | None


@dataclass(slots=True)
class StepRun:
    """One step batch under way."""

    channel: StageChannel
    device: torch.device
    executor: StageExecutor
    step: Step
    batches: Sequence[Any]
    seed: int
    read_loss: ReadLoss | None
    returned: dict[int, Any] = field(default_factory=dict)
    _signatures: dict[int, Signature] = field(default_factory=dict)
    _in_flight: dict[tuple[int, int], _InFlight] = field(default_factory=dict)
    _pending: dict[Action, list[tuple[Transfer, PendingReceive]]] = field(default_factory=dict)

    def post(self, action: Action) -> bool:
        """Start receiving what an action needs, unless it has been started; return false if its shapes are unknown."""
        if action in self._pending:
            return True
        stage_graph = self.executor.stage_graphs[action.stage]
        shapes = self.executor.shapes.get((stage_graph.index, self._signature(action.micro_batch)))
        if shapes is None:
            return False
        if action.kind == FORWARD:
            transfers = stage_graph.receives
        else:
            transfers = [transfer for transfer in stage_graph.sends if transfer.differentiable]
        self._pending[action] = [(transfer, self._expect(transfer, action.kind, shapes)) for transfer in transfers]
        return True

    def _signature(self, micro_batch: int) -> Signature:
        if micro_batch not in self._signatures:
            self._signatures[micro_batch] = signature(self.batches[micro_batch])
        return self._signatures[micro_batch]

    def carry_out(self, action: Action) -> float:
        """Run an action, and return when it had all it needed."""
        try:
            return self._forward(action) if action.kind == FORWARD else self._backward(action)
        except TraceMismatchError as error:
            raise TraceMismatchError(f"{action.place()}: {error}") from None

    def _expect(self, transfer: Transfer, kind: str, shapes: Shapes) -> PendingReceive:
        other = transfer.source if kind == FORWARD else transfer.destination
        shape = shapes[transfer.value]
        assert shape is not None
        return self.channel.expect(
            shape,
            self.executor.graph.values[transfer.value].dtype,
            source=self.executor.stage_graphs[other].rank,
            tag=self._tag(transfer, kind),
        )

    def _send(self, tensor: Tensor, transfer: Transfer) -> None:
        if tensor.requires_grad and not transfer.differentiable:
            raise self._unexpected_gradient(transfer)
        to = self.executor.stage_graphs[transfer.destination].rank
        self.channel.send(tensor.detach(), to=to, tag=self._tag(transfer, FORWARD))

    def _send_gradient(self, of: Tensor, transfer: Transfer) -> None:
        to = self.executor.stage_graphs[transfer.source].rank
        self.channel.send_gradient(of.grad, of=of, to=to, tag=self._tag(transfer, BACKWARD))

    def _unexpected_gradient(self, transfer: Transfer) -> TraceMismatchError:
        nodes = self.executor.graph.nodes
        maker = next(node for node in nodes if any(output.value == transfer.value for output in node.outputs))
        return TraceMismatchError(
            f"{maker} made a tensor that needs a gradient, and made one that needs none in the traced step. Freeze "
            "parameters, and detach tensors, for the whole run or not at all, or train with strategy=ddp."
        )

    def _tag(self, transfer: Transfer, kind: str) -> int:
        """Return a number of its own for each value on each way; within it, micro-batches keep their order."""
        way = (transfer.destination * 2 + (kind == BACKWARD)) * len(self.executor.graph.values)
        return HEADERS + way + transfer.value

    # -- Forward

    def _forward(self, action: Action) -> float:
        stage_graph = self.executor.stage_graphs[action.stage]
        batch = self.batches[action.micro_batch]
        key = (stage_graph.index, self._signature(action.micro_batch))
        is_new = key not in self.executor.shapes
        shapes = self._learn_shapes(stage_graph, action) if is_new else self.executor.shapes[key]
        if is_new:
            self.executor.shapes[key] = shapes
        self.post(action)
        received, inputs = self._open_inputs(action, stage_graph)
        start = perf_counter()
        result = self.executor.run(
            stage_graph, self.step, batch, received=received, shapes=shapes, seed=self._seed_of(action)
        )
        if is_new:
            self._pass_on_shapes(stage_graph, shapes, result.values, batch)
        for transfer in stage_graph.sends:
            self._send(result.values[transfer.value], transfer)
        loss = None
        if stage_graph.is_last:
            if self.read_loss is None:
                self.returned[action.micro_batch] = result.returned
            else:
                loss = self.read_loss(action.micro_batch, result.returned)
        if self.read_loss is not None:
            outputs = {
                transfer.value: result.values[transfer.value]
                for transfer in stage_graph.sends
                if transfer.differentiable
            }
            self._in_flight[action.stage, action.micro_batch] = _InFlight(inputs, outputs, loss)
        return start

    def _open_inputs(
        self, action: Action, stage_graph: StageGraph
    ) -> tuple[dict[int, Tensor], list[tuple[Transfer, Tensor]]]:
        received: dict[int, Tensor] = {}
        inputs = []
        for transfer, pending in self._pending.pop(action):
            tensor = pending.open(_description(action, transfer.source))
            received[transfer.value] = tensor
            if transfer.differentiable and self.read_loss is not None:
                tensor.requires_grad_()
                inputs.append((transfer, tensor))
                if transfer.value in stage_graph.cloned:
                    received[transfer.value] = tensor.clone()  # a leaf must not be written in place
        return received, inputs

    def _learn_shapes(self, stage_graph: StageGraph, action: Action) -> Shapes:
        """Return the shapes that the stages before know for this new kind of batch."""
        shapes: Shapes = [None] * len(self.executor.graph.values)
        if stage_graph.index > 0:
            source = self.executor.stage_graphs[stage_graph.index - 1].rank
            header = self.channel.receive_header(
                source=source, tag=stage_graph.index, what=_description(action, stage_graph.index - 1)
            )
            for value, shape in header.items():
                shapes[value] = shape
        return shapes

    def _pass_on_shapes(self, stage_graph: StageGraph, shapes: Shapes, made: dict[int, Tensor], batch: Any) -> None:
        for value, tensor in made.items():
            shapes[value] = tuple(tensor.shape)
        if not stage_graph.is_last:
            header = {value: shape for value, shape in enumerate(shapes) if shape is not None}
            following = self.executor.stage_graphs[stage_graph.index + 1]
            self.channel.send_header(header, to=following.rank, tag=following.index)

    def _seed_of(self, action: Action) -> int:
        return (self.seed * 1_000_003 + action.micro_batch * 7_919) % 2**63

    # -- Backward

    def _backward(self, action: Action) -> float:
        kept = self._in_flight.pop((action.stage, action.micro_batch))
        gradients: dict[int, Tensor] = {}
        for transfer, pending in self._pending.pop(action):
            gradient = pending.open_gradient(_description(action, transfer.destination))
            if gradient is not None:
                known = gradients.get(transfer.value)
                gradients[transfer.value] = gradient if known is None else known + gradient
        start = perf_counter()
        roots: list[Tensor] = [] if kept.loss is None else [kept.loss]
        root_gradients: list[Tensor | None] = [None] * len(roots)
        for value, gradient in gradients.items():
            if kept.outputs[value].requires_grad:  # else it was detached for this batch alone
                roots.append(kept.outputs[value])
                root_gradients.append(gradient)
        if roots:
            torch.autograd.backward(roots, root_gradients)
        for transfer, tensor in kept.inputs:
            self._send_gradient(tensor, transfer)
        return start


def _description(action: Action, other: int) -> str:
    tensors = "activations" if action.kind == FORWARD else "gradients"
    return f"the {tensors} of micro-batch {action.micro_batch} from stage {other}"
