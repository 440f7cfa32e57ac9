"""Extra state of modules (`get_extra_state`) in checkpoints of a pipeline."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.strategies.pipeline.strategy import PipelineStrategy
from trainkit.strategies.single import SingleStrategy

from tests.strategies.pipeline.training import Training, make, step_batches
from tests.strategies.pipeline.zoo.state import WIDTH, ExtraState
from trainkit import Data, Trainer
from trainkit.testing import run_ranks


def _fit(run_dir, strategy, num_steps, *, resume=None, sharded=False):
    torch.manual_seed(0)
    task = ExtraState()
    data = Data(train=TensorDataset(torch.randn(32, WIDTH), torch.randn(32, WIDTH)), batch_size=8)
    trainer = Trainer(
        strategy,
        max_duration=f"{num_steps}step",
        precision="fp64",
        callbacks=[Checkpoint(every="2step", sharded=sharded)],
        loggers=[],
        run_dir=run_dir,
    )
    trainer.fit(task, data, resume=resume)
    return task


def _pipeline():
    return PipelineStrategy(stages=2, device="cpu", accumulate=4)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_extra_state_of_a_later_stage_is_saved_and_resumed_by_a_pipeline_and_by_one_process(tmp_path, sharded):
    whole = _fit(tmp_path / "whole", SingleStrategy(device="cpu", accumulate=4), 4)
    half = _fit(tmp_path / "half", _pipeline(), 2, sharded=sharded)
    staged = _fit(tmp_path / "staged", _pipeline(), 4, resume=tmp_path / "half")
    alone = _fit(tmp_path / "alone", SingleStrategy(device="cpu", accumulate=4), 4, resume=tmp_path / "half")

    assert (whole.counting.calls, half.counting.calls) == (16, 8)
    for resumed in (staged, alone):
        assert resumed.counting.calls == 16
        for found, expected in zip(resumed.parameters(), whole.parameters(), strict=True):
            assert torch.allclose(found, expected, rtol=0.0, atol=1e-9)


def _loaded_while_training():
    strategy = PipelineStrategy(stages=2, device="cpu")
    training = Training(make(ExtraState), strategy)
    first, second = step_batches(ExtraState, sizes=(4, 4), num_steps=2)
    training.step(first)
    box = [strategy.state_dict(training.task)]
    dist.broadcast_object_list(box, src=0)
    training.step(second)
    before = training.task.counting.calls
    strategy.load_state_dict(training.task, box[0])
    return before, training.task.counting.calls


def test_extra_state_is_loaded_into_a_task_that_is_partitioned():
    assert run_ranks(_loaded_while_training, num_ranks=2)[1] == (4, 2)
