"""The command `partition`: how the strategy `pipeline` would cut a task, without training."""

from __future__ import annotations

from trainkit.command_line.cli import Arguments
from trainkit.command_line.composition import composing
from trainkit.errors import UserError


def partition(arguments: Arguments) -> int:
    """Print the plan of a pipeline and draw it; the task's step runs a few times on one batch in this process."""
    chosen = arguments.take("strategy")
    if chosen not in (None, "pipeline"):
        raise UserError(f"strategy={chosen} has no stages; only strategy=pipeline cuts a task. Leave strategy= out.")
    with composing(arguments.config_dirs) as composer:
        settings = composer.settings(["strategy=pipeline", *arguments.overrides], needs_task=not arguments.cfg)
    if arguments.cfg:
        print(settings.as_yaml() if arguments.resolve else settings.unresolved, end="")
        return 0
    from torch.utils.data import DataLoader

    from trainkit.command_line.assembly import assemble
    from trainkit.data import Data

    from .strategy import Pipeline

    assembly = assemble(settings, run_dir=None, loggers=False)
    strategy = assembly.trainer.strategy
    if not isinstance(strategy, Pipeline):
        raise UserError(f"{type(strategy).__name__} is no pipeline: it has no stages that could be shown.")
    data = Data(train=assembly.data) if isinstance(assembly.data, DataLoader) else assembly.data
    plan, drawing = strategy.preview(assembly.task, data.source("train"), precision=assembly.trainer.precision)
    print(f"{settings.name} in {len(plan.stages)} stages\n{plan}\n\n{drawing}")
    return 0
