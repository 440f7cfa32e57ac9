"""Fusion buffers on CUDA devices: copied to pinned memory on a separate stream, without a device sync in the step."""

from __future__ import annotations

import os

import pytest
import torch
from trainkit.strategies.fusion.strategy import FusionStrategy
from trainkit.strategies.single import SingleStrategy
from trainkit.strategies.transports.host_copy import StreamHostCopier

from tests.equality import largest_difference
from tests.marks import gpus
from tests.strategies.fusion.training import trained
from tests.tasks import Recorder
from trainkit.testing import run_ranks

pytestmark = gpus()
POLICY = (os.environ.get("TRAINKIT_PRETENDED_CUDA", "") + ":").split(":")[1]


class SyncDetector(Recorder):
    """Makes torch raise if the training thread waits for the device in a step after one of `steps`."""

    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def on_step_complete(self, run):
        torch.cuda.set_sync_debug_mode("default")

    def on_step_end(self, run):
        torch.cuda.set_sync_debug_mode("error" if run.state.step in self.steps else "default")

    def close(self):
        torch.cuda.set_sync_debug_mode("default")


def differences_on_cuda(run_dir):
    """Return the largest difference from single for each transport and format; two ranks share a device."""
    found = {}
    alone = run_dir / f"single_{torch.distributed.get_rank()}"
    for name in ("perceptron", "gpt"):
        single = trained(SingleStrategy(device="cuda"), name, run_dir=alone, log_every="100step")
        # In the third step a rank has no samples, and reads which parameters the others have used.
        for transport, steps in {"shared_memory": (1, 2, 3), "exchange": (1, 3)}.items():
            for reduce_dtype in (None, "bf16"):
                strategy = FusionStrategy(
                    device="cuda",
                    backend="gloo",
                    transport=transport,
                    reduce_dtype=reduce_dtype,
                    buffer_mb=0.0005,
                    max_in_flight=2,
                )
                ours = trained(strategy, name, SyncDetector(steps), run_dir=run_dir / "fusion", log_every="100step")
                found[name, transport, reduce_dtype] = largest_difference(ours, single)
    return found


def test_ranks_on_cuda_train_to_the_weights_of_one_device(tmp_path):
    for found in run_ranks(differences_on_cuda, 2, tmp_path, timeout=150):
        for case, difference in found.items():
            assert difference < (1e-5 if case[2] is None else 3e-2), case


@pytest.mark.skipif(POLICY not in ("", "late", "side_first"), reason="what is queued may have run already")
def test_copies_wait_for_what_fills_the_buffer_and_not_for_what_comes_later():
    device = torch.device("cuda")
    copier, target = StreamHostCopier(device), torch.empty(1 << 20, pin_memory=True)
    source = torch.zeros(1 << 20, device=device)
    torch.cuda._sleep(50_000_000)
    source.fill_(1.0)
    copy = copier.to_host(source, target, after=copier.mark())
    torch.cuda._sleep(500_000_000)
    assert not copy.query()
    copy.synchronize()
    assert target.eq(1.0).all() and not torch.cuda.current_stream().query()
    target.fill_(2.0)
    torch.cuda.current_stream().wait_event(copier.to_device(target, source))
    assert (source + 0.0).eq(2.0).all().item()
    copier.close()
