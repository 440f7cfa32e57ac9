"""Branches on values: inside a module's forward they train in a pipeline, elsewhere the plan warns of them."""

import logging
import random

import pytest
import torch
from torch import nn
from trainkit.strategies.pipeline.plan.planner import TraceInput, TrainingStep, plan_steps

from tests.seams.training import BATCH_SIZE, BOUND, WIDTH, Layers, batches, difference, trained


class Experts(nn.Module):
    """Mixture of experts; calls only those that have rows."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))

    def forward(self, inputs):
        scores = self.gate(inputs).softmax(-1)
        result = torch.zeros_like(inputs)
        for index, expert in enumerate(self.experts):
            result = self.add(result, inputs, scores[:, index : index + 1], scores.argmax(-1) == index, expert)
        return result


class RowsOfWhere(Experts):
    def add(self, result, inputs, scores, chosen, expert):
        (rows,) = torch.where(chosen)
        return result.index_add(0, rows, expert(inputs[rows]) * scores[rows]) if len(rows) else result


class RowsOfAMask(Experts):
    def add(self, result, inputs, scores, chosen, expert):
        rows = inputs[chosen] * 2
        if rows.shape[0]:
            result[chosen] = expert(rows) * scores[chosen]
        return result


class OwnGenerator(nn.Module):
    """Takes one of two branches, by a generator of its own."""

    def __init__(self):
        super().__init__()
        self.generator = random.Random(0)
        self.left = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.right = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, inputs):
        return self.left(inputs) if self.generator.random() < 0.5 else self.right(inputs)


class Branching(Layers):
    kind = RowsOfWhere

    def build(self):
        self.first, self.second = self.kind(), self.kind()

    def forward(self, inputs):
        return super().forward(self.second(self.first(inputs)))


class WithMask(Branching):
    kind = RowsOfAMask


class WithGenerator(Branching):
    kind = OwnGenerator


@pytest.mark.parametrize("make_task", [Branching, WithMask, WithGenerator])
def test_a_module_that_branches_in_its_forward_is_kept_whole(make_task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task = make_task()
    optimizer, size = task.configure_optimizers(), BATCH_SIZE // 2
    for inputs, targets in batches():
        for batch in zip(inputs.split(size), targets.split(size), strict=True):
            (task.training_step(batch) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert difference(trained("pipeline", make_task()), task.state_dict()) < BOUND


class BranchInTheStep(Layers):
    def training_step(self, batch):
        hidden = self.a(batch[0])
        if hidden.detach().mean() > 0:
            hidden = torch.relu(hidden)
        return nn.functional.mse_loss(self.c(torch.tanh(self.b(hidden))), batch[1])


def test_the_plan_warns_of_a_step_that_asks_a_tensor_for_its_value(caplog):
    for make_task, lines in ((Layers, 0), (BranchInTheStep, 1)):
        caplog.clear()
        task = make_task()
        with caplog.at_level(logging.WARNING):
            plan_steps([TraceInput(task, TrainingStep(task.training_step), next(batches()), "measured")], num_stages=2)
        messages = [record.getMessage() for record in caplog.records if "asks a tensor for its value" in record.msg]
        assert len(messages) == lines and all("test_pipelined_branches.py:" in message for message in messages)
