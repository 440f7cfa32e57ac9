import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from trainkit.strategies.ddp.strategy import DDPStrategy
from trainkit.strategies.dp.strategy import DataParallelStrategy
from trainkit.strategies.single import SingleStrategy

from trainkit.errors import UserError
from trainkit.integrations.lightning import LightningTask, TrainerProxy, data_of, read_optimizers
from trainkit.trainer import Trainer

pytestmark = pytest.mark.filterwarnings("ignore:.*isinstance.*LeafSpec.*:FutureWarning")


@pytest.fixture(scope="module")
def modules():
    """LightningModules, imported by the one test process that needs them: the import takes seconds."""
    from tests.integrations import lightning_modules

    return lightning_modules


def fit(task, data, *, tmp_path, strategy=None, epochs=2):
    trainer = Trainer(
        strategy or SingleStrategy(), max_duration=f"{epochs}epoch", run_dir=tmp_path, callbacks=[], loggers=[]
    )
    return trainer.fit(task, data)


@pytest.fixture(scope="module")
def trained_by_lightning(modules, tmp_path_factory):
    import lightning.pytorch as pl

    trained = modules.classifier()
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
def test_an_unmodified_module_has_the_weights_and_metrics_that_lightning_gives_it(
    modules, trained_by_lightning, tmp_path
):
    expected, metrics = trained_by_lightning
    task = LightningTask(modules.classifier())
    result = fit(task, data_of(task.module), tmp_path=tmp_path)
    torch.testing.assert_close(task.module.net.weight, expected.net.weight)
    assert result.metrics["validation/loss"] == pytest.approx(metrics["val_loss"], abs=1e-6)
    assert result.metrics["validation/acc"] == pytest.approx(metrics["val_acc"], abs=1e-6)
    assert 0 <= result.metrics["train/acc"] <= 1
    assert result.metrics["train/epoch_acc"] == pytest.approx(metrics["train_epoch_acc"], abs=1e-6)
    assert result.metrics["validation/epoch_acc"] == pytest.approx(metrics["val_epoch_acc"], abs=1e-6)


def test_epoch_hooks_see_the_current_epoch_and_step(modules, tmp_path):
    task = LightningTask(modules.classifier())
    fit(task, data_of(task.module), tmp_path=tmp_path)
    assert task.module.epochs_seen == [(0, 0), (1, 4)]


def test_a_module_can_read_the_number_of_steps_of_the_run(modules, tmp_path):
    class Asks(modules.Classifier):
        def configure_optimizers(self):
            self.asked = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    task = LightningTask(Asks())
    assert fit(task, data_of(task.module), tmp_path=tmp_path).steps == task.module.asked == 8


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(DataParallelStrategy(devices=["cpu", "cpu"]), id="dp"),
        pytest.param(DDPStrategy(devices=2), id="ddp", marks=pytest.mark.slow),  # each rank imports Lightning
    ],
)
def test_a_module_trains_to_the_same_weights_on_several_devices(modules, strategy, tmp_path):
    alone, together = LightningTask(modules.classifier()), LightningTask(modules.classifier())
    expected = fit(alone, data_of(alone.module), tmp_path=tmp_path / "alone")
    result = fit(together, data_of(together.module), tmp_path=tmp_path / "together", strategy=strategy)
    torch.testing.assert_close(together.module.net.weight, alone.module.net.weight)
    for name in ("train/epoch_acc", "validation/acc", "validation/epoch_acc"):
        assert result.metrics[name] == pytest.approx(expected.metrics[name], abs=1e-6)


def test_hooks_that_are_not_called_are_named(modules):
    class Hooked(modules.Classifier):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            pass

    with pytest.warns(UserWarning, match="on_train_batch_end"):
        LightningTask(Hooked())


def test_manual_optimization_is_rejected(modules):
    manual = modules.classifier()
    manual.automatic_optimization = False
    with pytest.raises(UserError, match="configure_phases"):
        LightningTask(manual)


def test_an_unknown_trainer_attribute_is_rejected_with_the_known_ones(modules):
    task = LightningTask(modules.classifier())
    with pytest.raises(UserError, match="estimated_stepping_batches"):
        task.module.trainer.strategy.reduce(1)
    assert not hasattr(TrainerProxy(), "datamodule")


def test_a_step_without_a_loss_is_rejected(modules):
    class Silent(modules.Classifier):
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


def test_a_monitored_metric_becomes_a_validation_metric():
    optimizer = optimizer_of(nn.Linear(1, 1))
    config = {
        "optimizer": optimizer,
        "lr_scheduler": {"scheduler": ReduceLROnPlateau(optimizer), "monitor": "val_loss"},
    }
    _, (schedule,) = read_optimizers(config, of="Net")
    assert (schedule.every, schedule.metric) == ("metric", "validation/loss")


def test_several_optimizers_are_rejected_with_the_alternative():
    model = nn.Linear(1, 1)
    with pytest.raises(UserError, match="configure_phases"):
        read_optimizers([optimizer_of(model), optimizer_of(model)], of="Net")


# ---- What is logged at the end of epochs


def test_values_at_the_end_of_an_epoch_are_means_over_its_samples_and_metrics_are_reset(modules, tmp_path):
    class Collecting(modules.Classifier):
        def on_train_epoch_start(self):
            super().on_train_epoch_start()
            assert self.train_accuracy.update_count == 0

        def on_validation_epoch_start(self):
            self.losses = []

        def validation_step(self, batch, batch_idx):
            self.losses.append(nn.functional.cross_entropy(self(batch[0]), batch[1], reduction="none"))
            self.log("val_object", self.val_accuracy)
            super().validation_step(batch, batch_idx)

        def on_validation_epoch_end(self):
            self.log_dict({"val_mean": torch.cat(self.losses).mean(), "val_count": len(torch.cat(self.losses))})
            super().on_validation_epoch_end()

    task = LightningTask(Collecting())
    metrics = fit(task, data_of(task.module), tmp_path=tmp_path).metrics
    assert metrics["validation/mean"] == pytest.approx(metrics["validation/loss"], abs=1e-6)
    assert metrics["validation/count"] == 10
    assert metrics["validation/object"] == pytest.approx(metrics["validation/epoch_acc"], abs=1e-6)


def test_a_value_logged_outside_of_steps_and_epoch_ends_is_named(modules, tmp_path):
    class Early(modules.Classifier):
        def on_fit_start(self):
            self.log("early", 1.0)

    task = LightningTask(Early())
    with pytest.warns(UserWarning, match=r"self\.log\('early'\) is ignored"):
        fit(task, data_of(task.module), tmp_path=tmp_path, epochs=1)


# ---- Data modules


def test_a_data_module_is_set_up_for_each_stage_when_it_is_read(modules, tmp_path):
    task, source = LightningTask(modules.OverSeveralLoaders()), modules.Prepared()
    data = data_of(source)
    assert source.calls == ["prepare"]
    metrics = fit(task, data, tmp_path=tmp_path, epochs=1).metrics
    assert source.calls == ["prepare", "fit"]
    assert metrics["validation/dataloader_0/loader"] == 0
    assert metrics["validation/dataloader_1/loader"] == 1
    assert metrics["validation/dataloader_1/first"] == pytest.approx(4 / 7)
    assert {"validation/dataloader_0/epoch_acc", "validation/dataloader_1/epoch_acc"} < set(metrics)
    trainer = Trainer("single", run_dir=tmp_path / "later", callbacks=[], loggers=[])
    assert set(trainer.test(task, data)) == {"test/loss"}
    assert trainer.predict(task, data).shape == (3, 2)
    assert source.calls == ["prepare", "fit", "test", "predict"]


def test_a_data_module_that_is_only_validated_is_set_up_for_that_alone(modules, tmp_path):
    source = modules.Prepared()
    Trainer("single", run_dir=tmp_path, callbacks=[], loggers=[]).validate(
        LightningTask(modules.OverSeveralLoaders()), data_of(source)
    )
    assert source.calls == ["prepare", "validate"]


def test_several_training_loaders_are_rejected_with_the_alternative(modules, tmp_path):
    class Several(modules.Prepared):
        def train_dataloader(self):
            return [super().train_dataloader()] * 2

    with pytest.raises(UserError, match="Mixture"):
        fit(LightningTask(modules.classifier()), data_of(Several()), tmp_path=tmp_path)
