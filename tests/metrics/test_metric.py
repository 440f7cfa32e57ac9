"""Metric objects: states over a pass, for any batches, and errors for wrong ones."""

import pytest
import torch
from torch import nn

from tests.tasks import Recorder, Regression, regression_data
from trainkit import Data, UserError
from trainkit.distributed.collectives import Collectives
from trainkit.metrics.accumulate import MetricAccumulator
from trainkit.metrics.metric import Metric
from trainkit.metrics.step_output import MetricUpdate, StepOutput
from trainkit.metrics.sync import MetricShard, compute_synced, is_metric, metrics_in, states_on_host


class Count(Metric):
    """Has a state of each kind."""

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.int64))
        self.add_state("least", torch.tensor(100), "min")
        self.add_state("most", torch.tensor(-1), "max")
        self.add_state("level", torch.zeros((), dtype=torch.float64), "mean")
        self.add_state("rows", [], "cat")

    def update(self, numbers):
        self.total += numbers.sum()
        self.least = torch.minimum(self.least, numbers.min())
        self.most = torch.maximum(self.most, numbers.max())
        self.level = torch.cat([*self.rows, numbers]).double().mean()
        self.rows.append(numbers)

    def compute(self):
        named = {name: getattr(self, name) for name in ("total", "least", "most", "level")}
        return {**named, "rows": torch.cat(self.rows).tolist()}


def counted(*batches):
    metric = Count()
    for batch in batches:
        metric.update(torch.tensor(batch))
    return MetricShard(states_on_host(metrics_in(metric)), sum(map(len, batches)))


def test_states_of_ranks_are_merged_by_their_reductions():
    parts = [counted([0, 3], [6]), counted([1, 4], [7]), counted([2], [5])]
    together = compute_synced(Count(), parts)
    assert together["rows"] == list(range(8))  # in the order of the dataset
    assert (together["total"], together["least"], together["most"]) == (28, 0, 7)
    assert together["level"] == 3.5  # each rank weighs as many samples as it has


def test_rows_that_are_not_those_of_samples_come_rank_by_rank():
    assert compute_synced(Count(), [counted([0, 1]), MetricShard(counted([2, 3]).states, 5)])["rows"] == [0, 1, 2, 3]


def test_a_sum_of_small_floats_is_rounded_once():
    class Sum(Metric):
        def __init__(self):
            super().__init__()
            self.add_state("total", torch.zeros(()))

        def update(self, number):
            self.total += number

        def compute(self):
            return self.total

    parts = []
    for number in [1.0] + [2.0**-25] * 8:
        metric = Sum()
        metric.update(torch.tensor(number))
        parts.append(MetricShard(states_on_host(metrics_in(metric)), 1))
    assert float(compute_synced(Sum(), parts)) == 1.0 + 2.0**-22


def test_states_of_torchmetrics_without_a_reduction_are_stacked():
    torchmetrics = pytest.importorskip("torchmetrics")
    numbers = torch.randn(2, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def measured(part):
        metric = torchmetrics.PearsonCorrCoef().set_dtype(torch.float64)
        metric.update(*numbers[:, part])
        return metric

    parts = [MetricShard(states_on_host(metrics_in(measured(slice(start, start + 4)))), 4) for start in (0, 4, 8)]
    together = compute_synced(measured(slice(0, 1)), parts)
    assert float(together) == pytest.approx(float(measured(slice(0, 12)).compute()), rel=1e-12)


def test_reset_restores_the_defaults_and_states_are_not_in_the_state_dict():
    metric = Count()
    metric.update(torch.tensor([5]))
    assert metric.state_dict() == {}
    metric.reset()
    assert (int(metric.total), metric.rows, int(metric.least)) == (0, [], 100)
    metric.update(torch.tensor([1]))
    assert int(metric.total) == 1  # the default itself was not added to


def test_states_move_with_the_task_but_keep_their_types():
    task = nn.Sequential(nn.Linear(1, 1), Count())
    task.to(device="meta", dtype=torch.bfloat16)
    assert task[1].total.is_meta and task[1].level.dtype == torch.float64
    task[1].reset()
    assert task[1].total.is_meta


def test_update_keeps_no_graph():
    class Sum(Metric):
        def __init__(self):
            super().__init__()
            self.add_state("total", torch.zeros(()))

        def update(self, losses):
            self.total = self.total + losses.sum()

    metric = Sum()
    metric.update(torch.ones(2, requires_grad=True) * 3)
    assert metric.total == 6 and metric.total.grad_fn is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (("x", torch.zeros(1), "add"), "reduction='add'"),
        (("x", torch.zeros(1), "cat"), "begin with an empty list"),
        (("x", [], "sum"), "with a tensor for the others"),
    ],
)
def test_a_wrong_state_is_refused(settings, message):
    with pytest.raises(UserError, match=message):
        Count().add_state(*settings)


def test_only_modules_with_metric_states_are_metrics():
    assert is_metric(Count())
    assert not is_metric(Regression())
    assert not is_metric(Count)


class Scalar(Count):
    """Gives one number of the states."""

    def compute(self):
        return self.total


class Matrix(Count):
    """Gives what cannot be logged."""

    def compute(self):
        return torch.zeros(2, 2)


class Counting(Regression):
    def __init__(self, metric=Scalar):
        super().__init__()
        self.count = metric()

    def validation_step(self, batch):
        self.count.update(batch[2])
        return {"loss": super().validation_step(batch[:2])["loss"], "count": self.count}


def numbered(num_samples):
    return torch.utils.data.TensorDataset(*regression_data(num_samples).tensors, torch.arange(num_samples))


def test_training_counts_between_log_points_without_the_evaluations_between_them(make_trainer):
    class Both(Counting):
        def training_step(self, batch):
            self.count.update(batch[2])
            return {"loss": super().training_step(batch[:2]), "count": self.count}

    recorder = Recorder()
    data = Data(train=numbered(12), validation=numbered(5), batch_size=4, shuffle=False)
    trainer = make_trainer(log_every="2step", evaluate_every="1step", callbacks=[recorder], max_duration="1epoch")
    trainer.fit(Both(), data)
    assert [row["train/count"] for row in recorder.logged] == [sum(range(8)), sum(range(8, 12))]
    assert [metrics["validation/count"] for _, _, metrics in recorder.evaluations] == [10.0] * 3


def test_a_result_that_is_not_a_number_is_refused_with_its_shape(make_trainer):
    with pytest.raises(UserError, match=r"'count' computed a tensor of shape \(2, 2\)"):
        make_trainer().validate(Counting(Matrix), Data(validation=numbered(5), batch_size=4))


def test_a_metric_object_cannot_be_the_weight(make_trainer):
    class Wrong(Counting):
        def validation_step(self, batch):
            return {"loss": batch[0].sum(), "weight": self.count}

    with pytest.raises(UserError, match="returned 'weight' = a value of type Scalar"):
        make_trainer().validate(Wrong(), Data(validation=numbered(5), batch_size=4))


def test_a_metric_object_is_the_loss_of_an_evaluation_and_not_of_training(make_trainer):
    class Named(Counting):
        def training_step(self, batch):
            return {"loss": self.count}

        def validation_step(self, batch):
            return {"loss": super().validation_step(batch)["count"]}

    data = Data(train=numbered(5), validation=numbered(5), batch_size=4)
    counted = make_trainer().validate(Counting(), data)["validation/count"]
    assert make_trainer().validate(Named(), data) == {"validation/loss": counted}
    with pytest.raises(UserError, match="without a loss"):
        make_trainer().fit(Named(), data)


def test_of_processes_that_share_samples_one_counts():
    """Stages of a pipeline have one rank; where each evaluates the whole, their states are the same."""

    part = counted([1, 2, 3])

    class Stages(Collectives):
        def all_gather_object(self, value):
            if isinstance(value, dict):
                return [{}, value]
            return [(0, {}), (0, {"count": [part]}), (0, {"count": [part]}), (1, {"count": [part]})]

    objects = MetricAccumulator()
    objects.add(StepOutput(None, 1.0, objects=[MetricUpdate("count", Scalar(), 3)]))
    assert objects.reduce(Stages(process=1)) == {"count": 12.0}
