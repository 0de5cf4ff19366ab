"""Record what operators allocate on this GPU besides their outputs, call by call.

    python benchmarks/operators_on_a_card.py OUT.json

Attention: a case is one call of scaled_dot_product_attention and its backward pass. We record the kernel that ran; a
fused one is an operator of its own. For both passes we record every block requested and freed (negative), in bytes and
in order. Sums over rows, as for a bias's gradient: we record the blocks of one call.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from vramsweep.runners.measure.dispatch_modes import SdpaKernels  # noqa: E402

# batch, heads, heads of key and value, length, width, width of the values
SHAPES = (
    (2, 8, 8, 512, 64, 64), (2, 8, 8, 500, 64, 64), (1, 8, 8, 769, 128, 128), (4, 12, 12, 512, 64, 64),
    (2, 8, 8, 512, 80, 80), (2, 8, 8, 512, 96, 96), (2, 8, 8, 512, 160, 160), (2, 8, 8, 512, 192, 128),
    (2, 8, 8, 512, 256, 256), (2, 8, 8, 512, 72, 72), (2, 8, 8, 512, 20, 20), (2, 8, 8, 512, 65, 65),
    (2, 8, 2, 512, 64, 64), (2, 8, 1, 512, 64, 64), (2, 8, 1, 512, 128, 128), (1, 4, 4, 64, 16, 16),
)  # fmt: skip
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MASKS = ("none", "causal", "bool", "float", "row")  # row: one mask of the keys for every query
ROWS = (64, 256, 512, 769, 1024, 2048, 4096, 8192, 16384)
COLUMNS = (48, 64, 512, 768, 1000, 1024, 2048, 2304, 2560, 3072, 4096, 5120, 10240, 50257)
DROPOUTS = (0.0, 0.1, 0.125)


def mask_of(kind: str, batch: int, length: int, dtype: torch.dtype) -> torch.Tensor | None:
    """Return a call's mask on the GPU; None for kinds that need no tensor."""
    if kind == "bool":
        return torch.ones(batch, 1, length, length, dtype=torch.bool, device="cuda").tril()
    if kind == "float":
        return torch.zeros(batch, 1, length, length, dtype=dtype, device="cuda")
    if kind == "row":
        return torch.ones(batch, 1, 1, length, dtype=torch.bool, device="cuda")
    return None


def requests() -> list[int]:
    """Return the blocks requested and freed (negative) since the last call, in bytes, and start recording anew."""
    found = []
    for event in torch.cuda.memory._snapshot()["device_traces"][0]:
        if event["action"] == "alloc":
            found.append(event["size"])
        elif event["action"] == "free_completed":
            found.append(-event["size"])
    torch.cuda.memory._record_memory_history(enabled=None)
    torch.cuda.memory._record_memory_history(context=None, stacks="python", max_entries=100_000, clear_history=True)
    return found


def case(shape: tuple[int, ...], dtype: torch.dtype, mask: str, dropout: float, gqa: bool) -> dict[str, Any]:
    """Run one call and its backward pass; return its kernels and blocks, or the error."""
    batch, heads, shared, length, width, wide = shape
    sizes = ((heads, width), (shared, width), (shared, wide))
    made = [torch.randn(batch, length, h, w, dtype=dtype, device="cuda").transpose(1, 2) for h, w in sizes]
    query, key, value = (tensor.requires_grad_() for tensor in made)
    said = {"shape": shape, "dtype": str(dtype).removeprefix("torch."), "mask": mask, "dropout": dropout, "gqa": gqa}
    given = mask_of(mask, batch, length, dtype)
    grad = torch.ones(batch, heads, length, wide, dtype=dtype, device="cuda")
    torch.cuda.synchronize()
    requests()
    try:
        with SdpaKernels() as kernels:
            out = F.scaled_dot_product_attention(
                query, key, value, attn_mask=given, dropout_p=dropout, is_causal=mask == "causal", enable_gqa=gqa
            )
        forward = requests()
        out.backward(grad)
        torch.cuda.synchronize()
        return said | {"kernel": sorted(kernels.seen), "forward": forward, "backward": requests()}
    except RuntimeError as error:
        return said | {"error": str(error).splitlines()[0]}


def added(rows: int, columns: int, dtype: torch.dtype) -> dict[str, Any]:
    """Sum a tensor over its rows; return the blocks that this takes."""
    made = torch.randn(rows, columns, dtype=dtype, device="cuda")
    torch.cuda.synchronize()
    requests()
    result = made.sum(0, keepdim=True)
    torch.cuda.synchronize()
    assert result.shape == (1, columns)
    return {"rows": rows, "columns": columns, "dtype": str(dtype).removeprefix("torch."), "requests": requests()}


def main() -> None:
    """Run every case and write OUT.json; cases with shared heads run with `enable_gqa` and broadcast."""
    for _ in range(2):  # creates handles and workspaces before the first case
        case(SHAPES[0], torch.bfloat16, "causal", 0.0, False)
    found = []
    for shape, dtype, mask, dropout in itertools.product(SHAPES, DTYPES, MASKS, DROPOUTS):
        if dropout and shape not in SHAPES[:4]:
            continue
        for gqa in (False, True) if shape[1] != shape[2] else (False,):
            found.append(case(shape, dtype, mask, dropout, gqa))
    card = torch.cuda.get_device_properties(0)
    sums = [added(*one) for one in itertools.product(ROWS, COLUMNS, DTYPES)]
    told = {"gpu": card.name, "multiprocessors": card.multi_processor_count, "torch": torch.__version__,
            "cudnn": torch.backends.cudnn.version(), "attention": found, "sums": sums}  # fmt: skip
    Path(sys.argv[1]).write_text(json.dumps(told) + "\n")
    print(f"{len(found)} cases, {sum('error' in one for one in found)} refused")


if __name__ == "__main__":
    main()
