"""The ways through the code that CONTRIBUTING lists: their functions exist, and are called in that order."""

import re

import followed
import pytest
from conftest import ROOT, parametrized

MOST = 12
COMMANDS = {
    "A measured trial": next(way for name, way in followed.WAYS.items() if name.startswith("a measured")),
    "Predicted trials": next(way for name, way in followed.WAYS.items() if "together" in name),
    "`advise`": next(way for name, way in followed.WAYS.items() if name.startswith("advise")),
}


def listed(way: str) -> list[str]:
    """The functions of a way, as CONTRIBUTING lists them."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (found,) = re.findall(rf"^  - {re.escape(way)}.*?\.\n(?=  - |- )", text, re.MULTILINE | re.DOTALL)
    return re.findall(r"`(\w+(?:/\w+)+\.[\w.]+)`", found)


@pytest.mark.slow
@pytest.mark.parametrize("way", COMMANDS)
def test_a_way_is_as_it_is_described(way: str) -> None:
    functions = listed(way)
    assert 5 < len(functions) <= MOST
    calls = followed.follow(COMMANDS[way].words, ROOT)
    first: dict[str, int] = {}  # of each function the first call with a trial, if it has one
    for at, call in sorted(enumerate(calls), key=lambda one: not one[1].handed):
        first.setdefault(f"{call.module}.{call.function}", at)
    assert not set(functions) - set(first), "called at all"
    assert sorted(functions, key=first.__getitem__) == functions


@pytest.mark.slow
@parametrized("lengths_of_ways")
def test_a_way_is_as_straight_as_it_was(way: str, stays: int, returns: int) -> None:
    """How often whoever follows a trial changes the module, and comes back to one."""
    (found,) = (one for name, one in followed.WAYS.items() if name.startswith(way))
    changes, _, back = followed.count(followed.cut(followed.follow(found.words, ROOT), found))
    assert 3 < changes <= stays and back <= returns
