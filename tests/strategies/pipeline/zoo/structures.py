"""Structures: what modules are given and return beside a tensor."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tests.strategies.pipeline.zoo.chain import WIDTH, Piece


class _Layer(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)


class _Pair(NamedTuple):
    hidden: Tensor
    penalty: Tensor


class _Checked(namedtuple("Checked", "hidden mask")):
    """A named tuple with a constructor of its own, which looks at the tensors."""

    def __new__(cls, hidden, mask):
        assert hidden.shape[0] == mask.shape[0]
        return super().__new__(cls, hidden, mask)


@dataclass
class _State:
    hidden: Tensor
    depth: int = 0
    name: str = "state"
    parts: tuple = ()


@dataclass(frozen=True)
class _Frozen:
    hidden: Tensor
    scale: float

    def __post_init__(self):
        assert isinstance(self.scale, float)


class _Tuple(_Layer):
    def forward(self, x):
        y = super().forward(x)
        return y, None, {"norm": y.norm(), "name": "layer", "rows": len(y)}


class _Tuples(Piece):
    """A tuple with `None`, text, a number and a dictionary."""

    def __init__(self):
        super().__init__()
        self.part = _Tuple()

    def run(self, x):
        y, nothing, more = self.part(x)
        assert nothing is None and more["name"] == "layer"
        return self.layer(y) * more["norm"] / more["rows"]


class _Named(Piece):
    """A named tuple from module to module."""

    class Part(_Layer):
        def forward(self, pair):
            return _Pair(super().forward(pair.hidden), pair.penalty + pair.hidden.square().mean())

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([self.Part(), self.Part()])

    def run(self, x):
        pair = _Pair(x, x.new_zeros(()))
        for part in self.parts:
            pair = part(pair)
        return pair.hidden + pair.penalty


class _NamedAndChecked(Piece):
    class Part(_Layer):
        def forward(self, given):
            return _Checked(super().forward(given.hidden) * given.mask, given.mask)

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([self.Part(), self.Part()])

    def run(self, x):
        given = _Checked(x, (torch.arange(len(x)) % 2 == 0).to(x.dtype)[:, None])
        for part in self.parts:
            given = part(given)
        return given.hidden + given.mask


class _Data(Piece):
    """A dataclass with numbers, text and a tuple that grows."""

    class Part(_Layer):
        def forward(self, state):
            y = super().forward(state.hidden)
            return _State(y, state.depth + 1, state.name, (*state.parts, y.mean()))

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([self.Part(), self.Part()])

    def run(self, x):
        state = _State(x)
        for part in self.parts:
            state = part(state)
        return state.hidden / state.depth + sum(state.parts)


class _ChangedData(Piece):
    """A dataclass that a module changes in place and does not return."""

    class Part(_Layer):
        def forward(self, state):
            state.hidden = super().forward(state.hidden)
            state.depth += 1

    def __init__(self):
        super().__init__()
        self.part = self.Part()

    def run(self, x):
        state = _State(x, 1)
        self.part(state)
        return self.layer(state.hidden) / state.depth


class _FrozenData(Piece):
    """A frozen dataclass that checks its values."""

    class Part(_Layer):
        def forward(self, given):
            return _Frozen(super().forward(given.hidden), given.scale * 0.5)

    def __init__(self):
        super().__init__()
        self.part = self.Part()

    def run(self, x):
        given = self.part(_Frozen(x, 1.0))
        return self.layer(given.hidden) * given.scale


class _Output(Piece):
    """An output of transformers and an ordered dictionary."""

    class Part(_Layer):
        def forward(self, x):
            y = super().forward(x)
            return self.output_class(last_hidden_state=y, hidden_states=(x, y))

    class Other(_Layer):
        def forward(self, output):
            return OrderedDict(first=super().forward(output.last_hidden_state), second=output["hidden_states"][0])

    def __init__(self):
        from transformers.modeling_outputs import BaseModelOutput  # an import of a second

        super().__init__()
        self.part, self.other = self.Part(), self.Other()
        self.part.output_class = BaseModelOutput

    def run(self, x):
        found = self.other(self.part(x))
        return found["first"] * found["second"]


class _Mask(Piece):
    """A mask of the batch that modules pass on, and that is used behind them."""

    class Part(_Layer):
        def forward(self, x, mask, *, scale):
            return super().forward(x) * mask, mask, scale

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([self.Part(), self.Part(), self.Part()])

    def run(self, x):
        mask = 1.0 + (torch.arange(len(x)) % 2).to(x.dtype)[:, None]
        scale = torch.tensor([2.0], dtype=x.dtype)
        for part in self.parts:
            x, mask, scale = part(x, mask, scale=scale)
        return x * mask.square() * scale


class _Kept(Piece):
    """A list of hidden tensors, all of which the last module is given."""

    class Joined(_Layer):
        def forward(self, hidden, *others, weights=(1.0,)):
            return super().forward(sum(hidden[:-1], hidden[-1]) + sum(others)) * sum(weights)

    def __init__(self):
        super().__init__()
        self.parts, self.joined = nn.ModuleList([_Layer(), _Layer()]), self.Joined()

    def run(self, x):
        hidden = [x]
        for part in self.parts:
            hidden.append(part(hidden[-1]).tanh())
        return self.joined(hidden, x, hidden[1], weights=[0.5, 0.25])


class _Views(Piece):
    """Modules that return their input, a view of it, and write to it."""

    class Same(nn.Module):
        def forward(self, x):
            return x, x.view(-1, 2, 3)

    class Writing(_Layer):
        def forward(self, x):
            y = super().forward(x.clone())
            x.mul_(0.5)
            return y

    def __init__(self):
        super().__init__()
        self.same, self.writing = self.Same(), self.Writing()

    def run(self, x):
        x, view = self.same(x * 1.0)
        y = self.writing(x)
        return self.layer(x) + y + view.flatten(1)


class _Callables(Piece):
    """Modules in a list, a dictionary and a method."""

    def __init__(self):
        super().__init__()
        self.named = nn.ModuleDict({"first": _Layer(), "second": _Layer()})
        self.order = ["second", "first"]

    def both(self, x):
        return [self.named[name](x) for name in self.order]

    def run(self, x):
        second, first = self.both(x)
        return self.layer(second * first.tanh())


class _Generating(Piece):
    """A module that returns a generator, and one that returns an object."""

    class Rows(_Layer):
        def forward(self, x):
            y = super().forward(x)
            return (part for part in y.chunk(2, -1))

    def __init__(self):
        super().__init__()
        self.rows = self.Rows()

    def run(self, x):
        return self.layer(torch.cat(list(self.rows(x)), -1))


class _Normal(Piece):
    """A module that returns a distribution."""

    class Parameters(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean = _Layer()

        def forward(self, x):
            return torch.distributions.Normal(self.mean(x), 1.0, validate_args=False)

    def __init__(self):
        super().__init__()
        self.parameters_ = self.Parameters()

    def run(self, x):
        normal = self.parameters_(x)
        return self.layer(x) + normal.log_prob(x) + normal.mean


class _Lengths(Piece):
    """A module that returns shapes, lists of numbers and truth values."""

    class Measured(_Layer):
        def forward(self, x):
            y = super().forward(x)
            return y, y.shape, [len(y), float(y.detach().sum() > 0)], bool(y.detach().mean() > 0)

    def __init__(self):
        super().__init__()
        self.measured = self.Measured()

    def run(self, x):
        y, shape, numbers, is_positive = self.measured(x)
        y = y.view(shape) * numbers[1] / numbers[0]
        return self.layer(y) * (2.0 if is_positive else 0.5)


STRUCTURES = {
    "tuples": _Tuples,
    "named tuples": _Named,
    "named tuples with a constructor": _NamedAndChecked,
    "dataclasses": _Data,
    "a dataclass that a module changes": _ChangedData,
    "frozen dataclasses": _FrozenData,
    "model outputs": _Output,
    "a mask that is passed on": _Mask,
    "lists of hidden tensors": _Kept,
    "views of an input": _Views,
    "modules by name": _Callables,
    "a module that returns a generator": _Generating,
    "a module that returns a distribution": _Normal,
    "measured shapes": _Lengths,
}
