"""Manual optimization: the optimizers of a LightningModule that makes its own backward and steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from trainkit.errors import UserError
from trainkit.optim.optimizer import GradientClipping

if TYPE_CHECKING:
    from trainkit.integrations.lightning_hooks import TrainerProxy
    from trainkit.loops.fit_config import FitConfig
    from trainkit.strategy import Strategy


@dataclass(frozen=True)
class SchedulerConfig:
    """An entry of `lr_scheduler_configs`, from which `self.lr_schedulers()` takes the scheduler."""

    scheduler: Any


class ManualOptimization:
    """Stands in for the strategy of a module's trainer: the methods that Lightning's manual optimization calls.

    `self.optimizers()`, `self.manual_backward`, `self.toggle_optimizer` and `self.clip_gradients` are Lightning's own.
    There is one device, and no loss scaler.
    """

    def __init__(
        self, module: Any, proxy: TrainerProxy, optimizers: Sequence[Optimizer], schedulers: list[Any]
    ) -> None:
        self.lightning_module = module
        self._proxy = proxy
        self._optimizers = optimizers
        # By id, which stays unique: `_optimizers` holds them.
        self._stepped: set[int] = set()  # ids of the optimizers that have stepped since the last backward
        self._saved_gradients: dict[str, Tensor] = {}
        package = _package_of(module)
        wrapper = import_module(f"{package}.core.optimizer").LightningOptimizer
        self._lightning_optimizers = [wrapper(optimizer) for optimizer in optimizers]
        for wrapped in self._lightning_optimizers:
            # Private: Lightning's trainer sets these, and offers nothing public in their place.
            wrapped._strategy, wrapped._on_after_step = self, self._count_step
        proxy.strategy, proxy.optimizers = self, list(optimizers)
        proxy.lr_scheduler_configs = [SchedulerConfig(scheduler) for scheduler in schedulers]
        # The default precision plugin does nothing: trainkit has entered its autocast already.
        proxy.precision_plugin = import_module(f"{package}.plugins.precision").Precision()
        proxy.gradient_clip_val = proxy.gradient_clip_algorithm = None
        proxy.global_step = 0

    def backward(self, loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> None:
        """Add the gradients of a loss, between the module's hooks."""
        # New gradients: from now on each optimizer has some that it has not stepped on.
        self._stepped.clear()
        self.lightning_module.on_before_backward(loss)
        self.lightning_module.backward(loss, *args, **kwargs)
        self.lightning_module.on_after_backward()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Step an optimizer, which calls the closure and then the module's hook."""

        def evaluate() -> Any:
            loss = closure()
            self.lightning_module.on_before_optimizer_step(optimizer)
            return loss

        stepped = optimizer.step(closure=evaluate, **kwargs)
        self._stepped.add(id(optimizer))
        return stepped

    def start_step(self) -> None:
        """Start a training step: its gradients count as not stepped."""
        self._stepped.clear()
        parameters = dict(self.lightning_module.named_parameters())
        for name, gradient in self._saved_gradients.items():
            parameters[name].grad = gradient.to(parameters[name].device)
        self._saved_gradients = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the number of steps, and the gradients that accumulate from one training step to the next."""
        waiting = {
            id(parameter)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if id(optimizer) not in self._stepped
        }
        named = self.lightning_module.named_parameters()
        gradients = {
            name: parameter.grad for name, parameter in named if id(parameter) in waiting and parameter.grad is not None
        }
        return {"global_step": self._proxy.global_step, "gradients": gradients}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Restore the number of steps; the gradients are restored in the next training step."""
        self._proxy.global_step, self._saved_gradients = saved["global_step"], saved["gradients"]

    def _count_step(self) -> None:
        self._proxy.global_step += 1


def check_manual(module: Any, strategy: Strategy, config: FitConfig) -> None:
    """Raise UserError for a strategy or setting with which manual optimization would not be that of Lightning."""
    manual_clipping = "trainer.max_grad_norm=null trainer.max_grad_value=null, and call self.clip_gradients"
    remedies = {
        "strategy=single": not strategy.supports_manual_backward,
        "strategy.accumulate=1, without micro_batch_size": strategy.num_micro_batches != 1,
        "trainer.precision=bf16-mixed": config.precision.name == "fp16-mixed",
        manual_clipping: config.clip != GradientClipping(),
        "trainer.on_nonfinite=raise": config.on_nonfinite in ("skip", "rollback"),
        "trainer.skip_grad_norm_factor=null": config.skip_grad_norm_factor is not None,
    }
    needed = [remedy for remedy, is_needed in remedies.items() if is_needed]
    if needed:
        raise UserError(
            f"{type(module).__name__} has automatic_optimization=False: it makes its own backward and steps, on one "
            f"device and with one micro-batch. Set {'; '.join(needed)}."
        )


def _package_of(module: Any) -> str:
    """Return `lightning.pytorch`, or `pytorch_lightning`: two packages with the same classes."""
    base = next(cls for cls in type(module).__mro__ if cls.__name__ == "LightningModule")
    return str(base.__module__).removesuffix(".core.module")
