"""PYTORCH_CUDA_ALLOC_CONF: what is read, refused, rendered and judged."""

import json

import pytest
from conftest import ROOT, cases, parametrized, refusal
from hypothesis import given
from hypothesis import strategies as st

from vramsweep.harness.allocator.config import (
    ASYNC_RESERVED,
    MIB,
    OPTIONS,
    AllocatorConfig,
    AllocatorConfigError,
    as_simulated,
    differences,
    estimates,
    from_settings,
    parse,
    reported,
    to_settings,
    unknown_options,
    without_effect,
)
from vramsweep.harness.messages.errors import UserError

DOCS = ROOT / "docs" / "allocator_settings.md"
POWERS = st.integers(0, 7).map(lambda i: 1 << i)
CONFIGS = st.builds(
    AllocatorConfig, backend=st.sampled_from(["native", "cudaMallocAsync"]), expandable_segments=st.booleans(),
    large_segment_size_mb=st.integers(11, 64), max_split_size_mb=st.none() | st.integers(64, 10**6),
    max_non_split_rounding_mb=st.none() | st.integers(64, 10**6),
    roundup_power2_divisions=st.lists(st.just(0) | POWERS, min_size=16, max_size=16).map(tuple),
    garbage_collection_threshold=st.none() | st.floats(0.01, 0.99), per_process_memory_fraction=st.floats(0, 1),
    pinned_use_cuda_host_register=st.booleans(), pinned_num_register_threads=POWERS,
    pinned_reserve_segment_size_mb=st.none() | st.integers(1, 10**6),
)  # fmt: skip


@pytest.mark.slow
@given(CONFIGS)
def test_render_and_parse_are_inverse_and_settings_in_force_read_back(config):
    assert parse(config.render()) == config
    assert parse(config.render()).render() == config.render()
    assert differences(config, from_settings(to_settings(config))) == []


@pytest.mark.parametrize(("text", "does"), cases("allocator_torch"))
def test_torch_itself_agrees(text, does):
    torch = pytest.importorskip("torch", reason="compared where torch 2.12 or newer is installed")
    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12):
        pytest.skip(f"torch {torch.__version__} does not know every option here")

    def accepts(read):
        try:
            read(text)
        except ValueError:  # torch's; ours is a UserError
            return False
        except AllocatorConfigError:
            return False
        return True

    assert accepts(parse) is (does == "takes")
    assert accepts(torch._C._accelerator_setAllocatorSettings) is (does == "takes")


def test_fields_are_the_options():
    assert [o.name for o in OPTIONS] == list(AllocatorConfig.__dataclass_fields__)


@pytest.mark.parametrize(("text", "canonical"), cases("allocator_canonical"))
def test_canonical_form(text, canonical):
    assert parse(text).render() == canonical


@pytest.mark.parametrize("text", ["", " , ", "backend:native,expandable_segments:False", "roundup_power2_divisions:1"])
def test_defaults_are_nothing(text):
    assert parse(text).render() == ""


def test_the_first_interval_fills_the_smaller_ones():
    assert parse("roundup_power2_divisions:[4:2,16:8]").roundup_power2_divisions[:6] == (2, 2, 2, 0, 8, 0)


@pytest.mark.parametrize(("text", "message"), cases("allocator_mistakes"))
def test_what_is_wrong_is_named(text, message):
    assert message in refusal(AllocatorConfigError, parse, text)
    assert issubclass(AllocatorConfigError, UserError)


@pytest.mark.parametrize(("text", "said"), cases("allocator_without_effect"))
def test_what_does_nothing_is_said(text, said):
    assert without_effect(parse(text)) == ([] if said == "-" else [said])


def test_a_memory_limit_by_other_means_counts():
    assert without_effect(parse("garbage_collection_threshold:0.8"), memory_limited=True) == []


def test_an_option_newer_than_torch_is_named():
    assert unknown_options(parse("expandable_segments:True,max_split_size_mb:128"), "2.6.0") == []
    assert unknown_options(parse("per_process_memory_fraction:0.5"), "2.10.0") == []
    wanted = ["torch 2.9.1+cu128 does not know large_segment_size_mb, which is new in 2.11"]
    assert unknown_options(parse("large_segment_size_mb:40"), "2.9.1+cu128") == wanted


def test_every_native_option_contradicts_the_other_backend():
    text = "backend:cudaMallocAsync,expandable_segments:True,max_split_size_mb:128,garbage_collection_threshold:0.8"
    found = without_effect(parse(text))
    assert [one.split()[0] for one in found] == [one.partition(":")[0] for one in text.split(",")[1:]]
    assert all(one.endswith(" has no effect with backend:cudaMallocAsync") for one in found)


def test_a_version_that_is_none_is_refused():
    with pytest.raises(AllocatorConfigError, match="torch version 'main' is not of the form"):
        unknown_options(parse("expandable_segments:True"), "main")


def test_differences_say_both_sides():
    asked, got = parse("expandable_segments:True,max_split_size_mb:128"), parse("max_split_size_mb:256")
    assert differences(asked, got) == [
        "expandable_segments: requested True, in force False",
        "max_split_size_mb: requested 128, in force 256",
    ]


def test_settings_that_did_not_take_show():
    settings = to_settings(parse("")) | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert from_settings(settings).expandable_segments is False
    assert from_settings({"max_split_size": 128 * MIB}).max_split_size_mb == 128


def test_what_is_not_reported_is_neither_compared_nor_echoed():
    asked = parse("max_split_size_mb:128,pinned_free_catch_all:True,throw_on_cudamalloc_oom:True")
    settings = to_settings(asked)
    known = reported(settings)
    assert {"backend", "max_split_size_mb", "expandable_segments", "roundup_power2_divisions"} <= known
    assert not known & {"pinned_free_catch_all", "throw_on_cudamalloc_oom", "per_process_memory_fraction"}
    assert from_settings(settings).render(known) == "max_split_size_mb:128"
    other = parse("max_split_size_mb:256")
    assert differences(asked, other, known) == ["max_split_size_mb: requested 128, in force 256"]
    assert reported({}) == {"backend"}


@parametrized("malformed_settings")
def test_malformed_settings_are_refused(settings, message):
    with pytest.raises(AllocatorConfigError, match=message):
        from_settings(settings)


def test_the_documentation_names_what_is_read_back():
    told = DOCS.read_text().split("### What is read back")[1].split("What contradicts what")[0]
    named = {option.name for option in OPTIONS if f"`{option.name}`" in told} | {"backend"}
    assert named == reported(to_settings(AllocatorConfig()))


def test_the_driver_s_allocator_is_what_an_h100_showed():
    pairs, own, expandable = {}, "cuda_malloc_async", "expandable"
    for line in (ROOT / "results" / "reference" / "h100-80gb" / "rows.jsonl").read_text().splitlines():
        row = json.loads(line)
        if (row["outcome"], row["device"]) == ("ok", "cuda") and row["allocator"] in (expandable, own):
            settings = {key: value for key, value in row["trial"].items() if key not in ("allocator", "repeat")}
            pairs.setdefault(json.dumps(settings, sort_keys=True), {})[row["allocator"]] = row
    both = [pair for pair in pairs.values() if len(pair) == 2]
    ratios = [pair[own]["peak_reserved_bytes"] / pair[expandable]["peak_reserved_bytes"] for pair in both]
    low, high = ASYNC_RESERVED
    assert (len(both), round(min(ratios) - 1, 3), round(max(ratios) - 1, 3)) == (8, low, high)
    for pair in both:
        apart = pair[own]["peak_allocated_bytes"] - pair[expandable]["peak_allocated_bytes"]
        assert abs(apart) < 0.1 * MIB
    told = as_simulated(parse("backend:cudaMallocAsync,max_split_size_mb:128"))
    assert told.render() == "expandable_segments:True" and as_simulated(told) is told
    assert estimates(told) == [] and len(estimates(parse("backend:cudaMallocAsync"))) == 1
