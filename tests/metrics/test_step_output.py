"""Return values of a task's step, and the errors for unusable ones."""

import pytest
import torch

from trainkit import UserError
from trainkit.metrics.step_output import read_evaluation_output, read_training_output


class Digits:
    pass


def leaf(*shape):
    return torch.ones(shape, requires_grad=True)


def training(returned, num_samples=4):
    return read_training_output(returned, num_samples, Digits())


def evaluation(returned, num_samples=4):
    return read_evaluation_output(returned, num_samples, Digits(), "validation_step")


def test_a_tensor_is_the_loss_with_the_number_of_samples_as_its_weight():
    loss = leaf().sum()
    output = training(loss)
    assert output.loss is loss
    assert (output.weight, output.metrics, output.own_weight) == (4, {}, False)


def test_a_dict_gives_loss_weight_and_metrics():
    loss = leaf().sum()
    output = training({"loss": loss, "weight": 7, "accuracy": 0.5, "double": loss * 2})
    assert output.loss is loss
    assert (output.weight, output.own_weight) == (7, True)
    assert output.metrics["accuracy"] == 0.5
    assert output.metrics["double"] == 2
    assert not output.metrics["double"].requires_grad


def test_a_weight_has_no_graph():
    assert not training({"loss": leaf().sum(), "weight": leaf().sum()}).weight.requires_grad


def test_an_evaluation_needs_no_loss():
    assert evaluation({"accuracy": 0.5}).loss is None
    assert evaluation(torch.tensor(3.0)).loss == 3.0


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, r"Digits\.training_step returned None; return the loss as a tensor, or a dict"),
        (3.5, r"returned a value of type float; return the loss as a tensor"),
        ({"accuracy": 0.5}, r"without a loss; return the loss, or a dict with the key 'loss'"),
        ({}, r"without a loss; return the loss"),
        ({"loss": 1.0}, r"returned a value of type float as the loss; return a tensor"),
        ({"loss": leaf().sum(), "names": "abc"}, r"'names' = a value of type str; metrics are numbers or scalar"),
        ({"loss": leaf().sum(), "logits": leaf(2, 3)}, r"'logits' with shape \(2, 3\), .*return logits\.mean\(\)"),
        ({"loss": leaf().sum(), "weight": leaf(3)}, r"'weight' with shape \(3,\)"),
    ],
)
def test_an_unusable_output_is_refused_with_what_to_return(returned, message):
    with pytest.raises(UserError, match=message):
        training(returned)


@pytest.mark.parametrize("returned", [leaf(5), leaf(1), {"loss": leaf(5)}, {"loss": leaf(1)}])
def test_a_loss_that_is_not_scalar_is_refused_with_what_to_return(returned):
    with pytest.raises(UserError, match=r"shape \((5|1),\), but must be a scalar; return loss\.mean\(\)"):
        training(returned)


@pytest.mark.parametrize("wrap", [lambda loss: loss, lambda loss: {"loss": loss}])
def test_a_loss_without_a_gradient_is_refused_with_where_to_look(wrap):
    with pytest.raises(UserError, match=r"no gradient.*Do not detach it.*requires_grad=True"):
        training(wrap(leaf().sum().detach()))


@pytest.mark.parametrize("returned", [torch.ones(5), {"loss": torch.ones(5)}, {"accuracy": torch.ones(5)}])
def test_an_evaluation_that_is_not_scalar_is_refused_by_name(returned):
    with pytest.raises(UserError, match=r"Digits\.validation_step returned '(loss|accuracy)' with shape \(5,\)"):
        evaluation(returned)
