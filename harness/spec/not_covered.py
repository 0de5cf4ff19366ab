"""What a prediction did not look at: codes of the column `not_covered`, which a trace reports (Tracer.leave_out)."""

from collections.abc import Iterable

EAGER = "compiled_code"
CODES = {
    EAGER: "as eager: torch.compile's memory is not predicted (published peaks are 0.5 to 3.5 times eager's)",
    "evaluation": "evaluation after the traced steps",
    "generation": "generation of text after the traced steps",
    "checkpoints": "checkpoints after the traced steps, which gather divided weights",
    "growth": "memory that grows from step to step",
    "kernel_scratch": "scratch memory of operators that choose it on the GPU",
    "recurrent_layers": "what cuDNN keeps for recurrent layers; the peak is a lower bound",
    "ranks": "other ranks, which may need more than the traced one",
}


def describe(code: str, details: Iterable[str] = ()) -> str:
    """Return the sentence of a code with its details; of an unknown code, which a later version wrote, the code."""
    told = ", ".join(sorted(details))
    return CODES.get(code, code) + f" ({told})" * bool(told)
