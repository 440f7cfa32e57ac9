"""Memories: pieces that keep something from one call to the next."""

import itertools
import random
from collections import Counter, deque, namedtuple
from dataclasses import dataclass, field

import numpy
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from tests.strategies.pipeline.zoo.chain import WIDTH, Piece

# ---- Attributes


class _Array(Piece):
    """A numpy array that counts."""

    observed = ("seen",)

    def __init__(self):
        super().__init__()
        self.seen = numpy.zeros(3)

    def run(self, x):
        self.seen[1] += len(x)
        return self.layer(x) / self.seen[1]


class _Table(Piece):
    """A dictionary of tensors."""

    observed = ("means",)

    def __init__(self):
        super().__init__()
        self.means = {}

    def run(self, x):
        self.means["input"] = x.detach().mean(0)
        y = self.layer(x)
        self.means["output"] = y.detach().mean(0)
        return y + self.means["input"]


class _Nested(Piece):
    """Objects in objects, a set and a counter."""

    @dataclass
    class Inner:
        count: int = 0
        sizes: set = field(default_factory=set)

    observed = ("counts",)

    def __init__(self):
        super().__init__()
        self.inner = {"a": [self.Inner()]}
        self.counts = Counter()

    def run(self, x):
        inner = self.inner["a"][0]
        inner.count += 1
        inner.sizes.add(len(x))
        self.counts[len(x)] += 1
        return self.layer(x) / (inner.count + len(inner.sizes) + self.counts[len(x)])


class _Recent(Piece):
    """The last tensors in a deque, over which it takes the mean."""

    observed = ("recent",)

    def __init__(self):
        super().__init__()
        self.recent = deque(maxlen=2)

    def run(self, x):
        self.recent.append(x.detach().mean(0))
        return self.layer(x) + sum(self.recent) / 2


class _Property(Piece):
    """A property with a setter, and `__setattr__` of its own."""

    observed = ("_rate",)

    def __init__(self):
        super().__init__()
        self._rate = 1.0

    @property
    def rate(self):
        return self._rate

    @rate.setter
    def rate(self, value):
        self._rate = value

    def __setattr__(self, name, value):
        super().__setattr__(name, value * 1.0 if name == "_rate" else value)

    def run(self, x):
        self.rate = self.rate * 0.9
        return self.layer(x) * self.rate


class _ByName(Piece):
    """Attributes that are set and deleted by name."""

    observed = ("calls",)

    def __init__(self):
        super().__init__()
        self.calls = 0

    def run(self, x):
        setattr(self, "calls", getattr(self, "calls") + 1)  # noqa: B009, B010
        self.temporary = x * 2
        y = self.layer(self.temporary) * self.calls
        del self.temporary
        return y


class _Alternating(Piece):
    """A truth value that switches a sign."""

    observed = ("is_even",)

    def __init__(self):
        super().__init__()
        self.is_even = True

    def run(self, x):
        self.is_even = not self.is_even
        return self.layer(x) * (1.0 if self.is_even else -0.5)


class _Extremes(Piece):
    """The largest number so far, read from the model."""

    observed = ("largest",)

    def __init__(self):
        super().__init__()
        self.largest = 0.0

    def run(self, x):
        self.largest = max(self.largest, float(x.detach().abs().max()))
        return self.layer(x) / max(self.largest, 1e-6)


class _LongShort(Piece):
    """A tuple of hidden tensors, as that of an LSTM, over the mean of the samples."""

    observed = ("hidden",)

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH)
        self.hidden = (torch.zeros(1, WIDTH, dtype=torch.float64), torch.zeros(1, WIDTH, dtype=torch.float64))

    def run(self, x):
        hidden, cell = self.cell(x.mean(0, keepdim=True), self.hidden)
        self.hidden = (hidden.detach(), cell.detach())
        return self.layer(x) + hidden


class _Shared(Piece):
    """A counter of the class."""

    calls = 0

    def run(self, x):
        type(self).calls += 1
        return self.layer(x) / type(self).calls


class _Auxiliary(Piece):
    """Modules append losses to a list, which is summed and cleared."""

    class Router(nn.Module):
        def __init__(self, losses):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
            self.losses = losses

        def forward(self, x):
            y = x @ self.weight
            self.losses.append(y.square().mean())
            return y

    def __init__(self):
        super().__init__()
        self.losses = []
        self.first, self.second = self.Router(self.losses), self.Router(self.losses)

    def run(self, x):
        y = self.second(self.first(x).tanh())
        total = sum(self.losses)
        self.losses.clear()
        return y + total


class _Argument(Piece):
    """A module changes a dictionary that it is given."""

    class Deeper(nn.Linear):
        def forward(self, x, info):
            info["depth"] += 1
            info["seen"].append(len(x))
            return super().forward(x)

    def __init__(self):
        super().__init__()
        self.deeper = self.Deeper(WIDTH, WIDTH)

    def run(self, x):
        info = {"depth": 1, "seen": []}
        y = self.deeper(x, info)
        return self.layer(y) / info["depth"] / len(info["seen"])


class _FilledArgument(Piece):
    """A module puts its result into a dictionary that it is given."""

    class Filling(nn.Linear):
        def forward(self, state):
            state["x"] = super().forward(state["x"])

    def __init__(self):
        super().__init__()
        self.filling = self.Filling(WIDTH, WIDTH)

    def run(self, x):
        state = {"x": x}
        self.filling(state)
        return self.layer(state["x"])


# ---- Buffers


class _Hidden(Piece):
    """Buffers that are not saved: one replaced, one written in place, one set for the first time."""

    observed = ("replaced", "written", "late")

    def __init__(self):
        super().__init__()
        self.register_buffer("replaced", torch.zeros(WIDTH), persistent=False)
        self.register_buffer("written", torch.zeros(WIDTH), persistent=False)
        self.register_buffer("late", None, persistent=False)

    def run(self, x):
        self.late = x.detach().sum()
        self.replaced = self.replaced * 0.5 + x.detach().mean(0)
        y = self.layer(x + self.replaced)
        with torch.no_grad():
            self.written.add_(1.0)
        return y + self.written + self.late


class _Whole(Piece):
    """Buffers of whole numbers and truth values."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("seen", torch.zeros(WIDTH, dtype=torch.bool))

    def run(self, x):
        self.calls += 1
        self.seen |= x.detach().mean(0) > 0
        return self.layer(x) / self.calls + self.seen


class _Saved(Piece):
    """A running mean that is updated in place, and saved for backward by the product."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(WIDTH))

    def run(self, x):
        y = self.layer(x)
        with torch.no_grad():
            self.mean.lerp_(y.mean(0), 0.5)
        return y * self.mean.view(1, WIDTH)


class _Codebook(Piece):
    """Vector quantization with moving means and a straight-through gradient."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", torch.randn(5, WIDTH))
        self.register_buffer("counts", torch.ones(5))

    def run(self, x):
        nearest = torch.cdist(x.detach(), self.codes).argmin(-1)
        hot = torch.nn.functional.one_hot(nearest, 5).to(x.dtype)
        quantized = hot @ self.codes
        with torch.no_grad():
            self.counts.mul_(0.9).add_(hot.sum(0), alpha=0.1)
            self.codes.lerp_(hot.T @ x / self.counts[:, None], 0.1)
        penalty = (x - quantized.detach()).square().mean()
        return x + (quantized - x).detach() + penalty


class _Bank(Piece):
    """A bank of features that is written at places of the batch."""

    def __init__(self):
        super().__init__()
        self.register_buffer("bank", torch.randn(8, WIDTH))
        self.register_buffer("place", torch.zeros((), dtype=torch.long))

    def run(self, x):
        y = self.layer(x) @ self.bank.clone().T
        places = (self.place + torch.arange(len(x))) % 8
        self.bank.index_copy_(0, places, x.detach())
        self.place.add_(len(x))
        return x + y.logsumexp(-1, keepdim=True)


# ---- Parameters


class _Averaged(Piece):
    """A moving average of the layer, by torch's own class."""

    def __init__(self):
        super().__init__()
        self.average = AveragedModel(self.layer, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
        self.average.requires_grad_(False)

    def run(self, x):
        with torch.no_grad():
            y = self.average(x)
        y = y + self.layer(x)
        self.average.update_parameters(self.layer)
        return y


class _Normalized(Piece):
    """A trained weight that is normalized before its use."""

    def run(self, x):
        with torch.no_grad():
            self.layer.weight /= self.layer.weight.norm(dim=1, keepdim=True)
        return self.layer(x)


class _NewData(Piece):
    """A trained weight whose data is replaced before its use."""

    def run(self, x):
        self.layer.weight.data = torch.nn.functional.normalize(self.layer.weight.data)
        return self.layer(x)


class _Target(Piece):
    """A copy of the layer that is loaded from its state dict."""

    def __init__(self):
        super().__init__()
        self.target = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def run(self, x):
        with torch.no_grad():
            y = self.target(x)
        y = y + self.layer(x)
        self.target.load_state_dict(self.layer.state_dict())
        return y


class _AsVector(Piece):
    """A copy of the layer that is filled from a vector."""

    def __init__(self):
        super().__init__()
        self.target = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def run(self, x):
        vector = nn.utils.parameters_to_vector(self.layer.parameters()).detach()
        nn.utils.vector_to_parameters(vector * 0.5, self.target.parameters())
        return self.layer(x) + self.target(x)


# ---- Generators and iterators


class _OwnGenerator(Piece):
    """Noise from a generator of torch."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def run(self, x):
        return self.layer(x) + torch.randn(x.shape, dtype=x.dtype, generator=self.generator)


class _ShapedNoise(_OwnGenerator):
    """Noise by the model's numbers from a generator of torch."""

    def run(self, x):
        drawn = torch.bernoulli(x.detach().sigmoid(), generator=self.generator)
        return self.layer(x) * drawn


class _PythonGenerator(Piece):
    """Numbers from a generator of Python."""

    def __init__(self):
        super().__init__()
        self.generator = random.Random(3)

    def run(self, x):
        return self.layer(x) * self.generator.random()


class _NumpyGenerator(_PythonGenerator):
    """Numbers from a generator of numpy."""

    def __init__(self):
        super().__init__()
        self.generator = numpy.random.default_rng(3)


class _Iterator(Piece):
    """Numbers from an iterator."""

    def __init__(self):
        super().__init__()
        self.numbers = itertools.count(1)

    def run(self, x):
        return self.layer(x) / next(self.numbers)


class _Metric(Piece):
    """A metric of torchmetrics that the step updates."""

    def __init__(self):
        super().__init__()
        from torchmetrics import MeanMetric  # here, as it takes each rank two seconds

        self.metric = MeanMetric()

    def run(self, x):
        self.metric.update(x.detach().mean())
        return self.layer(x)


class _Slots(Piece):
    """A counter in an object with slots, and one in a named tuple."""

    class Counter:
        __slots__ = ("calls",)

        def __init__(self):
            self.calls = 0

    Pair = namedtuple("Pair", "calls other")

    def __init__(self):
        super().__init__()
        self.counter = self.Counter()
        self.pair = self.Pair(0, 1)

    def run(self, x):
        self.counter.calls += 1
        self.pair = self.pair._replace(calls=self.pair.calls + 1)
        return self.layer(x) / self.counter.calls * self.pair.calls


class _Closure(Piece):
    """A counter in a closure."""

    def __init__(self):
        super().__init__()
        calls = 0

        def count():
            nonlocal calls
            calls += 1
            return calls

        self.count = count

    def run(self, x):
        return self.layer(x) / self.count()


MEMORIES = {
    "an array": _Array,
    "a table of tensors": _Table,
    "objects in objects": _Nested,
    "recent tensors": _Recent,
    "a property": _Property,
    "attributes by name": _ByName,
    "an alternating sign": _Alternating,
    "the largest number": _Extremes,
    "hidden tensors": _LongShort,
    "a counter of the class": _Shared,
    "losses in a list": _Auxiliary,
    "a changed argument": _Argument,
    "a filled argument": _FilledArgument,
    "buffers that are not saved": _Hidden,
    "buffers of whole numbers": _Whole,
    "a buffer that backward needs": _Saved,
    "a codebook": _Codebook,
    "a bank of features": _Bank,
    "an averaged model": _Averaged,
    "a normalized weight": _Normalized,
    "replaced data": _NewData,
    "a loaded state dict": _Target,
    "parameters as a vector": _AsVector,
    "a generator of torch": _OwnGenerator,
    "noise by the model's numbers": _ShapedNoise,
    "a generator of Python": _PythonGenerator,
    "a generator of numpy": _NumpyGenerator,
    "an iterator": _Iterator,
    "a metric": _Metric,
    "slots and named tuples": _Slots,
    "a closure": _Closure,
}
