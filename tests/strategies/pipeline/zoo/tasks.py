"""The zoo: all tasks that a pipeline must train as one process does, or refuse; `REFUSED` has the sentences."""

from functools import partial

import torch

from tests.marks import EVERY_CASE
from tests.strategies.pipeline import library_models, models, recipe_models
from tests.strategies.pipeline.zoo import state
from tests.strategies.pipeline.zoo.architectures import ARCHITECTURES
from tests.strategies.pipeline.zoo.chain import Called, Chain, chain
from tests.strategies.pipeline.zoo.families import FAMILIES
from tests.strategies.pipeline.zoo.functions import FUNCTIONS
from tests.strategies.pipeline.zoo.memories import MEMORIES
from tests.strategies.pipeline.zoo.modules import MODULES
from tests.strategies.pipeline.zoo.structures import STRUCTURES

PIECES = {name: partial(Called, function) for name, function in FUNCTIONS.items()} | MODULES | MEMORIES | STRUCTURES
"""What `Chain` puts between layers, by name."""
SMALL = {name: chain(piece) for name, piece in PIECES.items()} | ARCHITECTURES | {t.__name__: t for t in state.TASKS}
TASKS = SMALL | models.OWN | recipe_models.RECIPES
"""All tasks by name, except those of transformers."""


LIBRARY = library_models.LIBRARY | FAMILIES
"""Models of transformers."""

REFUSED = {
    **{task.__name__: sentence for task, sentence in state.REFUSED.items()},
    "a counter of the class": "changes '_Shared.calls', an attribute of a class.*self.calls = ",
    "an exception": "module 'pieces.1.layer' .* raises RuntimeError, which the step catches",
    "an iterator": "reads the iterator 'pieces.1.numbers'.*self.numbers.index.",
    "a random call after fork_rng": "seeds torch's random generator itself before `randn`",
    "fork_rng": "seeds torch's random generator itself before `randn`",
    "recent tensors": "calls `div` .* runs for the first time, and `add` .* in its place when it runs again",
    "a tensor subclass": "uses a tensor that none of the calls which a trace sees has made",
    "a write through an array": "writes to the array of `numpy`.*which other stages do not see",
    "a write through dlpack": "uses a tensor that none of the calls which a trace sees has made",
    "a write through from_numpy": "writes to the array of `numpy`.*which other stages do not see",
    "an averaged model": "calls `copy_` .* runs for the first time, and `to` .* in its place when it runs again",
}
"""Refused before training."""
if tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14):
    REFUSED["a Function by a name bound before"] = (
        "calls `_Reverse.apply` .*Write `_Reverse.apply.*one module's forward"
    )
REFUSED_LATER = {
    **{task.__name__: sentence for task, sentence in state.REFUSED_IN_THE_FIRST_STEP.items()},
    "a metric": "the metric MeanMetric is updated by calls of which an earlier stage than the last makes some",
    "chunk, split and unbind": "`unbind` .* has 2 tensors in its result, and the traced step has",
    "rows of a tensor": "`unbind` .* has 2 tensors in its result, and the traced step has",
}
"""Refused in the step whose batch shows it."""
UNFOLLOWED = {
    "a closure": "state outside of the task, which docs/pipeline.md says is not detected",
    "Llava": "makes a tensor of each image, so that every micro-batch needs as many, which batches here do not have",
    "Mixtral": "its experts have no kernel for fp64",
}
"""Not held against one process here, with the reason; of the last two test_equality.py holds what holds."""
EQUAL = [name for name in TASKS if name not in REFUSED | REFUSED_LATER | UNFOLLOWED]
IN_PHASES = {"Adversarial", "CountedPhases", "SmallGAN"}
OF_LIBRARY = [name for name in LIBRARY if name not in UNFOLLOWED]


def in_chains(names):
    """Return the names with those of pieces joined, so that a task has six of them; unchanged in `make zoo`."""
    names = list(names)
    if EVERY_CASE:
        return names
    pieces = [name for name in names if name in PIECES]
    chained = [" + ".join(pieces[first : first + 6]) for first in range(0, len(pieces), 6)]
    return [*chained, *(name for name in names if name not in PIECES)]


def find(name):
    """Return the task of a name, or of several pieces' names with ` + ` between them."""
    if " + " in name:
        return partial(Chain, *(PIECES[piece] for piece in name.split(" + ")))
    return (TASKS | LIBRARY)[name]
