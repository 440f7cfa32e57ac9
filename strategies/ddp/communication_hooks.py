"""Ways to reduce a bucket with fewer bytes: half-precision, low rank, or not in every step.

Each hook is called as `hook(state, bucket)` and leaves the mean over ranks. These are generators: they yield what
they wait for, and the Reducer lets them go on in the order of buckets (see `hook_run`). PyTorch's own hooks, which
return a future, can be registered as well.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .gradient_bucket import GradientBucket

Steps = Generator[Any, Any, Tensor]


def average_hook(group: dist.ProcessGroup, bucket: GradientBucket) -> Steps:
    """Leave the mean, uncompressed."""
    buffer = bucket.buffer().div_(group.size())
    yield dist.all_reduce(buffer, group=group, async_op=True)
    return buffer


def fp16_hook(group: dist.ProcessGroup, bucket: GradientBucket) -> Steps:
    """Leave the mean, sent as float16; gradients above 65504 overflow."""
    return _cast_hook(group, bucket, torch.float16)


def bf16_hook(group: dist.ProcessGroup, bucket: GradientBucket) -> Steps:
    """Leave the mean, sent as bfloat16: the range of float32 with 8 bits of precision."""
    return _cast_hook(group, bucket, torch.bfloat16)


def _cast_hook(group: dist.ProcessGroup, bucket: GradientBucket, dtype: torch.dtype) -> Steps:
    buffer = bucket.buffer()
    sent = buffer.div(group.size()).to(dtype)
    yield dist.all_reduce(sent, group=group, async_op=True)
    return buffer.copy_(sent)


@dataclass(slots=True)
class PowerSGD:
    """State of the low-rank compression of Vogels et al. (2019), with error feedback and warm start.

    M (n, m)  ~  P (n, r) @ Q (m, r)^T        n * m numbers become (n + m) * r
    """

    group: dist.ProcessGroup
    rank: int = 2
    start_step: int = 10  # before it gradients are sent whole: they change most then
    factors: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # (bucket, position) -> Q
    errors: dict[int, Tensor] = field(default_factory=dict)  # bucket -> what was not sent yet
    steps: dict[int, int] = field(default_factory=dict)


def power_sgd_hook(state: PowerSGD, bucket: GradientBucket) -> Steps:
    """Leave a low-rank approximation of the mean; what it lacks is added to the next step's gradient."""
    index, buffer, world_size = bucket.index(), bucket.buffer(), state.group.size()
    step = state.steps[index] = state.steps.get(index, -1) + 1
    if step < state.start_step:
        buffer.div_(world_size)
        yield dist.all_reduce(buffer, group=state.group, async_op=True)
        return buffer
    if index in state.errors:
        buffer.add_(state.errors[index])
    whole = buffer.clone()
    matrices, vectors = _split_by_shape(bucket.gradients(), state.rank)
    lefts = [matrix @ _factor(state, index, position, matrix) for position, matrix in matrices]
    sent = _join([*lefts, *(vector for _, vector in vectors)], buffer).div_(world_size)
    yield dist.all_reduce(sent, group=state.group, async_op=True)
    _split_into([*lefts, *(vector for _, vector in vectors)], sent)
    lefts = [_orthonormal(left) for left in lefts]
    rights = [matrix.t() @ left for (_, matrix), left in zip(matrices, lefts, strict=True)]
    sent = _join(rights, buffer).div_(world_size)
    yield dist.all_reduce(sent, group=state.group, async_op=True)
    _split_into(rights, sent)
    for (position, matrix), left, right in zip(matrices, lefts, rights, strict=True):
        matrix.copy_(left @ right.t())
        state.factors[index, position] = right
    state.errors[index] = whole.sub_(buffer)
    _forget_errors_of_vectors(state.errors[index], bucket, vectors)
    return buffer


def _split_by_shape(
    gradients: Sequence[Tensor], rank: int
) -> tuple[list[tuple[int, Tensor]], list[tuple[int, Tensor]]]:
    """Return (position, matrix) of gradients that low rank makes smaller, and the others."""
    matrices, vectors = [], []
    for position, gradient in enumerate(gradients):
        matrix = gradient.view(gradient.shape[0], -1) if _can_be_matrix(gradient) else gradient
        if matrix.dim() == 2 and 2 * rank * sum(matrix.shape) < matrix.numel():
            matrices.append((position, matrix))
        else:
            vectors.append((position, gradient))
    return matrices, vectors


def _can_be_matrix(gradient: Tensor) -> bool:
    return gradient.dim() >= 2 and gradient.is_contiguous()


def _factor(state: PowerSGD, index: int, position: int, matrix: Tensor) -> Tensor:
    """Return Q of the last step, or at first the same random one on every rank."""
    known = state.factors.get((index, position))
    if known is not None:
        return known
    generator = torch.Generator().manual_seed(1_000_003 * index + position)
    random = torch.randn(matrix.shape[1], state.rank, generator=generator)
    return _orthonormal(random.to(matrix.device, matrix.dtype))


def _orthonormal(matrix: Tensor) -> Tensor:
    wide = matrix.float() if matrix.dtype in (torch.float16, torch.bfloat16) else matrix
    basis: Tensor = torch.linalg.qr(wide).Q
    return basis.to(matrix.dtype)


def _join(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else like.new_zeros(0)


def _split_into(tensors: Sequence[Tensor], flat: Tensor) -> None:
    for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(part.view(tensor.shape))


def _forget_errors_of_vectors(error: Tensor, bucket: GradientBucket, vectors: Sequence[tuple[int, Tensor]]) -> None:
    """Vectors are sent whole: what differs from the local ones is the other ranks' part, not an error."""
    places = bucket.gradients_in(error)
    for position, _ in vectors:
        places[position].zero_()


@dataclass(slots=True)
class AveragePeriod:
    """State of local SGD: every rank steps on its own gradients, and parameters are averaged now and then."""

    group: dist.ProcessGroup
    start_step: int = 100  # before it gradients are averaged in every step
    period: int = 8  # steps between two averagings of parameters
    step: int = 0

    def after_step(self, parameters: Sequence[nn.Parameter]) -> None:
        """Average the parameters if it is time; collective."""
        self.step += 1
        if self.step <= self.start_step or self.step % self.period:
            return
        with torch.no_grad():
            for parameter in parameters:
                mean = parameter.detach().div(self.group.size())
                dist.all_reduce(mean, group=self.group)
                parameter.copy_(mean)


def local_sgd_hook(state: AveragePeriod, bucket: GradientBucket) -> Steps:
    """Leave the mean at first, later the rank's own gradient."""
    buffer = bucket.buffer()
    if state.step < state.start_step:
        buffer.div_(state.group.size())
        yield dist.all_reduce(buffer, group=state.group, async_op=True)
    return buffer


HOOKS: dict[str, Callable[[Any, Any], Steps] | None] = {
    "none": None,
    "fp16": fp16_hook,
    "bf16": bf16_hook,
    "power_sgd": power_sgd_hook,
    "local_sgd": local_sgd_hook,
}
