"""The API page has everything that is public: what trainkit offers, each strategy, callback and logger, and testing."""

import re
from importlib import import_module
from pathlib import Path

import trainkit
from trainkit import registry, testing

PAGE = Path(__file__).parents[2] / "docs/api.md"
LISTED = re.findall(r"^::: ([\w.]+)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)


def _object(path):
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


def test_everything_public_is_on_the_page_once():
    groups = ("strategy", "callbacks", "logger")
    public = {
        _object(registry._settings(group, name)["_target_"]) for group in groups for name in registry.names(group)
    }
    public |= {getattr(trainkit, name) for name in trainkit.__all__} | {
        getattr(testing, name) for name in testing.__all__
    }
    on_page = [_object(path) for path in LISTED]
    assert {thing.__name__ for thing in public} - {thing.__name__ for thing in on_page} == set()
    assert len(on_page) == len(set(on_page))
    assert [thing.__name__ for thing in on_page if not thing.__doc__] == []
