"""The axis of an answer's table: length, batch, or a whole number that a command was given."""

from typing import Any

import pytest

from vramsweep.harness.sweep.result_table import add_options, choose_axis, has_tokens

OPTION = "runner.options."


def rows(lengths: Any, batches: Any, **options: Any) -> list[dict[str, Any]]:
    values = {OPTION + name: list(some) for name, some in options.items()}
    each = [dict(zip(values, some, strict=True)) for some in zip(*values.values(), strict=True)] or [{}] * len(lengths)
    return [{"seq_len": n, "micro_batch": b} | own for n, b, own in zip(lengths, batches, each, strict=True)]


@pytest.mark.parametrize(
    ("found", "axis"),
    [
        (rows([64, 128], [1, 1]), "seq_len"),
        (rows([None, None], [1, 2]), "micro_batch"),
        (rows([None] * 3, [None] * 3, n="124"), "runner.options.n"),
        (rows([None] * 4, [None] * 4, size=["32", "64"] * 2, n="1124"), "runner.options.n"),  # it has more values
        (rows([512, 1024], [4, 4], longest=["512", "1024"]), "runner.options.longest"),  # the length follows it
        (rows([512, 1024] * 2, [4] * 4, n="1122"), "seq_len"),
        (rows([512] * 2, [4, 8], lr=["1e-4", "1e-5"]), "micro_batch"),
    ],
)  # fmt: skip
def test_a_number_is_the_axis_if_lengths_and_batches_follow_it(found: list[dict[str, Any]], axis: str) -> None:
    assert choose_axis(found) == axis


def test_options_are_columns_and_a_length_of_one_is_none() -> None:
    row = add_options({"seq_len": 1, "trial": {"runner": {"options": {"n": "16", "lr": "1e-4"}}}})
    assert (row["runner.options.n"], row["runner.options.lr"]) == (16, "1e-4")
    assert not has_tokens([row, {"seq_len": None}]) and has_tokens([{"seq_len": 2}])
    assert has_tokens([{"seq_len": None, "tokens_per_s": 9.0}])  # lengths vary, and their tokens were counted
