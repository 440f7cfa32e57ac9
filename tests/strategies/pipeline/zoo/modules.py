"""Modules between layers: of torch, with parametrizations, adapters, hooks and experts."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.strategies.pipeline.zoo.chain import WIDTH, Piece, Wrapped
from tests.strategies.pipeline.zoo.functions import reverse


class _Shaped(nn.Module):
    """Calls a module with the samples in another shape, and flattens its result."""

    def __init__(self, module, *shape):
        super().__init__()
        self.module, self.shape = module, shape

    def forward(self, x):
        return self.module(x.view(len(x), *self.shape)).flatten(1)[:, :WIDTH]


def _linear():
    return nn.Linear(WIDTH, WIDTH)


class _Recurrent(Piece):
    """A recurrent module over the samples, whose state goes on to the next layer too."""

    def __init__(self, kind):
        super().__init__()
        self.recurrent = kind(WIDTH, WIDTH, num_layers=2)

    def run(self, x):
        out, state = self.recurrent(x[None])
        last = state[0] if isinstance(state, tuple) else state
        return out[0] + last[-1] + self.layer(x)


class _Packed(Piece):
    """Sequences of different lengths, packed."""

    def __init__(self):
        super().__init__()
        self.recurrent = nn.GRU(2, 3, batch_first=True, bidirectional=True)

    def run(self, x):
        lengths = torch.arange(len(x)) % 3 + 1
        packed = pack_padded_sequence(x.view(len(x), 3, 2), lengths, batch_first=True, enforce_sorted=False)
        out, last = self.recurrent(packed)
        padded, _ = pad_packed_sequence(out, batch_first=True, total_length=3)
        return padded.mean(1) + last.sum(0).sum(-1, keepdim=True)


class _Cells(Piece):
    """An LSTM cell in a loop over the features, which carries its state."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(2, WIDTH)

    def run(self, x):
        state = None
        for part in x.view(len(x), 3, 2).unbind(1):
            state = self.cell(part, state)
        return state[0] + self.layer(state[1])


class _Attention(Piece):
    def __init__(self, **settings):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, **settings)
        self.settings = settings

    def run(self, x):
        mask = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        out, weights = self.attention(x, self.layer(x), x, attn_mask=mask, need_weights=True)
        return out + weights.sum()


class _Bags(Piece):
    """An embedding bag with offsets, and a sparse one with weights of the samples."""

    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(10, WIDTH, mode="sum")
        self.table = nn.Embedding(10, WIDTH, padding_idx=0)

    def run(self, x):
        words = x.detach().argsort(-1)
        bags = self.bag(words.flatten(), torch.arange(len(x)) * WIDTH, per_sample_weights=x.flatten())
        return bags + self.table(words[:, 0])


class _SparseEmbedding(Piece):
    """An embedding with sparse gradients."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(10, WIDTH, sparse=True)

    def run(self, x):
        return x + self.table(x.detach().argmax(-1))


class _Experts(Piece):
    """Experts with a fixed routing by the sample's place, a shared one, and gates."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([_linear() for _ in range(3)])
        self.gate = nn.Linear(WIDTH, 3)

    def run(self, x):
        gates = self.gate(x).softmax(-1)
        route = torch.arange(len(x)) % 2
        out = self.layer(x)
        for index, expert in enumerate(self.experts[:2]):
            chosen = (route == index).nonzero()[:, 0]
            out = out.index_add(0, chosen, expert(x[chosen]) * gates[chosen, index : index + 1])
        return out


class _RoutedExperts(_Experts):
    """Experts that are given the samples of their largest gate, in one module's forward."""

    class Routed(nn.Module):
        def forward(self, x, gates, experts):
            out = torch.zeros_like(x)
            for index, expert in enumerate(experts):
                chosen = gates.argmax(-1) == index
                out[chosen] = F.linear(x[chosen], *expert) * gates[chosen, index : index + 1]
            return out

    def __init__(self):
        super().__init__()
        self.routed = self.Routed()

    def run(self, x):
        gates = self.gate(x).softmax(-1)
        return self.routed(x, gates, [(expert.weight, expert.bias) for expert in self.experts]) + self.layer(x)


class _Adapter(Piece):
    """A frozen layer with a trained product of two small matrices, as in LoRA."""

    def __init__(self):
        super().__init__()
        self.layer.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(WIDTH, 2)), nn.Parameter(torch.randn(2, WIDTH))

    def run(self, x):
        return self.layer(x) + x @ self.down @ self.up


class _PartlyFrozen(Piece):
    """A layer whose weight is frozen, and one without any gradient."""

    def __init__(self):
        super().__init__()
        self.layer.weight.requires_grad_(False)
        self.frozen = _linear().requires_grad_(False)

    def run(self, x):
        return self.layer(x) + self.frozen(x).detach()


class _Positive(nn.Module):
    def forward(self, weight):
        return weight.exp()

    def right_inverse(self, weight):
        return weight.abs().add(0.1).log()


def _parametrized(*parametrizations_):
    layer = _linear()
    for each in parametrizations_:
        parametrize.register_parametrization(layer, "weight", each())
    return layer


class _Scaled(nn.Module):
    """A parametrization with a parameter and a buffer."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("mask", torch.ones(WIDTH, WIDTH).tril())

    def forward(self, weight):
        return weight * self.mask * self.scale


class _Cached(Piece):
    """A parametrized weight that is computed once for two uses."""

    def __init__(self):
        super().__init__()
        parametrize.register_parametrization(self.layer, "weight", _Scaled())

    def run(self, x):
        with parametrize.cached():
            return self.layer(x) + self.layer(x.sin())


class _Pruned(Piece):
    def __init__(self):
        super().__init__()
        prune.l1_unstructured(self.layer, "weight", amount=0.3)

    def run(self, x):
        return self.layer(x)


class _Parameters(Piece):
    """Lists and dictionaries of parameters, one of them complex and one a scalar."""

    def __init__(self):
        super().__init__()
        self.some = nn.ParameterList([torch.randn(WIDTH), torch.randn(WIDTH)])
        self.others = nn.ParameterDict({"scale": nn.Parameter(torch.tensor(0.5)), "shift": torch.zeros(WIDTH)})
        self.phase = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex128))

    def run(self, x):
        for parameter in self.some:
            x = x * parameter
        turned = (x * self.phase).real
        return (self.layer(x) + turned) * self.others["scale"] + self.others.shift


class _Tied(Piece):
    """A weight that is used again, transposed."""

    def run(self, x):
        return F.linear(self.layer(x).tanh(), self.layer.weight.T)


class _TiedWithHook(_Tied):
    """The same, with a hook that bounds the sum of both gradients."""

    def __init__(self):
        super().__init__()
        self.layer.weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))


class _TiedWithLateHook(_Tied):
    """The same, with a hook that bounds what has been added up."""

    def __init__(self):
        super().__init__()
        self.layer.weight.register_post_accumulate_grad_hook(self.bound)

    @staticmethod
    def bound(weight):
        weight.grad.clamp_(-1e-3, 1e-3)


class _Hooked(Piece):
    """Hooks of every kind, registered once."""

    def __init__(self):
        super().__init__()
        self.layer.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        self.layer.register_forward_hook(lambda module, args, kwargs, output: output + 1, with_kwargs=True)
        self.layer.register_full_backward_hook(lambda module, given, out: (given[0] * 0.5,))
        self.layer.register_full_backward_pre_hook(lambda module, out: (out[0] * 3,))
        self.layer.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))

    def run(self, x):
        return self.layer(x) + x


class _GradientHook(Piece):
    """A hook on a tensor, set where the tensor is made."""

    def run(self, x):
        y = self.layer(x)
        y.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        return y.sin() + x


class _Quantized(Piece):
    """Fake quantization, whose observer moves the range in every call."""

    def __init__(self):
        super().__init__()
        with torch.no_grad():
            self.register_buffer("low", torch.tensor(0.0))
            self.register_buffer("high", torch.tensor(0.1))

    def run(self, x):
        with torch.no_grad():
            self.low.copy_(torch.minimum(self.low, x.min()))
            self.high.copy_(torch.maximum(self.high, x.max()))
        scale = (self.high - self.low) / 15
        quantized = ((x - self.low) / scale).round() * scale + self.low
        return self.layer(x + (quantized - x).detach())


class _Adaptive(Piece):
    """Adaptive softmax, which returns a named tuple."""

    def __init__(self):
        super().__init__()
        self.softmax = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, 8, [2, 4], div_value=1.0)

    def run(self, x):
        output, loss = self.softmax(x.mean(0).expand(8, -1), torch.arange(8))
        return x * loss + output.sum()


class _Decoder(Piece):
    """A layer of a decoder with memory and masks as keywords."""

    def __init__(self):
        super().__init__()
        self.decoder = nn.TransformerDecoderLayer(WIDTH, 2, 8, 0.0)

    def run(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(len(x), dtype=x.dtype)
        return self.decoder(x, memory=self.layer(x), tgt_mask=mask, tgt_is_causal=True)


def _wrapped(build):
    return partial(Wrapped, build)


class _Reversing(nn.Module):
    def forward(self, inputs):
        return reverse(inputs.tanh(), 0.7).sin()


MODULES = {
    "a module that calls a Function by a name bound before": _wrapped(_Reversing),
    "batch norm": _wrapped(lambda: nn.BatchNorm1d(WIDTH)),
    "batch norm with a total mean": _wrapped(lambda: nn.BatchNorm1d(WIDTH, momentum=None, affine=False)),
    "layer norm and RMS norm": _wrapped(lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH))),
    "group norm": _wrapped(lambda: nn.GroupNorm(2, WIDTH)),
    "instance norm with statistics": _wrapped(
        lambda: _Shaped(nn.InstanceNorm1d(2, affine=True, track_running_stats=True), 2, 3)
    ),
    "LSTM": partial(_Recurrent, nn.LSTM),
    "GRU": partial(_Recurrent, nn.GRU),
    "packed sequences": _Packed,
    "LSTM cell in a loop": _Cells,
    "multi-head attention": _Attention,
    "attention with bias and zeros": partial(_Attention, add_bias_kv=False, add_zero_attn=False),
    "transformer encoder": _wrapped(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0), 2, enable_nested_tensor=False)
    ),
    "transformer decoder": _Decoder,
    "transposed convolution": _wrapped(lambda: _Shaped(nn.ConvTranspose1d(2, 2, 3, stride=2), 2, 3)),
    "depthwise convolution": _wrapped(lambda: _Shaped(nn.Conv1d(2, 4, 3, padding=1, groups=2), 2, 3)),
    "pooling and pixel shuffle": _wrapped(
        lambda: nn.Sequential(
            _Shaped(nn.Sequential(nn.Conv2d(1, 4, 1), nn.PixelShuffle(2), nn.AdaptiveAvgPool2d((2, 3))), 1, 2, 3)
        )
    ),
    "embedding bags": _Bags,
    "sparse gradients": _SparseEmbedding,
    "experts": _Experts,
    "routed experts": _RoutedExperts,
    "LoRA": _Adapter,
    "frozen parts": _PartlyFrozen,
    "weight norm": _wrapped(lambda: parametrizations.weight_norm(_linear())),
    "spectral norm": _wrapped(lambda: parametrizations.spectral_norm(_linear())),
    "old spectral norm": _wrapped(lambda: torch.nn.utils.spectral_norm(_linear())),
    "orthogonal weight": _wrapped(lambda: parametrizations.orthogonal(_linear(), use_trivialization=False)),
    "two parametrizations": _wrapped(lambda: _parametrized(_Positive, _Scaled)),
    "cached parametrization": _Cached,
    "pruned": _Pruned,
    "lists of parameters": _Parameters,
    "a transposed weight": _Tied,
    "a hook on a shared weight": _TiedWithHook,
    "a late hook on a shared weight": _TiedWithLateHook,
    "registered hooks": _Hooked,
    "a hook on a tensor": _GradientHook,
    "fake quantization": _Quantized,
    "adaptive softmax": _Adaptive,
    "PReLU and in-place ReLU": _wrapped(lambda: nn.Sequential(_linear(), nn.ReLU(inplace=True), nn.PReLU())),
}
