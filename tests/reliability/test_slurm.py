"""Requeueing of a SLURM job: rejected settings, and what is only logged."""

import pytest

from tests.tasks import Regression, regression_data
from trainkit import Data, UserError
from trainkit.signals import requeue_job


def test_a_job_that_would_start_from_scratch_is_not_requeued(make_trainer):
    trainer = make_trainer(preemption_signal="SIGUSR1", requeue=True)
    with pytest.raises(UserError, match="add resume=auto"):
        trainer.fit(Regression(), Data(train=regression_data(8), batch_size=4))


def test_requeueing_needs_a_preemption_signal(make_trainer):
    with pytest.raises(UserError, match=r"trainer\.preemption_signal=SIGUSR1, and #SBATCH --signal=USR1@120"):
        make_trainer(requeue=True)


def test_a_signal_that_no_scheduler_sends_is_rejected(make_trainer):
    with pytest.raises(UserError, match=r"preemption_signal='SIGUSR' is unknown\. Did you mean 'SIGUSR"):
        make_trainer(preemption_signal="SIGUSR")


def test_nothing_is_requeued_outside_of_slurm(monkeypatch, caplog):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    requeue_job()
    assert "this is not a SLURM job" in caplog.text


@pytest.mark.parametrize("answer", ["echo 'Job is pending' >&2; exit 1", None])
def test_a_failed_requeue_is_logged_with_the_command_to_type(tmp_path, monkeypatch, caplog, answer):
    if answer is not None:
        (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{answer}\n")
        (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    requeue_job()
    assert "Type: scontrol requeue 4711" in caplog.text
    assert ("Job is pending" if answer else "No such file") in caplog.text
