import json
import time

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset
from trainkit.callbacks.speed_monitor import SpeedMonitor
from trainkit.strategies.ddp.strategy import DDPStrategy
from trainkit.strategies.dp.strategy import DataParallelStrategy
from trainkit.strategies.fusion.strategy import FusionStrategy
from trainkit.strategies.pipeline.strategy import PipelineStrategy
from trainkit.strategies.single import SingleStrategy

from tests.tasks import Recorder, SkipStep, flat
from tests.tasks import fit as train
from trainkit import Callback, Data, Phase, TaskModule, UserError
from trainkit.errors import NonFiniteLoss
from trainkit.testing import run_ranks

LATENT = 3


class Adversarial(TaskModule):
    """A generator of two numbers and a discriminator; noise comes with the sample, so that it is the same anywhere."""

    def __init__(self, *, every=1, lr=0.05):
        super().__init__()
        self.generator = nn.Linear(LATENT, 2)
        self.discriminator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
        self.every = every
        self.lr = lr

    def configure_phases(self):
        generator = Adam(self.generator.parameters(), lr=self.lr)
        return [
            Phase("discriminator", SGD(self.discriminator.parameters(), lr=self.lr, momentum=0.9)),
            Phase("generator", (generator, StepLR(generator, 1, 0.9)), every=self.every, max_grad_norm=0.5),
        ]

    def discriminator_step(self, batch):
        real, noise = batch
        fake = self.discriminator(self.generator(noise))
        true = self.discriminator(real)
        return {"loss": nn.functional.softplus(fake).mean() + nn.functional.softplus(-true).mean(), "fake": fake.mean()}

    def generator_step(self, batch):
        return nn.functional.softplus(-self.discriminator(self.generator(batch[1]))).mean()

    def validation_step(self, batch):
        return {"spread": self.generator(batch[1]).std()}


class Manual(Adversarial):
    manual = True

    def manual_step(self, control):
        for name in ("discriminator", "discriminator", "generator"):
            control.backward(name)
            control.step(name)


def samples(count=20):
    generator = torch.Generator().manual_seed(5)
    return TensorDataset(
        torch.randn(count, 2, generator=generator) + 1.0, torch.randn(count, LATENT, generator=generator)
    )


def made(kind=Adversarial, **settings):
    torch.manual_seed(0)
    return kind(**settings)


def fit(task, tmp_path, strategy=None, *, duration="2epoch", **settings):
    settings = {"max_duration": duration, "log_every": "1step", "precision": "fp64", **settings}
    return train(strategy or SingleStrategy(), task, Data(train=samples(), batch_size=8), run_dir=tmp_path, **settings)


def by_hand(*, num_steps, every=1, critic_steps=1):
    """Train as one would write it without a framework: three steps an epoch of batches 8, 8, 4 in order."""
    task = made(every=every).double()
    data = [tensor.double() for tensor in samples().tensors]
    first, second = task.configure_phases()
    critic, (actor, schedule) = first.optimizer, second.optimizer
    starts = [(0, 8), (8, 16), (16, 20)] * num_steps
    for step in range(num_steps):
        batch = [tensor[slice(*starts[step])] for tensor in data]
        for _ in range(critic_steps):
            critic.zero_grad()
            task.discriminator_step(batch)["loss"].backward()
            critic.step()
        if step % every == 0:
            actor.zero_grad()
            task.generator_step(batch).backward()
            nn.utils.clip_grad_norm_(task.generator.parameters(), 0.5)
            actor.step()
            schedule.step()
    return task


def fit_in_order(task, tmp_path, *, precision="fp64", **settings):
    data = Data(train=samples(), batch_size=8, shuffle=False)
    train(SingleStrategy(**settings), task, data, max_duration="2epoch", run_dir=tmp_path, precision=precision)
    return task


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_phases_train_as_a_loop_written_by_hand_does(every, accumulate, tmp_path):
    task = fit_in_order(made(every=every), tmp_path, accumulate=accumulate)
    torch.testing.assert_close(flat(task), flat(by_hand(num_steps=6, every=every)), rtol=0, atol=1e-12)


def test_a_manual_task_drives_its_phases_itself(tmp_path):
    task = fit_in_order(made(Manual), tmp_path)
    torch.testing.assert_close(flat(task), flat(by_hand(num_steps=6, critic_steps=2)), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "strategy"),
    [
        (Adversarial, DDPStrategy(devices=2, micro_batch_size=3)),
        (Manual, DDPStrategy(devices=2)),
        (Adversarial, DataParallelStrategy(devices=["cpu", "cpu"])),
    ],
    ids=["ddp", "manual-ddp", "dp"],
)
def test_several_devices_have_the_weights_of_one(kind, strategy, tmp_path):
    alone, together = made(kind), made(kind)
    fit(alone, tmp_path / "alone")
    result = fit(together, tmp_path / "together", strategy, callbacks=["speed_monitor"])
    torch.testing.assert_close(flat(together), flat(alone), rtol=0, atol=1e-12)
    assert result.steps == 6
    waits_for_ranks = isinstance(strategy, DDPStrategy)
    assert [line["seconds"].get("communication", 0) > 0 for line in step_times(tmp_path / "together")] == [
        waits_for_ranks
    ] * 6


def test_metrics_carry_the_name_of_their_phase(tmp_path):
    result = fit(made(), tmp_path, callbacks=["learning_rate_monitor"])
    found = {name for name in result.metrics if name.startswith("train/")}
    assert found == {
        "train/discriminator/loss",
        "train/discriminator/fake",
        "train/discriminator/learning_rate",
        "train/generator/loss",
        "train/generator/grad_norm",
        "train/generator/learning_rate",
        "train/epoch",
    }
    assert result.metrics["train/generator/learning_rate"] == pytest.approx(0.05 * 0.9**6)


def test_only_the_parameters_of_a_phase_have_gradients_in_it(tmp_path):
    seen = {}

    class Watching(Adversarial):
        def generator_step(self, batch):
            seen["generator"] = {name for name, p in self.named_parameters() if p.requires_grad}
            return super().generator_step(batch)

    task = made(Watching)
    task.discriminator[0].bias.requires_grad_(False)  # frozen by the user
    fit(task, tmp_path, duration="1step")
    assert seen["generator"] == {"generator.weight", "generator.bias"}
    assert [name for name, p in task.named_parameters() if not p.requires_grad] == ["discriminator.0.bias"]


def test_a_run_in_phases_resumes_bit_equal_and_refuses_other_phases(tmp_path):
    whole, part = made(every=2), made(every=2)
    fit(whole, tmp_path / "whole", duration="5step")
    fit(part, tmp_path / "part", duration="3step", callbacks=["checkpoint"])
    again = made(every=2, lr=0.05)
    fit(again, tmp_path / "part", duration="5step", resume=tmp_path / "part")
    assert torch.equal(flat(again), flat(whole))

    class OneOptimizer(Adversarial):
        configure_phases = TaskModule.configure_phases

        def training_step(self, batch):
            return self.generator_step(batch)

        def configure_optimizers(self):
            return SGD(self.parameters(), lr=0.1)

    with pytest.raises(UserError, match=r"with the phases discriminator, generator.*without phases"):
        fit(made(OneOptimizer), tmp_path / "part", resume=tmp_path / "part")


def test_a_loss_that_is_not_finite_in_any_phase_ends_the_run(tmp_path):
    class Broken(Adversarial):
        def generator_step(self, batch):
            return super().generator_step(batch) * float("nan")

    with pytest.raises(NonFiniteLoss, match="step 1"):
        fit(made(Broken), tmp_path)


def test_phases_are_refused_before_anything_starts_where_a_strategy_has_none(tmp_path):
    with pytest.raises(UserError, match="strategy=ddp"):
        fit(made(), tmp_path, FusionStrategy(devices=2))
    with pytest.raises(UserError, match=r"Adversarial has phases.*strategy.shared_parameters=same_stage"):
        fit(made(), tmp_path, PipelineStrategy(stages=2, shared_parameters="replicated"))


class Declares(Adversarial):
    """Declares the phases it is given."""

    declared = None

    def configure_phases(self):
        return self.declared(self)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        (lambda task: [], "return a list of trainkit.Phase"),
        (lambda task: [Phase("a", SGD(task.parameters(), 1), step="generator_stp")], "generator_step"),
        (lambda task: [Phase("generator", SGD(task.parameters(), 1))] * 2, "two phases called 'generator'"),
        (
            lambda task: [
                Phase("generator", SGD(task.generator.parameters(), 1)),
                Phase("discriminator", SGD(task.parameters(), 1)),
            ],
            "generator.weight is trained by the phases 'generator' and 'discriminator'",
        ),
        (lambda task: [Phase("the generator", SGD(task.parameters(), 1))], "letters, digits"),
        (lambda task: [Phase("generator", SGD(task.parameters(), 1), every=0)], "at least 1"),
    ],
)
def test_phases_that_cannot_be_trained_are_refused_by_name(declared, message, tmp_path):
    task = made(Declares)
    task.declared = declared
    with pytest.raises(UserError, match=message):
        fit(task, tmp_path)


@pytest.mark.parametrize("step", [2, 3])
def test_a_skipped_step_steps_the_schedules_of_phases_that_were_due(step, tmp_path):
    result = fit(made(every=2), tmp_path, duration="4step", callbacks=["learning_rate_monitor", SkipStep(step)])
    assert result.metrics["train/generator/learning_rate"] == pytest.approx(0.05 * 0.9**2)


def test_a_manual_step_with_an_unknown_phase_is_rejected_with_the_nearest(tmp_path):
    class Typo(Manual):
        def manual_step(self, control):
            control.backward("genrator")

    with pytest.raises(UserError, match="'generator'"):
        fit(made(Typo), tmp_path)


def test_a_manual_task_needs_phases(tmp_path):
    class Undeclared(Manual):
        configure_phases = TaskModule.configure_phases

    with pytest.raises(UserError, match="define configure_phases"):
        fit(made(Undeclared), tmp_path)


def test_a_phase_that_is_not_due_is_not_logged(tmp_path):
    recorder = Recorder()
    fit(made(every=2), tmp_path, callbacks=[recorder], duration="4step")
    assert ["train/generator/loss" in metrics for metrics in recorder.logged] == [True, False, True, False]


class Slow(Manual):
    """Sleeps in forwards, and in the optimizer of the generator."""

    def discriminator_step(self, batch):
        time.sleep(0.02)
        return super().discriminator_step(batch)

    def generator_step(self, batch):
        time.sleep(0.01)
        return super().generator_step(batch)

    def configure_phases(self):
        phases = super().configure_phases()
        phases[1].optimizer[0].register_step_pre_hook(lambda *_: time.sleep(0.03))
        return phases


def step_times(folder):
    return [json.loads(line) for line in (folder / "step_times.jsonl").read_text().splitlines()]


def test_the_parts_of_a_step_are_those_of_all_its_phases(tmp_path):
    result = fit(made(Slow), tmp_path, duration="2step", callbacks=[SpeedMonitor(log_step_times=True)])
    first, second = step_times(tmp_path)
    assert (first["steps"], second["steps"]) == (1, 1)
    assert second["seconds"]["forward"] >= 0.05
    assert second["seconds"]["optimizer"] >= 0.03
    assert result.metrics["time/forward"] == pytest.approx(second["seconds"]["forward"] * 1e3, rel=1e-3)


# ---- Mixed precision


def by_hand_in_mixed_precision(dtype, *, num_steps):
    """As one would write it with autocast, with a GradScaler for each optimizer where the type needs one."""
    task = made()
    data = samples().tensors
    first, second = task.configure_phases()
    critic, (actor, schedule) = first.optimizer, second.optimizer
    scalers = [torch.amp.GradScaler("cpu", enabled=dtype is torch.float16) for _ in range(2)]
    starts = [(0, 8), (8, 16), (16, 20)] * num_steps
    for step in range(num_steps):
        batch = [tensor[slice(*starts[step])] for tensor in data]
        for optimizer, part, scaler in ((critic, "discriminator", scalers[0]), (actor, "generator", scalers[1])):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype):
                loss = getattr(task, f"{part}_step")(batch)
            scaler.scale(loss["loss"] if part == "discriminator" else loss).backward()
            scaler.unscale_(optimizer)
            if part == "generator":
                nn.utils.clip_grad_norm_(task.generator.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
        schedule.step()
    return task


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # by hand, of a step that overflows
@pytest.mark.parametrize(("precision", "dtype"), [("fp16-mixed", torch.float16), ("bf16-mixed", torch.bfloat16)])
def test_phases_train_in_mixed_precision_as_a_loop_written_by_hand_does(precision, dtype, tmp_path):
    task = fit_in_order(made(), tmp_path, precision=precision)
    torch.testing.assert_close(flat(task), flat(by_hand_in_mixed_precision(dtype, num_steps=6)), rtol=0, atol=1e-6)
    assert not torch.allclose(flat(task), flat(by_hand(num_steps=6).float()), rtol=0, atol=1e-6)


class Overflowing(Manual):
    """Takes both gradients before either is applied; the discriminator's overflow in the first step."""

    def configure_phases(self):
        # Unlike Adam's, a step of SGD shows what its gradient was multiplied by.
        return [Phase(name, SGD(part.parameters(), self.lr)) for name, part in parts_of(self).items()]

    def manual_step(self, control):
        self.overflows = control.num_steps == 0
        control.backward("discriminator")
        control.backward("generator")
        control.step("discriminator")
        control.step("generator")

    def discriminator_step(self, batch):
        metrics = super().discriminator_step(batch)
        return {**metrics, "loss": metrics["loss"].float() * (1e36 if self.overflows else 1.0)}


class Exact(Overflowing):
    """Expected weights of the other phase if the one that overflows changes nothing."""

    def discriminator_step(self, batch):
        return Manual.discriminator_step(self, batch)["loss"] * 0


def parts_of(task):
    return {"discriminator": task.discriminator, "generator": task.generator}


class Scales(Callback):
    """Starts with a scale at which nothing overflows, and records it after each step."""

    def __init__(self):
        self.seen = []

    def on_fit_start(self, run):
        if run.resumed_from is None:
            run.precision.load_state_dict({**torch.amp.GradScaler("cpu").state_dict(), "scale": 2.0**8})

    def on_step_end(self, run):
        states = run.precision.state_dict().get("phases", {})
        self.seen.append({name: (state["scale"], state["_growth_tracker"]) for name, state in states.items()})


def test_an_overflow_of_one_phase_leaves_the_gradient_of_the_other_as_it_is(tmp_path):
    """The generator's gradient was scaled before the discriminator's overflow halved a scale."""
    mixed, exact = made(Overflowing, lr=0.5), made(Exact, lr=0.5)
    start = flat(exact.discriminator)
    fit(mixed, tmp_path / "mixed", duration="1step", precision="fp16-mixed", callbacks=[Scales()])
    fit(exact, tmp_path / "exact", duration="1step", precision="fp32")
    assert torch.equal(flat(mixed.discriminator), start)
    assert not torch.equal(flat(mixed.generator), flat(made().generator))
    torch.testing.assert_close(flat(mixed.generator), flat(exact.generator), rtol=1e-2, atol=1e-3)


def test_the_scale_of_a_phase_follows_only_its_steps(tmp_path):
    scales = Scales()
    fit(made(Overflowing), tmp_path / "overflowing", duration="4step", precision="fp16-mixed", callbacks=[scales])
    assert scales.seen[-1] == {"discriminator": (2.0**7, 3), "generator": (2.0**8, 4)}

    scales = Scales()
    fit(made(every=2), tmp_path / "every", duration="4step", precision="fp16-mixed", callbacks=[scales])
    assert scales.seen[-1] == {"discriminator": (2.0**8, 4), "generator": (2.0**8, 2)}


class OverflowingOnOneRank(Overflowing):
    """The discriminator's overflow comes from a single sample of the first step."""

    def discriminator_step(self, batch):
        marked = (batch[0] == SECOND_SAMPLE).all(dim=1).any()
        self.overflows = bool(self.overflows and self.can_overflow and marked)
        return super().discriminator_step(batch)

    can_overflow = True


class NeverOverflowing(OverflowingOnOneRank):
    can_overflow = False


SECOND_SAMPLE = samples().tensors[0][torch.randperm(20, generator=torch.Generator().manual_seed(0))[1]]


def phases_in_fp16(folder):
    """Return the weights and the scales of this rank, after the sample of rank 1 has overflowed in a phase."""
    scales, task = Scales(), made(OverflowingOnOneRank, lr=0.5)
    fit(task, folder, DDPStrategy(device="cpu"), duration="4step", precision="fp16-mixed", callbacks=[scales])
    return flat(task), scales.seen


@pytest.mark.slow
def test_an_overflow_on_one_rank_skips_the_phase_on_all_of_them_as_on_one_device(tmp_path):
    alone, plain, scales = made(OverflowingOnOneRank, lr=0.5), made(NeverOverflowing, lr=0.5), Scales()
    fit(alone, tmp_path / "alone", duration="4step", precision="fp16-mixed", callbacks=[scales])
    fit(plain, tmp_path / "plain", duration="4step", precision="fp16-mixed", callbacks=[Scales()])

    (first, first_scales), (second, second_scales) = run_ranks(phases_in_fp16, 2, tmp_path / "ranks")

    assert torch.equal(first, second)
    assert first_scales == second_scales == scales.seen
    assert scales.seen[-1] == {"discriminator": (2.0**7, 3), "generator": (2.0**8, 4)}
    torch.testing.assert_close(first, flat(alone), rtol=0, atol=1e-3)
    assert (flat(plain) - flat(alone)).abs().max() > 20e-3  # what it would be without the overflow


def test_phases_in_fp16_resume_bit_equal_after_an_overflow(tmp_path):
    whole, part, again = made(Overflowing), made(Overflowing), made(Overflowing)
    scales = Scales()
    fit(whole, tmp_path / "whole", duration="5step", precision="fp16-mixed", callbacks=[Scales()])
    fit(part, tmp_path / "part", duration="3step", precision="fp16-mixed", callbacks=[Scales(), "checkpoint"])
    folder = tmp_path / "part"
    fit(again, folder, duration="5step", precision="fp16-mixed", callbacks=[scales], resume=folder)
    assert torch.equal(flat(again), flat(whole))
    assert scales.seen[0] == {"discriminator": (2.0**7, 3), "generator": (2.0**8, 4)}
