"""What is refused, and what is only told, when a SLURM job is to be queued again."""

import pytest

from tests.tasks import Regression, regression_data
from trainkit import Data, UserError
from trainkit.signals import requeue_job


def test_a_job_that_would_begin_anew_is_not_queued_again(make_trainer):
    trainer = make_trainer(preemption_signal="SIGUSR1", requeue=True)
    with pytest.raises(UserError, match="add resume=auto"):
        trainer.fit(Regression(), Data(train=regression_data(8), batch_size=4))


def test_queueing_again_needs_a_signal(make_trainer):
    with pytest.raises(UserError, match=r"trainer\.preemption_signal=SIGUSR1, and #SBATCH --signal=USR1@120"):
        make_trainer(requeue=True)


def test_a_signal_that_no_scheduler_sends_is_refused(make_trainer):
    with pytest.raises(UserError, match=r"preemption_signal='SIGUSR' is unknown\. Did you mean 'SIGUSR"):
        make_trainer(preemption_signal="SIGUSR")


def test_outside_of_slurm_nothing_is_queued(monkeypatch, caplog):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    requeue_job()
    assert "this is not a SLURM job" in caplog.text


@pytest.mark.parametrize("answer", ["echo 'Job is pending' >&2; exit 1", None])
def test_a_refusal_is_logged_with_what_to_type(tmp_path, monkeypatch, caplog, answer):
    if answer is not None:
        (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{answer}\n")
        (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    requeue_job()
    assert "Type: scontrol requeue 4711" in caplog.text
    assert ("Job is pending" if answer else "No such file") in caplog.text
