"""The command `partition`: how the strategy `pipeline` would cut a task, without training."""

from __future__ import annotations

from trainkit.cli.compose import compose_config
from trainkit.cli.main import Arguments
from trainkit.errors import UserError


def partition(arguments: Arguments) -> int:
    """Print the plan of a pipeline and draw it; the task's step runs a few times on one batch in this process."""
    chosen = arguments.take("strategy")
    if chosen not in (None, "pipeline"):
        raise UserError(f"strategy={chosen} has no stages; only strategy=pipeline cuts a task. Leave strategy= out.")
    with compose_config(arguments.config_dirs) as composer:
        settings = composer.settings(["strategy=pipeline", *arguments.overrides], needs_task=not arguments.cfg)
    if arguments.cfg:
        print(settings.as_yaml() if arguments.resolve else settings.unresolved, end="")
        return 0
    from torch.utils.data import DataLoader

    from trainkit.cli.run_commands import assemble
    from trainkit.data import Data

    from .strategy import Pipeline

    run = assemble(settings, run_dir=None, loggers=False)
    strategy = run.trainer.strategy
    if not isinstance(strategy, Pipeline):
        raise UserError(f"{type(strategy).__name__} is not a pipeline: it has no stages to show.")
    data = Data(train=run.data) if isinstance(run.data, DataLoader) else run.data
    plan, drawing = strategy.preview(run.task, data.source("train"), precision=run.trainer.precision)
    print(f"{settings.name} in {len(plan.stages)} stages\n{plan}\n\n{drawing}")
    return 0
