"""What a traced script does not show is in its row: unreached evaluation, generation and checkpoints, compiled code."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import commands
import pytest

from vramsweep.harness.spec import trial_parser
from vramsweep.runners.predict import make_trace, predicted_row
from vramsweep.runners.scripts import traced_script

pytestmark = pytest.mark.deterministic

Predict = Callable[..., dict[str, Any]]
LOOP = """
import sys, torch
from torch import nn
{before}
net = nn.Sequential(nn.Linear(64, 4096), nn.GELU(), nn.Linear(4096, 64)).cuda()
f = net
{built}
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(9):
    f(torch.zeros(512, 64, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    {each}
{after}
"""


@pytest.fixture
def predict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Predict:
    """Predict a script, given as a whole or as what fills LOOP's places."""

    def run(whole: str = LOOP, **places: str) -> dict[str, Any]:
        script = tmp_path / "loop.py"
        if whole is LOOP:
            monkeypatch.setattr(traced_script, "CARDLESS", ())  # takes seconds, and only libraries need it
        script.write_text(whole.format(**dict.fromkeys(("before", "built", "each", "after"), "") | places))
        device = {"name": "simulated", "gpu": "l4-24gb"}
        trial = trial_parser.parse(commands.command(f"PYTHON {script}", device=device))
        trace, details = make_trace.trace_trial(trial, trial.device.card, tmp_path, traced_script)
        return predicted_row.predict(trial, trace, details).columns

    return run


EVALUATE = """
{decorated}
def evaluate(net):
    {body}
"""
GRADLESS = EVALUATE.format(decorated="@torch.no_grad()", body="net(torch.zeros(9, 64, device='cuda'))")
EVALS = EVALUATE.format(decorated="", body="net.eval(); net(torch.zeros(9, 64, device='cuda')); net.train()")


@pytest.mark.parametrize(("places", "expected"), [
    ({"after": "net.eval()"}, ["evaluation"]),
    ({"after": "with torch.inference_mode():\n    f(1)"}, ["evaluation"]),
    ({"before": GRADLESS, "after": "evaluate(net)"}, ["evaluation"]),
    ({"before": EVALS, "each": "if step == 7: evaluate(net)"}, ["evaluation"]),
    ({"before": EVALS, "each": "evaluate(net)"}, []),
    ({"before": GRADLESS, "each": "evaluate(net)", "after": "evaluate(net)"}, []),
    ({"before": GRADLESS + EVALS.replace("evaluate", "other")}, []),  # no code calls them
    ({"built": "net.eval()\nnet.train()"}, []),
    ({"after": "net.generate()"}, ["generation"]),
    ({"after": "torch.save(net.state_dict(), 'a.pt')"}, []),  # takes no memory of the GPU
    ({"before": "from torch.distributed.checkpoint.state_dict import get_model_state_dict",
      "after": "get_model_state_dict(net)"}, ["checkpoints"]),
])  # fmt: skip
def test_what_is_left_out_of_a_script(predict: Predict, places: dict[str, str], expected: list[str]) -> None:
    row = predict(**places)
    assert row["not_covered"] == expected
    assert row["prediction_basis"].startswith("traced: parameters" if expected else "exact: parameters")


@pytest.mark.parametrize(
    "built", ["f = torch.compile(net)", "net.compile(fullgraph=True)", "f = torch.compile(lambda x: net(x))"]
)
def test_compiled_code_is_predicted_as_eager(predict: Predict, built: str) -> None:
    eager, compiled = predict(), predict(built=built)
    assert compiled["not_covered"] == ["compiled_code"]
    assert {k for k in eager if eager[k] != compiled[k]} == {"not_covered", "prediction_basis"}


def test_flex_attention_keeps_no_scores(predict: Predict) -> None:
    imported = "from torch.nn.attention.flex_attention import flex_attention"
    row = predict(before=imported, built="f = lambda x: flex_attention(*[net(x)[None, None]] * 3)")
    assert row["not_covered"] == ["compiled_code"]
    assert 0 < row["peak_allocated_bytes"] - predict()["peak_allocated_bytes"] < 512 * 512 * 4


LLAMA = """
from transformers import LlamaConfig, LlamaForCausalLM
net = LlamaForCausalLM(LlamaConfig(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                                   num_attention_heads=4)){to}
"""
TOKENS = """
for step in range(9):
    tokens = torch.randint(0, 512, (2, 64), device="cuda")
    net(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
torch.save(net.state_dict(), "net.pt")
"""
CAUSAL = LLAMA.format(to=".cuda()") + "import torch\noptimizer = torch.optim.AdamW(net.parameters())" + TOKENS
TRAINER = (
    LLAMA.format(to="")
    + """
import torch
from transformers import Trainer, TrainingArguments
rows = [dict.fromkeys(("input_ids", "labels"), torch.arange(64))] * 64
arguments = TrainingArguments(output_dir="out", report_to="none", max_steps=9)
trainer = Trainer(net, arguments, train_dataset=rows)
trainer.train()
trainer.save_model("out")
"""
)
AUTOCAST = "f = torch.autocast('cuda', dtype=torch.{})(net)"
PLAIN = {
    "mlp": {},
    "bf16": {"built": AUTOCAST.format("bfloat16")},
    "grad_scaler": {"built": AUTOCAST.format("float16") + "\nscaler = torch.amp.GradScaler('cuda')", "each":
                    "scaler.scale(f(torch.zeros(8, 64, device='cuda')).sum()).backward(); scaler.step(optimizer); "
                    "scaler.update(); optimizer.zero_grad()"},
    "accumulation": {"each": "for _ in range(3): f(torch.zeros(8, 64, device='cuda')).sum().backward()"},
    "schedule": {"built": "import math", "each": "scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1); "
                 "nn.utils.clip_grad_norm_(net.parameters(), 1.0); scheduler.step()"},
    "fused": {"each": "torch.optim.AdamW(net.parameters(), fused=True)"},
    "loader": {"before": "from torch.utils.data import DataLoader, TensorDataset",
               "each": "for one, in DataLoader(TensorDataset(torch.rand(8, 64)), 4, shuffle=True): one.cuda()"},
    "language_model": {"whole": CAUSAL},
    "lora": {"whole": CAUSAL.replace("import torch\n", "import torch, peft\nnet = peft.get_peft_model(net, "
             "peft.LoraConfig(task_type='CAUSAL_LM', target_modules=['q_proj']))\n")},
    "trainer": {"whole": TRAINER},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("places", PLAIN.values(), ids=PLAIN)
def test_nothing_is_left_out_of_plain_scripts(predict: Predict, places: dict[str, str]) -> None:
    row = predict(**places)
    assert row["not_covered"] == [] and row["prediction_basis"].startswith("exact: parameters")
