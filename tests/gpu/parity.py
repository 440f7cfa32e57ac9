"""Every strategy, number of ranks and precision on CUDA against a plain torch loop on the CPU in fp64.

The bound is four times the tolerance of `trainkit.parity`, the relative difference that rounding explains: 4e-11 in
fp64, 4e-5 in fp32, 8e-2 and 2e-2 mixed in bf16 and fp16, 0.4 in bf16. In units of what one rounding costs these are
4e5, 700, 20, 40 and 100. Four times, as the products of 6 steps round differently in fp64 and in halves of a batch:
plain loops in mixed bf16 and in fp64 differ by 2.5e-2. TF32 is off; it rounds as fp16 does: fp32 would fail with it.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset
from trainkit.strategies.ddp.strategy import DDPStrategy
from trainkit.strategies.dp.strategy import DataParallelStrategy
from trainkit.strategies.fsdp.strategy import FSDPStrategy
from trainkit.strategies.fusion.strategy import FusionStrategy
from trainkit.strategies.pipeline.strategy import PipelineStrategy
from trainkit.strategies.single import SingleStrategy
from trainkit.strategies.torch_ddp import TorchDDPStrategy

from tests.equality import GPT, TASKS, largest_difference
from tests.gpu.figures import figure
from tests.marks import gpus
from tests.tasks import fit
from trainkit import Data
from trainkit.parity.compare import TOLERANCES

pytestmark = gpus()
PRETENDED = "pretended_torch" in sys.modules
BATCH_SIZE, STEPS = 8, 6
SHRUNK = 2.0**-6
"""Factor of the losses: fp16 has no number above 65504, and the first scale of its gradients is 65536."""
AUTOCAST = {"bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}
TRUE = {"fp64": torch.float64, "bf16-true": torch.bfloat16}

ALONE = {
    "single": lambda: SingleStrategy(device="cuda"),
    "single, accumulated": lambda: SingleStrategy(device="cuda", accumulate=2),
    "dp": lambda: DataParallelStrategy(devices=["cuda:0", "cuda:0"]),
}
RANKS = {
    "ddp": DDPStrategy,
    "torch_ddp": TorchDDPStrategy,
    "fusion": FusionStrategy,
    "fsdp": FSDPStrategy,
}
WHERE: dict[str, dict[str, Any]] = {
    "1 nccl": {"devices": 1, "backend": "nccl"},
    "2 gloo": {"devices": 2, "backend": "gloo"},  # which share the device; NCCL refuses that
}
CASES = {
    **ALONE,
    **{
        f"{name}, {ranks}": lambda make=make, where=where: make(device="cuda", **where)
        for ranks, where in WHERE.items()
        for name, make in RANKS.items()
    },
    "pipeline, 1 nccl": lambda: PipelineStrategy(device="cuda", stages=1, accumulate=2, backend="nccl"),
    "pipeline, 2 gloo": lambda: PipelineStrategy(device="cuda", stages=2, accumulate=2, backend="gloo"),
}


def make(name: str) -> Any:
    """Return a task whose losses, and so its gradients, are small; its learning rate makes up for it."""
    kind = TASKS[name][0]

    class Shrunk(kind):  # type: ignore[misc,valid-type]
        def training_step(self, batch: Any) -> Any:
            outputs = super().training_step(batch)
            if not isinstance(outputs, dict):
                return outputs * SHRUNK
            return {**outputs, "loss": outputs["loss"] * SHRUNK}

    return Shrunk(lr=(0.03 if kind is GPT else 0.1) / SHRUNK)


def samples(name: str) -> TensorDataset:
    """Return the samples of all steps."""
    dataset: TensorDataset = TASKS[name][1](BATCH_SIZE * STEPS)
    return dataset


def plain_loop(name: str, device: str, precision: str) -> dict[str, torch.Tensor]:
    """Return the weights after a loop of torch alone."""
    task, true = make(name), TRUE.get(precision, torch.float32)
    task.to(device, true)
    optimizer = task.configure_optimizers()
    scaler = torch.amp.GradScaler(device, enabled=precision == "fp16-mixed")
    cast = torch.autocast(device, dtype=AUTOCAST.get(precision, torch.bfloat16), enabled=precision in AUTOCAST)
    for rows in zip(*(tensor.split(BATCH_SIZE) for tensor in samples(name).tensors), strict=True):
        batch = [tensor.to(device, true if tensor.is_floating_point() else None) for tensor in rows]
        with cast:
            outputs = task.training_step(batch)
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return weights(task)


def weights(task: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a task's parameters and buffers on the CPU."""
    return {name: tensor.detach().cpu() for name, tensor in task.state_dict().items()}


def assert_near(strategy: Any, name: str, precision: str, case: str, folder: Any) -> None:
    """Train, note the differences from both loops, and fail above the bound of the precision."""
    if PRETENDED and precision == "bf16-true" and name in ("gpt", "conv_net"):
        pytest.skip("the pretended device has the norms of the CPU, whose statistics are of another type")
    task, differences = make(name), dict[str, float]()
    data = Data(train=samples(name), batch_size=BATCH_SIZE, shuffle=False)
    # The pretended device has the fused kernels of the CPU, whose SGD in bf16 is wrong.
    fused = not (PRETENDED and precision == "bf16-true")
    settings = {"precision": precision, "fused_optimizer": fused, "evaluate_every": None}
    fit(strategy, task, data, run_dir=folder, max_duration="1epoch", **settings)
    trained = weights(task)
    for loop in ("cpu", "cuda"):
        expected = plain_loop(name, loop, "fp64" if loop == "cpu" else precision)
        differences[loop] = largest_difference([trained], [expected])
        figure(f"{case}, {precision}: from {loop}", differences[loop])
    assert all(difference < 4 * TOLERANCES[precision] for difference in differences.values()), differences


@pytest.mark.parametrize("precision", list(TOLERANCES))
@pytest.mark.parametrize("case", list(CASES))
def test_a_strategy_on_cuda_trains_to_the_weights_of_a_plain_loop(case, precision, tmp_path):
    assert_near(CASES[case](), "gpt", precision, case, tmp_path)


@pytest.mark.parametrize("precision", list(TOLERANCES))
@pytest.mark.parametrize("name", [name for name in TASKS if name != "gpt"])
def test_another_task_on_cuda_trains_to_the_weights_of_a_plain_loop(name, precision, tmp_path):
    assert_near(SingleStrategy(device="cuda"), name, precision, f"single, {name}", tmp_path)
