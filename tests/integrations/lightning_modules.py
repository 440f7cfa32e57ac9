"""LightningModules as users of Lightning write them, and their data."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.demos.boring_classes import (  # noqa: F401 - trained by the tests
    BoringDataModule,
    BoringModel,
    DemoModel,
    ManualOptimBoringModel,
)
from lightning.pytorch.demos.transformer import LightningTransformer
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MaxMetric, MeanMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy


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
        self.train_accuracy, self.val_accuracy = MulticlassAccuracy(2), MulticlassAccuracy(2)
        self.epochs_seen = []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.cross_entropy(self(x), y)
        self.log("train_loss", loss, prog_bar=True, on_step=True)
        self.log_dict({"train_acc": (self(x).argmax(1) == y).float().mean()})
        self.train_accuracy.update(self(x), y)
        return loss

    def on_train_epoch_end(self):
        self.log("train_epoch_acc", self.train_accuracy)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.cross_entropy(self(x), y))
        self.log("val_acc", (self(x).argmax(1) == y).float().mean(), sync_dist=True)
        self.val_accuracy.update(self(x), y)

    def on_validation_epoch_end(self):
        self.log("val_epoch_acc", self.val_accuracy.compute(), prog_bar=True)
        self.val_accuracy.reset()

    def on_train_epoch_start(self):
        self.epochs_seen.append((self.current_epoch, self.global_step))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": StepLR(optimizer, 1, 0.5), "interval": "epoch"}}

    def train_dataloader(self):
        return DataLoader(samples(), batch_size=6)

    def val_dataloader(self):
        return DataLoader(samples(10), batch_size=4)


class Deep(Classifier):
    """Layers enough for two stages."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


class Counting(Deep):
    """A loss that depends on the number of the batch."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1 + batch_idx % 3)


def classifier():
    torch.manual_seed(0)
    return Classifier()


class Prepared(pl.LightningDataModule):
    """Makes each stage's data in `setup`, as Lightning's guide has it."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def prepare_data(self):
        self.calls.append("prepare")

    def setup(self, stage):
        self.calls.append(stage)
        if stage == "fit":
            self.train = samples()
        if stage in ("fit", "validate"):
            self.val = [samples(10), samples(7)]
        if stage == "test":
            self.test = samples(5)
        if stage == "predict":
            self.predict = samples(3)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=6)

    def val_dataloader(self):
        return [DataLoader(one, batch_size=4) for one in self.val]

    def test_dataloader(self):
        return DataLoader(self.test, batch_size=4)

    def predict_dataloader(self):
        return [DataLoader(self.predict, batch_size=4)]


class OverSeveralLoaders(Classifier):
    def validation_step(self, batch, batch_idx, dataloader_idx):
        self.log("val_loader", float(dataloader_idx))
        self.log("val_first", float(batch_idx == 0))
        super().validation_step(batch, batch_idx)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self(batch[0])


class SmallTransformer(LightningTransformer):
    """The demo transformer on a few tokens of its own; its dropout depends on the index of the batch alone."""

    def __init__(self):
        super().__init__(vocab_size=20)

    def prepare_data(self):
        """Download nothing."""

    def on_train_batch_start(self, batch, batch_idx):
        torch.manual_seed(batch_idx)

    def train_dataloader(self):
        tokens = torch.randint(0, 20, (49,), generator=torch.Generator().manual_seed(1))
        return DataLoader([(tokens[i : i + 8], tokens[i + 1 : i + 9]) for i in range(0, 48, 8)], batch_size=2)


class GAN(pl.LightningModule):
    """Two networks that train against each other, in the pattern of Lightning's guide to manual optimization."""

    def __init__(self, every=1):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
        self.discriminator = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.Tanh(), nn.Linear(8, 1))
        self.every = every
        self.seen = []

    def training_step(self, batch, batch_idx):
        torch.manual_seed(batch_idx)
        real, _ = batch
        generator_optimizer, discriminator_optimizer = self.optimizers()
        noise = torch.randn(len(real), 3)

        self.toggle_optimizer(generator_optimizer)
        loss = self.adversarial(self.discriminator(self.generator(noise)), 1.0)
        self.log("train_generator_loss", loss, on_epoch=True)
        self.manual_backward(loss / self.every)
        if (batch_idx + 1) % self.every == 0:
            self.clip_gradients(generator_optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            generator_optimizer.step()
            generator_optimizer.zero_grad()
        self.untoggle_optimizer(generator_optimizer)

        with discriminator_optimizer.toggle_model():
            fake = self.discriminator(self.generator(noise).detach())
            loss = (self.adversarial(self.discriminator(real), 1.0) + self.adversarial(fake, 0.0)) / 2
            self.log("train_loss", loss, on_epoch=True, on_step=False)
            discriminator_optimizer.zero_grad()
            self.manual_backward(loss)
            discriminator_optimizer.step()
        self.lr_schedulers()[0].step()
        self.seen.append((self.current_epoch, batch_idx, self.global_step))

    def adversarial(self, score, target):
        return nn.functional.binary_cross_entropy_with_logits(score, torch.full_like(score, target))

    def on_train_epoch_end(self):
        self.lr_schedulers()[1].step(metrics=1.0)

    def configure_optimizers(self):
        generator_optimizer = torch.optim.Adam(self.generator.parameters(), lr=0.05)
        discriminator_optimizer = torch.optim.SGD(self.discriminator.parameters(), lr=0.1, momentum=0.9)
        return [generator_optimizer, discriminator_optimizer], [
            StepLR(generator_optimizer, 3, 0.5),
            ReduceLROnPlateau(discriminator_optimizer, patience=0),
        ]

    def train_dataloader(self):
        return DataLoader(samples(), batch_size=4)


CALLED_HOOKS = [
    f"on_{stage}_{edge}"
    for stage in ("fit", "train", "train_epoch", "train_batch", "validation", "validation_epoch", "validation_batch")
    for edge in ("start", "end")
]


def noting(hook):
    """Return a method that notes its call with what is true there."""

    def method(self, *arguments):
        modes = (self.training, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"))
        plain = [argument for argument in arguments if isinstance(argument, int)]
        self.calls.append((hook, self.current_epoch, self.global_step, *modes, float(self.net.weight.sum()), *plain))

    return method


class Noting(Classifier):
    """Notes every hook that is called, with what it sees."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def on_after_backward(self):
        self.calls.append(("on_after_backward", self.global_step, float(self.net.weight.grad.sum())))

    def on_before_optimizer_step(self, optimizer):
        self.calls.append(("on_before_optimizer_step", type(optimizer).__name__, float(self.net.weight.grad.sum())))

    def setup(self, stage):
        self.calls.append(("setup", stage))

    def teardown(self, stage):
        self.calls.append(("teardown", stage))


class KeepsItsBest(pl.LightningModule):
    """Logs metric objects, and keeps the best accuracy in one that the hook after a validation alone updates."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)
        self.train_loss, self.val_loss, self.val_accuracy = MeanMetric(), MeanMetric(), MulticlassAccuracy(2)
        self.best, self.highest, self.counted = MaxMetric(), MaxMetric(), SumMetric()
        self.next_value = 3.0

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.train_loss(loss)
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        self.val_loss(nn.functional.cross_entropy(logits, batch[1]))
        self.val_accuracy(logits, batch[1])
        self.log("val/loss", self.val_loss, on_epoch=True)
        self.log("val/accuracy", self.val_accuracy, on_epoch=True)

    def on_validation_epoch_end(self):
        self.best(self.val_accuracy.compute())
        self.highest(self.next_value)
        self.counted(1.0)
        self.next_value -= 1.0
        self.log("val/best", self.best.compute())
        self.log("val/highest", self.highest.compute())
        self.log("val/counted", self.counted.compute())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


for _hook in CALLED_HOOKS:
    setattr(Noting, _hook, noting(_hook))


class ManualNoting(ManualOptimBoringModel):
    """Notes the hooks of manual optimization."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def on_before_backward(self, loss):
        self.calls.append(("on_before_backward", float(loss.detach())))

    def on_after_backward(self):
        self.calls.append(("on_after_backward", float(self.layer.weight.grad.sum()), self.global_step))

    def on_before_optimizer_step(self, optimizer):
        self.calls.append(("on_before_optimizer_step", type(optimizer).__name__))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.calls.append(("on_train_batch_end", float(outputs["loss"]), batch_idx, self.global_step))
