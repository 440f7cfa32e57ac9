"""A PyTorch trainer whose strategies decide where the work is done, never what is computed."""

from importlib import import_module
from pkgutil import extend_path
from typing import TYPE_CHECKING, Any

# At the repository's root this folder shadows the installed package; the path then leads on to its other parts.
__path__ = extend_path(__path__, __name__)

if TYPE_CHECKING:
    from trainkit.callback import Callback as Callback
    from trainkit.custom_loop import Session as Session
    from trainkit.custom_loop import session as session
    from trainkit.data.batch import BatchPlan as BatchPlan
    from trainkit.data.data import Data as Data
    from trainkit.data.files import Files as Files
    from trainkit.data.mixture import Mixture as Mixture
    from trainkit.data.mixture import Sequential as Sequential
    from trainkit.data.opened_shards import Shards as Shards
    from trainkit.data.packing import Packed as Packed
    from trainkit.duration import Duration as Duration
    from trainkit.errors import Stopped as Stopped
    from trainkit.errors import UserError as UserError
    from trainkit.logger import Logger as Logger
    from trainkit.metrics.metric import Metric as Metric
    from trainkit.model.deferred_init import deferred_init as deferred_init
    from trainkit.optim.lr_schedule import LRSchedule as LRSchedule
    from trainkit.optim.phase import Phase as Phase
    from trainkit.phases import PhaseControl as PhaseControl
    from trainkit.state import TrainState as TrainState
    from trainkit.strategy import Strategy as Strategy
    from trainkit.task import TaskModule as TaskModule
    from trainkit.trainer import Trainer as Trainer

__version__ = "0.1.0"

_HOMES = {
    "BatchPlan": "data.batch",
    "Callback": "callback",
    "Data": "data.data",
    "Duration": "duration",
    "Files": "data.files",
    "LRSchedule": "optim.lr_schedule",
    "Logger": "logger",
    "Metric": "metrics.metric",
    "Mixture": "data.mixture",
    "Packed": "data.packing",
    "Phase": "optim.phase",
    "PhaseControl": "phases",
    "Sequential": "data.mixture",
    "Session": "custom_loop",
    "Shards": "data.opened_shards",
    "Stopped": "errors",
    "Strategy": "strategy",
    "TaskModule": "task",
    "TrainState": "state",
    "Trainer": "trainer",
    "UserError": "errors",
    "deferred_init": "model.deferred_init",
    "session": "custom_loop",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Import a public name on its first use, so that the command line answers without importing torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'trainkit' has no attribute {name!r}")
    return getattr(import_module(f"trainkit.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
