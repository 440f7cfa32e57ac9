"""LightningModules as users of Lightning write them, and their data."""

import lightning.pytorch as pl
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset
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
