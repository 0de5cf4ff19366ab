"""Sizes and times as they are typed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramsweep.harness import units
from vramsweep.harness.errors import UserError


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GiB", 24 << 30), ("1.5 MiB", 3 << 19), ("80GB", 80 * 10**9), ("512B", 512), ("2Gi", 2 << 30),
     ("24gib", 24 << 30), ("24GIB", 24 << 30), (" 24gb ", 24 * 10**9)],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert units.size(text) == size


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not a size"), ("GiB", "is not a size"), ("-1GiB", "is not a size"), ("1e9", "is not a size"),
        ("1 2GiB", "is not a size"), ("٣GiB", "is not a size"), ("infGiB", "is not a size"), ("nan", "is not a size"),
        ("24", "'24' has no unit: 24GiB (2^30 bytes each), 24GB (10^9)"), ("0", "'0' has no unit"),
        ("24G", "may be either: 24GiB (units of 1024) or 24GB (units of 1000)"), ("24m", "24MiB (units"),
        ("24Gb", "has a unit that there is not"), ("24Zib", "has a unit that there is not"),
        ("0GiB", "is not a size above 0"), ("0.2B", "is not a size above 0"),
        ("9" * 400 + "GiB", "more than any memory"), ("8192PiB", "more than any memory"),
    ],
)  # fmt: skip
def test_sizes_that_are_none(text: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        units.size(text)
    assert said in str(error.value) and "\n" not in str(error.value)


@given(st.integers(1, 9999), st.sampled_from(["MiB", "GiB", "GB", "MB"]))
def test_a_setting_that_is_named_in_gib_takes_any_unit_and_says_the_same(number: int, unit: str) -> None:
    found = units.in_its_unit("device.memory_gib", f"{number}{unit}")
    assert float(found) * units.GIB == pytest.approx(units.size(f"{number}{unit}"), rel=1e-12)
    assert units.in_its_unit("device.memory_gib", str(number)) == str(number)


@pytest.mark.parametrize(
    ("key", "typed", "bare"),
    [("device.memory_gib", "24GiB", "24"), ("timeout_s", "10m", "600"), ("backoff_s", "1m5s", "65"),
     ("cluster.hours", "90m", "1.5"), ("cluster.hours", "2d", "48"), ("cluster.mem_gib", "512MiB", "0.5"),
     ("device.memory_gib", "null", "null"), ("timeout_s", "range(1,3)", "range(1,3)"), ("timeout_s", "1e3", "1e3"),
     ("timeout_s", "-1", "-1"), ("seq_len", "512k", "512k")],
)  # fmt: skip
def test_what_is_named_in_a_unit_takes_others(key: str, typed: str, bare: str) -> None:
    assert units.in_its_unit(key, typed) == bare


@pytest.mark.parametrize("typed", ["24Gb", "24G", "0GiB"])
def test_what_is_named_in_a_unit_takes_no_nonsense(typed: str) -> None:
    with pytest.raises(UserError, match=f"device.memory_gib={typed} "):
        units.in_its_unit("device.memory_gib", typed)


@pytest.mark.parametrize(
    ("typed", "spent"),
    [("90m", 5400), ("8h", 28800), ("1h30m", 5400), ("3600s", 3600), ("0.5s", 0.5), ("1.5h", 5400), ("1d", 86400),
     ("1h 5s", 3605), ("2H", 7200)],
)  # fmt: skip
def test_times(typed: str, spent: float) -> None:
    assert units.seconds(typed) == spent


@given(st.integers(0, 99), st.integers(0, 99), st.integers(1, 99))
def test_the_parts_of_a_time_add_up(hours: int, minutes: int, rest: int) -> None:
    assert units.seconds(f"{hours}h{minutes}m{rest}s") == 3600 * hours + 60 * minutes + rest


def test_a_bare_number_is_a_time_only_where_its_unit_is_said() -> None:
    assert units.gib("24") == 24 and units.gib("512MiB") == 0.5
    with pytest.raises(UserError, match="90 has no unit: 90m, 90h or 90s"):
        units.seconds("90")
