from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tasks import Regression, regression_data
from trainkit.loggers.guarded import SafeLogger
from trainkit.loggers.media import histogram_of
from trainkit.loggers.tensorboard import EventFile, TensorBoardLogger
from trainkit.model.graph import record_graph

LAYOUT = "custom_scalars__config__"
Read = Callable[[Path], Any]


@pytest.fixture(scope="module")
def read() -> Read:
    """Read a run's folder as TensorBoard does, checksums included."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return lambda folder: EventAccumulator(str(folder / "tensorboard")).Reload()


def curve(events: Any, name: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events.Scalars(name)]


def written(folder: Path, *steps: int, opened_at: int = 0) -> None:
    logger = TensorBoardLogger()
    logger.open(folder, step=opened_at)
    for step in steps:
        logger.write({"train/loss": 1.0 / step, "validation/accuracy": step / 64}, step=step)
    logger.close()


def test_tensorboard_reads_every_scalar_under_its_name(tmp_path: Path, read: Read) -> None:
    written(tmp_path, 2, 4)

    events = read(tmp_path)
    assert events.Tags()["scalars"] == ["train/loss", "validation/accuracy"]
    assert curve(events, "train/loss") == [(2, 0.5), (4, 0.25)]
    assert curve(events, "validation/accuracy") == [(2, 2 / 64), (4, 4 / 64)]


def test_what_trainkit_measures_is_not_among_what_steps_return(tmp_path: Path, read: Read) -> None:
    logger = TensorBoardLogger()
    logger.open(tmp_path, step=0)
    measured = ("samples_per_second", "data_wait_fraction", "epoch", "learning_rate.1", "g/learning_rate", "grad_norm")
    returned = ("loss", "accuracy", "generator/loss", "gradient_penalty")
    logger.write({f"train/{name}": 1.0 for name in (*returned, *measured)}, step=1)
    logger.write({"validation/loss": 1.0, "device/memory_mib": 1.0}, step=1)
    logger.close()

    assert sorted(read(tmp_path).Tags()["scalars"]) == [
        "device/memory_mib",
        "optimizer/g/learning_rate",
        "optimizer/grad_norm",
        "optimizer/learning_rate.1",
        "speed/data_wait_fraction",
        "speed/epoch",
        "speed/samples_per_second",
        *("train/accuracy", "train/generator/loss", "train/gradient_penalty", "train/loss"),
        "validation/loss",
    ]


def test_training_and_validation_of_a_metric_share_a_chart(tmp_path: Path, read: Read) -> None:
    from tensorboard.plugins.custom_scalar import layout_pb2

    written(tmp_path, 1)
    written(tmp_path, 2, opened_at=1)

    events = read(tmp_path)
    layouts = [layout_pb2.Layout.FromString(e.tensor_proto.string_val[0]) for e in events.Tensors(LAYOUT)]
    (category,) = layouts[-1].category
    assert [chart.title for chart in category.chart] == ["accuracy"]
    assert [*category.chart[0].multiline.tag] == ["^train/accuracy$", "^validation/accuracy$"]


def test_the_settings_are_kept_as_text(tmp_path: Path, read: Read) -> None:
    logger = TensorBoardLogger()
    logger.open(tmp_path, step=0)
    logger.write_config("trainer:\n  seed: 7\n")
    logger.close()

    (event,) = read(tmp_path).Tensors("config")
    assert b"seed: 7" in event.tensor_proto.string_val[0]


def test_numbers_that_are_not_finite_come_back_as_they_were(tmp_path: Path, read: Read) -> None:
    logger = TensorBoardLogger()
    logger.open(tmp_path, step=0)
    for step, value in enumerate([math.nan, math.inf, -math.inf, 0.5]):
        logger.write({"train/loss": value}, step=step)
    logger.close()

    values = [value for _, value in curve(read(tmp_path), "train/loss")]
    assert math.isnan(values[0])
    assert values[1:] == [math.inf, -math.inf, 0.5]


def test_files_are_read_in_the_order_of_their_opening_though_all_are_of_one_second(tmp_path: Path) -> None:
    names = []
    for step in (1, 2, 3):
        before = set((tmp_path / "tensorboard").glob("*"))
        written(tmp_path, step, opened_at=step - 1)
        names += [path.name for path in set((tmp_path / "tensorboard").iterdir()) - before]

    assert names == sorted(names)
    assert len(names) == 3


def test_images_histograms_and_texts_come_back(tmp_path: Path, read: Read) -> None:
    logger = TensorBoardLogger()
    logger.open(tmp_path, step=0)
    logger.write_image("image", torch.full((2, 3, 3), 7, dtype=torch.uint8), step=4)
    logger.write_histogram("weights", histogram_of(torch.tensor([0.0, 0.1, 0.9, 1.0, 2.0]), bins=2), step=4)
    logger.write_text("samples", "hello", step=4)
    logger.close()

    events = read(tmp_path)
    (image,) = events.Images("image")
    (histogram,) = events.Histograms("weights")
    (text,) = events.Tensors("samples")
    assert (image.step, image.height, image.width) == (4, 2, 3)
    assert image.encoded_image_string.startswith(b"\x89PNG")
    value = histogram.histogram_value
    assert (value.bucket_limit, value.bucket) == ([0.0, 1.0, 2.0], [0, 3, 2])
    assert (value.min, value.max, value.num) == (0.0, 2.0, 5)
    assert text.tensor_proto.string_val[0] == b"hello"


def test_settings_are_in_the_table_of_the_plugin_hparams(tmp_path: Path, read: Read) -> None:
    from tensorboard.plugins.hparams import metadata

    logger = SafeLogger(TensorBoardLogger())
    logger.open(tmp_path, step=0)
    logger.write_config(
        "trainer: {seed: 7, compile: false, max_grad_norm: null, max_duration: [1epoch, 30min]}\nlong: " + "a" * 600
    )
    assert logger.failures == 0
    logger.close()

    contents = read(tmp_path).PluginTagToContent("hparams")
    session = metadata.parse_session_start_info_plugin_data(contents[metadata.SESSION_START_INFO_TAG])
    known = {name: getattr(value, value.WhichOneof("kind")) for name, value in session.hparams.items()}
    long = known.pop("long")
    assert len(long) == 500 and long.endswith("... (600 characters)")
    assert known == {"trainer.seed": 7, "trainer.compile": False, "trainer.max_duration": "['1epoch', '30min']"}


def test_the_graph_of_a_step_shows_its_operations_by_module(tmp_path: Path, read: Read) -> None:
    task = Regression(hidden=3)
    before = torch.get_rng_state()

    graph = record_graph(task, [*regression_data(8).tensors])
    logger = TensorBoardLogger()
    logger.open(tmp_path, step=0)
    logger.write_graph(graph)
    logger.close()

    nodes = {node.name: node for node in read(tmp_path).Graph().node}
    assert nodes["network/0/linear"].input == ["batch/0", "network/0/weight", "network/0/bias"]
    assert nodes["network/1/tanh"].input == ["network/0/linear"]
    assert nodes["mse_loss"].input == ["network/3/linear", "batch/1"]
    shape = nodes["network/0/linear"].attr["_output_shapes"].list.shape[0]
    assert [size.size for size in shape.dim] == [8, 3]
    assert task.training
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in task.modules())


@pytest.mark.parametrize("text", ["", "loss", "x" * 1000])
def test_checksums_are_those_that_tensorboard_writes(tmp_path: Path, text: str) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    file = EventFile(tmp_path)
    start = file.path.stat().st_size
    file.add(Event(step=3, file_version=text))
    file.close()

    record = file.path.read_bytes()[start:]
    data = record[12:-4]
    assert Event.FromString(data) == Event(step=3, file_version=text)
    assert record[:8] == struct.pack("<Q", len(data))
    assert record[8:12] == struct.pack("<I", masked_crc32c(record[:8]))
    assert record[-4:] == struct.pack("<I", masked_crc32c(data))
