"""Communication hooks: gradients reduced at low rank, and hooks of the user.

A hook is called as `hook(state, bucket)` and leaves the mean over ranks. These are generators: they yield the works
that they wait for, and the Reducer resumes them in the order of buckets (see `PendingHook`). PyTorch's hooks, which
return a future, can be registered as well.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import import_module
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from trainkit.errors import UserError, nearest

from ..reducer.bucket import GradBucket
from ..transports.process_group import CommunicationHook, HookSteps

Numbered = list[tuple[int, Tensor]]  # by position in the bucket


class ErrorFeedback:
    """Differences between gradients and what was sent of them, by parameter; they are added to the next gradients."""

    def __init__(self) -> None:
        self.by_name: dict[str, Tensor] = {}
        self._flats: dict[int, Tensor] = {}  # by bucket; `by_name` has views of them

    def of(self, bucket: GradBucket) -> Tensor:
        """Return the errors of a bucket, at first zeros: (numel,)."""
        flat = self._flats.get(bucket.index())
        if flat is None:
            flat = self._flats[bucket.index()] = torch.zeros_like(bucket.buffer())
            for name, error in zip(bucket.names(), bucket.gradients_in(flat), strict=True):
                if name in self.by_name:
                    error.copy_(self.by_name[name])
                self.by_name[name] = error
        return flat

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Replace all errors by those of a checkpoint."""
        self.by_name, self._flats = dict(saved), {}


def sum_of_errors(states: Sequence[Mapping[str, Any]], *, world_size: int) -> dict[str, Tensor]:
    """Return for each of `world_size` ranks an equal part of the errors that other ranks have saved."""
    names = dict.fromkeys(name for state in states for name in state["errors"])
    # Equal parts: the new ranks add up again to the sum that the old ones would have added to the next gradients.
    return {
        name: sum(state["errors"][name] for state in states if name in state["errors"]) / world_size for name in names
    }


def average_hook(group: dist.ProcessGroup, bucket: GradBucket) -> HookSteps:
    """Leave the mean, uncompressed."""
    buffer = bucket.buffer().div_(group.size())  # before the sum, which might overflow in fp16
    yield dist.all_reduce(buffer, group=group, async_op=True)
    return buffer


@dataclass(slots=True)
class PowerSGD:
    """State of the low-rank compression of Vogels et al. (2019), with error feedback and warm start.

    M (n, m)  ~  P (n, r) @ Q (m, r)^T        n * m numbers become (n + m) * r
    """

    group: dist.ProcessGroup
    rank: int = 2
    start_step: int = 10  # before it gradients are sent uncompressed: they change most then
    factors: dict[str, Tensor] = field(default_factory=dict, init=False)  # parameter -> Q
    errors: ErrorFeedback = field(default_factory=ErrorFeedback, init=False)
    steps: dict[int, int] = field(default_factory=dict, init=False)  # bucket -> steps so far
    first_step: int = field(default=0, init=False)  # of buckets without a number of steps

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, the factors and this rank's errors."""
        steps = max(self.steps.values(), default=self.first_step)
        return {"steps": steps, "factors": dict(self.factors), "errors": dict(self.errors.by_name)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Continue with the errors of this rank."""
        self.steps, self.first_step = {}, saved["steps"]
        # Factors of another rank than the present setting do not fit; those parameters begin with random ones.
        self.factors = {name: factor for name, factor in saved["factors"].items() if factor.shape[1] == self.rank}
        self.errors.load(saved["errors"])

    def load_from_ranks(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue with the errors of another number of ranks: their sum is kept."""
        self.load_state_dict({**states[0], "errors": sum_of_errors(states, world_size=self.group.size())})


def power_sgd_hook(state: PowerSGD, bucket: GradBucket) -> HookSteps:
    """Leave a low-rank approximation of the mean; its error is added to the next step's gradient."""
    index, buffer, world_size = bucket.index(), bucket.buffer(), state.group.size()
    step = state.steps.get(index, state.first_step)
    state.steps[index] = step + 1
    if step < state.start_step:
        return (yield from average_hook(state.group, bucket))
    errors, names = state.errors.of(bucket), bucket.names()
    buffer.copy_(errors.add_(buffer))
    matrices, vectors = _split_by_shape(bucket.gradients(), state.rank)
    # One power iteration a step: with the factor of the last step as a start, one is enough.
    factors = [state.factors.get(names[position]) for position, _ in matrices]
    lefts = [
        matrix @ (_first_factor(state.rank, index, position, matrix) if factor is None else factor.to(matrix.device))
        for (position, matrix), factor in zip(matrices, factors, strict=True)
    ]
    sent = _join([*lefts, *(vector for _, vector in vectors)], buffer).div_(world_size)
    yield dist.all_reduce(sent, group=state.group, async_op=True)
    _split_into([*lefts, *(vector for _, vector in vectors)], sent)
    # Each rank computes the same basis from the same sum, so it need not be sent.
    lefts = [_orthonormal(left) for left in lefts]
    rights = [matrix.t() @ left for (_, matrix), left in zip(matrices, lefts, strict=True)]
    sent = _join(rights, buffer).div_(world_size)
    yield dist.all_reduce(sent, group=state.group, async_op=True)
    _split_into(rights, sent)
    for (position, matrix), left, right in zip(matrices, lefts, rights, strict=True):
        matrix.copy_(left @ right.t())
        state.factors[names[position]] = right.nan_to_num_(0.0, 0.0, 0.0)  # or every later step would be NaN too
    errors.sub_(buffer).nan_to_num_(0.0, 0.0, 0.0)  # of gradients that overflowed, or NaN: they would stay
    for position, _ in vectors:  # sent uncompressed: they differ only by the other ranks' gradients
        state.errors.by_name[names[position]].zero_()
    return buffer


def _split_by_shape(gradients: Sequence[Tensor], rank: int) -> tuple[Numbered, Numbered]:
    """Return (position, matrix) of gradients that low rank makes smaller, and (position, gradient) of the others."""
    matrices, vectors = [], []
    for position, gradient in enumerate(gradients):
        can_be_matrix = gradient.dim() >= 2 and gradient.is_contiguous()  # a view, into which the result is written
        matrix = gradient.view(gradient.shape[0], -1) if can_be_matrix else gradient
        if matrix.dim() == 2 and 2 * rank * sum(matrix.shape) < matrix.numel():
            matrices.append((position, matrix))
        else:
            vectors.append((position, gradient))
    return matrices, vectors


def _first_factor(rank: int, index: int, position: int, matrix: Tensor) -> Tensor:
    """Return a random Q, the same on every rank."""
    # Not the global generator: its state differs between ranks, and drawing would change the user's random numbers.
    # A prime that exceeds the number of parameters in a bucket gives every parameter another seed.
    generator = torch.Generator().manual_seed(1_000_003 * index + position)
    random = torch.randn(matrix.shape[1], rank, generator=generator)
    return _orthonormal(random.to(matrix.device, matrix.dtype))


def _orthonormal(matrix: Tensor) -> Tensor:
    # torch has no QR decomposition in 16 bits.
    wide = matrix.float() if matrix.dtype in (torch.float16, torch.bfloat16) else matrix
    basis: Tensor = torch.linalg.qr(wide).Q
    return basis.to(matrix.dtype)


def _join(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else like.new_zeros(0)


def _split_into(tensors: Sequence[Tensor], flat: Tensor) -> None:
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))


HOOKS: dict[str, Callable[[Any, Any], HookSteps] | None] = {
    "none": None,
    "power_sgd": power_sgd_hook,
}


@runtime_checkable
class SavedHookState(Protocol):
    """A hook's state that checkpoints hold, for each rank."""

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain values."""

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore what `state_dict` returned on this rank."""


@runtime_checkable
class MergedHookState(SavedHookState, Protocol):
    """A hook's state that continues on another number of ranks."""

    def load_from_ranks(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Continue from the states of all ranks of the run that was saved."""


@dataclass(frozen=True, slots=True)
class CommHook:
    """A hook, and the function that makes its state once the process group exists."""

    name: str
    hook: CommunicationHook
    make_state: Callable[..., Any] | None  # called with the process group and the options; `None`: it is the group
    options: Mapping[str, Any]

    def state(self, group: dist.ProcessGroup) -> Any:
        """Return a new state of the hook for the ranks of `group`."""
        return group if self.make_state is None else self.make_state(group, **self.options)


def make_comm_hook(
    hook: str | CommunicationHook, *, state: str | Callable[..., Any] | None, options: Mapping[str, Any] | None
) -> CommHook | None:
    """Return the hook of the settings `comm_hook`, `comm_hook_state` and `comm_hook_options`; `None` for no hook.

    Raises UserError for names that cannot be imported or called, and for settings that exclude each other.
    """
    if not isinstance(options, Mapping | None):
        raise UserError(f"comm_hook_options must be a mapping such as {{rank: 2}}, got {options!r}.")
    options = dict(options or {})
    if isinstance(hook, str) and "." not in hook:
        return _builtin_hook(hook, state=state, options=options)
    function = _import_function("comm_hook", hook)
    make_state = None if state is None else _import_function("comm_hook_state", state)
    if make_state is None and options:
        raise UserError(
            f"comm_hook_options={options} belong to power_sgd or to strategy.comm_hook_state; set "
            "comm_hook_state to the import path of a class that is called with the process group and these options."
        )
    try:
        parameters = [] if make_state is None else list(inspect.signature(make_state).parameters.values())
    except ValueError:  # written in C
        parameters = []
    if parameters and all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
        _check_names(options, [parameter.name for parameter in parameters[1:]])  # the first is the process group
    name = hook if isinstance(hook, str) else getattr(hook, "__qualname__", type(hook).__qualname__)
    return CommHook(name, function, make_state, options)


def _builtin_hook(name: str, *, state: str | Callable[..., Any] | None, options: Mapping[str, Any]) -> CommHook | None:
    if name in ("bf16", "fp16"):
        raise UserError(f"comm_hook={name} is the setting reduce_dtype; type strategy.reduce_dtype={name}.")
    if name not in HOOKS:
        raise UserError(
            f"comm_hook={name!r} is unknown.{nearest(name, HOOKS)} Choose {', '.join(HOOKS)}, or the import path of a "
            "function such as torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook."
        )
    if state is not None:
        raise UserError(
            f"comm_hook_state belongs to a custom hook; comm_hook={name} is built in. Omit comm_hook_state."
        )
    hook = HOOKS[name]
    valid = [] if hook is None else [field.name for field in fields(PowerSGD) if field.init and field.name != "group"]
    _check_names(options, valid)
    for option, value in options.items():
        least = 0 if option == "start_step" else 1
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise UserError(f"comm_hook_options.{option} must be a whole number, at least {least}, got {value!r}.")
    return None if hook is None else CommHook(name, hook, PowerSGD, options)


def _check_names(options: Mapping[str, Any], valid: list[str]) -> None:
    for option in options:
        if option not in valid:
            remedy = f"Valid options: {', '.join(valid)}." if valid else "This hook has no options."
            raise UserError(f"comm_hook_options has no {option!r}.{nearest(option, valid)} {remedy}")


def _import_function(setting: str, value: str | Callable[..., Any]) -> Callable[..., Any]:
    function: Any = value
    if isinstance(value, str):
        module, _, name = value.rpartition(".")
        try:
            home = import_module(module)
        except ImportError as error:
            raise UserError(f"{setting}={value} cannot be imported: {error}.") from None
        function = getattr(home, name, None)
        if function is None:
            raise UserError(f"{setting}={value}: {module} has no {name!r}.{nearest(name, vars(home))}")
    if not callable(function):
        raise UserError(f"{setting} must be a function or its import path, got {value!r}.")
    return function  # type: ignore[no-any-return] # an attribute of a module
