"""Being asked to stop by SIGINT, SIGTERM or SIGHUP."""

import os
import signal
import threading

import pytest
from trainkit.callbacks.checkpoint import Checkpoint

from tests.program import Program
from tests.tasks import Recorder, Regression, SaveAtEnd, assert_same_bits, fit, regression_data
from trainkit import Callback, Data, registry
from trainkit.errors import Stopped
from trainkit.signals import StopSignals

DATA = Data(train=regression_data(18), validation=regression_data(8, seed=1), batch_size=4)


class SendAt(Callback):
    """Sends this process a signal after a step."""

    def __init__(self, number, step, times=1):
        self.number, self.step, self.times = number, step, times

    def on_step_end(self, run):
        if run.state.step == self.step:
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_in_mid_epoch_ends_the_run_after_the_step_with_its_exit_code(make_trainer, number, code):
    recorder = Recorder()
    before = signal.getsignal(number)
    if before is signal.SIG_IGN:
        pytest.skip(f"the tests run below nohup, which ignores {number.name}")
    trainer = make_trainer(callbacks=[SendAt(number, 2), recorder, SaveAtEnd()], max_duration="2epoch")
    with pytest.raises(Stopped) as caught:
        trainer.fit(Regression(), DATA)
    assert caught.value.exit_code == code
    assert caught.value.signal_name == number.name
    assert recorder.steps_of("on_step_end") == [1, 2]
    assert recorder.moments[-3:] == [("on_fit_end", 2), ("on_save", 2), ("close", 2)]
    assert not any(name.startswith("on_exception") for name, _ in recorder.moments)
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_ended_by_a_signal_resumes_to_the_weights_of_an_uninterrupted_one(make_trainer, number):
    whole, resumed = Regression(hidden=8, dropout=0.5), Regression(hidden=8, dropout=0.5)
    make_trainer(max_duration="2epoch").fit(whole, DATA)
    trainer = make_trainer(callbacks=[SendAt(number, 7), SaveAtEnd()], max_duration="2epoch")
    with pytest.raises(Stopped):
        trainer.fit(Regression(hidden=8, dropout=0.5), DATA)
    make_trainer(max_duration="2epoch").fit(resumed, DATA, resume=trainer.run_dir)
    assert_same_bits(resumed, whole)


def test_a_signal_during_evaluation_ends_it_and_then_the_run(make_trainer):
    class Terminated(Regression):
        validated = 0

        def validation_step(self, batch):
            self.validated += 1
            os.kill(os.getpid(), signal.SIGTERM)
            return super().validation_step(batch)

    task, recorder = Terminated(), Recorder()
    with pytest.raises(Stopped):
        make_trainer(callbacks=[recorder], max_duration="9epoch").fit(task, DATA)
    assert task.validated == 1
    assert recorder.evaluations == []
    assert recorder.moments[-2:] == [("on_fit_end", 5), ("close", 5)]


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_a_signal_ends_an_evaluation_by_itself(make_trainer, stage):
    class Terminated(Regression):
        def forward(self, inputs):
            os.kill(os.getpid(), signal.SIGINT)
            return super().forward(inputs)

    name = "validation" if stage == "validate" else stage
    with pytest.raises(Stopped) as caught:
        getattr(make_trainer(), stage)(Terminated(), Data(**{name: regression_data(8)}, batch_size=4))
    assert caught.value.exit_code == 130


def test_a_second_interrupt_ends_the_run_at_once(make_trainer):
    recorder = Recorder()
    before = signal.getsignal(signal.SIGINT)
    trainer = make_trainer(callbacks=[SendAt(signal.SIGINT, 2, times=2), recorder])
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(Regression(), DATA)
    assert [name for name, _ in recorder.moments[-2:]] == ["on_exception KeyboardInterrupt", "close"]
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("strategy", ["single", "ddp"])
@pytest.mark.parametrize("saves", [True, False])
def test_a_second_interrupt_is_raised_after_one_line_about_what_is_not_saved(make_trainer, caplog, strategy, saves):
    if strategy == "ddp":
        strategy = registry.make("strategy", "ddp", {"device": "cpu", "devices": 2})
    callbacks = [Checkpoint(every="1step")] * saves + [SendAt(signal.SIGINT, 2, times=2)]
    trainer = make_trainer(strategy, callbacks=callbacks)
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(Regression(), DATA)
    saved = f"later steps than those in {trainer.run_dir}/checkpoints/step_00000001.pt are not saved."
    resume = f"To continue: Trainer(...).fit(task, data, resume='{trainer.run_dir}')"
    unsaved = "nothing was saved. To start again, type the same command."
    assert [text for text in caplog.messages if "interrupted" in text] == [
        f"interrupted; {f'{saved} {resume}' if saves else unsaved}"
    ]


@pytest.mark.parametrize("raises", [False, True])
def test_handlers_are_restored_also_after_an_error(raises):
    def mine(number, frame):
        raise AssertionError

    before = {number: signal.signal(number, mine) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        try:
            with StopSignals() as signals:
                assert signals.received is None
                os.kill(os.getpid(), signal.SIGTERM)
                assert signals.received is signal.SIGTERM
                if raises:
                    raise KeyError
        except KeyError:
            pass
        assert signal.getsignal(signal.SIGINT) is mine
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_outside_the_main_thread_training_works_and_no_handler_is_set(make_trainer):
    before = signal.getsignal(signal.SIGINT)
    results = []
    thread = threading.Thread(target=lambda: results.append(make_trainer().fit(Regression(), DATA)))
    thread.start()
    thread.join(600)
    assert results[0].steps == 5
    assert signal.getsignal(signal.SIGINT) is before


class Talk(SaveAtEnd):
    def on_step_end(self, run):
        if run.state.step == 5:
            print("ready")


def talk(run_dir):
    fit("single", Regression(), DATA, Talk(), run_dir=run_dir, max_duration="1h", evaluate_every=None)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_program_that_gets_a_signal_saves_and_ends_with_the_exit_code(tmp_path, number, code):
    receiver, sender = os.pipe()
    errors = tmp_path / "errors.txt"
    with errors.open("w") as file, Program(talk, tmp_path / "run", streams=(0, sender, file.fileno())) as program:
        os.close(sender)
        assert os.read(receiver, 100) == b"ready\n"
        os.kill(program.pid, number)
        ended = program.wait()
    os.close(receiver)
    assert ended == code
    assert errors.read_text() == ""
    assert len(list((tmp_path / "run" / "checkpoints").glob("*.pt"))) == 1
