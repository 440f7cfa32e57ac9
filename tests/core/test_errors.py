"""Errors that are addressed to a person."""

import pytest

from trainkit.errors import NonFiniteLoss, Stopped, UserError, nearest


def test_the_nearest_valid_name_is_suggested():
    assert nearest("sinlge", ["single", "ddp"]) == " Did you mean 'single'?"


def test_nothing_is_suggested_where_no_name_is_near():
    assert nearest("xyz", ["single", "ddp"]) == ""
    assert nearest("xyz", []) == ""


def test_a_user_error_is_a_value_error():
    with pytest.raises(ValueError, match="wrong"):
        raise UserError("wrong")
    assert issubclass(NonFiniteLoss, UserError)


def test_stopped_that_nobody_catches_ends_the_program_with_its_exit_code():
    with pytest.raises(SystemExit) as caught:
        raise Stopped("SIGTERM", 143)
    assert caught.value.code == 143
    assert caught.value.signal_name == "SIGTERM"
