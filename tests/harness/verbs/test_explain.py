"""`explain`: what is said of an explanation, its sums, and of mistakes."""

import json
import re
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from conftest import Cli, merged, parametrized, refusal, tiny
from rich.console import Console

from vramsweep.harness.hardware.gpu_lookup import CONTEXT_BYTES
from vramsweep.harness.hardware.step_time import LEAST, pooled
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.spec import trial_parser
from vramsweep.harness.verbs import explain

pytestmark = pytest.mark.deterministic

MIB = 1 << 20


def parts(**mib: float) -> dict[str, int]:
    names = ("parameters", "buffers", "gradients", "optimizer_state", "activations", "communication", "temporaries",
             "workspaces", "rounding")  # fmt: skip
    return {name: int(mib.get(name, 0) * MIB) for name in names}


def moment(step: int | None, phase: str, **mib: float) -> dict[str, Any]:
    held = parts(**mib)
    return {"step": step, "phase": phase, "allocated": sum(held.values()), "reserved": sum(held.values()) + 64 * MIB,
            "parts": held}  # fmt: skip


def held(size: int, module: str, operator: str) -> dict[str, Any]:
    return {"bytes": size, "category": "activations", "module": module, "operator": operator, "line": "model.py:88",
            "step": 2, "phase": "forward"}  # fmt: skip


def answer(**over: Any) -> dict[str, Any]:
    backward = moment(2, "backward", parameters=400, optimizer_state=800, activations=3000, temporaries=0.01)
    made = {
        "phases": [moment(None, "load", parameters=400), moment(2, "forward", parameters=400, optimizer_state=800,
                   activations=2500), backward],
        "peak": backward, "peak_reserved": backward["reserved"], "peak_reserved_most": None, "host_refused": None,
        "most": parts(parameters=400, gradients=400, optimizer_state=800, activations=3000, temporaries=7),
        "largest": [{"held": held(125 * MIB, "model.layers.*.mlp", "aten.mm"), "count": 24}],
        "rest": 0, "rest_count": 0, "refused": None, "asked": None,
    }  # fmt: skip
    return made | over


def said(found: dict[str, Any], width: int = 100, show: Any = explain.show, **over: Any) -> str:
    chosen = trial_parser.parse(tiny(device={"name": "simulated", "gpu": "t4-16gb"}, **over))
    out = StringIO()
    show(chosen, found, Console(file=out, width=width))
    return out.getvalue()


TIMED: dict[str, Any] = {
    "estimated_kernels_s": {"product half": 0.02, "product unaligned": 0.018, "least time of kernels": 0.002,
                            "collectives": 0.0, "host": 0.03},
    "calibrated_step_s": 0.04, "calibrated_step_low_s": 0.03, "calibrated_step_high_s": 0.05, "estimated_launches": 999,
    "estimated_bound_by": "gpu", "calibration": "two measured steps",
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "pad"),
    [
        ({"vocab_size": 50257}, "the vocabulary from 50,257 to 50,304"),  # 64 x 786
        ({"vocab_size": 50304}, "the odd sizes of the model to multiples of 64"),  # another size is unaligned
    ],
)
def test_the_time_of_a_step_by_kind_of_kernel(config: dict[str, Any], pad: str) -> None:
    model = tiny()["model"] | {"config": config}
    found = answer(speed=TIMED, untimed=None)
    text = said(found, 120, explain.show_time, model=model)
    assert "a step takes about 40 ms (30 to 50); the GPU limits it" in text and "two measured steps" in text
    assert re.search(r"matrix products, half precision or FP8 +20.00 +50%", text)
    assert re.search(r"= all kernels, one after the other +40.00 ", text)
    assert re.search(r"host, for 999 launches +30.00 ", text) and "collectives" not in text
    assert " ".join(text.split()).count(f"take 45 % of the estimated step; pad {pad} ") == 1
    for over in ({"estimated_bound_by": "host"}, {"calibrated_step_s": 0.2}):  # nothing to gain, or less than a tenth
        assert "; pad" not in said(found | {"speed": TIMED | over}, 120, explain.show_time, model=model)
    sent = TIMED | {"estimated_kernels_s": TIMED["estimated_kernels_s"] | {"collectives": 0.041}}
    text = said(answer(speed=sent | {"calibrated_step_s": 0.041}, refused={}), 120, explain.show_time, model=model)
    assert "collectives limit it" in text and re.search(r"at the same time: collectives +41.00", text)
    assert "does not fit; the times are those of a run that did" in text and "; pad" not in text
    untimed = said({"speed": {}, "untimed": "no estimated times, because of it"}, 120, explain.show_time)
    assert untimed.endswith("no estimated times, because of it\n")
    assert set(explain.TIMES) == {*pooled().factors, LEAST}


def test_from_the_states_to_the_card_it_adds_up() -> None:
    found = dict(explain.to_card(answer()))
    states = 1600 * MIB
    assert found["states"] == states
    assert found["states_not_there_at_the_peak"] == -400 * MIB  # gradients
    upto = list(found).index("peak_allocated")
    assert sum(list(found.values())[:upto]) == found["peak_allocated"] == answer()["peak"]["allocated"]
    assert found["peak_allocated"] + found["reserved_beyond_allocated"] == found["peak_reserved"]
    assert found["device"] == found["peak_reserved"] + CONTEXT_BYTES == found["unknown"] + states


def test_what_is_printed_of_a_run_that_fits() -> None:
    text = said(answer())
    assert "fits: peak reserved 4.2 of 13.8 GiB (30 %), 9.6 GiB free" in text
    assert "24 x 0.12 GiB" in text and "model.layers.*.mlp aten.mm" in text
    assert "<0.01" in text  # ten kilobytes are not nothing
    assert "communication" not in text  # nothing of it anywhere
    assert "does not fit" not in text and "ran out" not in text
    assert "is earlier" not in text


def test_a_small_run_s_tables_are_in_mib() -> None:
    """Each says so, and nothing in it is a hundredth of a GiB."""
    small = moment(2, "backward", parameters=20, optimizer_state=1, activations=30)
    made = answer(peak=small, phases=[small], peak_reserved=60 * MIB, most=parts(parameters=20, activations=30))
    text = said(made)
    assert "Peak of each phase, by part, in MiB" in text and re.search(r"^ *MiB +share", text, re.MULTILINE)
    lines = {" ".join(line.split()[:-1]): line.split()[-1] for line in text.splitlines() if line.split()}
    assert lines["= peak reserved"] == "60.0" and lines["parameters 20.0"] == "20.0"
    assert "by part, in GiB" in said(answer()) and re.search(r"^ *GiB +share", said(answer()), re.MULTILINE)


def test_it_says_on_which_gpus_it_would_fit() -> None:
    (of_one,) = (trial_parser.parse(tiny(device={"name": "simulated", "gpu": "h100-80gb"})),)
    alike, others = explain.list_gpus(of_one, 100 << 30)
    assert alike.startswith("would fit on: gh200-144gb") and "h200-141gb" in alike and "h100-80gb" not in alike
    assert others.startswith("probably also on: ") and "other generations" in others
    assert list(explain.list_gpus(of_one, 10 << 40)) == ["would fit on none of the listed GPUs"]
    many = tiny(device={"name": "simulated", "gpu": "h100-80gb"}, sharding="ddp", world_size=8)
    assert next(explain.list_gpus(trial_parser.parse(many), 1)).startswith("would fit on (8 of each): ")
    half = merged(many, {"allocator": {"name": "half", "conf": "per_process_memory_fraction:0.5"}})
    assert "h100-80gb" not in next(explain.list_gpus(trial_parser.parse(half), 45 << 30))


def test_a_peak_of_an_earlier_step_is_pointed_out() -> None:
    first = moment(0, "optimizer", parameters=400, temporaries=5000)
    text = said(answer(peak=first, peak_reserved=first["reserved"]))
    assert "The run's peak, 5.3 GiB, is earlier, in the optimizer phase of step 0." in text


def test_what_is_printed_where_memory_ran_out() -> None:
    request = held(5000 * MIB, "lm_head", "aten.mm")
    refused = {"mark": {"step": 2, "phase": "forward", "end": 9}, "storage": 7, "request": 5000 * MIB,
               "allocated": 9400 * MIB, "reserved": 9500 * MIB,
               "parts": parts(parameters=400, activations=14000)}  # fmt: skip
    text = " ".join(said(answer(refused=refused, asked=request), width=120).split())
    assert "memory runs out in the forward phase of step 2: a request of 4.9 GiB fails (activations, lm_head, " in text
    assert "with 9.2 GiB allocated and 9.3 GiB reserved" in text
    assert "when memory ran out" in text
    assert "14.1" in text  # what was held and what was asked for


def test_names_are_no_markup() -> None:
    odd = {"held": held(MIB, "model[red]", "aten.[bold]mm"), "count": 1}
    assert "model[red] aten.[bold]mm" in said(answer(largest=[odd]))


@parametrized("shown_by_the_driver")
def test_what_the_driver_shows_names_what_is_not_in_it(over: dict[str, Any], line: str) -> None:
    assert line in " ".join(said(answer(), 120, **over).split())


def test_the_host_and_the_allocator_s_share_decide_too() -> None:
    text = said(answer(host_refused="8 GiB of host memory per node are not enough"))
    assert "does not fit in host memory: 8 GiB of host memory per node are not enough" in text
    ahead = " ".join(said(answer(peak_reserved_most=3 * answer()["peak_reserved"])).split())
    assert "4.2 to 12.5 of 13.8 GiB (90 %)" in ahead and "the peak grows if the CPU runs ahead" in ahead
    half = trial_parser.parse(tiny(device={"name": "simulated", "gpu": "l4-24gb"},
                            allocator={"name": "half", "conf": "per_process_memory_fraction:0.5"}))  # fmt: skip
    plain = trial_parser.parse(tiny(device={"name": "simulated", "gpu": "l4-24gb"}))
    assert half.memory_limit() == plain.memory_limit() // 2 > 10 << 30


def test_a_folder_without_predictions_has_nothing_to_explain(tmp_path: Path) -> None:
    row = {"trial_id": "a", "terminal": True, "device": "cuda", "outcome": "ok", "model": "m", "runner": "torch",
           "peak_reserved_bytes": 5, "trial": {}}  # fmt: skip
    (tmp_path / "journal.jsonl").write_text(json.dumps(row) + "\n")
    assert "has no predicted row; give a trial's settings" in refusal(UserError, explain.main, [str(tmp_path)])


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_one_trial_by_its_settings(cli: Cli) -> None:
    (found,) = cli.json("explain", "model=tiny", "seq_len=32", "device.gpu=t4-16gb")
    assert found["about"]["gpu"] == "t4-16gb"
    card = found["from_states_to_card"]
    assert card["peak_reserved"] == found["explanation"]["peak_reserved"] < found["memory_limit_bytes"]
    assert card["states"] > 0 and card["device"] == card["states"] + card["unknown"]
    assert "a peak rate of t4-16gb" in found["explanation"]["untimed"]  # it has none in bf16
