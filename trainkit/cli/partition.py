"""`trainkit partition`: show how the pipeline strategy would partition a task."""

from __future__ import annotations

from trainkit.cli.compose import compose_config
from trainkit.cli.main import Arguments
from trainkit.errors import UserError


def partition(arguments: Arguments) -> int:
    """Print and draw the partition of a task; its step runs a few times on one batch in this process."""
    chosen = arguments.take("strategy")
    if chosen not in (None, "pipeline"):
        raise UserError(f"strategy={chosen} has no stages; only strategy=pipeline partitions a task. Omit strategy=.")
    with compose_config(arguments.config_dirs) as composer:
        settings = composer.settings(["strategy=pipeline", *arguments.overrides], needs_task=not arguments.cfg)
    if arguments.cfg:
        print(settings.as_yaml() if arguments.resolve else settings.unresolved, end="")
        return 0
    from torch.utils.data import DataLoader

    from trainkit.cli.run_commands import assemble
    from trainkit.data.data import Data
    from trainkit.strategy import SupportsPartitionPreview

    run = assemble(settings, run_dir=None, loggers=False)
    strategy = run.trainer.strategy
    if not isinstance(strategy, SupportsPartitionPreview):
        raise UserError(f"{type(strategy).__name__} has no stages; only strategy=pipeline partitions a task.")
    data = Data(train=run.data) if isinstance(run.data, DataLoader) else run.data
    preview = strategy.preview(run.task, data.stage_data("train"), precision=run.trainer.fit_config.precision)
    print(f"{settings.name} in {preview}")
    return 0
