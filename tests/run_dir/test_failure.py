from trainkit.loops.fit_loop import FitLoop
from trainkit.loops.phases import PhaseControl
from trainkit.loops.run import Checkpointer, Run
from trainkit.loops.worker import prepare_fit
from trainkit.optim.optimizer import PhaseOptimizer
from trainkit.run_dir.failure import PHASE_OF_FUNCTION
from trainkit.strategy import Strategy


def test_every_phase_of_a_failure_is_named_after_a_function_that_exists() -> None:
    functions = [
        PhaseControl.backward,
        Strategy.optimizer_step,
        Strategy._normalize_gradients,
        Checkpointer.save,
        Run.log,
        FitLoop._log,
        PhaseOptimizer.step_schedules,
        Checkpointer.restore,
        Strategy.step_batches,
        Strategy.forward_backward,
        prepare_fit,
    ]
    assert [function.__name__ for function in functions] == list(PHASE_OF_FUNCTION)
