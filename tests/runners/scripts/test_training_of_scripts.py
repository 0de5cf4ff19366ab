"""Whether a script trains and grows, predicted: counted by hand for faulty scripts, and nothing for plain ones."""

from pathlib import Path

import commands
import pytest

from vramsweep.harness.rows.quality_flags import flags
from vramsweep.harness.spec import trial_parser
from vramsweep.runners.predict import make_trace, predicted_row
from vramsweep.runners.scripts import traced_script

HEAD = """import torch; from torch import nn; from torch.utils.checkpoint import checkpoint
net = nn.Sequential(*[one for _ in range(8) for one in (nn.Linear(64, 64), nn.ReLU())]).cuda()
x, head, kept = torch.zeros(8, 64, device="cuda"), nn.Linear(64, 10).cuda(), []
optimizer = torch.optim.AdamW([*net.parameters(), *head.parameters()])
{}
for i in range(9): {}; optimizer.step(); optimizer.zero_grad()
"""
PASS = "head(net(x)).mean().backward()"
SCALED = "scaler.scale(half()).backward(); scaler.unscale_(optimizer); scaler.step(optimizer); scaler.update()"
HALF = """scaler = torch.amp.GradScaler("cuda")
@torch.autocast("cuda", torch.float16)
def half(): return head(net(x)).mean()"""
EXPERTS = (
    "net = nn.ModuleList([nn.Linear(64, 64) for _ in range(3)]).cuda(); optimizer = torch.optim.Adam(net.parameters())"
)
KEPT = "kept.append(head(net(torch.ones(1 << 15, 64, device='cuda')))); kept[-1].sum().backward(retain_graph=True)"
# Each: before the loop, a step, elements without gradient (8 x 65 x 64: all but the head), flags
SCRIPTS = {
    "plain": ("pass", PASS, 0, []),
    "schedule": ("schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)", f"{PASS}; schedule.step()", 0, []),
    "scaler": (HALF, SCALED, 0, []),
    "accumulation": ("pass", f"{PASS}; {PASS}; nn.utils.clip_grad_norm_(net.parameters(), 1)", 0, []),
    "average": ("ema = torch.optim.swa_utils.AveragedModel(net)", f"{PASS}; ema.update_parameters(net)", 0, []),
    "closure": (f"def closure(): optimizer.zero_grad(); {PASS}", "optimizer.step(closure)", 0, []),
    "experts in turn": (EXPERTS, "net[i % 3](x).mean().backward()", 0, []),
    "checkpoint": ("pass", "head(checkpoint(net, x, use_reentrant=True)).sum().backward()", 33280, ["no_gradient"]),
    "detached": ("pass", "head(net(x).detach()).sum().backward()", 33280, ["no_gradient"]),
    "kept": ("pass", KEPT, 0, ["leaks"]),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SCRIPTS)
def test_whether_a_script_trains_and_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(traced_script, "CARDLESS", ())  # takes seconds, and no script here uses it
    before, step, untrained, flagged = SCRIPTS[name]
    (tmp_path / "train.py").write_text(HEAD.format(before, step))
    device = {"name": "simulated", "gpu": "a100-40gb"}
    trial = trial_parser.parse(commands.command(f"PYTHON {tmp_path / 'train.py'}", device=device))
    found = make_trace.trace_trial(trial, trial.device.card, tmp_path, traced_script)
    row = predicted_row.predict(trial, *found).columns | {"device": "simulated"}
    assert (row["parameters_without_gradient"], flags(row)) == (untrained, flagged)
    assert row["trainable_parameters"] == (3 * 65 * 64 if name == "experts in turn" else 8 * 65 * 64 + 65 * 10)
    each = ((1 + 8) * (8 << 20) + 10 * (4 << 15)) * (name == "kept")  # each step's input, eight layers' results, output
    assert row["step_growth_bytes"] == each
    full = row["full_after_steps"]
    assert full is None if not each else 0 <= row["memory_limit_bytes"] - full * each < 2 * each
