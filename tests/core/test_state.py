"""TrainState: counters and the clock."""

from trainkit import TrainState


def test_a_step_counts_its_samples_and_moves_on_in_the_epoch():
    state = TrainState(epoch_length=10)
    for samples, ends in ((4, False), (4, False), (2, True), (4, False)):
        state.advance(items=samples, samples=samples, ends_epoch=ends)
    assert (state.step, state.epoch, state.position, state.samples) == (4, 1, 4, 14)
    assert state.epochs == 1.4


def test_without_a_known_length_only_whole_epochs_count():
    state = TrainState()
    state.advance(items=4, samples=4, ends_epoch=False)
    assert state.epochs == 0
    state.advance(items=4, samples=4, ends_epoch=True)
    assert state.epochs == 1


def test_seconds_count_from_the_start_of_the_clock_on_top_of_those_before():
    state = TrainState()
    assert state.seconds == 0
    state.load_state_dict({**TrainState().state_dict(), "seconds": 100.0})
    assert state.seconds == 100
    state.start_clock()
    assert 100 <= state.seconds < 160


def test_a_clock_that_ranks_agree_on_stands_still_between_steps():
    state = TrainState()
    state.start_clock()
    state.set_clock(5.0)
    assert state.seconds == 5.0


def test_a_saved_state_is_restored_whole():
    state = TrainState(step=3, epoch=1, position=4, samples=14, metrics={"train/loss": 0.5}, evaluation_due=True)
    restored = TrainState()
    restored.load_state_dict(state.state_dict())
    assert restored.state_dict() == state.state_dict()


def test_a_saved_state_does_not_follow_the_running_one():
    state = TrainState(metrics={"train/loss": 0.5})
    saved = state.state_dict()
    state.metrics["train/loss"] = 0.1
    assert saved["metrics"] == {"train/loss": 0.5}
