"""TensorParallel: ranks that compute a module together, each with a part of its weights, on the same samples.

    blocks.0     rank 0   x ── norm ── widen [ a ] ── gelu ── shrink [ c ] ──┐
                 rank 1   x ── norm ── widen [ b ] ── gelu ── shrink [ d ] ──┴─ sum ── x + ...

Megatron-LM (Shoeybi et al., 2019) divides layers so. Between steps a divided parameter is an ordinary tensor, the part
of this rank, which `fully_shard` shards further. Inside its unit it is a DTensor of the whole, and so is every other
tensor there: PyTorch then decides for each operation what is divided, summed or sent, and the code of the module need
not know. At the end of the unit its outputs are whole on every rank.

The first call of each kind has whole weights, gathered on every rank. If it changes nothing of the module, it is
repeated in parts, and outputs, gradients and random numbers are compared. A unit that differs, that has operations
which cannot be computed in parts, or whose activations may be used elsewhere, gathers its weights in every call.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils.checkpoint import checkpoint

from trainkit.devices import accelerators_in_use, generator_state
from trainkit.errors import UserError
from trainkit.files import first_line
from trainkit.model.attribute_snapshot import PLAIN, AttributeSnapshot
from trainkit.rng import preserve_rng, rng_state, set_rng_state
from trainkit.tree import map_tensors, tensors_in, tree_leaves

from .tensor_operations import InParts, NotDivisible, replicated, whole
from .tensor_plan import Division, TensorUnit, divisions

logger = logging.getLogger(__name__)

_SHARE_OF_TOTAL = 0.01
"""Gradients may differ by rounding of this share of the norm of all of a unit: some are zero but for rounding."""
_SEED = 271828  # of the gradients of outputs with which a unit is tried; any other would do


class TensorParallel:
    """Divides the parameters of units over the ranks of a mesh of one dimension, in place."""

    def __init__(self, task: nn.Module, units: Sequence[TensorUnit], mesh: DeviceMesh, *, is_auto: bool) -> None:
        self.mesh, self._group = mesh, mesh.get_group()
        self.rank, self.size = mesh.get_local_rank(), mesh.size()
        self.is_in_pass = True
        """False between steps, when the units have no weights."""
        self.num_passes = 0
        """Forwards so far, each with its backward."""
        self._divided: dict[int, Division] = {}  # by the id of the task's parameter
        self._units = []
        for unit in units:
            by_name = {}
            for layer, kind in unit.kinds.items():
                inner = layer.removeprefix(unit.name).removeprefix(".")
                module = task.get_submodule(layer)
                assert isinstance(module, nn.Linear)
                for key, division in divisions(module, kind).items():
                    by_name[f"{inner}.{key}".lstrip(".")] = division
                    self._divided[id(getattr(module, key))] = division
            self._units.append(_RunningUnit(unit, by_name, self, is_auto=is_auto))
        for parameter in task.parameters():
            if id(parameter) in self._divided:
                parameter.data = self._divided[id(parameter)].part(parameter.data, self.rank, self.size)

    def division_of(self, parameter: Tensor) -> Division | None:
        """Return how a parameter of the task is divided; `None` if every rank has the whole."""
        return self._divided.get(id(parameter))

    def join(self, division: Division, part: Tensor) -> Tensor:
        """Return the whole tensor of which each rank has a part; collective over tensor-parallel ranks."""
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, part.detach().contiguous(), group=self._group)
        return division.join(parts)

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Leave the mean over the tensor-parallel ranks in each tensor; collective over them."""
        by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
        for tensor in tensors:
            by_dtype[tensor.dtype].append(tensor)
        for same in by_dtype.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in same])
            dist.all_reduce(flat, group=self._group)
            flat /= self.size
            for tensor, part in zip(same, flat.split([tensor.numel() for tensor in same]), strict=True):
                tensor.copy_(part.view(tensor.shape))

    def spread(self, value: Tensor) -> Tensor:
        """Return the largest difference of a number between tensor-parallel ranks; collective over them."""
        extremes = torch.stack([value, -value]).double()
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self._group)
        return extremes.sum()

    def any_rank(self, flag: bool) -> bool:
        """Return True if `flag` is true on any tensor-parallel rank; collective over them."""
        value = torch.tensor([float(flag)], device=self.mesh.device_type)
        dist.all_reduce(value, dist.ReduceOp.MAX, group=self._group)
        return bool(value.item())

    def same_on_ranks(self, value: float) -> bool:
        """Return True on all tensor-parallel ranks if all have this value; collective over them."""
        extremes = torch.tensor([value, -value], dtype=torch.float64).to(self.mesh.device_type)
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=self._group)
        largest, smallest = extremes.tolist()
        return largest == -smallest or math.isnan(value)

    def install(self) -> None:
        """Let the ranks compute the units together."""
        for unit in self._units:
            unit.install()

    def remove(self) -> None:
        """Give the modules their forward back."""
        for unit in self._units:
            unit.remove()


class _RunningUnit:
    """A module whose forward is computed by all tensor-parallel ranks."""

    def __init__(
        self, unit: TensorUnit, by_name: Mapping[str, Division], parallel: TensorParallel, *, is_auto: bool
    ) -> None:
        self.name, self.module = unit.name, unit.module
        self.class_name = type(unit.module).__name__  # `fully_shard` gives it another class
        self.device = torch.device(parallel.mesh.device_type)
        self._by_name, self._parallel, self._is_auto = by_name, parallel, is_auto
        self._shapes = {  # of the parts
            name: division.part_shape(self.module.get_parameter(name).shape, parallel.size)
            for name, division in by_name.items()
        }
        self._inner_modules = [(name, module) for name, module in self.module.named_modules() if name]
        self._reason: str | None = None  # why it gathers its weights
        self._tried: dict[tuple[Any, ...], int] = {}  # kind of a call -> the pass of the first one
        self._former = vars(self.module).get("forward")
        # Of a module with activation checkpointing the forward that is recomputed: what is recomputed must contain the
        # exchange of parameters.
        plain_forward = getattr(type(self.module), "plain_forward", None)
        self._recomputes = plain_forward is not None
        self._forward = self.module.forward if plain_forward is None else partial(plain_forward, self.module)

    @property
    def gathers(self) -> bool:
        """True if each rank computes the module with whole weights."""
        return self._reason is not None

    def install(self) -> None:
        """Let calls of the module come to `run`."""
        self.module.forward = self.run  # hooks of the module stay around it

    def remove(self) -> None:
        """Give the module its forward back."""
        vars(self.module).pop("forward", None)
        if self._former is not None:
            self.module.forward = self._former

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Return the outputs of the module; collective over tensor-parallel ranks."""
        if not self._parallel.is_in_pass:  # a callback's call, perhaps of one rank: the others would not come
            raise UserError(
                f"{self.name} is called between steps, and tensor-parallel ranks compute it together. In a callback "
                "use, on every rank: `with run.whole_task() as task:`, in which the task has all values."
            )
        if self.gathers:
            return self._computed(True, args, kwargs)
        # What decides which code of the module runs: other code may have another fault.
        key = (self.module.training, torch.is_grad_enabled(), *map(_kind_of, tree_leaves((args, kwargs))))
        reason = self._open_reason(args, kwargs)
        if key in self._tried:
            if reason is not None:  # not agreed on by a message, which each call would have to wait for
                raise NotDivisible(self.name, reason)
            # Until the end of the pass: a checkpoint around the unit may run the first call again in backward.
            return self._computed(self._tried[key] == self._parallel.num_passes, args, kwargs)
        self._tried[key] = self._parallel.num_passes
        self._gather_if(reason)
        if self.gathers:
            return self._computed(True, args, kwargs)
        self._check_same_inputs(args, kwargs)
        # This one counts, so that what the code changes is changed once.
        attributes, versions = AttributeSnapshot(self.module), self._versions()
        trial = _Trial(self, args, kwargs)
        outputs = self._computed(True, args, kwargs)
        changed = [*attributes.changed(), *attributes.replaced()]
        if changed or self._versions() != versions:
            self._gather_if(f"it changes {changed[0] if changed else 'a buffer'} of the module")
        elif not _is_plain(outputs, list, dict):
            self._gather_if(f"it returns a {type(outputs).__name__}, or an object in it")
        else:
            self._gather_if(trial.reason())
        return outputs

    def _versions(self) -> list[int]:
        # Private: torch has no public count of writes to a tensor. It counts none of those of inference mode.
        return [0 if buffer.is_inference() else buffer._version for buffer in self.module.buffers()]

    def _open_reason(self, args: Any, kwargs: Any) -> str | None:
        """Return why activations would leave the module; `None` if no reason is seen before it runs."""
        for name, module in self._inner_modules:
            of_forward, of_backward = module._forward_hooks or module._forward_pre_hooks, module._backward_hooks
            if of_forward or of_backward or module._backward_pre_hooks:
                return f"{name} has hooks, which would get parts of activations"
        other = next((value for value in (*args, *kwargs.values()) if not _is_plain(value)), None)
        if other is not None:
            hint = " (set use_cache=False)" if "Cache" in type(other).__name__ else ""
            return f"it is called with a {type(other).__name__}{hint}, which the ranks would have to share"
        return None

    def _gather_if(self, reason: str | None) -> None:
        """Compute the module with whole weights from here on, on all ranks, if a reason is given on any; collective."""
        if not self._parallel.any_rank(reason is not None):
            return
        self._reason = reason or "it differs on another rank"
        if not self._is_auto:
            raise UserError(
                f"tensor_plan divides {self.name} ({self.class_name}), but computed in parts {self._reason}. Take its "
                "layers out of strategy.tensor_plan, or set strategy.tensor_plan=auto, which gathers its weights."
            )
        if self._parallel.rank == 0:
            logger.warning(
                "%s (%s) is computed with gathered weights on every tensor-parallel rank: in parts, %s.",
                self.name,
                self.class_name,
                self._reason,
            )

    def _computed(self, gathers: bool, args: Any, kwargs: Any) -> Any:
        if self._recomputes and torch.is_grad_enabled():
            return checkpoint(self._compute, gathers, args, kwargs, use_reentrant=False)
        return self._compute(gathers, args, kwargs)

    def _compute(self, gathers: bool, args: Any, kwargs: Any) -> Any:
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        for name, shape in self._shapes.items():
            with torch._C.DisableTorchFunctionSubclass():
                is_part = name in parameters and Tensor.size(parameters[name]) == shape
            if not is_part:
                raise UserError(
                    f"{self.name} is called with another tensor in place of {name}, as by torch.func.functional_call, "
                    "and tensor-parallel ranks divide this parameter. Set strategy.tensor_plan without its layer."
                )
        try:
            return self.compute(parameters, args, kwargs, gathers=gathers)
        except Exception as error:
            if not gathers and not isinstance(error, UserError):
                error.add_note(
                    f"raised in {self.name} ({self.class_name}), which tensor-parallel ranks compute in parts. If it "
                    "is not raised with strategy.tensor_parallel=1, set strategy.tensor_plan without its layers."
                )
            raise

    def _check_same_inputs(self, args: Any, kwargs: Any) -> None:
        """Raise UserError unless all tensor-parallel ranks call the unit with the same values; collective over them."""
        tensors = [tensor for tensor in tensors_in((args, kwargs)) if not tensor.is_complex()]
        digest = sum(float(tensor.detach().double().sum()) for tensor in tensors)
        if not self._parallel.same_on_ranks(digest):
            raise UserError(
                f"{self.name} has other inputs on each tensor-parallel rank, and they train on the same samples: their "
                "data or random transforms differ. Let samples depend only on their index and torch's generator."
            )

    def compute(self, parameters: Mapping[str, Tensor], args: Any, kwargs: Any, *, gathers: bool) -> Any:
        """Return the outputs with these parameters of the module, of which the divided ones are this rank's parts."""
        mesh = self._parallel.mesh
        if gathers:
            with torch._C.DisableTorchFunctionSubclass():  # elsewhere a part refuses to be used
                wholes = {
                    name: _GatheredWeight.apply(parameters[name], division, self._parallel)  # type: ignore[no-untyped-call]
                    for name, division in self._by_name.items()
                }
            for weight in wholes.values():
                weight.__class__, weight._is_param = GatheredWeight, True
            with self._replaced({**parameters, **wholes}):
                outputs = self._forward(*args, **kwargs)
            if any(not weight.is_inference() and weight._version for weight in wholes.values()):
                raise lost_change(self.name)
            return outputs

        def distributed(tensor: Tensor) -> DTensor:
            return replicated(tensor, mesh)

        # By id: a parameter that two modules share is one DTensor.
        placements = {id(parameters[name]): [division.placement] for name, division in self._by_name.items()}
        with torch._C.DisableTorchFunctionSubclass():
            unique = {
                id(parameter): DTensor.from_local(
                    parameter, mesh, placements.get(id(parameter), [Replicate()]), run_check=False
                )
                for parameter in parameters.values()
            }
        for tensor in unique.values():
            tensor._is_param = True  # by which torch knows a parameter
        tensors = {name: unique[id(parameter)] for name, parameter in parameters.items()}
        with self._replaced(tensors), InParts(self.name):
            outputs = self._forward(*map_tensors(args, distributed), **map_tensors(kwargs, distributed))

        def end(tensor: DTensor) -> Tensor:
            local: Tensor = _End.apply(whole(tensor, mesh), self.name)  # type: ignore[no-untyped-call]
            return local

        return map_tensors(outputs, lambda tensor: end(tensor) if isinstance(tensor, DTensor) else tensor)

    @contextmanager
    def _replaced(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Let the module have other tensors in place of its parameters in the block."""
        former: list[tuple[dict[str, Any], str, Tensor]] = []
        for name, tensor in tensors.items():
            owner, _, key = name.rpartition(".")
            # Not by assignment: a module refuses a tensor that is no parameter, as a DTensor of a graph is none.
            table = self.module.get_submodule(owner)._parameters
            former.append((table, key, table[key]))  # type: ignore[arg-type] # named_parameters has no None
            table[key] = cast(nn.Parameter, tensor)
        try:
            yield
        finally:
            for table, key, parameter in former:
                table[key] = cast(nn.Parameter, parameter)


def _is_plain(value: Any, *containers: type) -> bool:
    """Return True for tensors, numbers and texts, also in tuples and in `containers`."""
    if type(value) in (tuple, *containers):
        return all(_is_plain(part, *containers) for part in (value.values() if type(value) is dict else value))
    return isinstance(value, (Tensor, *PLAIN))


def _kind_of(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.dtype, leaf.dim(), leaf.requires_grad
    return type(leaf), leaf if isinstance(leaf, bool) else None


class _Trial:
    """One call of a unit, repeated with whole and with divided weights."""

    def __init__(self, unit: _RunningUnit, args: Any, kwargs: Any) -> None:
        self._unit = unit
        # Copies, as a call may change its inputs.
        self._inputs = map_tensors((args, kwargs), lambda tensor: tensor.detach().clone())
        self._need_gradients = [tensor.requires_grad for tensor in tensors_in((args, kwargs))]
        self._random_state = rng_state(accelerators_in_use())
        self._epsilon = 0.0  # of the least precise type in the call

    def reason(self) -> str | None:
        """Return why the unit cannot be computed in parts; `None` if it can. Collective over tensor-parallel ranks."""
        try:
            expected = self._call(gathers=True)
            found = self._call(gathers=False)
        except torch.OutOfMemoryError:
            raise
        except NotDivisible as error:
            return error.reason
        except Exception as error:
            return f"it raises {type(error).__name__}: {first_line(error).rstrip('.')}"
        return expected.difference(found, self._epsilon)

    def _call(self, *, gathers: bool) -> _Called:
        module = self._unit.module
        needs = iter(self._need_gradients)
        # Detached, as the gradients of the trial belong to no step.
        inputs = map_tensors(self._inputs, lambda tensor: tensor.clone().requires_grad_(next(needs)))
        named = dict(module.named_parameters(remove_duplicate=False))
        with torch._C.DisableTorchFunctionSubclass():
            unique = {id(p): p.detach().requires_grad_(p.requires_grad) for p in named.values()}
        parameters = {name: unique[id(parameter)] for name, parameter in named.items()}
        with preserve_rng():
            set_rng_state(self._random_state, accelerators_in_use())
            # Other hooks, those of activation checkpointing, would keep nothing for this backward. The leaves are not
            # what the module gets: it may change its inputs in place.
            with saved_tensors_hooks(Tensor.detach, _unchanged):
                args, kwargs = map_tensors(inputs, lambda leaf: leaf.clone() if leaf.requires_grad else leaf)
                outputs = list(tensors_in(self._unit.compute(parameters, args, kwargs, gathers=gathers)))
            of = [*tensors_in(inputs), *parameters.values()]
            gradients = self._gradients(outputs, of)
            random_state = torch.get_rng_state(), generator_state(self._unit.device)
        self._note_precision([*outputs, *parameters.values()])
        names = [*(f"input {index}" for index in range(len(self._need_gradients))), *parameters]
        return _Called([output.detach() for output in outputs], dict(zip(names, gradients, strict=True)), random_state)

    def _gradients(self, outputs: Sequence[Tensor], of: Sequence[Tensor]) -> list[Tensor | None]:
        differentiable = [output for output in outputs if output.requires_grad]
        wanted = [tensor for tensor in of if tensor.requires_grad]
        if not differentiable or not wanted:
            return [None] * len(of)
        # The same on every rank, and another one for each element: a sum would miss elements that are exchanged.
        generator = torch.Generator().manual_seed(_SEED)
        weights = [
            torch.randn(output.shape, generator=generator).to(output.device, output.dtype) for output in differentiable
        ]
        gradients = iter(torch.autograd.grad(differentiable, wanted, weights, allow_unused=True))
        return [next(gradients) if tensor.requires_grad else None for tensor in of]

    def _note_precision(self, tensors: Sequence[Tensor]) -> None:
        kind = self._unit.device.type
        dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
        if torch.is_autocast_enabled(kind):
            dtypes.add(torch.get_autocast_dtype(kind))
        self._epsilon = max([torch.finfo(dtype).eps for dtype in dtypes], default=0.0)


@dataclass(frozen=True)
class _Called:
    """What one call of a unit has made."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor | None]
    random_state: tuple[Any, ...]

    def difference(self, found: _Called, epsilon: float) -> str | None:
        """Return what is different in another call, `None` if nothing is except for rounding."""
        return next(self._differences(found, epsilon), None)

    def _differences(self, found: _Called, epsilon: float) -> Iterator[str]:
        # Half of the digits: orders of summation differ in fewer, and errors in more.
        tolerance = math.sqrt(epsilon)
        shapes, expected_shapes = ([(o.shape, o.dtype) for o in call.outputs] for call in (found, self))
        if shapes != expected_shapes:
            yield f"its outputs have the shapes and types {shapes} instead of {expected_shapes}"
            return
        for index, (output, other) in enumerate(zip(self.outputs, found.outputs, strict=True)):
            if _distance(output, other) > tolerance * _norm(output):
                yield f"its output {index} has other values"
        total = math.hypot(*(_norm(gradient) for gradient in self.gradients.values() if gradient is not None))
        for name, gradient in self.gradients.items():
            other_gradient = found.gradients[name]
            if gradient is None or other_gradient is None or gradient.shape != other_gradient.shape:
                if not (gradient is None and other_gradient is None):
                    yield f"the gradient of {name} has another shape"
            elif _distance(gradient, other_gradient) > tolerance * (_norm(gradient) + _SHARE_OF_TOTAL * total):
                yield f"{name} has another gradient"
        states = zip(self.random_state, found.random_state, strict=True)
        if not all(state is None or torch.equal(state, other) for state, other in states):
            yield "it draws other random numbers"


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.detach().double()))


def _distance(expected: Tensor, found: Tensor) -> float:
    """Return the norm of the difference; that of what is not finite where it is expected counts zero."""
    difference = (expected.detach().double() - found.detach().double()).where(expected.isfinite(), 0.0)
    # Infinite and not NaN, with which every comparison would be false.
    return float(torch.linalg.vector_norm(difference).nan_to_num(math.inf))


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def lost_change(unit: str) -> UserError:
    """Return the error of a unit that changes a weight."""
    return UserError(
        f"a weight of {unit} was changed, got a hook, or had its data or gradient read during a step, where it is a "
        "gathered copy: the change would be lost. Change parameters in a callback's on_step_end, in `with "
        "run.whole_task() as task:`, or set strategy.tensor_plan without its layers."
    )


class GatheredWeight(Tensor):
    """A gathered copy of a weight, of which changes by `data` are seen: they would be lost."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment] # results are tensors

    def _refuse(self, *_: Any) -> Any:
        raise lost_change("a module that tensor-parallel ranks compute together")

    is_leaf = True  # as of a parameter
    data = grad = property(_refuse, _refuse)
    register_hook = register_post_accumulate_grad_hook = requires_grad_ = _refuse  # type: ignore[assignment]


class _End(torch.autograd.Function):
    """The end of a unit that is computed in parts: gradients of its gradients would not be summed over ranks."""

    @staticmethod
    def forward(context: Any, output: Tensor, unit: str) -> Tensor:
        context.unit = unit
        # A clone, as the user may change the output in place, and a view would not tell `fully_shard`.
        return output.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise UserError(
                f"the step takes gradients of gradients (create_graph=True) of {context.unit}, which tensor-parallel "
                "ranks compute in parts. Set strategy.tensor_plan without its layers, or strategy.tensor_parallel=1."
            )
        return gradient, None


class _GatheredWeight(torch.autograd.Function):
    """A whole weight, of whose gradient each rank takes its part: all compute the same one."""

    @staticmethod
    def forward(context: Any, part: Tensor, division: Division, parallel: TensorParallel) -> Tensor:
        context.division, context.parallel = division, parallel
        return parallel.join(division, part)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        parallel = context.parallel
        return context.division.part(gradient, parallel.rank, parallel.size), None, None
