"""PYTORCH_CUDA_ALLOC_CONF: what is read, refused, rendered and judged."""

from pathlib import Path

import pytest
from allocator_recorder import settings_of
from hypothesis import given
from hypothesis import strategies as st

from vramsweep.harness.allocator.config import (
    MIB,
    OPTIONS,
    AllocatorConfig,
    AllocatorConfigError,
    differences,
    from_settings,
    parse,
    reported,
    unknown_options,
    without_effect,
)
from vramsweep.harness.errors import UserError

DOCS = Path(__file__).parents[3] / "docs" / "allocator.md"
POWERS = st.integers(0, 7).map(lambda i: 1 << i)
CONFIGS = st.builds(
    AllocatorConfig,
    backend=st.sampled_from(["native", "cudaMallocAsync"]),
    expandable_segments=st.booleans(),
    large_segment_size_mb=st.integers(11, 64),
    max_split_size_mb=st.none() | st.integers(64, 10**6),
    max_non_split_rounding_mb=st.none() | st.integers(64, 10**6),
    roundup_power2_divisions=st.lists(st.just(0) | POWERS, min_size=16, max_size=16).map(tuple),
    garbage_collection_threshold=st.none() | st.floats(0.01, 0.99),
    per_process_memory_fraction=st.floats(0, 1),
    pinned_use_cuda_host_register=st.booleans(),
    pinned_num_register_threads=POWERS,
    pinned_reserve_segment_size_mb=st.none() | st.integers(1, 10**6),
)


@given(CONFIGS)
def test_render_and_parse_are_inverse(config):
    assert parse(config.render()) == config
    assert parse(config.render()).render() == config.render()


@given(CONFIGS)
def test_settings_in_force_read_back(config):
    assert differences(config, from_settings(settings_of(config))) == []


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        ("large_segment_size_mb:20,max_split_size_mb:20", True),
        ("large_segment_size_mb:20,max_split_size_mb:19", False),
        ("large_segment_size_mb:11,max_split_size_mb:11", True),
        ("large_segment_size_mb:10", False),
        ("max_split_size_mb:32,large_segment_size_mb:64", False),
        ("large_segment_size_mb:20,max_non_split_rounding_mb:20", True),
        ("large_segment_size_mb:20,max_non_split_rounding_mb:19", False),
        ("garbage_collection_threshold:0.99", True),
        ("garbage_collection_threshold:1.0", False),
        ("garbage_collection_threshold:0", False),
        ("expandable_segments:True,", True),
        ("expandable_segments:true", False),
        ("roundup_power2_divisions:16", True),
        ("roundup_power2_divisions:0", False),
        ("roundup_power2_divisions:3", False),
        ("roundup_power2_divisions:[256:1,512:2,1024:4,>:8]", True),
        ("roundup_power2_divisions:[256:0]", True),
        ("roundup_power2_divisions:[256:3]", False),
        ("roundup_power2_divisions:[250:2]", False),
        ("roundup_power2_divisions:[]", True),
        ("pinned_max_round_threshold_mb:0,pinned_max_cached_size_mb:0", True),
    ],
)
def test_torch_itself_agrees(text, accepted):
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

    assert accepts(parse) is accepted
    assert accepts(torch._C._accelerator_setAllocatorSettings) is accepted


def test_fields_are_the_options():
    assert [o.name for o in OPTIONS] == list(AllocatorConfig.__dataclass_fields__)


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("", ""),
        (" , ", ""),
        ("backend:native,expandable_segments:False", ""),
        ("max_split_size_mb: 128 , expandable_segments : True,", "expandable_segments:True,max_split_size_mb:128"),
        ("max_split_size_mb:128,max_split_size_mb:256", "max_split_size_mb:256"),
        ("roundup_power2_divisions:1", ""),
        ("roundup_power2_divisions:8", "roundup_power2_divisions:8"),
        ("roundup_power2_divisions:[1:4,>:4]", "roundup_power2_divisions:4"),
        ("roundup_power2_divisions:[256:1,512:2,1024:4]", "roundup_power2_divisions:[256:0,512:2,1024:4]"),
        ("roundup_power2_divisions:[8192:2,>:4]", "roundup_power2_divisions:[8192:2,16384:4,32768:4]"),
        ("garbage_collection_threshold:.80", "garbage_collection_threshold:0.8"),
        ("release_lock_on_hipmalloc:True", "release_lock_on_cudamalloc:True"),
    ],
)
def test_canonical_form(text, canonical):
    assert parse(text).render() == canonical


def test_the_first_interval_fills_the_smaller_ones():
    assert parse("roundup_power2_divisions:[4:2,16:8]").roundup_power2_divisions[:6] == (2, 2, 2, 0, 8, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_split_size_mb:19", "max_split_size_mb:19 is too small: allowed is at least large_segment_size_mb (20)"),
        ("large_segment_size_mb:64,max_split_size_mb:32", "allowed is at least large_segment_size_mb (64)"),
        ("max_non_split_rounding_mb:5", "max_non_split_rounding_mb:5 is too small"),
        ("large_segment_size_mb:10", "large_segment_size_mb:10 is not valid: allowed is more than 10"),
        ("max_split_size_mb:-1", "max_split_size_mb:-1 is not valid"),
        ("max_split_size_mb:128.7", "max_split_size_mb:128.7 is not valid"),
        ("max_split_size_mb:99999999999999999999", "is not valid"),
        ("max_split_size_mb", "max_split_size_mb has no value: write max_split_size_mb:VALUE"),
        ("max_split_size_mb:", "max_split_size_mb has no value"),
        ("expandable_segments:true", "expandable_segments:true is not valid: allowed is True or False"),
        ("garbage_collection_threshold:1.0", "allowed is more than 0 and less than 1"),
        ("garbage_collection_threshold:nan", "allowed is more than 0 and less than 1"),
        ("per_process_memory_fraction:1.5", "per_process_memory_fraction:1.5 is not valid: allowed is 0 to 1"),
        ("roundup_power2_divisions:3", "roundup_power2_divisions:3 is not valid: allowed is a power of two"),
        ("roundup_power2_divisions:0", "roundup_power2_divisions:0 is not valid"),
        ("roundup_power2_divisions:[250:2]", "roundup_power2_divisions:[250:2] is not valid"),
        ("roundup_power2_divisions:[256:3]", "roundup_power2_divisions"),
        ("roundup_power2_divisions:[256:2", "the brackets [ ] do not match"),
        ("pinned_num_register_threads:256", "allowed is a power of two up to 128"),
        ("backend:jemalloc", "backend:jemalloc is not valid: allowed is native or cudaMallocAsync"),
        ("expandable_segment:True", "unknown allocator option 'expandable_segment': did you mean expandable_segments?"),
        ("speed:1", "unknown allocator option 'speed': options are backend"),
        ("roundup_bypass_threshold_mb:64", "roundup_bypass_threshold_mb is not an option any more"),
    ],
)
def test_what_is_wrong_is_named(text, message):
    with pytest.raises(AllocatorConfigError) as error:
        parse(text)
    assert message in str(error.value)
    assert isinstance(error.value, UserError)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("expandable_segments:True,max_split_size_mb:128", []),
        ("backend:cudaMallocAsync,pinned_use_background_threads:True", []),
        ("max_non_split_rounding_mb:64", ["max_non_split_rounding_mb has no effect without max_split_size_mb"]),
        ("per_process_memory_fraction:0.5,garbage_collection_threshold:0.8", []),
        (
            "garbage_collection_threshold:0.8",
            [
                "garbage_collection_threshold has no effect without a memory limit: set per_process_memory_fraction "
                "below 1"
            ],
        ),
        (
            "pinned_num_register_threads:4",
            ["pinned_num_register_threads has no effect without pinned_use_cuda_host_register:True"],
        ),
        (
            "pinned_max_round_threshold_mb:8,pinned_max_cached_size_mb:4",
            ["pinned_max_round_threshold_mb above pinned_max_cached_size_mb: the cache size decides"],
        ),
    ],
)
def test_what_does_nothing_is_said(text, expected):
    assert without_effect(parse(text)) == expected


def test_an_option_newer_than_torch_is_named():
    assert unknown_options(parse("expandable_segments:True,max_split_size_mb:128"), "2.6.0") == []
    assert unknown_options(parse("per_process_memory_fraction:0.5"), "2.10.0") == []
    assert unknown_options(parse("large_segment_size_mb:40"), "2.9.1+cu128") == [
        "torch 2.9.1+cu128 does not know large_segment_size_mb: it is new in 2.11"
    ]


def test_every_native_option_contradicts_the_other_backend():
    text = "backend:cudaMallocAsync,expandable_segments:True,max_split_size_mb:128,garbage_collection_threshold:0.8"
    found = without_effect(parse(text))
    assert [f.split(":")[1].split(" and ")[1] for f in found] == [
        "expandable_segments",
        "max_split_size_mb",
        "garbage_collection_threshold",
    ]


def test_a_memory_limit_by_other_means_counts():
    assert without_effect(parse("garbage_collection_threshold:0.8"), memory_limited=True) == []


def test_a_version_that_is_none_is_refused():
    with pytest.raises(AllocatorConfigError, match="torch version 'main' is not of the form"):
        unknown_options(parse("expandable_segments:True"), "main")


def test_differences_say_both_sides():
    asked, got = parse("expandable_segments:True,max_split_size_mb:128"), parse("max_split_size_mb:256")
    assert differences(asked, got) == [
        "expandable_segments: asked for True, in force is False",
        "max_split_size_mb: asked for 128, in force is 256",
    ]


def test_settings_that_did_not_take_show():
    settings = settings_of(parse("")) | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert from_settings(settings).expandable_segments is False
    assert from_settings({"max_split_size": 128 * MIB}).max_split_size_mb == 128


def test_what_is_not_reported_is_neither_compared_nor_echoed():
    asked = parse("max_split_size_mb:128,pinned_free_catch_all:True,throw_on_cudamalloc_oom:True")
    settings = settings_of(asked)
    known = reported(settings)
    assert {"backend", "max_split_size_mb", "expandable_segments", "roundup_power2_divisions"} <= known
    assert not known & {"pinned_free_catch_all", "throw_on_cudamalloc_oom", "per_process_memory_fraction"}
    assert from_settings(settings).render(known) == "max_split_size_mb:128"
    other = parse("max_split_size_mb:256")
    assert differences(asked, other, known) == ["max_split_size_mb: asked for 128, in force is 256"]
    assert reported({}) == {"backend"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"PYTORCH_CUDA_ALLOC_CONF": 3}, "is not text"),
        ({"garbage_collection_threshold": None}, "garbage_collection_threshold is None, expected float"),
        ({"max_split_size": "big"}, "max_split_size is 'big', expected int"),
        ({"roundup_power2_divisions": {"1": 0}}, "roundup_power2_divisions is not complete"),
    ],
)
def test_malformed_settings_are_refused(settings, message):
    with pytest.raises(AllocatorConfigError, match=message):
        from_settings(settings)


def test_the_documentation_names_what_is_read_back():
    told = DOCS.read_text().split("### What is read back")[1].split("What contradicts what")[0]
    named = {option.name for option in OPTIONS if f"`{option.name}`" in told} | {"backend"}
    assert named == reported(settings_of(AllocatorConfig()))
