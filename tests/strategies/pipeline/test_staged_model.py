"""Before the first step: the partition follows training, and no batch is lost."""

import collections
import functools

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset
from trainkit.strategies.pipeline.strategy import PipelineStrategy

from tests.strategies.pipeline.models import Mlp
from tests.strategies.pipeline.training import largest_difference, make
from trainkit.data.data import Data
from trainkit.testing import run_ranks
from trainkit.trainer import Trainer

CALLED = []
"""Calls in this process, outside of the task: an attribute that several stages change would be refused."""


class _Backwards(Mlp):
    """Is evaluated in another order than it is trained, and knows who called which module."""

    def __init__(self):
        super().__init__(depth=1)
        self.side = torch.nn.Linear(3, 3)
        for name in ("net", "side"):
            self.get_submodule(name).register_forward_hook(lambda module, args, output, name=name: self.note(name))

    def note(self, name):
        CALLED.append((name, self.training))

    def training_step(self, batch):
        return torch.nn.functional.cross_entropy(self.side(self.net(batch[0])), batch[1])

    def validation_step(self, batch):
        side = self.side(torch.ones(len(batch[1]), 3, dtype=batch[0].dtype))
        return {"loss": torch.nn.functional.cross_entropy(self.net(batch[0]) + side, batch[1])}

    def predict_step(self, batch):
        return self.net(batch[0])


class _Samples(torch.utils.data.Dataset):
    """Draws from torch's generator, and counts what is read."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return 16

    def __getitem__(self, index):
        self.read.append(index)
        return torch.randn(8, dtype=torch.float64) + index / 16, index % 3


class _Once(IterableDataset):
    """A stream that cannot be read twice."""

    def __init__(self):
        self.rest = iter([(torch.full((8,), index / 9.0, dtype=torch.float64), index % 3) for index in range(24)])

    def __iter__(self):
        return self.rest


def _fit(data, *, sanity, replicas=1):
    strategy = PipelineStrategy(
        stages=dist.get_world_size() // replicas, replicas=replicas, device="cpu", split_points=["side"]
    )
    CALLED.clear()
    task = make(_Backwards).eval()  # as it may come from an evaluation
    trainer = Trainer(
        strategy,
        max_duration="3step",
        precision="fp64",
        num_sanity_batches=2 if sanity else 0,
        evaluate_every="2step" if sanity else None,
        fast_dev_run=False,
        run_dir=None,
        callbacks=[],
        loggers=[],
    )
    validation = [(torch.ones(8, dtype=torch.float64), 0)] * 6
    data = Data(train=data, validation=validation, batch_size=8)
    trainer.fit(task, data)
    weights = {name: tensor.clone() for name, tensor in task.state_dict().items()}
    counts = collections.Counter(name for name, training in CALLED if not training)
    return weights, counts, (trainer, task, data)


def _facts():
    torch.set_num_threads(1)
    plain, sane, once = _Samples(), _Samples(), _Once()
    weights, _, (trainer, task, data) = _fit(plain, sanity=False)
    expected = task.validation_step((torch.ones(6, 8, dtype=torch.float64), torch.zeros(6, dtype=torch.long)))
    again = trainer.validate(task, data)["validation/loss"] - float(expected["loss"])
    same, evaluated, _ = _fit(sane, sanity=True)
    _fit(once, sanity=True)
    start = make(_Backwards).double().state_dict()
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, evaluated)
    all_weights = [None] * dist.get_world_size()
    dist.all_gather_object(all_weights, weights)
    return {
        "again": again,
        "apart": max(largest_difference(weights, others) for others in all_weights),
        "trained": {name for name, tensor in weights.items() if not torch.equal(tensor, start[name])},
        "names": set(start),
        "difference": largest_difference(weights, same),
        "read": (plain.read, sane.read),
        "left": len(list(once.rest)),
        "evaluated": everyone,
    }


def _with_replicas():
    torch.set_num_threads(1)
    _, evaluated, _ = _fit(_Samples(), sanity=True, replicas=2)
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, evaluated)
    return everyone


@functools.cache
def _found():
    return run_ranks(_facts, 2)[0]


def test_evaluations_before_and_between_steps_change_no_weight_and_no_sample():
    found = _found()

    assert found["difference"] == 0.0
    plain, sane = found["read"]
    # The traced batch, and the first micro-batch once it is seen to draw, are read twice.
    assert plain == sane and len(plain) == len(set(plain)) + 8 + 2


def test_ranks_that_were_there_before_have_the_whole_trained_task_afterwards():
    found = _found()

    assert found["apart"] == 0.0
    assert found["trained"] == found["names"]
    assert abs(found["again"]) < 1e-12  # evaluated by the same trainer, in stages again


def test_no_sample_of_a_stream_is_lost_by_tracing_the_first_ones():
    assert _found()["left"] == 0


def test_an_evaluation_before_training_uses_the_stages_of_training():
    first, second = _found()["evaluated"]

    assert first["side"] == 2  # when the step was traced, twice
    assert second == {"side": first["net"] - 2}


def test_replicas_evaluate_in_their_stages_before_they_train():
    counts = run_ranks(_with_replicas, 4)[0]

    for first, second in (counts[:2], counts[2:]):
        assert first["side"] == 2 and first["net"] > 1
        assert set(second) == {"side"}
