"""Ends of a run that the caller must not take for another: `sys.exit` in user code, and a closed terminal."""

import json
import os
import pty
import signal
import sys

import pytest
import torch
from trainkit.callbacks.checkpoint import Checkpoint
from trainkit.callbacks.early_stopping import EarlyStopping
from trainkit.callbacks.ema import EMA
from trainkit.callbacks.progress_bar import ProgressBar

from tests.program import Program, wait_until
from tests.seams.training import MAKE_STRATEGY, Layers, samples
from trainkit import Callback, Data, Trainer
from trainkit.cli.main import main
from trainkit.distributed.launcher import launch_ranks
from trainkit.errors import RankExit
from trainkit.signals import StopSignals


class Leaves(Callback):
    """Calls `sys.exit` on the last rank after a step."""

    def __init__(self, code):
        self.code = code

    def on_step_end(self, run):
        if run.state.step == 2 and run.strategy.comm.rank == run.strategy.comm.num_processes - 1:
            sys.exit(self.code)


@pytest.mark.parametrize(("strategy", "rank"), [("single", 0), ("ddp", 1)])
@pytest.mark.parametrize("code", [0, "enough"])
def test_sys_exit_in_a_run_is_a_failure_that_names_the_rank_the_step_and_the_line(tmp_path, strategy, rank, code):
    trainer = Trainer(
        MAKE_STRATEGY[strategy](), callbacks=[Leaves(code)], loggers=[], max_duration="4step", run_dir=tmp_path / "run"
    )
    line = rf"rank {rank} called sys\.exit\({code!r}\) in step 2, test_endings\.py:\d+\. .*run\.request_stop"
    with pytest.raises(RankExit, match=line):
        trainer.fit(Layers(), Data(train=samples(), batch_size=8))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed" and "called sys.exit" in summary["exit_reason"]


class LeavesInValidation(Layers):
    def validation_step(self, batch):
        sys.exit(0)


def test_sys_exit_in_an_evaluation_is_a_failure():
    with pytest.raises(RankExit, match=r"rank 0 called sys\.exit\(0\)"):
        Trainer(callbacks=[], loggers=[]).validate(LeavesInValidation(), Data(validation=samples(), batch_size=8))


def test_sys_exit_in_a_function_that_ranks_run_is_a_failure():
    with pytest.raises(RankExit, match=r"rank 0 called sys\.exit\(\) "):
        launch_ranks(sys.exit, num_ranks=1, enter=id, log_dir=None)


def leave():
    sys.exit(0)


def test_the_command_line_says_one_line_and_ends_with_exit_code_1(monkeypatch, capsys):
    import trainkit.cli.main as module

    monkeypatch.setattr(module, "_run", lambda argv: launch_ranks(leave, num_ranks=2, enter=id, log_dir=None))
    assert main([]) == 1
    said = capsys.readouterr().err
    assert "called sys.exit(0) test_endings.py" in said and "Traceback" not in said


class Ready(Callback):
    def __init__(self, folder):
        self.folder = folder

    def on_step_end(self, run):
        (self.folder / "ready").touch()


def train_in_a_terminal(strategy, folder):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests that run below nohup inherit that it is ignored
    callbacks = [ProgressBar(), Checkpoint(), Ready(folder)]
    trainer = Trainer(MAKE_STRATEGY[strategy](), callbacks=callbacks, loggers=[], max_duration="1h", run_dir=folder)
    trainer.fit(Layers(), Data(train=samples(), batch_size=8))


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_a_run_whose_terminal_is_closed_saves_and_ends_with_the_code_of_sighup(tmp_path, strategy):
    terminal, end = pty.openpty()
    with Program(train_in_a_terminal, strategy, tmp_path, streams=(end, end, end)) as program:
        os.close(end)
        wait_until((tmp_path / "ready").exists, runs=lambda: program.exit_code is None)
        os.close(terminal)
        os.killpg(program.pid, signal.SIGHUP)  # to all processes of the terminal, as the kernel does
        assert program.wait() == 129
    assert json.loads((tmp_path / "summary.json").read_text())["exit_reason"] == "SIGHUP"
    assert list((tmp_path / "checkpoints").glob("step_*.pt"))


def test_a_program_that_ignores_sighup_goes_on_ignoring_it():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGHUP)
            assert signals.received is None and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


class Norms(Callback):
    """Keeps a norm of each step, a tensor of the device, and a count that no state has."""

    def __init__(self):
        self.norms, self.steps = [], 0

    def on_step_end(self, run):
        with run.whole_task() as task:
            self.norms.append(task.c.bias.detach().norm())
        self.steps += 1

    def state_dict(self):
        return {"norms": torch.stack(self.norms)} if self.norms else {}

    def load_state_dict(self, saved):
        self.norms = list(saved["norms"])


@pytest.mark.parametrize("strategy", ["ddp", "pipeline"])
def test_the_states_of_callbacks_come_back_from_ranks_that_are_other_processes(strategy):
    states = []
    for name in ("single", strategy):
        norms, stopping = Norms(), EarlyStopping(monitor="validation/loss", patience=5)
        callbacks = [EMA(decay=0.9), norms, stopping]  # the first has a state only while a checkpoint is saved
        data = Data(train=samples(), validation=samples(), batch_size=8, shuffle=False)
        trainer = Trainer(MAKE_STRATEGY[name](), callbacks=callbacks, loggers=[], max_duration="2epoch", report=False)
        result = trainer.fit(Layers(), data)
        assert len(norms.norms) == result.steps and not result.callback_states
        states.append([torch.stack(norms.norms), stopping.state_dict()["best"], stopping.state_dict()["best_step"]])
    one, several = states
    torch.testing.assert_close(one, several)


class NotSent(Norms):
    """Has a state that no other process can have."""

    def state_dict(self):
        return {"call": lambda: None}


class NotTaken(Norms):
    def load_state_dict(self, saved):
        raise KeyError("average")


def test_a_state_that_cannot_come_back_costs_nothing_but_a_warning(caplog):
    def train(strategy, *callbacks):
        task, data = Layers(), Data(train=samples(), batch_size=8, shuffle=False)
        Trainer(MAKE_STRATEGY[strategy](), callbacks=[*callbacks], loggers=[], report=False).fit(task, data)
        return task.state_dict()

    weights = train("ddp", NotSent(), NotTaken())
    assert "NotTaken did not take its state from the ranks: KeyError: 'average'" in caplog.text
    torch.testing.assert_close(weights, train("single"))
