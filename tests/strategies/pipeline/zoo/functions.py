"""Functions between modules: with a backward of their own, in contexts of torch, and of every kind of operation."""

import copy
from functools import cache, partial

import numpy
import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

# ---- Functions with a backward of their own


class _Reverse(torch.autograd.Function):
    """The gradient reversal of domain-adversarial training."""

    @staticmethod
    def forward(ctx, inputs, scale):
        ctx.scale = scale
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.scale * gradient, None


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        return inputs.mul(4.0).round().div(4.0)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class _Affine(torch.autograd.Function):
    """Uses a parameter, saves tensors, and returns two results."""

    @staticmethod
    def forward(ctx, inputs, weight):
        ctx.save_for_backward(inputs, weight)
        return inputs @ weight, inputs.sum()

    @staticmethod
    def backward(ctx, gradient, gradient_of_sum):
        inputs, weight = ctx.saved_tensors
        return gradient @ weight.T + gradient_of_sum, 2.0 * inputs.T @ gradient


class _InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        ctx.mark_dirty(inputs)
        return inputs.mul_(0.5)

    @staticmethod
    def backward(ctx, gradient):
        return 3.0 * gradient


class _WithContext(torch.autograd.Function):
    @staticmethod
    def forward(inputs, scale=2.0):
        return inputs.sin() * scale

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx, gradient):
        return ctx.saved_tensors[0].cos() * gradient * 5.0, None


class _Nested(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        return _Reverse.apply(inputs.tanh(), 2.0) + 1.0

    @staticmethod
    def backward(ctx, gradient):
        return 7.0 * gradient


class _SavesItsResult(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        result = inputs.exp()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0] * 0.5


class _WithIndices(torch.autograd.Function):
    """Returns indices that have no gradient, and values."""

    @staticmethod
    def forward(ctx, inputs):
        values, indices = inputs.sort(-1)
        ctx.mark_non_differentiable(indices)
        ctx.indices = indices
        return values, indices

    @staticmethod
    def backward(ctx, gradient, _):
        return torch.zeros_like(gradient).scatter(-1, ctx.indices, gradient)


class _WithNone(torch.autograd.Function):
    """Returns two results, of which one may have no gradient, and asks which inputs need one."""

    @staticmethod
    def forward(ctx, inputs, weight, unused):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(inputs, weight)
        return inputs * weight.sum(), inputs.square()

    @staticmethod
    def backward(ctx, gradient, square):
        inputs, weight = ctx.saved_tensors
        assert square is None
        of_weight = (gradient * inputs).sum().expand_as(weight) if ctx.needs_input_grad[1] else None
        return gradient * weight.sum(), of_weight, None


class _Reversible(torch.autograd.Function):
    """Computes its graph again in backward, as reversible layers do."""

    @staticmethod
    def forward(ctx, inputs, layer, weight, bias):
        ctx.layer = layer
        ctx.save_for_backward(inputs)
        return layer(inputs).sin()

    @staticmethod
    def backward(ctx, gradient):
        inputs = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            result = ctx.layer(inputs).sin()
        layer = ctx.layer
        found = torch.autograd.grad(result, (inputs, layer.weight, layer.bias), gradient)
        return found[0], None, found[1], found[2]


reverse = _Reverse.apply  # as users keep it


def _affine(piece, x):
    out, total = _Affine.apply(x, piece.layer.weight)
    return out + total


@torch.library.custom_op("zoo::scaled_sine", mutates_args=())
def _scaled_sine(inputs: torch.Tensor, scale: float) -> torch.Tensor:
    return inputs.sin() * scale


_scaled_sine.register_autograd(
    lambda ctx, gradient: (gradient * ctx.saved_tensors[0].cos() * 2.0, None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)


def _with_none(piece, x):
    first, _ = _WithNone.apply(x, piece.layer.weight, 3.0)
    return first


def _with_indices(piece, x):
    values, indices = _WithIndices.apply(x)
    return values + x.gather(-1, indices.flip(-1))


OWN_BACKWARD = {
    "gradient reversal": lambda piece, x: _Reverse.apply(x, 0.7),
    "a Function by a name bound before": lambda piece, x: reverse(x, 0.7),
    "straight-through": lambda piece, x: _StraightThrough.apply(x) + x,
    "a parameter and two results": _affine,
    "written in place by a Function": lambda piece, x: _InPlace.apply(x * 1.0),
    "setup_context": lambda piece, x: _WithContext.apply(x),
    "nested Functions": lambda piece, x: _Nested.apply(x),
    "a saved result": lambda piece, x: _SavesItsResult.apply(x),
    "results without a gradient": _with_indices,
    "gradients that are None": _with_none,
    "a graph made again in backward": lambda piece, x: _Reversible.apply(
        x, piece.layer, piece.layer.weight, piece.layer.bias
    ),
    "custom_op": lambda piece, x: _scaled_sine(x, 2.0) + x,
    "reentrant checkpoint": lambda piece, x: checkpoint(
        lambda given: piece.layer(given).sin() * given, x, use_reentrant=True
    ),
    "checkpoint": lambda piece, x: checkpoint(
        lambda given: piece.layer(_Reverse.apply(given.sin(), 2.0)) * given, x, use_reentrant=False
    ),
}

# ---- Calls that hide others


def _twice(inputs: torch.Tensor) -> torch.Tensor:
    return inputs * 2 + inputs.sin()


_scripted = torch.jit.script(_twice)


@cache
def _compiled():
    return torch.compile(_twice, backend="eager")


def _captured(piece, x):
    """Keep the argument and the result of a module by hooks that the step registers and removes."""
    kept = []
    handles = [
        piece.layer.register_forward_pre_hook(lambda module, args: kept.append(args[0])),
        piece.layer.register_forward_hook(lambda module, args, output: kept.append(output)),
        piece.layer.register_forward_hook(lambda module, args, output: kept.append(output * 2)),
    ]
    out = piece.layer(x)
    for handle in handles:
        handle.remove()
    return out + kept[0] * kept[1] + kept[2]


def _doubled(piece, x):
    """Change the result of a module by a hook that the step registers and removes."""
    handle = piece.layer.register_forward_hook(lambda module, args, output: output * 2)
    out = piece.layer(x)
    handle.remove()
    return piece.layer(out)


def _per_sample(piece, x):
    """Weigh samples by the norm of their own gradients."""

    def loss(parameters, sample):
        return torch.func.functional_call(piece.layer, parameters, (sample,)).square().sum()

    parameters = dict(piece.layer.named_parameters())
    gradients = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    return x * gradients["weight"].square().sum((1, 2)).tanh()[:, None]


def _slope(piece, x):
    """Ask for the gradient of a tensor that the step itself makes a leaf."""
    moved = torch.zeros_like(x).requires_grad_()
    (slope,) = torch.autograd.grad(piece.layer(x.detach() + moved).square().sum(), moved)
    return x + 0.1 * slope + 2 * x.sin().detach().requires_grad_()


def _penalty(piece, x):
    """Multiply by the norm of a gradient, which is differentiated again."""
    given = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(piece.layer(given).sin().sum(), given, create_graph=True)
    return x * slope.norm()


def _moved_weights(piece, x):
    """Call a module with weights after an inner gradient step, as in meta-learning."""
    weights = dict(piece.layer.named_parameters())
    inner = torch.func.functional_call(piece.layer, weights, (x.detach(),)).square().mean()
    slopes = torch.autograd.grad(inner, tuple(weights.values()), create_graph=True)
    moved = {name: weight - 0.1 * slope for (name, weight), slope in zip(weights.items(), slopes, strict=True)}
    return torch.func.functional_call(piece.layer, moved, (x,))


def _ensemble(piece, x):
    """Call one module with several weights at once."""
    weights = {name: torch.stack([p, -p]) for name, p in piece.layer.named_parameters()}
    outs = torch.vmap(lambda given: torch.func.functional_call(piece.layer, given, (x,)))(weights)
    return outs.sin().sum(0)


def _selective(piece, x):
    policy = partial(create_selective_checkpoint_contexts, lambda ctx, op, *a, **k: CheckpointPolicy.PREFER_RECOMPUTE)
    return checkpoint(lambda given: piece.layer(given).sin(), x, use_reentrant=False, context_fn=policy)


def _nested_checkpoints(piece, x):
    def inner(given):
        return checkpoint(lambda deeper: piece.layer(deeper).sin(), given, use_reentrant=False) * 2

    return checkpoint(inner, x, use_reentrant=False)


HIDING = {
    "vmap": lambda piece, x: torch.vmap(lambda row: piece.layer(row) * row.sum())(x),
    "vmap with a closure": lambda piece, x: torch.vmap(lambda row: row * x.sum())(x),
    "torch.func.grad": lambda piece, x: torch.func.grad(lambda y: piece.layer(y).square().sum())(x),
    "gradients of each sample": _per_sample,
    "torch.jit.script": lambda piece, x: _scripted(x),
    "torch.compile": lambda piece, x: _compiled()(x),
    "hooks that capture": _captured,
    "a hook that changes a result": _doubled,
    "requires_grad_": _slope,
    "from_numpy": lambda piece, x: x * torch.from_numpy(x.detach().numpy() * 2.0) * torch.Tensor([2.0]).double(),
    "a gradient that is differentiated": _penalty,
    "functional_call with moved weights": _moved_weights,
    "functional_call under vmap": _ensemble,
    "selective checkpoint": _selective,
    "nested checkpoints": _nested_checkpoints,
}

# ---- Contexts


def _without_gradient(piece, x):
    with torch.no_grad():
        scale = piece.layer(x).norm()
    return x / scale


def _inference(piece, x):
    with torch.inference_mode():
        scale = piece.layer(x.detach()).norm()
    return x * scale.clone()


def _packed(piece, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved * 2, lambda saved: saved / 2):
        return piece.layer(x).sin() * x


def _on_cpu(piece, x):
    with torch.autograd.graph.save_on_cpu():
        return piece.layer(x).sin() * x


def _autocast(piece, x):
    with torch.autocast("cpu", torch.bfloat16):
        return piece.layer(x)


def _on_device(piece, x):
    with torch.device("cpu"):
        return x * torch.ones(x.shape[-1], dtype=x.dtype)


class _Logging(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class _Dispatched(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def _own_mode(piece, x):
    with _Logging():
        return piece.layer(x).sin() + x


def _own_dispatch(piece, x):
    with _Dispatched():
        return piece.layer(x).sin() + x


def _profiled(piece, x):
    with torch.profiler.record_function("layer"):
        return piece.layer(x).sin()


def _caught(piece, x):
    try:
        return piece.layer(x[:, :2])
    except RuntimeError:
        return piece.layer(x)


def _yielded(piece, x):
    def halves():
        for half in x.chunk(2, -1):
            yield half.sin()

    return torch.cat(list(halves()), -1)


def _forked(piece, x):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return x + torch.randn(x.shape, dtype=x.dtype)


CONTEXTS = {
    "no_grad": _without_gradient,
    "inference_mode": _inference,
    "saved_tensors_hooks": _packed,
    "save_on_cpu": _on_cpu,
    "autocast": _autocast,
    "torch.device": _on_device,
    "a function mode": _own_mode,
    "a dispatch mode": _own_dispatch,
    "record_function": _profiled,
    "an exception": _caught,
    "a generator": _yielded,
    "fork_rng": _forked,
    "a random call after fork_rng": lambda piece, x: F.dropout(_forked(piece, x) * 0 + x, 0.0),
}

# ---- Operations


def _views(piece, x):
    """Write through views."""
    y = piece.layer(x)
    y[:, 0] += 1.0
    y[:, 1:3].mul_(2.0)
    y[y.detach() > 1] = 0.0
    return y + x


def _detached(piece, x):
    """Write through a detached tensor, which changes the other one."""
    y = piece.layer(x) * 1.0
    seen = y.detach()
    z = x.sin()
    seen.mul_(2.0)
    return y + z


def _through_data(piece, x):
    y = x * 2.0
    seen = y.data
    z = piece.layer(x)
    seen.add_(1.0)
    return y + z


def _through_numpy(piece, x):
    """Write through the array of a tensor."""
    y = (x * 2.0).detach()
    array = y.numpy()
    z = piece.layer(x)
    numpy.add(array, 1.0, out=array)
    return y + z


def _from_array(piece, x):
    """Write through a tensor that is made from the array of another one."""
    y = (x * 2.0).detach()
    other = torch.from_numpy(y.numpy())
    z = piece.layer(x)
    other.add_(1.0)
    return y * z


def _through_dlpack(piece, x):
    y = (x * 2.0).detach()
    other = torch.from_dlpack(y)
    z = piece.layer(x)
    other.add_(1.0)
    return y * z


def _filled(piece, x):
    """Write results by `out=` and into an empty tensor."""
    y = torch.empty_like(x)
    with torch.no_grad():
        torch.sin(x, out=y)
    z = torch.zeros_like(x)
    z[:, ::2] = piece.layer(x)[:, ::2]
    return y * z + x


def _sorted(piece, x):
    top = x.topk(2)
    return x.sort(-1).values * top.values[:, :1] + (top.indices == 0).to(x.dtype).sum()


def _scattered(piece, x):
    """Sum messages along the edges of a graph."""
    count = len(x)
    source, target = torch.arange(count), torch.arange(count).roll(1)
    messages = piece.layer(x)[source]
    mean = torch.zeros_like(x).scatter_reduce(0, target[:, None].expand_as(x), messages, "mean", include_self=False)
    return torch.zeros_like(x).index_add(0, target, messages) + mean + x


def _attention(piece, x):
    heads = piece.layer(x).view(len(x), 3, 2)
    return F.scaled_dot_product_attention(heads, heads, heads * 0.5, is_causal=True).flatten(1)


def _einsum(piece, x):
    return torch.einsum("bi,oi,bo->bo", x, piece.layer.weight, x).tanh()


def _spectrum(piece, x):
    """Filter complex coefficients, which go from stage to stage."""
    spectrum = torch.fft.rfft(x)
    phase = torch.polar(torch.ones(4, dtype=x.dtype), torch.linspace(0, 1, 4, dtype=x.dtype))
    filtered = spectrum * phase
    return torch.fft.irfft(filtered.conj(), n=x.shape[-1]) + filtered.abs().sum() + filtered.imag.mean()


def _solved(piece, x):
    gram = x.T @ x + torch.eye(x.shape[-1], dtype=x.dtype)
    factor = torch.linalg.cholesky(gram)
    q, r = torch.linalg.qr(gram)
    return torch.linalg.solve(gram, x.T).T + torch.cholesky_solve(x.T, factor).T + (q @ r).trace()


def _sparse(piece, x):
    weight = torch.eye(x.shape[-1], dtype=x.dtype).to_sparse()
    return torch.sparse.mm(weight, piece.layer(x).T).T


def _integers(piece, x):
    """Whole numbers, truth values, half precision and nothing at all go from stage to stage."""
    classes = x.argmax(-1)
    is_large = x > 0
    half = x.to(torch.bfloat16)
    nothing = x[:0]
    y = piece.layer(x)
    y = y * is_large + classes[:, None] + half.to(x.dtype) + nothing.sum()
    return y / (1 + len(nothing) + is_large.sum())


def _strided(piece, x):
    """Transposed, expanded and flipped tensors go from stage to stage."""
    transposed, expanded, stepped = x.T, x[:1].expand_as(x), x[:, ::2]
    scalar = x.sum()
    y = piece.layer(x)
    return y + transposed.T + expanded + stepped.mean() + scalar


def _read(piece, x):
    """Read numbers of the model and branch by them."""
    scale = float(x.detach().abs().max())
    assert torch.isfinite(x).all()
    y = piece.layer(x)
    if x.detach().sum() > 1e9:
        return y.sin().sin()
    return y / max(scale, 1.0) + len(f"{scale:.0f}") + sum(x.detach()[0].tolist())


def _split(piece, x):
    first, second = x.chunk(2, -1)
    rows = [row * (index + 1) for index, row in enumerate(x.unbind(0))]
    total = sum(part.sum() for part in x.split([1, 2, 3], -1))
    return torch.cat([second, first], -1) + torch.stack(rows) + total


def _rows(piece, x):
    return torch.stack([piece.layer(row) for row in x])


def _foreach(piece, x):
    first, second = torch._foreach_mul([x, x.sin()], [2.0, 3.0])
    torch._foreach_add_([first.detach()], 0.0)
    return first + second


def _folded(piece, x):
    image = x.view(len(x), 1, 2, 3)
    patches = F.unfold(image, 2, padding=1)
    grid = F.affine_grid(torch.eye(2, 3, dtype=x.dtype).expand(len(x), 2, 3), image.shape, align_corners=False)
    sampled = F.grid_sample(image, grid, align_corners=False)
    return F.fold(patches, (2, 3), 2, padding=1).flatten(1) + sampled.flatten(1)


def _distances(piece, x):
    near = torch.cdist(x, x.detach().roll(1, 0)).softmax(-1)
    mask = torch.ones(len(x), len(x), dtype=torch.bool).tril()
    return near.masked_fill(~mask, 0.0) @ x + x.cumsum(-1).logsumexp(-1, keepdim=True)


def _reused(piece, x):
    for _ in range(3):
        x = piece.layer(x).tanh() + x
    return x


def _slices_of_a_parameter(piece, x):
    weight = piece.layer.weight
    top, bottom = weight[:3], weight[3:]
    y = torch.cat([x @ top.T, x @ bottom.T], -1)
    return y @ weight.T + weight.square().sum()


def _with_aten(piece, x):
    return torch.ops.aten.addmm.default(piece.layer.bias, x, piece.layer.weight.t()) + torch.add(x, x, alpha=0.5)


def _copied(piece, x):
    return piece.layer(x) + copy.deepcopy(x.detach()) + x.detach().clone().requires_grad_(False)


class _Named(torch.Tensor):
    """A subclass of Tensor."""


def _subclassed(piece, x):
    named = x.as_subclass(_Named)
    return (piece.layer(named) + named.sin()).as_subclass(torch.Tensor)


def _unused(piece, x):
    """Compute what nothing uses, in several ways."""
    piece.layer(x)
    x.exp()
    values, _ = x.max(-1)
    return x + values[:, None]


def _constants(piece, x):
    """Make tensors of the batch's size, random ones by a seed too."""
    noise = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(7))
    ramp = torch.arange(len(x), dtype=x.dtype)[:, None]
    return piece.layer(x + x.new_full((1,), 0.5)) + noise * ramp + torch.full_like(x, 0.1)


OPERATIONS = {
    "writes through views": _views,
    "a write through a detached tensor": _detached,
    "a write through data": _through_data,
    "a write through an array": _through_numpy,
    "a write through from_numpy": _from_array,
    "a write through dlpack": _through_dlpack,
    "out= and empty tensors": _filled,
    "sort and topk": _sorted,
    "scatter and index_add": _scattered,
    "attention": _attention,
    "einsum": _einsum,
    "complex numbers": _spectrum,
    "linear algebra": _solved,
    "sparse matrices": _sparse,
    "types of numbers": _integers,
    "strides": _strided,
    "numbers of the model": _read,
    "chunk, split and unbind": _split,
    "rows of a tensor": _rows,
    "foreach": _foreach,
    "fold and grid_sample": _folded,
    "distances and masks": _distances,
    "a module called three times": _reused,
    "slices of a parameter": _slices_of_a_parameter,
    "aten": _with_aten,
    "copies": _copied,
    "a tensor subclass": _subclassed,
    "unused results": _unused,
    "constants": _constants,
}
FUNCTIONS = {**OWN_BACKWARD, **HIDING, **CONTEXTS, **OPERATIONS}
