"""CIFAR-10 is read as its authors wrote it, fetched when asked and whole, and never otherwise."""

import hashlib
import tarfile
from pathlib import Path

import numpy as np
import pytest
from trainkit.recipes import image_classification
from trainkit.recipes.image_classification import ImageData, download_cifar10, read_cifar10

from tests.recipes.tiny import make_image_folder
from trainkit.errors import UserError

FOLDER = "cifar-10-batches-bin"
FILES = [*(f"data_batch_{part}.bin" for part in range(1, 6)), "test_batch.bin"]


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """An archive laid out as that of CIFAR-10, with two images in each file."""
    made = tmp_path / "made" / FOLDER
    made.mkdir(parents=True)
    for number, name in enumerate(FILES):
        rows = np.zeros((2, 3073), dtype=np.uint8)
        rows[:, 0] = number, 9
        rows[:, 1:1025] = 10 * number  # red
        rows[:, 1 + 2048] = 255  # blue of the first pixel
        rows.tofile(made / name)
    packed = tmp_path / "cifar.tar.gz"
    with tarfile.open(packed, "w:gz") as file:
        file.add(made, FOLDER)
    return packed


def _md5(archive: Path) -> str:
    return hashlib.md5(archive.read_bytes(), usedforsecurity=False).hexdigest()


def test_the_archive_is_downloaded_once_and_its_images_are_read(archive, tmp_path):
    folder = tmp_path / "cifar"
    download_cifar10(folder, url=archive.as_uri(), md5=_md5(archive))
    assert sorted(path.name for path in folder.iterdir()) == [FOLDER]
    assert sorted(path.name for path in (folder / FOLDER).iterdir()) == sorted(FILES)
    pixels, classes = read_cifar10(folder / FOLDER, "train")
    assert pixels.shape == (10, 32, 32, 3)
    assert classes == [0, 9, 1, 9, 2, 9, 3, 9, 4, 9]
    assert pixels[2, 5, 5].tolist() == [10, 0, 0] and pixels[2, 0, 0].tolist() == [10, 0, 255]
    assert read_cifar10(folder / FOLDER, "validation")[1] == [5, 9]
    archive.unlink()
    download_cifar10(folder, url=archive.as_uri(), md5="")  # is there, and not fetched again
    image, chosen = ImageData(folder=str(folder), augment=False).dataset("train")[2]
    assert (image.shape, chosen) == ((3, 32, 32), 1)


def test_a_failed_download_leaves_no_files(archive, tmp_path):
    folder = tmp_path / "cifar"
    cut = tmp_path / "cut.tar.gz"
    cut.write_bytes(archive.read_bytes()[:-200])
    with pytest.raises(UserError, match="has the wrong checksum"):
        download_cifar10(folder, url=cut.as_uri(), md5=_md5(archive))
    with pytest.raises(UserError, match=r"cannot be downloaded.*data_batch_1\.bin"):
        download_cifar10(folder, url=(tmp_path / "nowhere").as_uri())
    assert list(folder.iterdir()) == []


def test_missing_and_truncated_files_are_named(archive, tmp_path):
    download_cifar10(tmp_path, url=archive.as_uri(), md5=_md5(archive))
    (tmp_path / FOLDER / "data_batch_2.bin").unlink()
    (tmp_path / FOLDER / "data_batch_4.bin").write_bytes(b"12")
    with pytest.raises(UserError, match=r"data_batch_2\.bin, data_batch_4\.bin missing"):
        read_cifar10(tmp_path / FOLDER, "train")


def test_nothing_is_downloaded_unless_asked(archive, tmp_path, monkeypatch):
    fetched = []

    def fetch(url, timeout):
        fetched.append(url)
        raise OSError("no network")

    monkeypatch.setattr(image_classification, "urlopen", fetch)
    with pytest.raises(UserError, match=r"data\.download=true"):
        ImageData(folder=str(tmp_path / "cifar")).dataset("train")
    make_image_folder(tmp_path / "photos")
    assert len(ImageData(folder=str(tmp_path / "photos")).dataset("train")) == 36
    assert fetched == []
    with pytest.raises(UserError, match="no network"):
        ImageData(folder=str(tmp_path / "cifar"), download=True).dataset("train")
    assert fetched == [image_classification.CIFAR10_URL]
