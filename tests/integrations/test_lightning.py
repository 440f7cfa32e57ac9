import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.callbacks.gradient_norms import GradientNorms
from trainkit.callbacks.learning_rate_finder import LearningRateFinder
from trainkit.strategies.ddp.strategy import DDPStrategy
from trainkit.strategies.dp.strategy import DataParallelStrategy
from trainkit.strategies.single import SingleStrategy

from tests.seams.training import MAKE_STRATEGY
from tests.tasks import fit as train
from tests.tasks import seeded
from trainkit.data.data import Data
from trainkit.errors import UserError
from trainkit.integrations.lightning import LightningTask, TrainerProxy, data_of, read_optimizers
from trainkit.trainer import Trainer

# Slow: the import of Lightning alone takes as long as a hundred tests.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*isinstance.*LeafSpec.*:FutureWarning")]


@pytest.fixture(scope="module")
def modules():
    """LightningModules, imported by the one test process that needs them: the import takes seconds."""
    from tests.integrations import lightning_modules

    return lightning_modules


def fit(task, data, *, tmp_path, strategy=None, epochs=2, **settings):
    settings = {"max_duration": f"{epochs}epoch", "report": False, "num_sanity_batches": 2, **settings}
    return train(strategy or SingleStrategy(), task, data, run_dir=tmp_path, **settings)


def fit_by_lightning(module, data=None, *, tmp_path, epochs=2, **settings):
    import lightning.pytorch as pl

    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tmp_path,
        **settings,
    )
    trainer.fit(module, data)
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def has_weights_of(module, other):
    pairs = zip(module.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(own, others) and own.isfinite().all() for own, others in pairs)


@pytest.fixture(scope="module")
def trained_by_lightning(modules, tmp_path_factory):
    trained = modules.classifier()
    return trained, fit_by_lightning(trained, tmp_path=tmp_path_factory.mktemp("lightning"))


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


def test_a_validation_belongs_to_the_epoch_that_it_ends_and_knows_sanity_batches(modules, tmp_path):
    seen = []

    class Counts(modules.Classifier):
        def on_validation_epoch_end(self):
            seen.append((self.trainer.sanity_checking, self.current_epoch, self.global_step))
            super().on_validation_epoch_end()

    task = LightningTask(Counts())
    fit(task, data_of(task.module), tmp_path=tmp_path)
    assert seen == [(True, 0, 0), (False, 0, 4), (False, 1, 8)]


def test_a_module_can_read_the_number_of_steps_of_the_run(modules, tmp_path):
    class Asks(modules.Classifier):
        def configure_optimizers(self):
            self.asked = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    task = LightningTask(Asks())
    assert fit(task, data_of(task.module), tmp_path=tmp_path).steps == task.module.asked == 8


def test_a_pipeline_counts_batches_as_one_device_with_as_many_micro_batches(modules, tmp_path):
    weights = []
    for name in ("single", "pipeline"):
        task = LightningTask(seeded(modules.Counting))
        fit(task, data_of(task.module), tmp_path=tmp_path / name, strategy=MAKE_STRATEGY[name]())
        weights.append([parameter.detach() for parameter in task.parameters()])
    torch.testing.assert_close(*weights)


@pytest.mark.parametrize("name", [name for name in MAKE_STRATEGY if name != "single"])
def test_a_module_trains_to_the_same_weights_on_several_devices(modules, name, tmp_path):
    alone, together = LightningTask(seeded(modules.Deep)), LightningTask(seeded(modules.Deep))
    expected = fit(alone, data_of(alone.module), tmp_path=tmp_path / "alone")
    result = fit(together, data_of(together.module), tmp_path=tmp_path / "together", strategy=MAKE_STRATEGY[name]())
    for weight, of_one in zip(together.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(weight, of_one)
    for metric in ("train/epoch_acc", "validation/acc", "validation/epoch_acc"):
        assert result.metrics[metric] == pytest.approx(expected.metrics[metric], abs=1e-6)


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(SingleStrategy(), id="single"),
        pytest.param(DataParallelStrategy(devices=["cpu", "cpu"]), id="dp"),
        pytest.param(DDPStrategy(devices=2), id="ddp"),
    ],
)
@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_metric_objects_that_hooks_update_keep_their_states_from_evaluation_to_evaluation(modules, strategy, tmp_path):
    import lightning.pytorch as pl

    samples = modules.samples()
    expected = fit_by_lightning(
        seeded(modules.KeepsItsBest),
        pl.LightningDataModule.from_datasets(samples, samples, batch_size=8),
        tmp_path=tmp_path / "lightning",
        epochs=3,
    )
    task = LightningTask(seeded(modules.KeepsItsBest))
    data = Data(train=samples, validation=samples, batch_size=8, shuffle=False)
    metrics = fit(task, data, tmp_path=tmp_path / "run", strategy=strategy, epochs=3).metrics
    assert metrics["validation/highest"] == expected["val/highest"] == 3
    assert metrics["validation/counted"] == expected["val/counted"] == 4  # and after the sanity batches
    assert metrics["validation/best"] == pytest.approx(max(metrics["validation/accuracy"], metrics["validation/best"]))
    assert [name for name in metrics if name.startswith("train/")] == ["train/loss", "train/epoch"]


def test_a_metric_object_that_steps_and_hooks_update_is_refused(modules, tmp_path):
    class Mixed(modules.KeepsItsBest):
        def on_validation_epoch_end(self):
            self.val_accuracy(torch.tensor([[0.0, 1.0]]), torch.tensor([1]))

    with pytest.raises(UserError, match="val_accuracy is updated in steps and in a hook at the end of an epoch"):
        fit(
            LightningTask(Mixed()),
            Data(train=modules.samples(), validation=modules.samples(), batch_size=8),
            tmp_path=tmp_path,
        )


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


# ---- The same as Lightning


@pytest.mark.filterwarnings("ignore")  # Lightning's own
@pytest.mark.parametrize("name", ["BoringModel", "DemoModel", "ManualOptimBoringModel", "SmallTransformer"])
def test_lightnings_demo_classes_have_the_weights_that_lightning_gives_them(modules, tmp_path, name):
    expected, module = seeded(getattr(modules, name)), seeded(getattr(modules, name))
    data = None if name == "SmallTransformer" else seeded(modules.BoringDataModule)
    fit_by_lightning(expected, data, tmp_path=tmp_path)
    fit(LightningTask(module), data_of(data or module), tmp_path=tmp_path, fused_optimizer=False)
    assert has_weights_of(module, expected)


@pytest.mark.filterwarnings("ignore")  # Lightning's own
@pytest.mark.parametrize("every", [1, 2])
def test_a_gan_with_manual_optimization_has_the_weights_and_values_that_lightning_gives_it(modules, tmp_path, every):
    expected, gan = seeded(lambda: modules.GAN(every)), seeded(lambda: modules.GAN(every))
    logged = fit_by_lightning(expected, tmp_path=tmp_path)
    settings = {"fused_optimizer": False, "log_every": "1epoch"}
    metrics = fit(LightningTask(gan), data_of(gan), tmp_path=tmp_path, **settings).metrics
    assert has_weights_of(gan, expected)
    assert gan.seen == expected.seen
    assert metrics["train/generator_loss"] == pytest.approx(logged["train_generator_loss"], abs=1e-6)
    assert metrics["train/loss"] == pytest.approx(logged["train_loss"], abs=1e-6)


@pytest.mark.filterwarnings("ignore")  # Lightning's own
@pytest.mark.parametrize(
    ("name", "precision"), [("Noting", "fp32"), ("Noting", "bf16-mixed"), ("ManualNoting", "bf16-mixed")]
)
def test_hooks_are_called_in_lightnings_order_and_see_the_same(modules, tmp_path, name, precision):
    expected, module = seeded(getattr(modules, name)), seeded(getattr(modules, name))
    data = None if name == "Noting" else seeded(modules.BoringDataModule)
    fit_by_lightning(expected, data, tmp_path=tmp_path, precision=precision.replace("fp32", "32-true"))
    settings = {"precision": precision, "fused_optimizer": False}
    fit(LightningTask(module), data_of(data or module), tmp_path=tmp_path, **settings)
    assert module.calls == expected.calls


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_modules_that_the_user_put_in_evaluation_mode_stay_there(modules, tmp_path):
    class Frozen(modules.Classifier):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4).eval()
            self.modes = []

        def forward(self, x):
            self.modes.append((self.training, self.norm.training, self.net.training))
            return self.net(self.norm(x))

    expected, module = seeded(Frozen), seeded(Frozen)
    fit_by_lightning(expected, tmp_path=tmp_path)
    fit(LightningTask(module), data_of(module), tmp_path=tmp_path, fused_optimizer=False)
    assert module.modes == expected.modes
    assert has_weights_of(module, expected)


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_tensors_that_a_step_creates_in_fp64_are_those_of_lightning(modules, tmp_path):
    expected, gan = seeded(modules.GAN), seeded(modules.GAN)
    fit_by_lightning(expected, tmp_path=tmp_path, precision="64-true")
    fit(LightningTask(gan), data_of(gan), tmp_path=tmp_path, precision="fp64", fused_optimizer=False)
    assert gan.dtype == torch.float64
    assert has_weights_of(gan, expected)


def test_a_module_knows_the_device_that_its_task_is_moved_to(modules):
    task = LightningTask(modules.classifier())
    task.to("meta")
    assert task.module.device == torch.device("meta")


# ---- Manual optimization


@pytest.mark.parametrize("every", [1, 2])
def test_a_resumed_gan_has_the_bits_of_one_that_was_not_stopped(modules, tmp_path, every):
    def train(folder, **settings):
        gan = seeded(lambda: modules.GAN(every))
        fit(LightningTask(gan), data_of(gan), tmp_path=tmp_path / folder, callbacks=[Checkpoint()], **settings)
        return gan

    whole = train("whole", epochs=3)
    train("stopped", max_duration="9step")  # with every=2, a gradient waits for the next batch
    resumed = train("stopped", epochs=3, resume=tmp_path / "stopped")
    assert has_weights_of(resumed, whole)
    assert resumed.seen == whole.seen[9:]


@pytest.mark.parametrize(
    ("strategy", "settings", "remedy"),
    [
        (DDPStrategy(devices=2), {}, "Set strategy=single"),
        (DataParallelStrategy(devices=["cpu", "cpu"]), {}, "Set strategy=single"),
        (SingleStrategy(accumulate=2), {}, "strategy.accumulate=1"),
        (SingleStrategy(micro_batch_size=2), {}, "without micro_batch_size"),
        (SingleStrategy(), {"precision": "fp16-mixed"}, "trainer.precision=bf16-mixed"),
        (SingleStrategy(), {"max_grad_norm": 1.0}, "trainer.max_grad_norm=null .*self.clip_gradients"),
        (SingleStrategy(), {"on_nonfinite": "skip"}, "trainer.on_nonfinite=raise"),
        (SingleStrategy(), {"skip_grad_norm_factor": 5.0}, "trainer.skip_grad_norm_factor=null"),
    ],
)
def test_manual_optimization_refuses_what_would_change_it(modules, tmp_path, strategy, settings, remedy):
    gan = modules.GAN()
    with pytest.raises(UserError, match=f"GAN has automatic_optimization=False.* {remedy}"):
        fit(LightningTask(gan), data_of(gan), tmp_path=tmp_path / "run", strategy=strategy, **settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("callback", "name"),
    [(GradientNorms(), "gradient_norms"), (LearningRateFinder(phase="optimizer_0"), "learning_rate_finder")],
)
def test_manual_optimization_refuses_callbacks_that_need_steps_or_gradients(modules, tmp_path, callback, name):
    gan = modules.GAN()
    with pytest.raises(UserError, match=f"automatic_optimization=False.*{name}"):
        fit(LightningTask(gan), data_of(gan), tmp_path=tmp_path, callbacks=[callback])


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda gan: None, "returned no optimizer; return torch optimizers"),
        (lambda gan: [1], "returned int; return torch optimizers"),
        (lambda gan: torch.optim.LBFGS(gan.parameters()), "returned LBFGS, which does not work with automatic_opt"),
        (
            lambda gan: ([optimizer_of(gan)], [StepLR(optimizer_of(gan), 1)]),
            "returned a StepLR .* of one of the returned",
        ),
    ],
)
def test_manual_optimization_refuses_unusable_optimizers(modules, tmp_path, returned, message):
    gan = modules.GAN()
    gan.configure_optimizers = lambda: returned(gan)
    with pytest.raises(UserError, match=f"GAN.configure_optimizers {message}"):
        fit(LightningTask(gan), data_of(gan), tmp_path=tmp_path)


def test_manual_optimization_trains_in_bf16_with_the_default_callbacks(modules, tmp_path):
    gan = modules.GAN()
    result = fit(LightningTask(gan), data_of(gan), tmp_path=tmp_path, precision="bf16-mixed", callbacks=None, epochs=1)
    assert (result.steps, gan.global_step) == (6, 12)
    assert {"train/loss", "train/generator_loss", "train/optimizer_1/learning_rate"} < set(result.metrics)


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


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_batch_end", "on_validation_start"])
def test_a_value_logged_where_nothing_is_logged_is_refused(modules, tmp_path, hook):
    logging = type("Early", (modules.Classifier,), {hook: lambda self, *arguments: self.log("early", 1.0)})
    task = LightningTask(logging())
    with pytest.raises(UserError, match=r"self\.log\('early'\) was called where nothing is logged"):
        fit(task, data_of(task.module), tmp_path=tmp_path, epochs=1)


def test_a_value_is_logged_once_whatever_the_arguments_of_log(modules, tmp_path):
    class Logs(modules.Classifier):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("train_twice", loss.detach(), on_step=True, on_epoch=True, sync_dist=True, batch_size=1)
            self.log("loss", loss)
            return {"loss": loss, "other": 1.0}

    task = LightningTask(seeded(Logs))
    metrics = fit(task, data_of(task.module), tmp_path=tmp_path, epochs=1, evaluate_every=None).metrics
    assert set(metrics) == {"train/loss", "train/twice", "train/acc", "train/epoch_acc", "train/epoch"}
    assert metrics["train/twice"] == metrics["train/loss"]


def test_a_module_has_the_hyperparameters_that_it_saves(modules, tmp_path):
    task = LightningTask(modules.Classifier(lr=0.25))
    result = fit(task, data_of(task.module), tmp_path=tmp_path, epochs=1)
    assert (task.module.hparams.lr, result.steps) == (0.25, 4)


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


# ---- What is exact or refused


def losing(modules, use):
    """Return a classifier whose training_step also calls `use(self, loss)`."""

    class Uses(modules.Classifier):
        def training_step(self, batch, batch_idx):
            loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
            use(self, loss)
            return loss

    return LightningTask(Uses())


BATCH = [torch.ones(2, 4), torch.zeros(2).long()]


def test_a_logged_value_does_not_replace_the_returned_loss(modules):
    logged = losing(modules, lambda module, loss: module.log("train_loss", 2 * loss)).training_step(BATCH)
    assert set(logged) == {"loss", "train_loss"}
    assert logged["train_loss"] == 2 * logged["loss"]
    for same in (lambda loss: loss, lambda loss: loss.detach()):
        task = losing(modules, lambda module, loss, same=same: module.log("loss", same(loss)))
        assert set(task.training_step(BATCH)) == {"loss"}


def test_a_logged_weight_is_a_metric_and_not_the_weight_of_the_batch(modules):
    logged = losing(modules, lambda module, loss: module.log("train_weight", 3.0)).training_step(BATCH)
    assert set(logged) == {"loss", "train_weight"}


def test_a_number_logged_as_the_validation_loss_counts_and_the_returned_one_does_not(modules):
    class Returns(modules.Classifier):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", 1.5)
            return torch.tensor(7.0)

    assert float(LightningTask(Returns()).validation_step(BATCH)["loss"]) == 1.5


def test_a_module_prints_on_rank_0(modules, capsys):
    losing(modules, lambda module, loss: module.print("once")).training_step(BATCH)
    assert capsys.readouterr().out == "once\n"


def test_a_batch_is_changed_after_its_transfer_in_every_step(modules):
    class Changes(modules.Classifier):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            self.changed = batch[0] * 2
            return [self.changed, batch[1]]

        def predict_step(self, batch, batch_idx):
            return batch[0]

    task = LightningTask(Changes())
    assert torch.equal(task.predict_step(BATCH), BATCH[0] * 2)
    for step in (task.training_step, task.validation_step):
        task.module.changed = None
        step(BATCH)
        assert task.module.changed is not None


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda module, loss: module.log("loss", 2 * loss), "logs 'loss' with another value"),
        (lambda module, loss: module.log("weight", 1.0), r"self\.log\('weight'\) has a name with a meaning"),
        (lambda module, loss: module.log("x", loss, reduce_fx="max"), r"'x', reduce_fx='max'.*MaxMetric"),
        (lambda module, loss: module.log_dict({"x": loss}, reduce_fx=torch.sum), "'x', reduce_fx='sum'"),
        (lambda module, loss: setattr(module.trainer, "should_stop", True), "should_stop cannot be set.*EarlyStopping"),
        (lambda module, loss: setattr(module.trainer, "mine", 1), r"self\.trainer\.mine is not offered"),
        (lambda module, loss: module.trainer.max_epochs, r"self\.trainer\.max_epochs is not offered"),
        (lambda module, loss: module.optimizers(), r"self\.optimizers needs Lightning's own loop"),
        (lambda module, loss: module.lr_schedulers(), r"self\.lr_schedulers needs"),
        (lambda module, loss: module.toggle_optimizer(None), r"self\.toggle_optimizer needs"),
        (lambda module, loss: module.manual_backward(loss), r"self\.manual_backward needs"),
        (lambda module, loss: module.all_gather(loss), r"self\.all_gather needs"),
        (lambda module, loss: module.logger.experiment, r"self\.logger is not offered"),
        (lambda module, loss: module.local_rank, r"self\.local_rank is not offered"),
    ],
)
def test_what_needs_lightnings_own_loop_is_refused_by_name(modules, use, message):
    with pytest.raises(UserError, match=message):
        losing(modules, use).training_step(BATCH)


@pytest.mark.parametrize(
    ("method", "remedy"),
    [
        ("backward", "scale the loss"),
        ("optimizer_step", "automatic_optimization = False"),
        ("optimizer_zero_grad", "automatic_optimization = False"),
        ("lr_scheduler_step", "LRScheduler"),
        ("configure_gradient_clipping", "max_grad_norm"),
        ("on_before_batch_transfer", "on_after_batch_transfer"),
        ("transfer_batch_to_device", "on_after_batch_transfer"),
        ("configure_sharded_model", "configure_model"),
        ("configure_callbacks", "Trainer\\(callbacks"),
        ("on_before_backward", "end of training_step"),
        ("on_before_zero_grad", "on_before_optimizer_step"),
        ("on_save_checkpoint", "register_buffer"),
        ("on_load_checkpoint", "register_buffer"),
        ("on_validation_model_eval", "hook that is called"),
        ("training_epoch_end", "on_train_epoch_end"),
    ],
)
def test_a_method_that_would_change_training_and_is_not_called_is_refused_with_the_remedy(modules, method, remedy):
    overriding = type("Overriding", (modules.Classifier,), {method: lambda self, *args: None})
    with pytest.raises(UserError, match=f"Overriding overrides {method}, .*{remedy}"):
        LightningTask(overriding())


@pytest.mark.parametrize("method", ["on_after_batch_transfer", "transfer_batch_to_device", "load_state_dict"])
def test_a_method_of_a_data_module_that_is_not_called_is_refused(modules, method):
    overriding = type("Overriding", (modules.Prepared,), {method: lambda self, *args: None})
    with pytest.raises(UserError, match=f"Overriding overrides {method}"):
        data_of(overriding())


@pytest.mark.parametrize(
    ("hook", "strategy", "settings"),
    [
        ("on_train_batch_end", SingleStrategy(accumulate=2), {}),
        ("on_train_batch_start", DataParallelStrategy(devices=["cpu", "cpu"]), {}),
        ("on_before_optimizer_step", DDPStrategy(devices=2), {}),
        ("on_after_backward", SingleStrategy(), {"precision": "fp16-mixed"}),
    ],
)
def test_a_hook_that_would_have_another_moment_is_refused_before_training(modules, tmp_path, hook, strategy, settings):
    module = type("Hooked", (modules.Classifier,), {hook: lambda self, *args: None})()
    with pytest.raises(UserError, match=f"Hooked overrides {hook}, which cannot be called at Lightning's moment"):
        fit(LightningTask(module), data_of(module), tmp_path=tmp_path / "run", strategy=strategy, **settings)
    assert not (tmp_path / "run").exists()


def test_a_hook_around_a_batch_is_refused_with_lbfgs(modules, tmp_path):
    class Repeated(modules.Classifier):
        def on_train_batch_start(self, batch, batch_idx):
            """Would be called for each evaluation."""

        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), max_iter=2)

    module = Repeated()
    with pytest.raises(UserError, match="Repeated overrides on_train_batch_start, which LBFGS would call"):
        fit(LightningTask(module), data_of(module), tmp_path=tmp_path)


def test_an_epoch_that_a_hook_would_end_is_refused(modules, tmp_path):
    module = type("Ends", (modules.Classifier,), {"on_train_batch_start": lambda self, batch, batch_idx: -1})()
    with pytest.raises(UserError, match="on_train_batch_start returned -1"):
        fit(LightningTask(module), data_of(module), tmp_path=tmp_path)


def test_values_logged_before_the_optimizer_steps_are_means_over_steps(modules, tmp_path):
    class Norms(modules.Classifier):
        def on_before_optimizer_step(self, optimizer):
            self.norms = [*getattr(self, "norms", []), self.net.weight.grad.norm()]
            self.log("train_norm", self.norms[-1])

    module = seeded(Norms)
    metrics = fit(LightningTask(module), data_of(module), tmp_path=tmp_path, epochs=1, log_every="1epoch").metrics
    assert metrics["train/norm"] == pytest.approx(float(torch.stack(module.norms).mean()))


def test_a_module_is_set_up_and_torn_down_once_for_each_stage(modules, tmp_path):
    class Staged(modules.OverSeveralLoaders):
        calls = ()

        def prepare_data(self):
            self.calls = [*self.calls, "prepare"]

        def setup(self, stage):
            self.calls = [*self.calls, f"setup {stage}"]

        def configure_model(self):
            self.calls = [*self.calls, "configure"]

        def teardown(self, stage):
            self.calls = [*self.calls, f"teardown {stage}"]

        def on_predict_start(self):
            self.calls = [*self.calls, "predict"]

        def predict_dataloader(self):
            return self.val_dataloader()

    module = Staged()
    task = LightningTask(module)
    data = data_of(module)
    fit(task, data, tmp_path=tmp_path, epochs=1, evaluate_every=None)
    Trainer("single", run_dir=tmp_path, callbacks=[], loggers=[]).predict(task, data)
    assert module.calls == [
        *("prepare", "setup fit", "configure", "teardown fit"),
        *("setup predict", "predict", "teardown predict"),
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"interval": "batch"}, "interval='batch'"),
        ({"frequency": 2}, "frequency=2"),
        ({"intervall": "step"}, "the key 'intervall', which is unknown here. Did you mean 'interval'"),
        ({"monitor": "train_loss"}, "monitor='train_loss' is not offered"),
        ({"monitor": "val_loss", "interval": "step"}, "interval='step' with monitor='val_loss'"),
        ({"scheduler": None}, "a NoneType as a scheduler"),
    ],
)
def test_a_schedule_that_would_step_at_another_moment_is_refused(settings, message):
    optimizer = optimizer_of(nn.Linear(1, 1))
    scheduler = ReduceLROnPlateau(optimizer) if "monitor" in settings else StepLR(optimizer, 1)
    config = {"scheduler": scheduler, **settings}
    with pytest.raises(UserError, match=message):
        read_optimizers({"optimizer": optimizer, "lr_scheduler": config}, of="Net")


def test_the_metric_of_a_schedule_may_stand_beside_the_optimizer():
    optimizer = optimizer_of(nn.Linear(1, 1))
    form = {"optimizer": optimizer, "lr_scheduler": ReduceLROnPlateau(optimizer), "monitor": "val_loss"}
    _, (schedule,) = read_optimizers(form, of="Net")
    assert schedule.metric == "validation/loss"
    with pytest.raises(UserError, match="the key 'frequency', which is unknown here"):
        read_optimizers({**form, "frequency": 2}, of="Net")


@pytest.mark.filterwarnings("ignore")  # what torch's compiler warns of is its own
def test_the_forward_that_the_steps_of_a_module_call_is_compiled_or_its_layers_are_asked_for(modules, tmp_path):
    class NoForward(modules.pl.LightningModule):
        configure_optimizers = modules.DemoModel.configure_optimizers

        def __init__(self):
            super().__init__()
            self.l1, self.learning_rate = nn.Linear(32, 10), 0.02

        def training_step(self, batch, batch_idx):
            return self.l1(batch).sum()

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    def num_graphs(module, **settings):
        graphs.clear()
        compilation = {"backend": backend, **settings}
        quiet = {"callbacks": [], "loggers": [], "run_dir": tmp_path}
        Trainer(SingleStrategy(device="cpu"), compile=compilation, max_duration="2step", **quiet).fit(
            LightningTask(module), Data(train=[torch.ones(32)] * 4, batch_size=2)
        )
        torch.compiler.reset()
        return len(graphs)

    graphs = []
    assert num_graphs(modules.DemoModel())
    assert num_graphs(NoForward(), blocks=["module.*"])
    with pytest.raises(UserError, match=r"NoForward has no forward.*blocks': \['module\.\*'\]"):
        num_graphs(NoForward())
