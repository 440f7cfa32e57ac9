"""A program that trains with a progress bar: `progress_program.py RUN_DIR fit|validate|raise`."""

import fcntl
import logging
import sys
import termios
import time

import torch
from torch.utils.data import TensorDataset
from trainkit.callbacks.checkpoint import Checkpoint

from trainkit import Data, TaskModule, Trainer
from trainkit.errors import Stopped


class Slow(TaskModule):
    def __init__(self, raise_at=None):
        super().__init__()
        self.net, self.raise_at, self.steps = torch.nn.Linear(4, 1), raise_at, 0

    def training_step(self, batch):
        time.sleep(0.01)
        self.steps += 1
        if self.steps == 15:
            print("printed by the task")
        if self.steps in (16, 40):
            logging.warning("a warning of step %d", self.steps)
        if self.steps == self.raise_at:
            raise RuntimeError("a bug in the task")
        return {"loss": (self.net(batch[0]) - batch[1]).square().mean(), "accuracy": torch.tensor(0.75)}

    def validation_step(self, batch):
        time.sleep(0.05)
        return {"loss": (self.net(batch[0]) - batch[1]).square().mean()}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def main(run_dir, mode):
    logging.basicConfig(level=logging.INFO, format="logged: %(message)s")
    if sys.stdout.isatty():
        fcntl.ioctl(1, termios.TIOCSCTTY, 0)  # so that Ctrl-C typed into the terminal is a signal
    torch.manual_seed(0)
    x = torch.randn(120, 4)
    dataset = TensorDataset(x, x.sum(1, keepdim=True))
    data = Data(train=dataset, validation=TensorDataset(x[:40], x[:40].sum(1, keepdim=True)), batch_size=4)
    trainer = Trainer(
        max_duration="2epoch",
        evaluate_every="20step",
        log_every="5step",
        run_dir=run_dir,
        loggers=[],
        callbacks=[
            "model_summary",
            "speed_monitor",
            Checkpoint(monitor="validation/loss", every=None),
            "progress_bar",
        ],
    )
    try:
        if mode == "validate":
            trainer.validate(Slow(), data)
        else:
            trainer.fit(Slow(raise_at=25 if mode == "raise" else None), data)
    except Stopped as stopped:
        sys.exit(stopped.exit_code)


if __name__ == "__main__":
    main(*sys.argv[1:])
