"""Tasks whose step changes state, by kind of state; `REFUSED` has the sentences about those that cannot be followed."""

from array import array
from collections import deque
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from tests.strategies.pipeline.zoo.chain import WIDTH, Zoo
from trainkit.optim.phase import Phase


class _Stateful(Zoo):
    """Eight layers; a subclass changes state between them."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(8)])

    def body(self, x, start=0, stop=8):
        for layer in self.layers[start:stop]:
            x = layer(x).tanh()
        return x

    def loss(self, x, batch):
        return (x - batch[1]).square().mean()


# ---- Buffers that are replaced by new tensors


class ReplacedBuffer(_Stateful):
    """A running mean that is read at the start of the step and replaced after two layers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def training_step(self, batch):
        x = self.body(batch[0] - self.mean, 0, 2)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.loss(self.body(x, 2), batch)


class ReplacedLater(_Stateful):
    """The new tensor is made in the first stage and assigned in the last one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def training_step(self, batch):
        x = self.body(batch[0], 0, 4)
        mean = x.detach().mean(0)
        x = self.body(x, 4)
        self.mean = mean
        return self.loss(x, batch)


class SwappedBuffers(_Stateful):
    """One buffer becomes the other one, as in double buffering."""

    def __init__(self):
        super().__init__()
        self.register_buffer("now", torch.zeros(WIDTH))
        self.register_buffer("before", torch.ones(WIDTH))

    def training_step(self, batch):
        x = self.body(batch[0], 0, 5)
        x = x + self.before
        self.before, self.now = self.now, x.detach().mean(0)
        return self.loss(self.body(x, 5), batch)


class BatchBuffer(_Stateful):
    """A buffer becomes a tensor of the batch."""

    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(4, WIDTH))

    def training_step(self, batch):
        x = self.body(batch[0] + self.last.mean(0), 0, 6)
        self.last = batch[1]
        return self.loss(self.body(x, 6), batch)


class ReplacedInModule(_Stateful):
    """A module that replaces its own buffer."""

    class Centered(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(WIDTH))

        def forward(self, x):
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return x - self.mean

    def __init__(self):
        super().__init__()
        self.centered = self.Centered()

    def training_step(self, batch):
        return self.loss(self.body(self.centered(self.body(batch[0], 0, 5)), 5), batch)


class FunctionalNorm(_Stateful):
    """Statistics that `F.batch_norm` writes, used before and after."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))

    def training_step(self, batch):
        x = self.body(batch[0] + self.mean, 0, 2)
        x = F.batch_norm(x, self.mean, self.variance, training=True)
        return self.loss(self.body(x, 2), batch)


# ---- Attributes that are no buffers


class HiddenState(_Stateful):
    """A recurrent step that carries its hidden state in an attribute."""

    observed = ("hidden",)

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.hidden = None

    def training_step(self, batch):
        x = self.body(batch[0], 0, 3)
        if self.hidden is None or len(self.hidden) != len(x):
            self.hidden = torch.zeros_like(x)
        x = self.cell(x, self.hidden)
        self.hidden = x.detach()
        return self.loss(self.body(x, 3), batch)


class HiddenTensor(_Stateful):
    """A plain tensor that is used at once and replaced later."""

    observed = ("hidden",)

    def __init__(self):
        super().__init__()
        self.hidden = torch.zeros(WIDTH, dtype=torch.float64)

    def training_step(self, batch):
        x = self.body(batch[0], 0, 1) * (1 + self.hidden)
        x = self.body(x, 1, 3)
        self.hidden = 0.5 * self.hidden + x.detach().mean(0)
        return self.loss(self.body(x, 3), batch)


class HiddenInModule(_Stateful):
    """A recurrent module that carries its hidden state in an attribute."""

    class Recurrent(nn.Module):
        observed = ("hidden",)

        def __init__(self):
            super().__init__()
            self.cell = nn.GRUCell(WIDTH, WIDTH)
            self.hidden = None

        def forward(self, x):
            hidden = self.hidden if self.hidden is not None and len(self.hidden) == len(x) else None
            self.hidden = self.cell(x, hidden)
            result = self.hidden
            self.hidden = result.detach()
            return result

    def __init__(self):
        super().__init__()
        self.recurrent = self.Recurrent()

    def training_step(self, batch):
        return self.loss(self.body(self.recurrent(self.body(batch[0], 0, 5)), 5), batch)


class HiddenWrittenInPlace(HiddenTensor):
    """The same tensor, written in place through `.data`."""

    def training_step(self, batch):
        x = self.body(batch[0], 0, 1) * (1 + self.hidden.clone())
        x = self.body(x, 1, 3)
        self.hidden.data.mul_(0.5).add_(x.detach().mean(0))
        return self.loss(self.body(x, 3), batch)


class CounterAtStart(_Stateful):
    """Counts its steps first, and weighs the loss by the count."""

    observed = ("calls",)

    def __init__(self):
        super().__init__()
        self.calls = 0

    def training_step(self, batch):
        self.calls += 1
        return self.loss(self.body(batch[0]), batch) * min(1.0, self.calls / 5)


class CounterAtEnd(CounterAtStart):
    """Reads the count in the first layers and counts last."""

    def training_step(self, batch):
        loss = self.loss(self.body(batch[0] * (1 + self.calls)), batch)
        self.calls += 1
        return loss


class CounterInTheMiddle(CounterAtStart):
    """Counts after two layers, and uses the count in the first and in the last ones."""

    def training_step(self, batch):
        x = self.body(batch[0], 0, 1) * (1 + 0.1 * self.calls)
        x = self.body(x, 1, 2)
        self.calls += 1
        return self.loss(self.body(x, 2) * self.calls, batch)


class CounterInModule(_Stateful):
    """A module counts its calls and uses the count."""

    class Counting(nn.Module):
        observed = ("calls",)

        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return x / self.calls

    def __init__(self):
        super().__init__()
        self.counting = self.Counting()

    def training_step(self, batch):
        return self.loss(self.body(self.counting(self.body(batch[0], 0, 6)), 6), batch)


class CounterOfModuleReadLater(CounterInModule):
    """The last stage reads the count of a module of the first one."""

    def __init__(self):
        super().__init__()
        self.counting = self.Counting()

    def training_step(self, batch):
        x = self.body(self.counting(self.body(batch[0], 0, 2)), 2)
        return self.loss(x, batch) * self.counting.calls


class LossAverage(_Stateful):
    """Divides the next loss by the running mean of the losses."""

    observed = ("average",)

    def __init__(self):
        super().__init__()
        self.average = 1.0

    def training_step(self, batch):
        loss = self.loss(self.body(batch[0]), batch)
        scaled = loss / self.average
        self.average = 0.9 * self.average + 0.1 * loss.item()
        return scaled


@dataclass
class Tracker:
    seen: int = 0
    recent: deque = field(default_factory=lambda: deque(maxlen=3))


class StateWithTheTask(_Stateful):
    """An object that refers to a module of the task counts, and a list keeps a tensor with a graph."""

    class Tracker:
        def __init__(self, module):
            self.module, self.norms = module, []

    def __init__(self):
        super().__init__()
        self.tracker = self.Tracker(self.layers[3])
        self.kept = [self.layers[0].weight * 2]

    def observations(self):
        return {"norms": self.tracker.norms, "kept": self.kept, "module": self.tracker.module is self.layers[3]}

    def training_step(self, batch):
        x = self.body(batch[0], 0, 6)
        self.tracker.norms.append(float(x.detach().norm()))
        self.kept[0] = x * 0.5
        return self.loss(self.body(x, 6), batch) * len(self.tracker.norms)


class StateInAnObject(_Stateful):
    """State in an object that is no module, and in a list."""

    observed = ("sizes",)

    def __init__(self):
        super().__init__()
        self.tracker, self.sizes = Tracker(), []

    def training_step(self, batch):
        x = self.body(batch[0], 0, 7)
        self.tracker.seen += len(x)
        self.tracker.recent.append(float(x.detach().mean()))
        self.sizes.append(len(x))
        return self.loss(self.body(x, 7), batch) * (1 + sum(self.tracker.recent) + len(self.sizes))


class LastValues(_Stateful):
    """Leaves values of every stage behind, for a reader after the step."""

    observed = ("early", "late", "number")

    def __init__(self):
        super().__init__()
        self.early = self.late = self.number = None

    def training_step(self, batch):
        x = self.body(batch[0], 0, 2)
        self.early = x.detach()
        x = self.body(x, 2)
        loss = self.loss(x, batch)
        self.late, self.number = x.detach(), loss.item()
        return loss


class SharedCache(_Stateful):
    """One module without parameters, called in every stage, which builds a table once."""

    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = None

        def forward(self, x):
            if self.table is None:
                self.table = torch.linspace(0.5, 1.5, WIDTH, dtype=x.dtype)
            return x * self.table

    def __init__(self):
        super().__init__()
        self.table = self.Table()

    def training_step(self, batch):
        x = batch[0]
        for start in range(0, 8, 2):
            x = self.table(self.body(x, start, start + 2))
        return self.loss(x, batch)


class SwitchedMode(_Stateful):
    """Evaluates a network inside of the step and switches it back."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def training_step(self, batch):
        x = self.norm(self.body(batch[0], 0, 1))
        self.norm.eval()
        x = self.norm(self.body(x, 1, 2))
        x = self.body(x, 2)
        self.norm.train()
        return self.loss(x, batch)


class FrozenForAWhile(_Stateful):
    """Freezes its last layers for one of two losses."""

    def training_step(self, batch):
        x = self.body(batch[0], 0, 4)
        self.layers[4:].requires_grad_(False)
        frozen = self.loss(self.body(x, 4), batch)
        for parameter in self.layers[4:].parameters():
            parameter.requires_grad = True
        return frozen + 0.1 * x.square().mean()


# ---- Queues


class Queue(_Stateful):
    """A queue of keys with a pointer, both buffers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.randn(WIDTH, 10))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def training_step(self, batch):
        x = self.body(batch[0])
        logits = x @ self.queue.clone()
        first = int(self.pointer)
        columns = torch.arange(first, first + len(x)) % 10
        self.queue[:, columns] = x.detach().T
        self.pointer[0] = (first + len(x)) % 10
        return self.loss(x, batch) + logits.square().mean() * 0.1


class PointerElsewhere(Queue):
    """The pointer is read and moved in the first stage, the queue is written in the last one."""

    def training_step(self, batch):
        first = int(self.pointer)
        self.pointer[0] = (first + len(batch[0])) % 10
        x = self.body(batch[0])
        logits = x @ self.queue.clone()
        self.queue[:, torch.arange(first, first + len(x)) % 10] = x.detach().T
        return self.loss(x, batch) + logits.square().mean() * 0.1


class ReadConstants(_Stateful):
    """Reads numbers from a buffer and from a parameter in the first stage, and uses them in the last one."""

    def __init__(self):
        super().__init__()
        self.register_buffer("window", torch.tensor([3.0, 2.0]))
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def training_step(self, batch):
        window, temperature = self.window.tolist(), float(self.temperature)
        x = self.body(batch[0] * self.temperature)
        return self.loss(x, batch) * window[0] / temperature


# ---- Parameters that the step writes


class _Taught(_Stateful):
    def __init__(self):
        super().__init__()
        self.teacher = nn.ModuleList([nn.Linear(WIDTH, WIDTH).requires_grad_(False) for _ in range(8)])

    @torch.no_grad()
    def taught(self, x, start=0, stop=8):
        for layer in self.teacher[start:stop]:
            x = layer(x).tanh()
        return x

    @torch.no_grad()
    def move_teacher(self):
        for own, other in zip(self.teacher.parameters(), self.layers.parameters(), strict=True):
            own.mul_(0.9).add_(other, alpha=0.1)


class TeacherMovedLast(_Taught):
    """A teacher that follows the student at the end of the step."""

    def training_step(self, batch):
        x, target = batch[0], batch[1]
        for index in range(8):
            x, target = self.body(x, index, index + 1), self.taught(target, index, index + 1)
        loss = (x - target).square().mean()
        self.move_teacher()
        return loss


class TeacherThroughData(TeacherMovedLast):
    """The same, written through `.data`."""

    def move_teacher(self):
        for own, other in zip(self.teacher.parameters(), self.layers.parameters(), strict=True):
            own.data = own.data * 0.9 + other.data * 0.1


class TeacherForeach(TeacherMovedLast):
    """The same in one call."""

    @torch.no_grad()
    def move_teacher(self):
        torch._foreach_lerp_([*self.teacher.parameters()], [p.detach() for p in self.layers.parameters()], 0.1)


class TeacherMovedInTurn(_Taught):
    """Each layer of the teacher follows its student where it is used."""

    def training_step(self, batch):
        x, target = batch[0], batch[1]
        for index in range(8):
            with torch.no_grad():
                for own, other in zip(self.teacher[index].parameters(), self.layers[index].parameters(), strict=True):
                    own.data.mul_(0.9).add_(other.data, alpha=0.1)
            x, target = self.body(x, index, index + 1), self.taught(target, index, index + 1)
        return (x - target).square().mean()


class Clamped(_Stateful):
    """Clamps trained weights where they are used, as a Wasserstein critic does."""

    def training_step(self, batch):
        x = batch[0]
        for layer in self.layers:
            layer.weight.data.clamp_(-0.3, 0.3)
            x = layer(x).tanh()
        return self.loss(x, batch)


class ClampedAtOnce(_Stateful):
    """Clamps all trained weights first."""

    def training_step(self, batch):
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-0.3, 0.3)
        return self.loss(self.body(batch[0]), batch)


class FrozenInitialized(_Stateful):
    """Fills a frozen parameter anew from `nn.init` and from the batch."""

    def __init__(self):
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)
        self.scale = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def training_step(self, batch):
        x = self.body(batch[0], 0, 4)
        nn.init.constant_(self.scale, 0.7)
        x = x * self.scale.clone()
        x = x + self.offset.clone()
        with torch.no_grad():
            self.offset.copy_(batch[1].mean(0))
        return self.loss(self.body(x, 4), batch)


class WrittenAndSaved(FrozenInitialized):
    """Multiplies by a parameter that the next micro-batch fills anew."""

    def training_step(self, batch):
        x = self.body(batch[0], 0, 4)
        nn.init.constant_(self.scale, 0.7)
        return self.loss(self.body(x * self.scale, 4), batch)


class ReadAsArray(FrozenInitialized):
    """Reads a parameter as an array."""

    def training_step(self, batch):
        scale = self.scale.numpy().max()
        return self.loss(self.body(batch[0] * self.scale), batch) * scale


class _Regularized(nn.Linear):
    """A layer that leaves a part of the loss in an attribute, which it does not have before."""

    def forward(self, x):
        y = super().forward(x)
        self.penalty = y.square().mean()
        return y


class PenaltiesOfModules(_Stateful):
    """Adds to the loss what layers have left behind."""

    def __init__(self):
        super().__init__()
        self.layers[3], self.layers[4] = _Regularized(WIDTH, WIDTH), _Regularized(WIDTH, WIDTH)

    def training_step(self, batch):
        hidden = self.body(batch[0], 0, 6)
        hidden = hidden * (1.0 + 0.1 * sum(layer.penalty for layer in self.layers[3:5]))
        return self.loss(self.body(hidden, 6), batch)


class CountedInBytes(_Stateful):
    """Counts in containers of plain numbers."""

    def __init__(self):
        super().__init__()
        self.bytes, self.numbers = bytearray(1), array("d", [0.5])

    def training_step(self, batch):
        hidden = self.body(batch[0], 0, 4)
        self.bytes[0] += 1
        hidden = self.body(hidden * self.bytes[0], 4)
        self.numbers[0] *= 1.5
        return self.loss(hidden * self.numbers[0], batch)

    def observations(self):
        return {"bytes": list(self.bytes), "numbers": list(self.numbers)}


class BatchWritten(_Stateful):
    """Writes to its batch at the start and in the middle."""

    def training_step(self, batch):
        batch[0].mul_(0.5)
        hidden = self.body(batch[0], 0, 4)
        batch[1].add_(batch[0].mean())
        return self.loss(self.body(hidden, 4), batch)


class ChangedUnseen(_Stateful):
    """Changes an attribute by the dictionary of the module."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def training_step(self, batch):
        vars(self)["seen"] += 1
        return self.loss(self.body(batch[0]), batch)


class WrittenThroughNumpy(_Stateful):
    """Writes to a buffer in a way that torch does not see."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(1, dtype=torch.float64))
        self.count = self.Count(self)

    class Count(nn.Module):
        def __init__(self, task):
            super().__init__()
            self.task = [task]

        def forward(self, x):
            self.task[0].seen.numpy()[0] += len(x)
            return x

    def training_step(self, batch):
        return self.loss(self.body(self.count(self.body(batch[0], 0, 4)), 4), batch)


class ReplacedParameter(_Stateful):
    """Replaces a parameter object."""

    def training_step(self, batch):
        self.layers[1].bias = nn.Parameter(torch.zeros(WIDTH, dtype=torch.float64))
        return self.loss(self.body(batch[0]), batch)


class NewBuffer(_Stateful):
    """Registers a buffer in the step."""

    def training_step(self, batch):
        if not hasattr(self, "mask"):
            self.register_buffer("mask", torch.ones(WIDTH, dtype=torch.float64))
        return self.loss(self.body(batch[0] * self.mask), batch)


# ---- Hooks on tensors


class HookInALaterStage(_Stateful):
    """Halves the gradient of the first stage's value, by a hook set in the last one."""

    def training_step(self, batch):
        x = self.layers[3](self.body(batch[0], 0, 3))
        y = self.body(x.tanh(), 4) + x
        x.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        return self.loss(y, batch)


class HookOnAParameter(_Stateful):
    """Bounds the gradient of a parameter that is used twice."""

    def training_step(self, batch):
        weight = self.layers[0].weight
        x = self.body(batch[0])
        weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        return self.loss(F.linear(x, weight), batch)


class HookRegisteredOnce(_Stateful):
    """Registers in its first step a hook that scales what a layer returns."""

    def __init__(self):
        super().__init__()
        self.is_hooked = False

    def training_step(self, batch):
        if not self.is_hooked:
            self.is_hooked = True
            self.layers[5].register_forward_hook(lambda module, inputs, output: 0.5 * output)
        return self.loss(self.body(batch[0]), batch)


# ---- State of modules of torch, and state beside the state dict


class Normalized(_Stateful):
    """Batch normalization and both spectral norms."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.new = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.old = torch.nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.recurrent = nn.LSTM(WIDTH, WIDTH)
        self.weighted = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def training_step(self, batch):
        x = self.weighted(self.new(self.body(batch[0], 0, 3)))
        x, _ = self.recurrent(self.body(self.norm(self.body(x, 3, 5)), 5)[None])
        return self.loss(self.old(x[0]), batch)


class ExtraState(_Stateful):
    """A module of the last layers saves its count as extra state."""

    class Counting(nn.Module):
        observed = ("calls",)

        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return x / self.calls

        def get_extra_state(self):
            return {"calls": self.calls}

        def set_extra_state(self, state):
            self.calls = state["calls"]

    def __init__(self):
        super().__init__()
        self.counting = self.Counting()

    def training_step(self, batch):
        return self.loss(self.body(self.counting(self.body(batch[0], 0, 7)), 7), batch)


# ---- State of several phases


class CountedPhases(_Stateful):
    """One phase counts and moves a mean; the other uses both, in its last layers."""

    observed = ("calls",)

    class Counting(nn.Linear):
        observed = ("calls",)

        def __init__(self):
            super().__init__(WIDTH, WIDTH)
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) / self.calls

    def __init__(self):
        super().__init__()
        self.first, self.second = self.Counting(), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.calls = 0

    def first_step(self, batch):
        self.calls += 1
        x = self.body(self.first(batch[0]), 0, 2)
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.loss(self.body(x, 2), batch)

    def second_step(self, batch):
        x = self.body(batch[0] + self.mean, 0, 4)
        return self.loss(self.second(x) * self.calls, batch)

    def configure_phases(self):
        first = [*self.first.parameters(), *self.layers.parameters()]
        return [
            Phase("first", torch.optim.SGD(first, lr=0.1)),
            Phase("second", torch.optim.SGD(self.second.parameters(), lr=0.1)),
        ]


# ---- What a pipeline does with them

REFUSED = {
    CounterAtEnd: "attribute 'calls' is written and used by `mul` .* and `return`.*in one module's forward",
    HiddenState: "calls `zeros_like` .* when it runs for the first time, and module 'cell' .* when it runs again",
    ReplacedParameter: "registers or replaces 'layers.1.bias'.*constructor",
    NewBuffer: "registers or replaces 'mask'.*constructor",
    ReadAsArray: "`numpy` .* reads elements of 'scale'.*tolist",
    ChangedUnseen: "changes the attribute 'seen' in a way that cannot be followed.*self.seen = ",
}
"""Refused before training."""
REFUSED_AT_A_CUT = {
    BatchBuffer: "cannot begin at module 'layers.4'.*buffer 'last' is written and used by `mean`",
    CounterOfModuleReadLater: "attribute 'counting.calls' is written and used by module 'counting'",
    TeacherMovedLast: "parameter 'teacher.0.weight' is written and used by module 'teacher.0'",
    TeacherThroughData: "parameter 'teacher.0.weight' is written and used by module 'teacher.0' .* and `data=`",
    HookInALaterStage: "`register_hook` .* sets a hook .* of module 'layers.3'.*Set it in the module",
    HookOnAParameter: "`register_hook` .* sets a hook on the gradient of a tensor of module 'layers.0'",
}
"""Refused if a stage begins in the middle."""
REFUSED_IN_THE_FIRST_STEP = {
    WrittenThroughNumpy: "the first step changed 'seen', which the traced step did not",
}
TOO_CLOSE_FOR_FOUR = {TeacherMovedLast, TeacherThroughData, TeacherForeach}
"""Too few places for four stages."""
TASKS = [
    task
    for task in vars().copy().values()
    if isinstance(task, type) and issubclass(task, _Stateful) and not task.__name__.startswith("_")
]
