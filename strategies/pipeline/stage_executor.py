"""Stage executor: runs the user's step and executes the nodes of one stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode

from trainkit.errors import UserError
from trainkit.metrics.sync import metrics_in
from trainkit.rng import seed_python, seeded_python

from .graph import (
    RETURN,
    Constant,
    Node,
    ParameterRef,
    ScalarValue,
    Signature,
    TracedGraph,
    ValueRef,
    changed,
    decoded,
    rebuild,
    tensors,
)
from .interception import Call, ModuleInterceptor, TracingMode
from .stage import StageGraph
from .tracer import Step

Shapes = list[tuple[int, ...] | None]


class TraceMismatchError(UserError):
    """The step did not make the calls of the traced step."""


class _StageFinished(BaseException):
    """Ends a step after the stage's last node; no `except Exception` of the user's stops it."""


@dataclass(slots=True)
class StageOutput:
    """Result of a stage for one micro-batch."""

    returned: Any
    """Return value of the step, in the last stage."""
    values: dict[int, Tensor]
    """The values made or received."""


class StageExecutor:
    """Executor of the stages of a traced step."""

    def __init__(self, graph: TracedGraph, task: nn.Module, device: torch.device):
        leaf_modules = {node.name for node in graph.nodes if node.is_leaf_module}
        self.graph = graph
        self.interceptor = ModuleInterceptor({name: task.get_submodule(name) for name in leaf_modules})
        self.device = device
        self.metrics = metrics_in(task)
        self.held: dict[str, Tensor] = {**dict(task.named_parameters()), **dict(task.named_buffers())}
        self.checkpoint_starts = _checkpoint_starts(graph.nodes)
        """For each node, whether a checkpoint begins with it that draws random numbers."""
        self._placeholders: dict[tuple[int, tuple[int, ...]], Tensor] = {}

    def run(
        self,
        stage_graph: StageGraph,
        step: Step,
        batch: Any,
        *,
        received: Mapping[int, Tensor],
        shapes: Shapes,
        seed: int,
    ) -> StageOutput:
        """Run `step` up to the end of the stage; the interceptor must be installed.

        `shapes` are those of all values for a batch like this, `None` where they are not known yet; what the stage
        makes must have them. Random nodes draw from generators seeded by `seed` and their own names.
        """
        if (
            stage_graph.start == stage_graph.stop
        ):  # this phase of the task has nothing to do here, and passes numbers on
            return StageOutput(None, dict(received))
        interpreter = _StageInterpreter(self, stage_graph, received, shapes, seed)
        seed_python(seed)
        with ExitStack() as stack:
            stack.enter_context(self.interceptor.handled_by(interpreter))
            if stage_graph.is_last:
                stack.enter_context(interpreter.watching(self.metrics))
            stack.enter_context(interpreter)
            try:
                returned = step(batch)
            except _StageFinished:
                returned = None
            else:
                interpreter.check_end()
        if self.graph.numbers is not None:
            interpreter.values[self.graph.numbers] = interpreter.numbers()
        return StageOutput(returned, interpreter.values)

    def placeholder(self, value: int, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor of one element that looks like the value."""
        key = (value, shape)
        if key not in self._placeholders:
            dtype = self.graph.values[value].dtype
            self._placeholders[key] = torch.zeros((), dtype=dtype, device=self.device).expand(shape)
        return self._placeholders[key]

    def seed(self, seed: int, node: Node) -> None:
        """Seed torch's generators for one node of one micro-batch."""
        mixed = _mixed(seed, node)
        torch.default_generator.manual_seed(mixed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(mixed)


def _mixed(seed: int, node: Node) -> int:
    return (seed * 0x9E3779B97F4A7C15 + node.key * 0xBF58476D1CE4E5B9) % 2**63


def _checkpoint_starts(nodes: list[Node]) -> list[bool]:
    random_ones = {node.checkpoint for node in nodes if node.is_random and node.checkpoint is not None}
    seen: set[int] = set()
    starts = []
    for node in nodes:
        starts.append(node.checkpoint in random_ones and node.checkpoint not in seen)
        if node.checkpoint is not None:
            seen.add(node.checkpoint)
    return starts


def _codes_of(graph: TracedGraph, received: Mapping[int, Tensor]) -> list[int]:
    """Return the numbers that earlier stages have sent, with zeros where none has come to yet."""
    if graph.numbers is None:
        return []
    if graph.numbers in received:
        found: list[int] = received[graph.numbers].tolist()
        return found
    return [0] * graph.values[graph.numbers].shape[0]


class _StageInterpreter(TracingMode):
    """One run of a step, node by node."""

    def __init__(
        self,
        executor: StageExecutor,
        stage_graph: StageGraph,
        received: Mapping[int, Tensor],
        shapes: Shapes,
        seed: int,
    ):
        super().__init__()
        self.values: dict[int, Tensor] = dict(received)
        self._executor = executor
        self._nodes = executor.graph.nodes
        self._starts = executor.checkpoint_starts
        self._stage_graph = stage_graph
        self._shapes = shapes
        self._seed = seed
        self._numbers = _codes_of(executor.graph, received)
        self._next = 0
        self._inside = False
        self._seed_checkpoint(0)

    def watching(self, metrics: Sequence[nn.Module]) -> AbstractContextManager[None]:
        """Return a context in which metrics are refused that count in another stage."""
        return updates_watched(metrics, position=lambda: self._next, executes=self._stage_graph.executes)

    def module_call(self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run or skip a leaf module."""
        node = self._expect(name)
        if not self._stage_graph.executes[node.index]:
            return self._end(node, self._skip(node))
        with self._executor.interceptor.handled_by(None):
            if _get_current_function_mode() is not self:
                return self._end(node, self._run_inside(node, call, args, kwargs))
            self.__exit__(None, None, None)  # so that torch calls inside the leaf module cost nothing
            try:
                result = self._execute(node, call, args, kwargs)
            finally:
                self.__enter__()
        return self._end(node, result)

    def torch_call(self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run or skip a torch function between leaf modules."""
        if self._inside:
            return call(*args, **kwargs)
        if self._next >= len(self._nodes) or self._nodes[self._next].name != name:
            if not tensors((args, kwargs)):
                result = call(*args, **kwargs)
                if not tensors(result):
                    return result  # such as `torch.is_grad_enabled()`: not a node
            raise self._mismatch(f"called `{name}`")
        node = self._expect(name)
        if not self._stage_graph.executes[node.index]:
            return self._end(node, self._skip(node))
        return self._end(node, self._execute(node, call, args, kwargs))

    def numbers(self) -> Tensor:
        """Return the numbers that modules have returned up to here, for the next stage."""
        return torch.tensor(self._numbers, dtype=torch.int64, device=self._executor.device)

    def check_end(self) -> None:
        """Raise unless the step has ended where the traced step ends."""
        if self._nodes[self._next].name != RETURN:
            raise self._mismatch("ended")

    def _expect(self, name: str) -> Node:
        node = self._nodes[min(self._next, len(self._nodes) - 1)]
        if node.name != name:
            raise self._mismatch(f"called '{name}'")
        self._next += 1
        return node

    def _end(self, node: Node, result: Any) -> Any:
        following = node.index + 1
        if following == self._stage_graph.stop and not self._stage_graph.is_last:
            raise _StageFinished
        if self._starts[following]:
            self._seed_checkpoint(following)
        return result

    def _seed_checkpoint(self, start: int) -> None:
        """Seed a checkpoint that begins with the node `start`.

        A checkpoint keeps the generators' state of its beginning, and runs its calls again from there. So this is
        where it is seeded, and nothing in it is seeded again.
        """
        if self._starts[start]:
            self._executor.seed(self._seed, self._nodes[start])

    def _run_inside(self, node: Node, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a leaf module under a mode of the user, which lies above this one and so cannot be left."""
        self._inside = True
        try:
            return self._execute(node, call, args, kwargs)
        finally:
            self._inside = False

    def _execute(self, node: Node, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if node.is_random and node.checkpoint is None:
            self._executor.seed(self._seed, node)
        if node.index in self._stage_graph.given:
            self._check_given(node, tensors((args, kwargs)))
        if node.draws_in_python:
            with seeded_python(_mixed(self._seed, node)):
                result = call(*args, **kwargs)
        else:
            result = call(*args, **kwargs)
        if node.name == "__iter__":
            result = list(result)
        if node.has_plain:
            self._note_numbers(node, result)
        made = self._stage_graph.made_by.get(node.index)
        if made is not None:
            self._keep(node, *made, tensors(result))
        return iter(result) if node.name == "__iter__" else result

    def _check_given(self, node: Node, given: list[Tensor]) -> None:
        """Raise unless the call is given what this stage received for it."""
        identities = {id(tensor) for tensor in given}
        for value in self._stage_graph.given[node.index]:
            if id(self.values[value]) not in identities:
                maker = next(
                    (e for e in self._nodes if any(output.value == value for output in e.outputs)), "the batch"
                )
                raise TraceMismatchError(
                    f"{node} was given another tensor than the one that {maker} made. A hook or an attribute carries "
                    "it past the step, and that does not happen in this stage. Return the tensor from the module's "
                    "forward, and use what the call returns."
                )

    def _note_numbers(self, node: Node, result: Any) -> None:
        try:
            for number, codes in changed(node, result):
                self._numbers[number.start : number.start + number.count] = codes
        except ValueError as error:
            raise TraceMismatchError(
                f"{node} has {error}, and the other stages would not know. Return the same structure for every "
                "batch, with what changes in tensors or numbers, or train with strategy=ddp."
            ) from None

    def _keep(self, node: Node, count: int, places: list[tuple[int, int]], made: list[Tensor]) -> None:
        if len(made) != count:
            raise TraceMismatchError(
                f"{node} has {len(made)} tensors in its result, and the traced step has {count} there. Return the "
                "same structure for every batch, or train with strategy=ddp."
            )
        for place, value in places:
            tensor = made[place]
            shape = self._shapes[value]
            if shape is not None and not self._stage_graph.is_last and tensor.shape != shape:
                raise TraceMismatchError(
                    f"{node} made a tensor of shape {tuple(tensor.shape)} where {shape} was expected "
                    "for a batch like this: its shape depends on the values, and the next stage cannot know it. Move "
                    "what depends on values into one module's forward, or begin no stage between them."
                )
            self.values[value] = tensor

    def _skip(self, node: Node) -> Any:
        if isinstance(node.result, ValueRef):
            return self._look_up(node.result)
        result = rebuild(node.result, self._look_up)
        return iter(result) if node.name == "__iter__" else result

    def _look_up(self, leaf: Any) -> Any:
        if isinstance(leaf, ValueRef):
            found = self.values.get(leaf.value)
            if found is not None:
                return found
            shape = self._shapes[leaf.value]
            assert shape is not None, f"the shape of value {leaf.value} was not passed on"
            outer, self._inside = self._inside, True  # what makes a placeholder is not a node
            try:
                return self._executor.placeholder(leaf.value, shape)
            finally:
                self._inside = outer
        if isinstance(leaf, ScalarValue):
            return decoded(leaf, self._numbers)
        if isinstance(leaf, ParameterRef):
            return self._executor.held[leaf.name]
        return None if isinstance(leaf, Constant) else leaf

    def _mismatch(self, done: str) -> TraceMismatchError:
        expected = self._nodes[min(self._next, len(self._nodes) - 1)]
        return TraceMismatchError(
            f"the step {done}, but the traced step calls {expected} here. A pipeline needs a step that makes the "
            "same calls for every batch. Move the branch into one module's forward, which may run any code, or "
            "train with strategy=ddp."
        )


@dataclass(slots=True)
class PartitionedStep:
    """One step of the task, divided among stages, and the shapes that its values have for each kind of batch."""

    executor: StageExecutor
    stage_graphs: list[StageGraph]
    shapes: dict[tuple[int, Signature], Shapes] = field(default_factory=dict)
    """By stage and batch; filled as batches of new shapes come."""

    @classmethod
    def of(cls, executor: StageExecutor, stage_graphs: list[StageGraph], traced: Signature) -> PartitionedStep:
        """Return the step with the shapes of the batch that was traced."""
        known: Shapes = [value.shape for value in executor.graph.values]
        return cls(executor, stage_graphs, {(stage_graph.index, traced): known for stage_graph in stage_graphs})

    @property
    def graph(self) -> TracedGraph:
        """The traced step."""
        return self.executor.graph


@contextmanager
def updates_watched(
    metrics: Sequence[nn.Module], *, position: Callable[[], int], executes: Sequence[bool]
) -> Iterator[None]:
    """Raise UserError in this context if a metric is updated by calls that this stage does not execute.

    `position` tells the next call of the step, and `executes` which of them this stage makes. What others make are
    placeholders here, and would be counted.
    """
    before = [(metric, vars(metric).get("update")) for metric in metrics]
    for metric in metrics:
        vars(metric)["update"] = _watched(metric, position, executes)
    try:
        yield
    finally:
        for metric, update in before:
            if update is None:
                del vars(metric)["update"]
            else:
                vars(metric)["update"] = update


def _watched(metric: nn.Module, position: Callable[[], int], executes: Sequence[bool]) -> Callable[..., Any]:
    update: Callable[..., Any] = metric.update  # type: ignore[assignment]

    def watched(*args: Any, **kwargs: Any) -> Any:
        first = position()
        result = update(*args, **kwargs)
        if not all(executes[first : position()]):
            raise UserError(
                f"the metric {type(metric).__name__} is updated by calls of which an earlier stage than the last makes "
                "some. Update metrics at the end of the step, after the loss, and begin the last stage before that: "
                "strategy.split_points=[name_of_a_module]."
            )
        return result

    return watched
