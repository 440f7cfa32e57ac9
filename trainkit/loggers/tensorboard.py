"""TensorBoard: curves of all metrics, and the settings of the run as text."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from trainkit.logger import Logger
from trainkit.loggers.event_file import EventFile


class TensorBoardLogger(Logger):
    """Writes event files into a folder of the run's: look at them with `tensorboard --logdir runs`.

    Metrics keep their names, so that `train/loss` and `train/accuracy` share the group `train`. All metrics of a
    moment are one event. A resumed run marks what its predecessor wrote beyond the resumed step as void.

    Args:
        folder: The folder in the run's folder.

    """

    def __init__(self, *, folder: str = "tensorboard") -> None:
        self.folder = folder
        self._file: EventFile | None = None

    def open(self, folder: Path, *, step: int) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2

        self.close()
        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._file = EventFile(folder / self.folder)
        # A restart voids all events from its step on that readers have seen before it.
        started = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._file.add(self._event(wall_time=time.time(), step=step + 1, session_log=started))
        self._opened_step = step

    def write(self, metrics: Mapping[str, float], *, step: int) -> None:
        if self._file is None:
            return
        value = self._summary.Value
        values = [value(tag=name, simple_value=number) for name, number in metrics.items()]
        self._file.add(self._event(wall_time=time.time(), step=step, summary=self._summary(value=values)))

    def write_config(self, config: str) -> None:
        if self._file is None or not config:
            return
        from tensorboard.compat.proto import summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2

        shape = tensor_shape_pb2.TensorShapeProto(dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=1)])
        text = f"```yaml\n{config}\n```".encode()
        tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[text], tensor_shape=shape)
        plugin = summary_pb2.SummaryMetadata.PluginData(plugin_name="text")
        value = summary_pb2.Summary.Value(
            tag="config", metadata=summary_pb2.SummaryMetadata(plugin_data=plugin), tensor=tensor
        )
        summary = self._summary(value=[value])
        self._file.add(self._event(wall_time=time.time(), step=self._opened_step, summary=summary))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
