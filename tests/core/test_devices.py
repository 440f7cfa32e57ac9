"""Choosing a device by name."""

import pytest
import torch

from tests.tasks import Regression, regression_data
from trainkit import Data, UserError
from trainkit.strategy import pick_device


def test_the_cpu_is_always_there():
    assert pick_device("cpu") == torch.device("cpu")


def test_auto_takes_the_best_device():
    has_mps = torch.backends.mps.is_available()
    best = "cuda" if torch.cuda.is_available() else "mps" if has_mps else "cpu"
    assert pick_device("auto").type == best


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpu", r"unknown device 'gpu'.*Choose auto, cpu, cuda, cuda:0 or mps"),
        ("cdua", r"Did you mean 'cuda'"),
        ("cuda:x", r"unknown device 'cuda:x'"),
        ("cuda:-1", r"unknown device"),
        ("", r"unknown device ''"),
    ],
)
def test_an_unknown_device_is_rejected_with_the_known_ones(name, message):
    with pytest.raises(UserError, match=message):
        pick_device(name)


def test_a_missing_cuda_device_is_rejected_with_the_number_of_devices():
    with pytest.raises(UserError, match=r"'cuda:99' is not available: torch sees \d+ CUDA devices?; set device="):
        pick_device("cuda:99")


@pytest.mark.parametrize("name", ["cuda:99", "gpu"])
def test_an_unknown_device_ends_a_run_before_anything_is_written(make_trainer, name):
    from trainkit.strategies.single import SingleStrategy

    trainer = make_trainer(SingleStrategy(device=name))
    with pytest.raises(UserError, match=r"device"):
        trainer.fit(Regression(), Data(train=regression_data(8), batch_size=4))
    assert not trainer.run_dir.exists()
