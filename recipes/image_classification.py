"""Image classification with a ResNet, on CIFAR-10 or a folder with one sub-folder of images per class.

CIFAR-10 (162 MB) is downloaded only when `data.download=true` asks for it. `size=tiny` generates images.

Needs the extra `images` for a folder of images.
"""

from __future__ import annotations

import hashlib
import shutil
import tarfile
from functools import partial
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
from trainkit.storage import local_path
from trainkit.task import TaskModule

CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
_CIFAR10_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
_CIFAR10_FOLDER = "cifar-10-batches-bin"
_CIFAR10_SIDE = 32
_CIFAR10_ROW = 1 + 3 * _CIFAR10_SIDE**2  # bytes: the class, then the pixels of each channel
_SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
_VALIDATION_EVERY = 10  # images, of which one validates, in a folder without a validation folder
_BLOCKS = {10: (1, 1, 1, 1), 18: (2, 2, 2, 2), 34: (3, 4, 6, 3)}
_WARMUP = 0.25  # of all steps


class ResNet(TaskModule):
    """Classifies images of shape (3, height, width) with residual blocks of two convolutions.

    With `norm=group` every strategy and every split of the batch gives the same weights; with `norm=batch` statistics
    are those of a micro-batch.

    Args:
        depth: Number of layers: 10, 18 or 34.
        width: Channels of the first blocks; 64 in the original.
        classes: Number of classes.
        norm: `batch` or `group`.
        stride: Stride of the first convolution: 1 for small images, 2 followed by pooling for about 224 pixels.
        lr: Peak learning rate of SGD, reached after a quarter of the steps.
        weight_decay: Weight decay of SGD.
        smoothing: Label smoothing in training.

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
        self.lr, self.weight_decay, self.smoothing = lr, weight_decay, smoothing
        kernel = 3 if stride == 1 else 7
        self.enter = nn.Sequential(
            nn.Conv2d(3, width, kernel, stride=stride, padding=kernel // 2, bias=False),
            _norm(norm, width),
            nn.ReLU(),
            nn.MaxPool2d(3, stride=2, padding=1) if stride == 2 else nn.Identity(),
        )
        self.blocks = nn.Sequential()
        channels_in = width
        for stage, count in enumerate(_BLOCKS[depth]):
            for block in range(count):
                channels = width * 2**stage
                self.blocks.append(_Block(channels_in, channels, stride=2 if stage and not block else 1, norm=norm))
                channels_in = channels
        self.leave = nn.Linear(channels_in, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits of images of shape (batch, 3, height, width)."""
        features = self.blocks(self.enter(images))  # (batch, 8 * width, height / 8, width / 8)
        logits: Tensor = self.leave(features.mean(dim=(2, 3)))  # (batch, classes)
        return logits

    def training_step(self, batch: Any) -> dict[str, Tensor]:
        """Return loss and accuracy."""
        logits, classes = self(batch[0]), batch[1]
        return {
            "loss": functional.cross_entropy(logits, classes, label_smoothing=self.smoothing if self.training else 0.0),
            "accuracy": (logits.argmax(dim=1) == classes).float().mean(),
        }

    validation_step = training_step

    def predict_step(self, batch: Any) -> Tensor:
        """Return the most likely class of each image."""
        return torch.argmax(self(batch[0]), dim=1)

    def configure_optimizers(self, total_steps: int) -> tuple[SGD, LambdaLR]:
        """Return SGD with momentum, and a learning rate that warms up over a quarter of the steps, then decays."""
        optimizer = SGD(self.parameters(), lr=self.lr, momentum=0.9, nesterov=True, weight_decay=self.weight_decay)
        return optimizer, LambdaLR(optimizer, partial(_lr_factor, total_steps=total_steps))


class Images(Dataset[tuple[Tensor, int]]):
    """Images and their classes.

    Args:
        pixels: Shape (images, height, width, 3) in uint8, or the files to read.
        classes: Class of each image, a number.
        side: Height and width that images of files are resized to.

    """

    def __init__(self, pixels: Any, classes: list[int], *, side: int) -> None:
        self.pixels = pixels
        self.classes = self.targets = classes  # `targets` is read by balance_classes
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
    """Images with random shifts of up to an eighth of the side and flips, which depend on the seed of the sample."""

    def get_sample(self, index: int, seed: int) -> tuple[Tensor, int]:
        """Return the augmented image at `index`, shape (3, height, width), and its class."""
        image, label = self[index]
        generator = torch.Generator().manual_seed(seed)
        height, width = image.shape[1:]
        margin = max(1, min(height, width) // 8)
        top, left = torch.randint(0, 2 * margin + 1, (2,), generator=generator).tolist()
        image = functional.pad(image, [margin] * 4)[:, top : top + height, left : left + width]
        is_flipped = bool(torch.rand((), generator=generator) < 0.5)
        return (image.flip(2) if is_flipped else image), label


class ImageData(Data):
    """CIFAR-10, the images of a folder, or generated images.

    A folder has `train` and `validation` with one sub-folder per class each, or only the sub-folders of the classes,
    of which every tenth image then validates.

    Args:
        folder: Folder of images, or of CIFAR-10 in its binary version (`cifar-10-batches-bin`); `None`: images of ten
            colours are generated.
        download: Download CIFAR-10 into `folder` if it does not exist.
        side: Height and width that images of files are resized to.
        augment: Shift and flip training images.
        batch_size: Images of one optimizer step, over all ranks.
        evaluation_batch_size: Images of one evaluation batch, over all ranks.
        num_workers: Worker processes that read samples; 0: the training process.
        balance_classes: Draw all classes equally often in training.

    """

    def __init__(
        self,
        *,
        folder: str | None = "data/cifar10",
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
        self.folder, self.download, self.side, self.augment = folder, download, side, augment
        self._images: dict[str, Images] = {}

    def dataset(self, stage: str) -> Images:
        """Return the images of a stage; test and predict use the validation images."""
        stage = "train" if stage == "train" else "validation"
        if stage not in self._images:
            kind = AugmentedImages if stage == "train" and self.augment else Images
            self._images[stage] = kind(*self._load(stage), side=self.side)
        return self._images[stage]

    def _load(self, stage: str) -> tuple[Any, list[int]]:
        if self.folder is None:
            return generate(stage, self.side)
        folder = local_path(self.folder, what="data.folder")
        if self.download:
            download_cifar10(folder)
        cifar = folder if folder.name == _CIFAR10_FOLDER else folder / _CIFAR10_FOLDER
        if cifar.is_dir():
            return read_cifar10(cifar, stage)
        if not folder.is_dir():
            raise UserError(
                f"data.folder={folder} does not exist. Set it to a folder with one sub-folder of images per class, or "
                "type data.download=true to download CIFAR-10 (162 MB) into it."
            )
        return _files(folder, stage)


def generate(stage: str, side: int) -> tuple[Any, list[int]]:
    """Return noisy images of ten colours, shape (images, side, side, 3), and their colours: 400 train, 100 validate."""
    # Fixed seeds: every process generates the same images, and validation has others than training.
    count, seed = (400, 1) if stage == "train" else (100, 2)
    generator = np.random.default_rng(seed)
    colours = np.random.default_rng(0).uniform(0, 256, (10, 1, 1, 3))
    classes = np.arange(count) % 10
    pixels = colours[classes] + generator.normal(0, 30, (count, side, side, 3))
    return pixels.clip(0, 255).astype(np.uint8), classes.tolist()


def download_cifar10(folder: Path, *, url: str = CIFAR10_URL, md5: str = _CIFAR10_MD5) -> None:
    """Download CIFAR-10 into `folder`, in one of the processes that ask for it, unless it exists.

    Raises UserError if the download fails or has the wrong checksum.
    """
    prepare_folder(folder / _CIFAR10_FOLDER, make=partial(_fetch, url=url, md5=md5))


def _fetch(folder: Path, *, url: str, md5: str) -> None:
    """Download the archive and extract its files into `folder`."""
    archive = folder / "archive.tar.gz"
    try:
        with urlopen(url, timeout=60) as response, archive.open("wb") as file:
            shutil.copyfileobj(response, file)
        # MD5 is what the site publishes; it finds damaged downloads. Some systems forbid it for security alone.
        digest = hashlib.md5(archive.read_bytes(), usedforsecurity=False).hexdigest()
        if digest != md5:
            raise UserError(f"{url} has the wrong checksum (md5 {digest}, expected {md5}).")
        # The filter refuses members that would be written outside of the folder.
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
    except OSError as error:
        raise UserError(
            f"{url} cannot be downloaded ({error}). Put the files there by hand: "
            f"{folder.parent / _CIFAR10_FOLDER}/data_batch_1.bin ..."
        ) from None
    archive.unlink()
    for path in (folder / _CIFAR10_FOLDER).iterdir():
        path.rename(folder / path.name)
    (folder / _CIFAR10_FOLDER).rmdir()


def read_cifar10(folder: Path, stage: str) -> tuple[Any, list[int]]:
    """Return pixels of shape (images, 32, 32, 3), and classes; a row has one byte of class and 3072 of pixels."""
    names = [f"data_batch_{part}.bin" for part in range(1, 6)] if stage == "train" else ["test_batch.bin"]
    complete = [path.name for path in folder.glob("*.bin") if path.stat().st_size % _CIFAR10_ROW == 0]
    missing = sorted({*names} - {*complete})
    if missing:
        raise UserError(
            f"{folder}: {', '.join(missing)} missing or truncated; delete the folder and type data.download=true, or "
            f"download {CIFAR10_URL} again."
        )
    rows = np.concatenate([np.fromfile(folder / name, dtype=np.uint8).reshape(-1, _CIFAR10_ROW) for name in names])
    pixels = rows[:, 1:].reshape(-1, 3, _CIFAR10_SIDE, _CIFAR10_SIDE).transpose(0, 2, 3, 1)
    return pixels, rows[:, 0].tolist()


def _files(folder: Path, stage: str) -> tuple[list[Path], list[int]]:
    """Return the images of a stage and their classes, numbered by the names of the folders."""
    split = (folder / "train").is_dir() and (folder / "validation").is_dir()
    parent = folder / stage if split else folder
    names = sorted(path.name for path in (folder / "train" if split else folder).iterdir() if path.is_dir())
    files, classes = [], []
    for number, name in enumerate(names):
        images = sorted(path for path in (parent / name).glob("*") if path.suffix.lower() in _SUFFIXES)
        if not split:
            validates = stage == "validation"
            images = [path for index, path in enumerate(images) if (index % _VALIDATION_EVERY == 0) == validates]
        files += images
        classes += [number] * len(images)
    if len(names) < 2 or not files:
        raise UserError(
            f"data.folder={folder} has {len(names)} folders with {len(files)} images for {stage}; put the images of "
            f"each class into one folder: {folder}/cat/1.png, {folder}/dog/1.png."
        )
    return files, classes


def _read(path: Path, *, side: int) -> Any:
    """Return the central square of an image, resized, shape (side, side, 3)."""
    try:
        from PIL import Image, ImageOps
    except ModuleNotFoundError:
        raise UserError(
            "reading images needs Pillow, which is not installed; type: pip install 'trainkit-torch[images]'"
        ) from None
    # Reading files leaves them open until the image is collected; the block closes each at once.
    with Image.open(path) as image:
        return np.asarray(ImageOps.fit(image.convert("RGB"), (side, side)))


def _lr_factor(step: int, *, total_steps: int) -> float:
    """Return the factor of the peak learning rate: warm-up over a quarter of the steps, then linear to zero."""
    warmup = max(1, int(_WARMUP * total_steps))
    if step < warmup:
        return (step + 1) / warmup
    return max(0.0, (total_steps - step) / max(1, total_steps - warmup))


def _norm(kind: str, channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(8, channels)


class _Block(nn.Module):
    """Residual block of two convolutions."""

    def __init__(self, channels_in: int, channels: int, *, stride: int, norm: str) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False),
            _norm(norm, channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            _norm(norm, channels),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            project = nn.Conv2d(channels_in, channels, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(project, _norm(norm, channels))

    def forward(self, features: Tensor) -> Tensor:
        """Return features of shape (batch, channels, height / stride, width / stride)."""
        return functional.relu(self.convolutions(features) + self.shortcut(features))
