"""Sizes and times as they are typed."""

import pytest
from conftest import cases, refusal
from hypothesis import given
from hypothesis import strategies as st

from vramsweep.harness.messages import units
from vramsweep.harness.messages.errors import UserError


@pytest.mark.parametrize(("text", "size"), cases("sizes"))
def test_sizes(text: str, size: str) -> None:
    assert units.parse_size(text) == int(size)


@pytest.mark.parametrize(("text", "said"), cases("sizes_that_are_none"))
def test_sizes_that_are_none(text: str, said: str) -> None:
    told = refusal(UserError, units.parse_size, text)
    assert said in told and "\n" not in told


@given(st.integers(1, 9999), st.sampled_from(["MiB", "GiB", "GB", "MB"]))
def test_a_setting_that_is_named_in_gib_takes_any_unit_and_says_the_same(number: int, unit: str) -> None:
    found = units.in_its_unit("device.memory_gib", f"{number}{unit}")
    assert float(found) * units.GIB == pytest.approx(units.parse_size(f"{number}{unit}"), rel=1e-12)
    assert units.in_its_unit("device.memory_gib", str(number)) == str(number)


@pytest.mark.parametrize(("key", "typed", "bare"), cases("units_of_settings"))
def test_what_is_named_in_a_unit_takes_others(key: str, typed: str, bare: str) -> None:
    assert units.in_its_unit(key, typed) == bare


@pytest.mark.parametrize("typed", ["24Gb", "24G", "0GiB"])
def test_what_is_named_in_a_unit_takes_no_nonsense(typed: str) -> None:
    with pytest.raises(UserError, match=f"device.memory_gib={typed} "):
        units.in_its_unit("device.memory_gib", typed)


@pytest.mark.parametrize(("typed", "spent"), cases("times"))
def test_times(typed: str, spent: str) -> None:
    assert units.parse_seconds(typed) == float(spent)


@given(st.integers(0, 99), st.integers(0, 99), st.integers(1, 99))
def test_the_parts_of_a_time_add_up(hours: int, minutes: int, rest: int) -> None:
    assert units.parse_seconds(f"{hours}h{minutes}m{rest}s") == 3600 * hours + 60 * minutes + rest


@pytest.mark.parametrize(
    ("largest", "unit"), [(0, "GiB"), (1 << 20, "MiB"), (102 << 20, "MiB"), (103 << 20, "GiB"), (1 << 40, "GiB")]
)
def test_a_table_has_the_unit_of_its_largest_size(largest: int, unit: str) -> None:
    assert units.choose_unit(largest) == unit


def test_sizes_of_a_column_are_in_its_unit() -> None:
    assert [units.format_in("MiB", size) for size in (0, 100, 1 << 19, -5 << 20, 3 << 30)] == [
        "0.0", "<0.01", "0.50", "-5.0", "3,072.0",
    ]  # fmt: skip
    assert units.format_gib(3 << 29) == "1.5" and units.format_gib(1 << 20) == "<0.01"


def test_a_bare_number_is_a_time_only_where_its_unit_is_said() -> None:
    assert units.gib("24") == 24 and units.gib("512MiB") == 0.5
    assert "90 has no unit; use 90m, 90h or 90s" in refusal(UserError, units.parse_seconds, "90")
