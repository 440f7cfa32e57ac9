from __future__ import annotations

import gc
from typing import Any

import pytest
from trainkit.callbacks.garbage_collection import GarbageCollection

from tests.tasks import Regression, data
from trainkit import Callback


def test_garbage_is_collected_at_the_given_steps_only_and_the_collector_is_restored(
    make_trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, bool]] = []

    class Observer(Callback):
        def on_step_end(self, run: Any) -> None:
            seen.append((len(collected), gc.isenabled()))

    collected: list[int] = []
    original = gc.collect

    def collect(generation: int = 2) -> int:
        collected.append(generation)
        return original(generation)

    monkeypatch.setattr(gc, "collect", collect)
    make_trainer(callbacks=[GarbageCollection(every=2), Observer()]).fit(Regression(), data())

    assert seen == [(1, False), (2, False), (2, False), (3, False)]
    assert collected == [2, 1, 1]
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
