import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset
from trainkit.strategies.ddp.strategy import DDPStrategy
from trainkit.strategies.dp.strategy import DataParallel
from trainkit.strategies.single import SingleDevice

from trainkit.errors import UserError
from trainkit.interop.lightning import LightningTask, TrainerView, data_of, read_optimizers
from trainkit.trainer import Trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*isinstance.*LeafSpec.*:FutureWarning")


def samples(count=24):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, 4, generator=generator)
    return TensorDataset(x, (x.sum(dim=1) > 0).long())


class Classifier(pl.LightningModule):
    """As a user of Lightning writes it."""

    def __init__(self, lr=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Linear(4, 2)
        self.epochs_seen = []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("train_loss", loss, prog_bar=True, on_step=True)
        self.log_dict({"train_acc": (self(x).argmax(1) == y).float().mean()})
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self(x), y))
        self.log("val_acc", (self(x).argmax(1) == y).float().mean(), sync_dist=True)

    def on_train_epoch_start(self):
        self.epochs_seen.append((self.current_epoch, self.global_step))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 1, 0.5), "interval": "epoch"}}

    def train_dataloader(self):
        return DataLoader(samples(), batch_size=6)

    def val_dataloader(self):
        return DataLoader(samples(10), batch_size=4)


def module():
    torch.manual_seed(0)
    return Classifier()


def fit(task, data, *, tmp_path, strategy=None, epochs=2):
    trainer = Trainer(
        strategy or SingleDevice(), max_duration=f"{epochs}epoch", run_dir=tmp_path, callbacks=[], loggers=[]
    )
    return trainer.fit(task, data)


@pytest.fixture(scope="module")
def trained_by_lightning(tmp_path_factory):
    trained = module()
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path_factory.mktemp("lightning"),
    )
    trainer.fit(trained)
    return trained, {name: float(value) for name, value in trainer.callback_metrics.items()}


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_an_unmodified_module_has_the_weights_and_metrics_that_lightning_gives_it(trained_by_lightning, tmp_path):
    expected, metrics = trained_by_lightning
    task = LightningTask(module())
    result = fit(task, data_of(task.module), tmp_path=tmp_path)
    torch.testing.assert_close(task.module.net.weight, expected.net.weight)
    assert result.metrics["validation/loss"] == pytest.approx(metrics["val_loss"], abs=1e-6)
    assert result.metrics["validation/acc"] == pytest.approx(metrics["val_acc"], abs=1e-6)
    assert 0 <= result.metrics["train/acc"] <= 1


def test_hooks_at_epochs_are_called_and_know_where_the_run_is(tmp_path):
    task = LightningTask(module())
    fit(task, data_of(task.module), tmp_path=tmp_path)
    assert task.module.epochs_seen == [(0, 0), (1, 4)]


@pytest.mark.parametrize("strategy", [DataParallel(devices=["cpu", "cpu"]), DDPStrategy(devices=2)], ids=["dp", "ddp"])
def test_a_module_trains_to_the_same_weights_on_several_devices(strategy, tmp_path):
    alone, together = LightningTask(module()), LightningTask(module())
    expected = fit(alone, data_of(alone.module), tmp_path=tmp_path / "alone")
    result = fit(together, data_of(together.module), tmp_path=tmp_path / "together", strategy=strategy)
    torch.testing.assert_close(together.module.net.weight, alone.module.net.weight)
    assert result.metrics["validation/acc"] == pytest.approx(expected.metrics["validation/acc"])


def test_hooks_that_are_not_called_are_named():
    class Hooked(Classifier):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            pass

    with pytest.warns(UserWarning, match="on_train_batch_end"):
        LightningTask(Hooked())


def test_manual_optimization_is_refused():
    manual = module()
    manual.automatic_optimization = False
    with pytest.raises(UserError, match="configure_phases"):
        LightningTask(manual)


def test_what_the_trainer_does_not_offer_is_said_with_what_it_does():
    task = LightningTask(module())
    with pytest.raises(UserError, match="estimated_stepping_batches"):
        task.module.trainer.strategy.reduce(1)
    assert not hasattr(TrainerView(), "datamodule")


def test_a_step_without_a_loss_is_refused():
    class Silent(Classifier):
        def training_step(self, batch, batch_idx):
            return None

    with pytest.raises(UserError, match="returned no loss"):
        LightningTask(Silent()).training_step([torch.ones(1, 4), torch.zeros(1).long()])


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def test_every_form_of_configure_optimizers_is_read():
    model = nn.Linear(1, 1)
    optimizer = optimizer_of(model)
    step = StepLR(optimizer, 1)
    forms = {
        "optimizer": optimizer,
        "list": [optimizer],
        "lists": ([optimizer], [step]),
        "dict": {"optimizer": optimizer, "lr_scheduler": step},
        "config": {"optimizer": optimizer, "lr_scheduler": {"scheduler": step, "interval": "step"}},
        "list of a dict": [{"optimizer": optimizer, "lr_scheduler": {"scheduler": step, "interval": "step"}}],
    }
    every = {}
    for name, form in forms.items():
        found, schedules = read_optimizers(form, of="Net")
        assert found is optimizer
        every[name] = [schedule.every for schedule in schedules]
    assert every == {
        "optimizer": [],
        "list": [],
        "lists": ["epoch"],
        "dict": ["epoch"],
        "config": ["step"],
        "list of a dict": ["step"],
    }


def test_a_monitored_metric_keeps_its_meaning():
    optimizer = optimizer_of(nn.Linear(1, 1))
    config = {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "val_loss"},
    }
    _, (schedule,) = read_optimizers(config, of="Net")
    assert (schedule.every, schedule.metric) == ("metric", "validation/loss")


def test_several_optimizers_are_refused_with_what_to_use():
    model = nn.Linear(1, 1)
    with pytest.raises(UserError, match="configure_phases"):
        read_optimizers([optimizer_of(model), optimizer_of(model)], of="Net")
