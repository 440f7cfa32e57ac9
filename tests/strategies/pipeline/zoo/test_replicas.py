"""Tasks of the zoo have the weights of one process under strategies with replicas, with accumulation and clipping."""

import warnings
from functools import partial

import pytest
import torch.distributed as dist
from trainkit.strategies.ddp.strategy import DDPStrategy
from trainkit.strategies.dp.strategy import DataParallelStrategy
from trainkit.strategies.fsdp.strategy import FSDPStrategy
from trainkit.strategies.fusion import FusionStrategy
from trainkit.strategies.single import SingleStrategy
from trainkit.strategies.torch_ddp import TorchDDPStrategy

from tests.marks import EVERY_CASE, in_make_zoo
from tests.strategies.pipeline.training import Training, make, step_batches
from tests.strategies.pipeline.zoo import tasks
from tests.strategies.pipeline.zoo.comparison import largest_difference
from trainkit.testing import run_ranks

BOUND = 1e-9
SIZES = (3, 3, 2, 3, 2)
STRATEGIES = {
    "ddp": partial(DDPStrategy, device="cpu"),
    "torch_ddp": partial(TorchDDPStrategy, device="cpu", find_unused_parameters=True),
    "fusion": partial(FusionStrategy, device="cpu"),
    "fsdp": partial(FSDPStrategy, device="cpu"),
}


def _trained(build, strategy, replica=0, num_replicas=1):
    task = make(build).double()
    training = Training(task, strategy, clip=0.5)
    training.run(step_batches(task, sizes=SIZES, num_steps=2, replica=replica, num_replicas=num_replicas))
    strategy.teardown()
    return {name: parameter.detach().clone() for name, parameter in task.named_parameters()}


def _difference(name, strategy, **replicas):
    build = tasks.find(name)
    return largest_difference(_trained(build, strategy, **replicas), _trained(build, SingleStrategy(device="cpu")))


def _outcomes(kind, names):
    warnings.simplefilter("ignore")
    found = {}
    for name in names:
        try:
            if kind == "dp":
                found[name] = _difference(name, DataParallelStrategy(devices=["cpu", "cpu"]))
            else:
                strategy = STRATEGIES[kind]()
                found[name] = _difference(name, strategy, replica=dist.get_rank(), num_replicas=2)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


OWN_STATE = {
    *(name for name in tasks.MEMORIES),
    *(task.__name__ for task in tasks.state.TASKS),
    *("spectral norm", "old spectral norm", "fake quantization"),
}
"""Tasks whose loss depends on state, which each replica changes by its own samples."""
HOOKS = {"a hook on a shared weight", "a late hook on a shared weight", "registered hooks"}
"""Hooks that are not linear see the gradient of one replica or of several, of one micro-batch or of several."""
OF_TORCH_DDP = {
    "reentrant checkpoint": "torch's DistributedDataParallel needs use_reentrant=False",
    "a hook on a tensor": "the loss is scaled by the number of ranks, which a bound on gradients sees",
}
OF_DP = {"hooks that capture": "replicas in threads of one process share the object in which the hooks keep values"}
OF_FSDP = {
    "lists of parameters": "complex parameters are refused by name",
    "sparse gradients": "sparse gradients are refused by name",
}
NAMES = [name for name in tasks.TASKS if name not in OWN_STATE | HOOKS]
IN_TURN = ["dp", "ddp", "fusion", "fsdp"]
"""Strategies of which each trains a quarter of the tasks, and in `make zoo` all."""


def _names(kind):
    """Return the tasks that a strategy trains."""
    refused = {
        "dp": OF_DP,
        "fsdp": OF_FSDP,
        "fusion": tasks.IN_PHASES,
        "torch_ddp": {*OF_TORCH_DDP, *tasks.IN_PHASES},
    }.get(kind, ())
    names = NAMES if EVERY_CASE else NAMES[IN_TURN.index(kind) :: len(IN_TURN)]
    return tasks.in_chains(name for name in names if name not in refused)


def _unequal(found):
    return {name: each for name, each in found.items() if isinstance(each, str) or not each <= BOUND}


@pytest.mark.slow
def test_two_replicas_on_one_device_have_the_weights_of_one_process():
    assert _unequal(_outcomes("dp", _names("dp"))) == {}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*IN_TURN[1:], pytest.param("torch_ddp", marks=in_make_zoo)])
def test_two_ranks_have_the_weights_of_one_process(kind):
    for found in run_ranks(_outcomes, 2, kind, _names(kind), timeout=600):
        assert _unequal(found) == {}
