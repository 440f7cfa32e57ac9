"""A step ends before it is logged, evaluated and saved."""

import pytest
import torch
from trainkit.callbacks.checkpoint import Checkpoint

from tests.seams.training import BOUND, Layers, batches, difference, samples, trained
from trainkit import Callback, Data
from trainkit.checkpoint.store import CheckpointStore

LIMIT = 0.2


class Clip(Callback):
    """Constrains the weights after every step, and doubles the bias of a layer at the end of an epoch."""

    def __init__(self):
        self.measured = []

    def on_step_end(self, run):
        with run.whole_task() as task, torch.no_grad():
            for parameter in task.parameters():
                parameter.clamp_(-LIMIT, LIMIT)

    def on_epoch_end(self, run):
        with run.whole_task() as task, torch.no_grad():
            task.b.bias.mul_(2)

    def on_evaluation_end(self, run, stage, metrics):
        self.measured.append(metrics["validation/loss"])


def plain_loop():
    task, losses = Layers(), []
    optimizer = task.configure_optimizers()
    for step, batch in enumerate(batches(), start=1):
        task.training_step(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter in task.parameters():
                parameter.clamp_(-LIMIT, LIMIT)
            if step % 2 == 0:
                losses.append(task.validation_step(samples(8).tensors).item())
            if step == 6:
                task.b.bias.mul_(2)
    return task.state_dict(), losses


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_what_a_callback_does_to_weights_is_in_the_metrics_and_the_checkpoint_of_the_same_step(
    strategy, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    reference, losses = plain_loop()
    data = Data(train=samples(), validation=samples(8), batch_size=8, shuffle=False)
    saving = Checkpoint(every="2step", monitor="validation/loss", save_last_k=None, save_at_end=False)
    weights = trained(strategy, Layers(), saving, Clip(), data=data, evaluate_every="2step", run_dir="run")
    assert difference(weights, reference) < BOUND
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    entries = store.entries()
    assert [entry.step for entry in entries] == [2, 4, 6]
    assert [entry.metrics["validation/loss"] for entry in entries] == pytest.approx(losses, rel=1e-6)
    assert difference(dict(store.load(entries[-1])["task"]), reference) < BOUND
