"""A look at a GPU in 100 s: its kernels and the host's calls are timed, and made into speeds (measured_speeds.py).

    python benchmarks/speed_readings.py OUT.json [--gpu NAME] [--device cpu]

Times are divided by the peaks of a listed GPU, the one that is here or NAME. --device cpu rehearses the program.
CUDA events time a batch of calls behind a kernel that only waits, so that the GPU never waits for the host. Calls on
tiny tensors time the host, in batches shorter than the queue of launches, so that it never waits for the GPU. Streams
are larger than any L2 cache; a product's operands may stay in it, as in a step. No GPU has run this module yet.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import asdict, replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from measured_speeds import HOST, KERNEL, make_speeds
from torch.nn.functional import gelu, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from vramsweep.harness.files import outputs
from vramsweep.harness.hardware.gpu_lookup import find_gpu, gpu_named
from vramsweep.harness.machine import machine
from vramsweep.runners.trace import operator_cost

Call = Callable[[], Any]
Items = Generator[tuple[str, str, Call, float], None, None]  # kind, what, call, weight
QUEUE, BATCH_S = 500, 0.02  # most launches of a batch (a queue takes 1,000), and its seconds unless one call takes more
BATCHES, HOST_BATCHES = 6, 20
WAIT_CYCLES = 40_000_000  # of the kernel that waits: about 24 ms, in which the host issues a batch
ADAMW: Any = torch.optim.AdamW
# By kind: tokens, outputs and inputs of a linear layer, and its share of a trial's FLOPs, summed over traced sweeps.
PRODUCTS = json.loads(Path(__file__).with_name("speed_products.json").read_text("utf-8"))


class Look(TorchDispatchMode):
    """The device, and its 16-bit type. While entered, it collects what operators cost. A rehearsal divides sizes."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device, self.cuda, self.scale = device, device == "cuda", 1 if device == "cuda" else 64
        wide = not self.cuda or torch.cuda.is_bf16_supported(including_emulation=False)
        self.half, self.word = (torch.bfloat16, "bf16") if wide else (torch.float16, "fp16")
        self.capability = torch.cuda.get_device_capability() if self.cuda else (9, 0)
        self.cards = machine.visible_gpus(os.environ)[:1] if self.cuda else []
        self.works: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        found = operator_cost.work(func, args, kwargs or {}, out, self.capability)
        self.works += [] if found is None else [found]
        return out

    def products(self, kind: str, dtype: torch.dtype) -> Items:
        """Yield a linear layer's products: forward, gradient of its input, gradient of its weight."""
        torch.backends.cuda.matmul.allow_tf32 = kind == "product tf32"
        for *sizes, weight in PRODUCTS[kind.replace("tf32", "fp32")]:
            t, o, i = (size // self.scale for size in sizes)
            x, w, y = (torch.randn(size, device=self.device, dtype=dtype) for size in ((t, i), (o, i), (t, o)))
            for pair in ((x, w.t()), (y, w), (y.t(), x)):
                yield kind, f"{t} tokens, {i} to {o}", partial(torch.mm, *pair), weight

    def attention(self) -> Items:
        """Yield causal attention, forward and backward, by batch, heads, length and width."""
        for b, h, n, d in ((4, 12, 512, 64), (4, 16, 2048, 64), (2, 32, 1024, 128), (1, 32, 4096, 128)):
            size = (b, h, n // self.scale, d)
            q, k, v = (torch.randn(size, device=self.device, dtype=self.half, requires_grad=True) for _ in range(3))
            forward = partial(scaled_dot_product_attention, q, k, v, is_causal=True)
            yield "attention forward", f"{size}", forward, 1.0
            out = forward()
            backward = partial(torch.autograd.grad, out, (q, k, v), torch.ones_like(out), retain_graph=True)
            yield "attention backward", f"{size}", backward, 1.0

    def streams(self) -> Items:
        """Yield operators that only move memory, then a tiny one, which lasts as long as any kernel does at least."""
        for dtype, other in ((self.half, torch.float32), (torch.float32, self.half)):
            x = torch.randn((1 << 17) // self.scale, 1024, device=self.device, dtype=dtype)
            calls: dict[str, Call] = {"add": partial(torch.add, x, x), "cast": partial(x.to, other)}
            calls |= {"gelu": partial(gelu, x), "softmax": partial(x.softmax, -1), "transpose": x.t().contiguous}
            yield from (("stream", f"{name}, {dtype}", call, 1.0) for name, call in calls.items())
        yield KERNEL, "add", partial(torch.add, x[0], x[0]), 1.0

    def optimizers(self) -> Items:
        """Yield steps of AdamW over 20 tensors of 5 million fp32 parameters."""
        for name, how in (("foreach", {"foreach": True}), ("fused", {"fused": True})):
            ones = [torch.nn.Parameter(torch.ones(5_000_000 // self.scale, device=self.device)) for _ in range(20)]
            for one in ones:
                one.grad = torch.ones_like(one)
            yield f"optimizer {name}", "AdamW", ADAMW(ones, **how).step, 1.0

    def host(self) -> Items:
        """Yield single calls, then training steps of GPT-2 with 12 tiny layers."""
        from transformers import GPT2Config, GPT2LMHeadModel

        x, layer = torch.ones(8, 8, device=self.device), torch.nn.Linear(8, 8, device=self.device)
        yield f"{HOST}call", "add", partial(torch.add, x, x), 1.0
        yield f"{HOST}call", "linear", partial(layer, x), 1.0
        yield f"{HOST}call", "linear, forward and backward", lambda: layer(x).sum().backward(), 1.0
        model: Any = GPT2LMHeadModel(GPT2Config(n_embd=64, n_head=4, vocab_size=512))
        optimizer = ADAMW(model.to(self.device).train().parameters(), foreach=True)
        tokens = torch.zeros(1, 32, dtype=torch.long, device=self.device)

        def autocast(call: Call) -> Any:
            with torch.autocast(self.device, self.half):
                return call()

        def step() -> None:
            autocast(partial(model, input_ids=tokens, labels=tokens)).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        yield f"{HOST}call", "linear under autocast", partial(autocast, partial(layer, x)), 1.0
        yield f"{HOST}plain", "step", step, 1.0
        model.gradient_checkpointing_enable()
        yield f"{HOST}checkpointing", "step", step, 1.0

    def read(self, precision: str, kind: str, what: str, call: Call, weight: float) -> dict[str, Any]:
        """Return the reading of a call, with the GPU's clock and the CPU time that other machines have stolen."""
        call()  # chooses kernels, and makes an optimizer's state
        self.works.clear()
        with self:
            call()
        cost = {name: sum(int(getattr(one, name)) for one in self.works) for name in ("flops", "nbytes", "launches")}
        most = max(1, QUEUE // max(1, cost["launches"])) if self.cuda else 1
        seconds = [self._time_batch(call, 1, kind)]
        for _ in range(HOST_BATCHES if kind.startswith(HOST) else BATCHES):
            seconds.append(self._time_batch(call, max(1, min(most, int(BATCH_S / seconds[0]))), kind))
        found = {"kind": kind, "what": what, "weight": weight, "precision": precision, **cost, "seconds": seconds[1:]}
        clock = machine.query_gpu(self.cards[0], "ClockInfo", 1) if self.cards else None  # of the multiprocessors
        return {**found, "sm_clock_mhz": clock, "stolen_s": getattr(psutil.cpu_times(), "steal", None)}

    def _time_batch(self, call: Call, calls: int, kind: str) -> float:
        """Return the seconds of a call. Raises RuntimeError if the GPU had to wait for the host."""
        if self.cuda:
            torch.cuda.synchronize()
        if gpu := self.cuda and not kind.startswith(HOST):
            torch.cuda._sleep(WAIT_CYCLES)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        issued = time.perf_counter() - start
        if not gpu:
            return issued / calls
        end.record()
        late = begin.query()
        end.synchronize()
        seconds: float = begin.elapsed_time(end) / 1e3
        if late and issued > seconds / 2:
            raise RuntimeError("the GPU had to wait for the host")
        return seconds / calls


def main(name: str, device: str, out: Path) -> int:
    """Time each part for its seconds at most; after each, write the file of speeds and readings. Return 0."""
    look, readings, left_out = Look(device), list[dict[str, Any]](), dict[str, str]()
    gpu = gpu_named(name) if look.cuda else replace(gpu_named("h100-80gb"), product=name)
    for part, limit, precision, items in (
        ("product half", 20, look.word, look.products("product half", look.half)),
        ("host", 25, "", look.host()),
        ("attention", 10, look.word, look.attention()),
        ("streams", 10, "", look.streams()),
        ("optimizers", 10, "", look.optimizers()),
        ("product fp32", 12, "fp32", look.products("product fp32", torch.float32)),
        ("product tf32", 6, "tf32", look.products("product tf32", torch.float32)),
        ("product unaligned", 5, look.word, look.products("product unaligned", look.half)),
    ):
        print(f"measuring {part}, at most {limit} s", flush=True)
        end = time.monotonic() + limit
        try:
            for item in items:
                if time.monotonic() > end:
                    raise TimeoutError(f"{limit} s were over")
                readings.append(look.read(precision, *item))
        except Exception as error:  # out of memory, most likely; the other parts are kept
            left_out[f"rest of {part}"] = (str(error).splitlines() or [type(error).__name__])[0]
            print(f"{part}: {error}", file=sys.stderr)
        finally:  # also if it is interrupted
            items.close()
            source = f"a look at {name} on {date.today()}, torch {torch.__version__}, {len(readings)} readings"
            speeds, pooled = make_speeds(readings, gpu, source)
            notes = {"pooled": pooled, "left_out": left_out, "readings": readings}
            outputs.write(out, json.dumps({**asdict(speeds), **notes}, indent=1) + "\n")
    return 0 if readings else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpu")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    asked = parser.parse_args()
    if asked.gpu is None:
        found = find_gpu(torch.cuda.get_device_name()) if asked.device == "cuda" else None
        if asked.device == "cuda" and found is None:
            sys.exit("the peaks of this GPU are unknown; name a listed GPU that has them: --gpu NAME")
        asked.gpu = found.name if found else asked.device
    signal.alarm(180)  # ends it even if the GPU hangs
    sys.exit(main(asked.gpu, asked.device, asked.out))
