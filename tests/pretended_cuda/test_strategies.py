"""Every strategy on the pretended device against a plain loop on the CPU, in fp64."""

from __future__ import annotations

import sys

import pytest
from trainkit.strategies.ddp.strategy import DDPStrategy
from trainkit.strategies.dp.strategy import DataParallelStrategy
from trainkit.strategies.fsdp.strategy import FSDPStrategy
from trainkit.strategies.fusion.strategy import FusionStrategy
from trainkit.strategies.pipeline.strategy import PipelineStrategy
from trainkit.strategies.single import SingleStrategy
from trainkit.strategies.torch_ddp import TorchDDPStrategy

from tests.marks import gpus
from tests.seams import training
from trainkit import Data, Trainer

if "pretended_torch" not in sys.modules:
    pytest.skip("`make test-gpu-pretended` runs it", allow_module_level=True)

pytestmark = gpus(2)

ON_CUDA = {
    "single": lambda: SingleStrategy(device="cuda", accumulate=2),
    "single on the second device": lambda: SingleStrategy(device="cuda:1"),
    "dp": lambda: DataParallelStrategy(devices=["cuda:0", "cuda:1"]),
    "dp twice on one device": lambda: DataParallelStrategy(devices=["cuda:0", "cuda:0"]),
    "ddp": lambda: DDPStrategy(device="cuda", devices=2),
    "ddp, accumulated": lambda: DDPStrategy(device="cuda", devices=2, accumulate=2),
    "ddp, unused parameters are looked for": lambda: DDPStrategy(
        device="cuda", devices=2, find_unused_parameters="graph"
    ),
    "ddp, optimizer in backward": lambda: DDPStrategy(device="cuda", devices=2, optimizer_in_backward=True),
    "ddp, gloo": lambda: DDPStrategy(device="cuda", devices=2, backend="gloo"),
    "torch_ddp": lambda: TorchDDPStrategy(device="cuda", devices=2),
    "torch_ddp, gloo": lambda: TorchDDPStrategy(device="cuda", devices=2, backend="gloo"),
    "fusion": lambda: FusionStrategy(device="cuda", devices=2),
    "fusion, gloo": lambda: FusionStrategy(device="cuda", devices=2, backend="gloo"),
    "fsdp": lambda: FSDPStrategy(device="cuda", devices=2),
    "fsdp, in host memory": lambda: FSDPStrategy(device="cuda", devices=2, offload="cpu"),
    "pipeline": lambda: PipelineStrategy(device="cuda", stages=2, accumulate=2),
    "pipeline, gloo": lambda: PipelineStrategy(device="cuda", stages=2, accumulate=2, backend="gloo"),
}


@pytest.fixture(scope="module")
def reference():
    """Return the weights of a plain loop on the CPU."""
    task = training.Layers()
    optimizer = task.configure_optimizers()
    for batch in training.batches():
        optimizer.zero_grad()
        task.training_step(batch).backward()
        optimizer.step()
    return {name: tensor.detach().clone() for name, tensor in task.state_dict().items()}


@pytest.mark.parametrize("name", list(ON_CUDA))
def test_a_strategy_on_cuda_trains_to_the_weights_of_a_plain_loop(name, reference, tmp_path):
    task = training.Layers()
    data = Data(train=training.samples(), batch_size=training.BATCH_SIZE, shuffle=False)
    settings = {"max_duration": "1epoch", "loggers": [], "callbacks": [], "num_sanity_batches": 0}
    Trainer(ON_CUDA[name](), run_dir=tmp_path, **settings).fit(task, data)
    weights = {name: tensor.detach().cpu() for name, tensor in task.state_dict().items()}
    assert training.difference(weights, reference) < training.BOUND
