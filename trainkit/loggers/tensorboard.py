"""TensorBoard: curves, histograms, images, text, hyperparameters and the task's graph, in event files."""

from __future__ import annotations

import os
import re
import socket
import struct
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.logger import Histogram, HyperParameter, Logger, check_inside_run_dir, truncate
from trainkit.loggers.media import png
from trainkit.model.graph import ModelGraph

if TYPE_CHECKING:
    from tensorboard.compat.proto.event_pb2 import Event
    from torch import Tensor

_OF_OPTIMIZERS = {"learning_rate", "grad_norm", "loss_scale", "skipped_steps"}
_OF_SPEED = {"epoch", "samples_per_second", "steps_per_second", "data_wait_fraction", "flops_per_second", "mfu"}
PREFIX = "events.out.tfevents."
LONGEST_SETTING = 500
"""Characters of one cell in the table of hyperparameters."""
_CASTAGNOLI = 0x82F63B78
"""The polynomial of CRC-32C with its bits reversed."""
# The format adds this to a rotated checksum, since checksums of data that contain checksums are weak.
_MASK_DELTA = 0xA282EAD8


class TensorBoardLogger(Logger):
    """Writes event files into a folder in the run's folder; view them with `tensorboard --logdir runs`.

    Metrics keep their names, and those that steps return share the groups `train` and `validation`. What trainkit
    measures in training is in groups of its own: `train/samples_per_second` is `speed/samples_per_second`, and
    `train/learning_rate` is `optimizer/learning_rate`. The tab CUSTOM SCALARS draws training and validation of each
    metric in one chart, and HPARAMS compares runs by their settings. A resumed run marks events beyond the resumed
    step as void.

    Args:
        folder: The folder in the run's folder.

    """

    def __init__(self, *, folder: str = "tensorboard") -> None:
        check_inside_run_dir(folder, where="folder")
        self.folder = folder
        self._file: Any = None  # an EventFile while open

    def open(self, folder: Path, *, step: int) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2

        self.close()
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._has_layout = False
        self._file = EventFile(folder / self.folder)
        # A restart voids all events from its step on that readers have seen before it.
        started = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._file.add(self._event(wall_time=time.time(), step=step + 1, session_log=started))
        self._opened_step = step

    def write(self, metrics: Mapping[str, float], *, step: int) -> None:
        value = self._summary.Value
        self._add([value(tag=_tag(name), simple_value=number) for name, number in metrics.items()], step=step)
        # Only now, as it takes time to import, and says nothing for a run without validation.
        validated = [name.removeprefix("validation/") for name in metrics if name.startswith("validation/")]
        if validated and not self._has_layout:
            self._has_layout = True
            self._write_layout(validated, step=step)

    def _write_layout(self, names: Sequence[str], *, step: int) -> None:
        """Write the charts of the tab CUSTOM SCALARS: training and validation of each metric together."""
        from tensorboard.plugins.custom_scalar import layout_pb2, metadata

        charts = []
        for name in names:
            tags = [f"^{stage}/{re.escape(name)}$" for stage in ("train", "validation")]
            charts.append(layout_pb2.Chart(title=name, multiline=layout_pb2.MultilineChartContent(tag=tags)))
        layout = layout_pb2.Layout(category=[layout_pb2.Category(title="train and validation", chart=charts)])
        self._write_bytes(metadata.CONFIG_SUMMARY_TAG, layout.SerializeToString(), metadata.PLUGIN_NAME, step=step)

    def write_config(self, config: str) -> None:
        self.write_text("config", f"```yaml\n{config}\n```", step=self._opened_step)

    def write_hyperparameters(self, values: Mapping[str, HyperParameter]) -> None:
        from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo

        session = SessionStartInfo(start_time_secs=time.time())
        for name, value in values.items():
            cell = session.hparams[name]
            if isinstance(value, bool):
                cell.bool_value = value
            elif isinstance(value, str):
                cell.string_value = truncate(value, LONGEST_SETTING)
            else:
                cell.number_value = value
        content = HParamsPluginData(session_start_info=session, version=0).SerializeToString()
        plugin = self._summary.Value(tag=SESSION_START_INFO_TAG, metadata=_metadata("hparams", content))
        self._add([plugin], step=self._opened_step)

    def write_text(self, name: str, text: str, *, step: int) -> None:
        self._write_bytes(name, text.encode(), "text", step=step, shape=[1])

    def _write_bytes(self, name: str, content: bytes, plugin: str, *, step: int, shape: Sequence[int] = ()) -> None:
        from tensorboard.compat.proto import tensor_pb2, tensor_shape_pb2, types_pb2

        sizes = tensor_shape_pb2.TensorShapeProto(dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=n) for n in shape])
        tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[content], tensor_shape=sizes)
        self._add([self._summary.Value(tag=name, metadata=_metadata(plugin), tensor=tensor)], step=step)

    def write_image(self, name: str, image: Tensor, *, step: int) -> None:
        height, width, _ = image.shape
        encoded = self._summary.Image(height=height, width=width, colorspace=3, encoded_image_string=png(image))
        self._add([self._summary.Value(tag=name, image=encoded)], step=step)

    def write_histogram(self, name: str, histogram: Histogram, *, step: int) -> None:
        from tensorboard.compat.proto.histogram_pb2 import HistogramProto

        counted = HistogramProto(
            min=histogram.edges[0],
            max=histogram.edges[-1],
            num=histogram.num_elements,
            sum=histogram.total,
            sum_squares=histogram.total_of_squares,
            # A bucket reaches from the limit before it to its own; the first one, empty, begins the lowest edge.
            bucket_limit=histogram.edges,
            bucket=[0, *histogram.counts],
        )
        self._add([self._summary.Value(tag=name, histo=counted)], step=step)

    def write_graph(self, graph: ModelGraph) -> None:
        self._file.add(self._event(wall_time=time.time(), graph_def=_graph_def(graph)))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _add(self, values: list[Any], *, step: int) -> None:
        self._file.add(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))


class EventFile:
    """One new event file in a folder; readers sort it after those that exist.

    Its records are protocol buffers with checksums:

        record      length   checksum of it   event   checksum of it
        bytes            8                4   length               4

    The writer of `tensorboard` takes 0.2 s to import (seconds if TensorFlow is installed), starts a thread, and loses
    its buffer when the process is killed; this one writes every event at once.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{PREFIX}{_next_stamp(folder):010d}.{socket.gethostname()}.{os.getpid()}.0"
        # O_EXCL: two processes never append to one file.
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o666)
        self._table = _crc_table()
        # The first record names the version of the format; readers expect it.
        self.add(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def add(self, event: Event) -> None:
        """Append the event; once returned, it outlives the process."""
        data = event.SerializeToString()
        length = struct.pack("<Q", len(data))
        os.write(self._file, b"".join((length, self._checksum(length), data, self._checksum(data))))

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _checksum(self, data: bytes) -> bytes:
        crc, table = 0xFFFFFFFF, self._table
        for byte in data:
            crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
        crc ^= 0xFFFFFFFF
        # Rotated by 15 bits, as the format of TFRecord asks.
        masked = (((crc >> 15) | (crc << 17)) + _MASK_DELTA) & 0xFFFFFFFF
        return struct.pack("<I", masked)


def _tag(name: str) -> str:
    """Return the tag of a metric: the group `train` has only what steps return."""
    stage, _, base = name.partition("/")
    parts = {part.partition(".")[0] for part in base.split("/")}  # a phase, or a group of parameters, may be one
    if stage != "train" or parts.isdisjoint(_OF_OPTIMIZERS | _OF_SPEED):
        return name
    return f"{'speed' if parts & _OF_SPEED else 'optimizer'}/{base}"


def _next_stamp(folder: Path) -> int:
    """Return a time, in seconds, later than that of every event file in the folder: readers sort by it."""
    stamps = [path.name.removeprefix(PREFIX).split(".")[0] for path in folder.glob(f"{PREFIX}*")]
    return max([int(time.time()), *(int(stamp) + 1 for stamp in stamps if stamp.isdigit())])


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = (crc >> 1) ^ (_CASTAGNOLI if crc & 1 else 0)
        table.append(crc)
    return table


def _metadata(plugin: str, content: bytes = b"") -> Any:
    from tensorboard.compat.proto.summary_pb2 import SummaryMetadata

    return SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name=plugin, content=content))


def _graph_def(graph: ModelGraph) -> bytes:
    from tensorboard.compat.proto.attr_value_pb2 import AttrValue
    from tensorboard.compat.proto.graph_pb2 import GraphDef
    from tensorboard.compat.proto.node_def_pb2 import NodeDef
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.compat.proto.versions_pb2 import VersionDef

    nodes = []
    for operation in graph.operations:
        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=size) for size in operation.shape])
        attributes = {"_output_shapes": AttrValue(list=AttrValue.ListValue(shape=[shape]))}
        nodes.append(NodeDef(name=operation.name, op=operation.kind, input=operation.inputs, attr=attributes))
    # 22 is the version that torch's SummaryWriter writes.
    encoded: bytes = GraphDef(node=nodes, versions=VersionDef(producer=22)).SerializeToString()
    return encoded
