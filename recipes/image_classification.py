"""Images in classes with a ResNet: CIFAR-10, or a folder of your own with a folder of images for each class.

CIFAR-10 (162 MB) is downloaded only when `data.download=true` asks for it.
"""

from __future__ import annotations

import hashlib
import tarfile
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal
from urllib.request import urlopen

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

from trainkit.data.data import Data
from trainkit.data.prepare import prepare_folder
from trainkit.errors import UserError
from trainkit.task import TaskModule

CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
_CIFAR10_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
_CIFAR10_FOLDER = "cifar-10-batches-bin"
_CIFAR10_SIDE = 32
_CIFAR10_ROW = 1 + 3 * _CIFAR10_SIDE**2  # bytes: the class, then the pixels of each colour
_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
_VALIDATION_SHARE = 10  # one image in so many, of a folder without a folder for validation
_BLOCKS = {10: (1, 1, 1, 1), 18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}
_CHUNK = 1 << 20
_WARMUP = 4  # one step in so many


class ResNet(TaskModule):
    """Classifies images of shape (3, height, width) with residual blocks of two convolutions.

    With `norm=group` nothing looks at more than one image, so that every strategy and every cut of the batch gives the
    same weights; with `norm=batch` statistics are those of a micro-batch.

    Args:
        depth: Layers: 10, 18 or 34.
        width: Channels of the first blocks; 64 in the original.
        classes: What images are told apart by.
        norm: `batch` or `group`.
        stride: Of the first convolution; 1 for small images, 2 with pooling behind it for those of about 224 pixels.
        lr: Highest learning rate of SGD, reached after a quarter of the steps.
        weight_decay: Of SGD.
        smoothing: Share of the label that is spread over all classes in training.

    """

    def __init__(
        self,
        *,
        depth: int = 18,
        width: int = 64,
        classes: int = 10,
        norm: Literal["batch", "group"] = "batch",
        stride: int = 1,
        lr: float = 0.1,
        weight_decay: float = 5e-4,
        smoothing: float = 0.1,
    ) -> None:
        super().__init__()
        if depth not in _BLOCKS:
            raise UserError(f"task.depth must be one of {', '.join(map(str, _BLOCKS))}, got {depth}.")
        if width < 8 or width % 8:
            raise UserError(f"task.width must be a multiple of 8 channels, got {width}.")
        if norm not in ("batch", "group"):
            raise UserError(f"task.norm must be batch or group, got {norm!r}.")
        if stride not in (1, 2):
            raise UserError(f"task.stride must be 1 or 2, got {stride}.")
        self.classes = classes
        self.lr = lr
        self.weight_decay = weight_decay
        self.smoothing = smoothing
        kernel = 3 if stride == 1 else 7
        self.enter = nn.Sequential(
            nn.Conv2d(3, width, kernel, stride=stride, padding=kernel // 2, bias=False),
            _norm(norm, width),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1) if stride == 2 else nn.Identity(),
        )
        blocks: list[nn.Module] = []
        channels_in = width
        for stage, count in enumerate(_BLOCKS[depth]):
            for block in range(count):
                channels = width * 2**stage
                blocks.append(_Block(channels_in, channels, stride=2 if stage and not block else 1, norm=norm))
                channels_in = channels
        self.blocks = nn.Sequential(*blocks)
        self.leave = nn.Linear(channels_in, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of images of shape (batch, 3, height, width)."""
        features = self.blocks(self.enter(images))  # (batch, 8 * width, height / 8, width / 8)
        logits: Tensor = self.leave(features.mean(dim=(2, 3)))  # (batch, classes)
        return logits

    def training_step(self, batch: Any) -> dict[str, Tensor]:
        """Return loss and accuracy."""
        logits = self(batch[0])
        loss = functional.cross_entropy(logits, batch[1], label_smoothing=self.smoothing)
        return {"loss": loss, "accuracy": (logits.argmax(dim=1) == batch[1]).float().mean()}

    def validation_step(self, batch: Any) -> dict[str, Tensor]:
        """Return loss and accuracy."""
        logits = self(batch[0])
        accuracy = (logits.argmax(dim=1) == batch[1]).float().mean()
        return {"loss": functional.cross_entropy(logits, batch[1]), "accuracy": accuracy}

    def predict_step(self, batch: Any) -> Tensor:
        """Return the most likely class of each image."""
        classes: Tensor = self(batch[0]).argmax(dim=1)
        return classes

    def configure_optimizers(self, total_steps: int) -> tuple[SGD, LambdaLR]:
        """Return SGD with momentum, and a learning rate that rises over a quarter of the steps and then falls."""
        optimizer = SGD(self.parameters(), lr=self.lr, momentum=0.9, nesterov=True, weight_decay=self.weight_decay)
        return optimizer, LambdaLR(optimizer, partial(_share_of_rate, total_steps=total_steps))


class Images(Dataset[tuple[Tensor, int]]):
    """Images and their classes; those to train on are moved and mirrored, as the sample's own seed says.

    Args:
        pixels: Of shape (images, height, width, 3), one byte each, or the files to read them from.
        classes: A number for each image.
        side: Height and width that images of files are brought to.

    """

    def __init__(self, pixels: Any, classes: list[int], *, side: int) -> None:
        self.pixels = pixels
        self.classes = self.targets = classes  # `targets` is what balance_classes looks for
        self.side = side

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        pixels = self.pixels[index]
        if isinstance(pixels, Path):
            pixels = _read(pixels, side=self.side)
        image = torch.from_numpy(np.array(pixels)).permute(2, 0, 1)  # (3, height, width)
        return image.float() / 127.5 - 1, self.classes[index]


class AugmentedImages(Images):
    """Images moved by up to an eighth of their side and mirrored, as the sample's own seed says."""

    def get_sample(self, index: int, seed: int) -> tuple[Tensor, int]:
        """Return the image at `index` and its class."""
        image, chosen = self[index]
        generator = torch.Generator().manual_seed(seed)
        height, width = image.shape[1:]
        margin = max(1, min(height, width) // 8)
        top, left = torch.randint(0, 2 * margin + 1, (2,), generator=generator).tolist()
        image = functional.pad(image, [margin] * 4)[:, top : top + height, left : left + width]
        mirrored = bool(torch.rand((), generator=generator) < 0.5)
        return (image.flip(2) if mirrored else image), chosen


class ImageData(Data):
    """CIFAR-10, or the images of a folder.

    A folder holds `train` and `validation` with a folder for each class in them, or the folders of the classes
    alone, of which every tenth image then validates.

    Args:
        folder: Where images are, or CIFAR-10 as it comes from its authors (`cifar-10-batches-bin`).
        download: Whether CIFAR-10 is downloaded into `folder` if it is not there.
        side: Height and width that images of files are brought to.
        augment: Whether images to train on are moved and mirrored.
        batch_size: Images of one optimizer step, over all ranks.
        evaluation_batch_size: Images of one evaluation batch, over all ranks.
        num_workers: Processes that read; 0: the training process.
        balance_classes: Whether all classes are drawn alike in training, however many images they have.

    """

    def __init__(
        self,
        *,
        folder: str = "data/cifar10",
        download: bool = False,
        side: int = 32,
        augment: bool = True,
        batch_size: int = 128,
        evaluation_batch_size: int = 500,
        num_workers: int = 2,
        balance_classes: bool = False,
    ) -> None:
        super().__init__(
            batch_size=batch_size,
            evaluation_batch_size=evaluation_batch_size,
            num_workers=num_workers,
            balance_classes=balance_classes,
        )
        if side < 8:
            raise UserError(f"data.side must be at least 8 pixels, got {side}.")
        self.folder = folder
        self.download = download
        self.side = side
        self.augment = augment

    def dataset(self, stage: str) -> Images:
        """Return the images of a stage; tests and predictions are made with the validation images."""
        if stage == "train" and self.augment:
            plain = self._train
            return AugmentedImages(plain.pixels, plain.classes, side=plain.side)
        return self._train if stage == "train" else self._validation

    @cached_property
    def _train(self) -> Images:
        return self._images("train")

    @cached_property
    def _validation(self) -> Images:
        return self._images("validation")

    def _images(self, stage: str) -> Images:
        folder = Path(self.folder)
        if self.download:
            download_cifar10(folder)
        cifar = folder if folder.name == _CIFAR10_FOLDER else folder / _CIFAR10_FOLDER
        if cifar.is_dir():
            return Images(*read_cifar10(cifar, stage), side=_CIFAR10_SIDE)
        if not folder.is_dir():
            raise UserError(
                f"data.folder={folder} is not there. Set it to a folder with a folder of images for each class, or "
                "type data.download=true to have CIFAR-10 (162 MB) there."
            )
        files, classes = _files(folder, stage)
        return Images(files, classes, side=self.side)


def download_cifar10(folder: Path, *, url: str = CIFAR10_URL, md5: str = _CIFAR10_MD5) -> None:
    """Leave CIFAR-10 in `folder`, fetched by one of the processes that ask for it, unless it is there.

    Raises UserError if it cannot be fetched, or is not what its authors published.
    """
    prepare_folder(folder / _CIFAR10_FOLDER, make=partial(_fetch, url=url, md5=md5))


def _fetch(folder: Path, *, url: str, md5: str) -> None:
    """Fill `folder` with the files of the archive."""
    archive, digest = folder / "archive.tar.gz", hashlib.md5(usedforsecurity=False)
    try:
        with urlopen(url, timeout=60) as response, archive.open("wb") as file:
            while chunk := response.read(_CHUNK):
                digest.update(chunk)
                file.write(chunk)
        if digest.hexdigest() != md5:
            raise UserError(f"{url} sent something else than CIFAR-10 (md5 {digest.hexdigest()}, not {md5}).")
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
    except OSError as error:
        raise UserError(
            f"{url} cannot be fetched ({error}). Put it there by hand: "
            f"{folder.parent / _CIFAR10_FOLDER}/data_batch_1.bin ..."
        ) from None
    archive.unlink()
    for path in (folder / _CIFAR10_FOLDER).iterdir():
        path.rename(folder / path.name)
    (folder / _CIFAR10_FOLDER).rmdir()


def read_cifar10(folder: Path, stage: str) -> tuple[Any, list[int]]:
    """Return pixels of shape (images, 32, 32, 3), and classes; one byte of class and 3072 of pixels for each image."""
    names = [f"data_batch_{part}.bin" for part in range(1, 6)] if stage == "train" else ["test_batch.bin"]
    whole = [path.name for path in folder.glob("*.bin") if path.stat().st_size % _CIFAR10_ROW == 0]
    missing = sorted({*names} - {*whole})
    if missing:
        raise UserError(
            f"{folder} lacks {', '.join(missing)}, or they are cut short; delete the folder and type "
            f"data.download=true, or fetch {CIFAR10_URL} again."
        )
    rows = np.concatenate([np.fromfile(folder / name, dtype=np.uint8).reshape(-1, _CIFAR10_ROW) for name in names])
    pixels = rows[:, 1:].reshape(-1, 3, _CIFAR10_SIDE, _CIFAR10_SIDE).transpose(0, 2, 3, 1)
    return pixels, rows[:, 0].tolist()


def _files(folder: Path, stage: str) -> tuple[list[Path], list[int]]:
    """Return the images of a stage and their classes, numbered in the order of the folders' names."""
    split = (folder / "train").is_dir() and (folder / "validation").is_dir()
    parent = folder / stage if split else folder
    names = sorted(path.name for path in (folder / "train" if split else folder).iterdir() if path.is_dir())
    files, classes = [], []
    for number, name in enumerate(names):
        found = sorted(path for path in (parent / name).glob("*") if path.suffix.lower() in _SUFFIXES)
        if not split:
            validates = stage == "validation"
            found = [path for index, path in enumerate(found) if (index % _VALIDATION_SHARE == 0) == validates]
        files += found
        classes += [number] * len(found)
    if len(names) < 2 or not files:
        raise UserError(
            f"data.folder={folder} has {len(names)} folders with {len(files)} images to {stage}; put the images of "
            f"each class into a folder of its own: {folder}/cat/1.png, {folder}/dog/1.png."
        )
    return files, classes


def _read(path: Path, *, side: int) -> Any:
    """Return the middle square of an image, brought to `side` pixels, shape (side, side, 3)."""
    try:
        from PIL import Image, ImageOps
    except ModuleNotFoundError:
        raise UserError(
            "reading images needs Pillow, which is not installed; type: pip install 'trainkit[images]'"
        ) from None
    with Image.open(path) as image:
        return np.asarray(ImageOps.fit(image.convert("RGB"), (side, side)))


def _share_of_rate(step: int, *, total_steps: int) -> float:
    """Return the share of the highest learning rate: rising over a quarter of the steps, then falling to zero."""
    warmup = max(1, total_steps // _WARMUP)
    if step < warmup:
        return (step + 1) / warmup
    return max(0.0, (total_steps - step) / max(1, total_steps - warmup))


def _norm(kind: str, channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(8, channels)


class _Block(nn.Module):
    """Two convolutions that add to what came in."""

    def __init__(self, channels_in: int, channels: int, *, stride: int, norm: str) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False),
            _norm(norm, channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            _norm(norm, channels),
        )
        same = stride == 1 and channels_in == channels
        self.shortcut: nn.Module = nn.Identity()
        if not same:
            project = nn.Conv2d(channels_in, channels, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(project, _norm(norm, channels))

    def forward(self, features: Tensor) -> Tensor:
        """Return features of shape (batch, channels, height / stride, width / stride)."""
        return functional.relu(self.convolutions(features) + self.shortcut(features))
