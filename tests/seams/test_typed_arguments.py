"""Arguments from the command line arrive as what they are annotated with, or are refused before anything is built."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trainkit.callbacks.lambda_callback import LambdaCallback

from tests.seams.training import Layers, samples
from trainkit import Data
from trainkit.cli.compose import compose_config
from trainkit.cli.main import main
from trainkit.cli.run_commands import assemble
from trainkit.errors import UserError

HERE = "tests.seams.test_typed_arguments"


class Act(Enum):
    TANH = "hyperbolic"
    RELU = "rectified"


class Size(IntEnum):
    SMALL = 1
    BIG = 2


@dataclass
class Head:
    act: Act = Act.TANH


class Typed(Layers):
    def __init__(
        self,
        *,
        act: Act = Act.TANH,
        acts: list[Act] | None = None,
        size: Size = Size.SMALL,
        widths: dict[Act, int] | None = None,
        where: Path | None = None,
        files: list[Path] | None = None,
        link: os.PathLike[str] | None = None,
        either: str | Path = "either",
        dtype: torch.dtype = torch.float64,
        device: torch.device | None = None,
        head: Head | None = None,
        net: nn.Module | None = None,
        kind: type[nn.Module] = nn.ReLU,
        scale: float | Tensor = 1.0,
        optimizer: Callable[..., Any] | None = None,
    ):
        super().__init__()
        names = ("act", "acts", "size", "widths", "where", "files", "link", "either", "dtype", "device", "head")
        values = (act, acts, size, widths, where, files, link, either, dtype, device, head)
        self.arguments = dict(zip(names, values, strict=True))
        self.optimizer = optimizer

    def configure_optimizers(self):
        return self.optimizer(self.parameters()) if self.optimizer else super().configure_optimizers()


def data(root: Path = Path(), mode: Act = Act.TANH):
    assert isinstance(root, Path) and isinstance(mode, Act)
    return samples()


def make_adam(parameters, lr=0.1):
    return torch.optim.Adam(parameters, lr=lr)


class Located(LambdaCallback):
    def __init__(self, folder: Path):
        super().__init__()
        self.folder = folder


SETTINGS = [
    *("trainer.max_duration=1step", "strategy.device=cpu", "callbacks=[]", "logger=[]", "trainer.report=false"),
    *(f"task._target_={HERE}.Typed", "data._target_=trainkit.Data", f"+data.train._target_={HERE}.data"),
    *("data.batch_size=8", "data.shuffle=false"),
]


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(os.getcwd())
    monkeypatch.chdir(tmp_path)


def built(*typed):
    with compose_config() as composer:
        return assemble(composer.settings([*SETTINGS, *typed]), run_dir=None)


def message(*typed):
    with pytest.raises(UserError) as caught, compose_config() as composer:
        composer.settings([*SETTINGS, *typed])
    return str(caught.value)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("act=RELU", Act.RELU),
        ("act=rectified", Act.RELU),
        ("acts=[TANH,rectified]", [Act.TANH, Act.RELU]),
        ("size=BIG", Size.BIG),
        ("size=2", Size.BIG),
        ("widths={RELU:3}", {Act.RELU: 3}),
        ("where=a/b", Path("a/b")),
        ("where=null", None),
        ("files=[a,b]", [Path("a"), Path("b")]),
        ("link=a", Path("a")),
        ("either=a", "a"),
        ("dtype=bfloat16", torch.bfloat16),
        ("dtype=torch.int8", torch.int8),
        ("device=cuda:1", torch.device("cuda:1")),
        (f"head={{_target_:{HERE}.Head,act:RELU}}", Head(Act.RELU)),
    ],
)
def test_text_arrives_as_the_object_that_it_names(typed, expected):
    argument = built(f"task.{typed}").task.arguments[typed.partition("=")[0]]
    assert argument == expected
    assert type(argument) is type(expected)


def test_arguments_of_data_and_callbacks_arrive_as_they_are_annotated():
    run = built(
        *("+data.train.root=a/b", "+data.train.mode=RELU"),
        *(f"+callbacks.located._target_={HERE}.Located", "+callbacks.located.folder=a"),
    )
    assert isinstance(run.data, Data)
    assert run.trainer.callbacks[-1].folder == Path("a")


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("act=nonsense", "task.act: 'nonsense' is not TANH or RELU."),
        ("act=RELUX", "task.act: 'RELUX' is not TANH or RELU. Did you mean 'RELU'?"),
        ("act=true", "task.act: true is not TANH or RELU."),
        ("acts=[TANH,reLU]", "task.acts: element 1: 'reLU' is not TANH or RELU."),
        ("size=3", "task.size: 3 is not SMALL or BIG."),
        ("widths={relux:3}", "task.widths: key relux: 'relux' is not TANH or RELU."),
        ("where=3", "task.where: 3 is a whole number, but must be a path or null."),
        ("dtype=flaot32", "task.dtype: 'flaot32' is not a dtype such as bfloat16. Did you mean 'float32'?"),
        ("device=gpu", "task.device: 'gpu' is text, but must be a device such as cuda:0 or null."),
        (f"head={{_target_:{HERE}.Head,act:RELUX}}", "task.head.act: 'RELUX' is not TANH or RELU."),
        ("head={act:RELU}", "is a mapping, but must be an object of Head (by _target_) or null."),
        ("net=resnet18", "task.net: 'resnet18' is text, but must be an object of Module (by _target_) or null."),
        ("kind=torch.nn.GELU", "task.kind: 'torch.nn.GELU' is text, but must be a class (by _target_)."),
        ("scale=big", "task.scale: 'big' is text, but must be an object of Tensor (by _target_) or a number."),
        ("optimizer={_target_:torch.optim.Adam,_partial_:true,lr:big}", "task.optimizer.lr: 'big' is text, but"),
    ],
)
def test_text_that_names_no_such_object_is_refused(typed, words):
    assert words in message(f"task.{typed}")


@pytest.mark.parametrize("value", ["big", "-1"])
def test_a_wrong_value_below_a_partial_target_ends_with_its_key(value, capsys):
    typed = f"task.optimizer={{_target_:{HERE}.make_adam,_partial_:true,lr:{value}}}"
    assert main(["fit", *SETTINGS, typed]) == 2
    assert "Typed.configure_optimizers: " in (error := capsys.readouterr().err)
    assert "Set a valid value of task.optimizer.lr." in error
    assert "Traceback" not in error
