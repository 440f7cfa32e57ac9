"""The check of a constructor's arguments against its annotations."""

from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from annotated_types import Ge, Gt, Interval, Lt, Unit
from hypothesis import given
from hypothesis import strategies as st

from trainkit import UserError
from trainkit.settings import check_arguments, check_choice


class Example:
    def __init__(
        self,
        *,
        every: Annotated[int, Ge(1), Unit("steps")] = 1,
        share: Annotated[float, Gt(0), Lt(1), "0.9 is usual"] = 0.5,
        limit: Annotated[float, Interval(ge=0, le=2)] | None = None,
        mode: Literal["min", "max"] = "min",
        thread: Literal["auto"] | bool = "auto",
        level: Literal[0, 1] | None = None,
        folder: str | Path | None = None,
        anything: Any = None,
        items: list[int] | None = None,
    ) -> None:
        check_arguments(Example.__init__, locals(), of="example")


@dataclass(kw_only=True)
class Base:
    count: Annotated[int, Ge(1)] = 1
    name: InitVar[str] = "a"

    def __post_init__(self, name):
        check_arguments(type(self), {**vars(self), "name": name})


@dataclass(kw_only=True)
class Derived(Base):
    rate: Annotated[float, Gt(0)] = 1.0


@dataclass(kw_only=True)
class Stricter(Derived):
    count: Annotated[int, Ge(5)] = 5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, "example.every must be a whole number of steps, at least 1, got 0."),
        ({"every": 1.0}, "example.every must be a whole number of steps, at least 1, got 1.0."),
        ({"every": True}, "example.every must be a whole number of steps, at least 1, got True."),
        ({"share": 1}, "example.share must be a number above 0 and below 1, got 1; 0.9 is usual."),
        ({"share": float("nan")}, "example.share must be a number above 0 and below 1, got nan; 0.9 is usual."),
        ({"share": "x"}, "example.share must be a number above 0 and below 1, got 'x'; 0.9 is usual."),
        ({"limit": 2.5}, "example.limit must be a number, at least 0 and at most 2, got 2.5."),
        ({"limit": "2"}, "example.limit must be None or a number, at least 0 and at most 2, got '2'."),
        ({"mode": "mxa"}, "example.mode='mxa' is unknown. Did you mean 'max'? Choose min or max."),
        ({"mode": ["min"]}, "example.mode=['min'] is unknown. Did you mean 'min'? Choose min or max."),
        ({"thread": "no"}, "example.thread must be auto, True or False, got 'no'."),
        ({"thread": 1}, "example.thread must be auto, True or False, got 1."),
        ({"level": True}, "example.level=True is unknown. Choose 0, 1 or None."),
        ({"level": 1.0}, "example.level=1.0 is unknown. Did you mean '1'? Choose 0, 1 or None."),
        ({"folder": 5}, "example.folder must be text, a Path or None, got 5."),
    ],
)
def test_a_wrong_argument_is_refused_with_what_is_accepted(settings, message):
    with pytest.raises(UserError) as caught:
        Example(**settings)
    assert str(caught.value) == message


def test_arguments_within_the_bounds_and_of_types_that_cannot_be_checked_are_accepted():
    Example(every=3, share=0.1, limit=0, mode="max", thread=False, level=1, folder=Path("x"), anything=5, items="no")
    Example(every=np.int64(2), share=np.float32(0.5), limit=None, level=None)


@given(st.integers() | st.floats())
def test_a_number_is_accepted_exactly_within_its_bounds(value):
    accepts = isinstance(value, int) and value >= 1
    try:
        Example(every=value)
    except UserError:
        assert not accepts
    else:
        assert accepts


def test_a_dataclass_checks_its_own_fields_and_those_of_its_bases():
    assert Derived(count=2, rate=0.5, name="b").count == 2
    for wrong in ({"count": 0}, {"rate": 0}, {"name": 3}):
        with pytest.raises(UserError, match=next(iter(wrong))):
            Derived(**wrong)
    with pytest.raises(UserError, match="count must be a whole number, at least 5, got 2"):
        Stricter(count=2)


def test_an_annotation_with_a_name_for_type_checkers_only_accepts_anything():
    def make(count: "Annotated[int, Ge(1)]", other: "OnlyForTypeCheckers"): ...  # noqa: F821

    check_arguments(make, {"count": 1, "other": object()})
    with pytest.raises(UserError, match="count must be a whole number, at least 1, got 0"):
        check_arguments(make, {"count": 0, "other": object()})


def test_a_choice_that_is_unknown_is_refused_with_the_nearest():
    check_choice("launcher", "ray", ("local", "ray"))
    with pytest.raises(UserError, match=r"launcher='lokal' is unknown\. Did you mean 'local'\? Choose local or ray\."):
        check_choice("launcher", "lokal", ("local", "ray"))
