"""Tasks of the zoo, and usual blocks of transformers, train by tensor parallelism as in one process."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from trainkit.strategies.fsdp.strategy import FSDPStrategy
from trainkit.strategies.single import SingleStrategy

from tests.marks import in_make_zoo
from tests.strategies.pipeline.training import Training, make, step_batches
from tests.strategies.pipeline.zoo import tasks
from tests.strategies.pipeline.zoo.chain import Zoo
from tests.strategies.pipeline.zoo.comparison import largest_difference
from tests.strategies.pipeline.zoo.test_replicas import HOOKS, OWN_STATE
from trainkit.errors import UserError
from trainkit.testing import run_ranks
from trainkit.tree import map_tensors

BOUND, BOUND_OF_LIBRARY = 1e-9, 1e-8
"""Models of transformers compute their norms and angles in fp32."""
WORDS, WIDTH, HEADS = 24, 16, 4

# ---- Blocks


class _Attention(nn.Module):
    """Attention to another sequence, or to the same one; `groups` heads of keys."""

    def __init__(self, *, bias=True, groups=HEADS, rotary=False, fused=False):
        super().__init__()
        narrow = WIDTH * groups // HEADS
        self.query = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.key, self.value = nn.Linear(WIDTH, narrow, bias=bias), nn.Linear(WIDTH, narrow, bias=bias)
        self.output = nn.Linear(WIDTH, WIDTH, bias=bias)
        self.groups, self.rotary, self.fused = groups, rotary, fused

    def forward(self, x, memory=None, mask=None):
        memory = x if memory is None else memory
        query = self.query(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        key, value = (
            layer(memory).unflatten(-1, (self.groups, -1)).transpose(1, 2) for layer in (self.key, self.value)
        )
        if self.rotary:
            query, key = _turned(query), _turned(key)
        if self.fused:
            enable = {"enable_gqa": True} if self.groups < HEADS else {}
            attended = F.scaled_dot_product_attention(query, key, value, mask, **enable)
        else:
            key, value = (each.repeat_interleave(HEADS // self.groups, 1) for each in (key, value))
            scores = query @ key.mT / query.shape[-1] ** 0.5
            attended = (scores if mask is None else scores.masked_fill(~mask, -1e9)).softmax(-1) @ value
        return self.output(attended.transpose(1, 2).flatten(2))


def _turned(x):
    """Rotate pairs of features by an angle that grows with the position."""
    angles = torch.outer(torch.arange(x.shape[-2]), torch.tensor([1.0, 0.1])).to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()], -1)


def _split(qkv):
    return qkv.split(WIDTH, -1)


def _chunk(qkv):
    return qkv.chunk(3, -1)


def _unflatten(qkv):
    return qkv.unflatten(-1, (3, WIDTH)).unbind(-2)


def _view(qkv):
    return qkv.view(*qkv.shape[:-1], 3, WIDTH).movedim(-2, 0)


def _slices(qkv):
    return tuple(qkv[..., first : first + WIDTH] for first in range(0, 3 * WIDTH, WIDTH))


class _FusedAttention(nn.Module):
    """One layer has queries, keys and values."""

    def __init__(self, divide, *, bias=True):
        super().__init__()
        self.qkv, self.output = nn.Linear(WIDTH, 3 * WIDTH, bias=bias), nn.Linear(WIDTH, WIDTH, bias=bias)
        self.divide = divide

    def forward(self, x):
        query, key, value = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.divide(self.qkv(x)))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.output(attended.transpose(1, 2).flatten(2))


class _Feed(nn.Module):
    def __init__(self, *, bias=True, width=WIDTH, hidden=2 * WIDTH, dropout=0.0):
        super().__init__()
        self.widen, self.shrink = nn.Linear(width, hidden, bias=bias), nn.Linear(hidden, width, bias=bias)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.shrink(self.dropout(F.gelu(self.widen(x))))


class _Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class _Experts(nn.Module):
    """Each token goes to the two best of four networks."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList([_Feed() for _ in range(4)])

    def forward(self, x):
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2, -1)
        y = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, slots = (chosen == number).nonzero(as_tuple=True)
            y = y.index_add(0, rows, expert(tokens[rows]) * weights[rows, slots, None])
        return y.view_as(x)


class _Block(nn.Module):
    def __init__(self, attention, feed):
        super().__init__()
        self.norm_attention, self.attention = nn.LayerNorm(WIDTH), attention()
        self.norm_feed, self.feed = nn.LayerNorm(WIDTH), feed()

    def forward(self, x):
        x = x + self.attention(self.norm_attention(x))
        return x + self.feed(self.norm_feed(x))


# ---- Tasks


class Language(Zoo):
    """Predicts the next word by two blocks; the head has the weight of the embedding."""

    def __init__(self, attention=_Attention, feed=_Feed):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([_Block(attention, feed) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def training_step(self, batch):
        x = self.words(batch[:, :-1])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), batch[:, 1:].flatten())

    @staticmethod
    def batch(size, generator):
        return torch.randint(WORDS, (size, 7), generator=generator)


class Translation(Zoo):
    """A decoder attends to what an encoder has made of another sequence, and to its own past."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.ModuleList([_Block(_Attention, _Feed) for _ in range(2)])
        self.own, self.cross = (nn.ModuleList([_Attention() for _ in range(2)]) for _ in range(2))
        self.feed, self.head = nn.ModuleList([_Gated() for _ in range(2)]), nn.Linear(WIDTH, WORDS)

    def training_step(self, batch):
        memory = self.words(batch[0])
        for block in self.encoder:
            memory = block(memory)
        x = self.words(batch[1][:, :-1])
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        for own, cross, feed in zip(self.own, self.cross, self.feed, strict=True):
            x = x + own(x, mask=mask)
            x = x + cross(x, memory=memory)
            x = x + feed(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch[1][:, 1:].flatten())

    @staticmethod
    def batch(size, generator):
        return Language.batch(size, generator)[:, :5], Language.batch(size, generator)


class Images(Zoo):
    """Attention between the patches of images, and a word for their class."""

    def __init__(self):
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, WIDTH, 4, 4), nn.Linear(WIDTH, 4)
        self.first, self.places = nn.Parameter(torch.zeros(1, 1, WIDTH)), nn.Parameter(torch.randn(5, WIDTH))
        self.blocks = nn.Sequential(*[_Block(lambda: _FusedAttention(_view), _Feed) for _ in range(2)])

    def training_step(self, batch):
        x = self.patches(batch[0]).flatten(2).mT
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places
        return F.cross_entropy(self.head(self.blocks(x)[:, 0]), batch[1])

    @staticmethod
    def batch(size, generator):
        return torch.randn(size, 3, 8, 8, generator=generator), torch.randint(4, (size,), generator=generator)


class _Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.tokens, self.channels = nn.LayerNorm(WIDTH), _Feed(width=4, hidden=8), _Feed()

    def forward(self, x):
        x = x + self.tokens(self.norm(x).mT).mT
        return x + self.channels(self.norm(x))


class Mixing(Images):
    """Patches are mixed by the transposed tensor."""

    def __init__(self):
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, WIDTH, 4, 4), nn.Linear(WIDTH, 4)
        self.blocks = nn.Sequential(_Mixing(), _Mixing())

    def training_step(self, batch):
        x = self.blocks(self.patches(batch[0]).flatten(2).mT)
        return F.cross_entropy(self.head(x.mean(1)), batch[1])


def _language(attention=_Attention, feed=_Feed):
    return lambda: Language(attention, feed)


OWN = {
    "plain attention": _language(),
    "attention without bias": _language(lambda: _Attention(bias=False), lambda: _Feed(bias=False)),
    "attention by one call": _language(lambda: _Attention(fused=True)),
    "grouped heads": _language(lambda: _Attention(groups=HEADS // 2)),
    "grouped heads by one call": _language(lambda: _Attention(groups=HEADS // 2, fused=True)),
    "one head of keys": _language(lambda: _Attention(groups=1)),
    "rotary positions": _language(lambda: _Attention(rotary=True), _Gated),
    "gated": _language(feed=_Gated),
    "dropout": _language(feed=lambda: _Feed(dropout=0.3)),
    "routed networks": _language(feed=_Experts),
    **{
        f"qkv by {divide.__name__[1:]}": _language(lambda divide=divide: _FusedAttention(divide))
        for divide in (_split, _chunk, _unflatten, _view, _slices)
    },
    "qkv without bias": _language(lambda: _FusedAttention(_split, bias=False)),
    "translation": Translation,
    "images": Images,
    "mixing": Mixing,
}


# ---- Comparison

LAYOUTS = {
    "two parts": (2, {"tensor_parallel": 2}),
    "two parts of one unit": (2, {"tensor_parallel": 2, "units": []}),
    "four parts": (4, {"tensor_parallel": 4}),
    "two shards of two parts": (4, {"tensor_parallel": 2}),
    "two replicas of two shards of two parts": (8, {"tensor_parallel": 2, "replicate": 2}),
    "one shard": (1, {}),
    "two shards": (2, {}),
}
"""Ranks, and settings of the strategy."""
SIZES = (3, 2, 3, 2)


def train(build, strategy):
    """Train a task of fp64 for three steps with clipped gradients; return it, the norms and how it was divided."""
    task = make(build).double()
    training = Training(task, strategy, clip=0.5)
    rank, num_ranks = strategy.comm.rank, strategy.comm.world_size
    norms = []
    for batch in step_batches(task, sizes=SIZES, num_steps=3, replica=rank, num_replicas=num_ranks):
        norms.append(training.step(batch)[1])
    norms = [*training.norms, *(norm for norm in norms if norm is not None)]
    parallel = getattr(getattr(strategy, "_sharded", None), "parallel", None)
    divided = 0 if parallel is None else len(parallel._divided)
    gathering = 0 if parallel is None else sum(unit.gathers for unit in parallel._units)
    strategy.teardown()
    return task, norms, (divided, gathering)


def outcome(build, settings):
    """Return the largest difference from one process, or why a task is refused, and how it was divided."""
    strategy = FSDPStrategy(device="cpu", min_unit_mb=0, timeout_seconds=60.0, **settings)
    try:
        task, norms, divided = train(build, strategy)
    except UserError as error:
        return f"UserError: {error}", (0, 0)
    alone, norms_alone, _ = train(build, SingleStrategy(device="cpu"))
    return max(
        largest_difference(dict(task.named_parameters()), dict(alone.named_parameters())),
        largest_difference(map_tensors(norms, float), map_tensors(norms_alone, float)),
    ), divided


# ---- Tests

TASKS = OWN | tasks.TASKS | tasks.LIBRARY
WITHOUT_KERNEL = {"Mixtral": "its experts have no kernel for fp64"}
LATER = {
    "a counter of the class": "the class counts in both trainings",
    "ReplacedParameter": "fsdp of one unit does not see the other parameter",
}
"""Tasks that differ from one process with one unit."""
FEW = [
    "attention by one call",
    "dropout",
    "gated",
    "grouped heads",
    "images",
    "qkv by split",
    "routed networks",
    "translation",
]
AT_ONCE = 60
"""Tasks of one start of ranks."""
LIMIT_SECONDS = 1500


def _names(layout):
    """Return the tasks of a layout: the losses of some depend on how samples are divided over ranks."""
    omitted = {*WITHOUT_KERNEL, *(LATER if "units" in LAYOUTS[layout][1] else ())}
    if "two shards" in layout:
        omitted |= {"dropout", *OWN_STATE, *HOOKS}
    return [name for name in TASKS if name not in omitted]


def _outcomes(layout, names):
    warnings.simplefilter("ignore")
    return {name: outcome(TASKS[name], LAYOUTS[layout][1]) for name in names}


def _of_ranks(layout, names):
    """Yield the outcomes of tasks on each rank."""
    for first in range(0, len(names), AT_ONCE):
        piece = names[first : first + AT_ONCE]
        for found in run_ranks(_outcomes, LAYOUTS[layout][0], layout, piece, timeout=LIMIT_SECONDS):
            assert list(found) == piece
            yield found


def test_usual_blocks_are_divided_and_train_as_in_one_process():
    for found in _of_ranks("two parts", FEW):
        assert {name: each for name, (each, _) in found.items() if isinstance(each, str) or not each <= BOUND} == {}
        assert {name: gathering for name, (_, (_, gathering)) in found.items() if gathering} == {}
        assert min(divided for _, (divided, _) in found.values()) >= 12


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["four parts", "two shards of two parts"])
def test_usual_blocks_train_as_in_one_process_in_other_layouts(layout):
    for found in _of_ranks(layout, [name for name in FEW if name != "dropout"]):
        assert {name: each for name, (each, _) in found.items() if not _is_equal_or_refused(name, each)} == {}


@in_make_zoo
@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_SECONDS)
@pytest.mark.parametrize(("layout", "least"), [("two parts", 60), ("two parts of one unit", 60), ("four parts", 40)])
def test_all_tasks_have_the_weights_of_one_process_or_are_refused(layout, least):
    num_divided = 0
    for found in _of_ranks(layout, _names(layout)):
        assert {name: each for name, (each, _) in found.items() if not _is_equal_or_refused(name, each)} == {}
        num_divided += sum(not isinstance(each, str) and divided > 0 for each, (divided, _) in found.values())
    assert num_divided >= least * LAYOUTS[layout][0]


def _is_equal_or_refused(name, each):
    if isinstance(each, str):
        return each.startswith("UserError: ")
    return each <= (BOUND_OF_LIBRARY if name in tasks.LIBRARY else BOUND)


@in_make_zoo
@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_SECONDS)
@pytest.mark.parametrize(
    ("layout", "names"),
    [
        ("two shards of two parts", _names("two shards of two parts")),
        ("two replicas of two shards of two parts", [name for name in FEW if name != "dropout"]),
    ],
)
def test_shards_and_replicas_of_parts_have_the_weights_of_one_process(layout, names):
    for found in _of_ranks(layout, names):
        assert {name: each for name, (each, _) in found.items() if not _is_equal_or_refused(name, each)} == {}
