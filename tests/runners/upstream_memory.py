"""Bytes that small models of transformers hold in a step on the CPU, by whichever version is installed.

`python tests/runners/upstream_memory.py [MODEL ...]` prints a line of JSON for that version. Those of several are in
tests/data/upstream_memory.jsonl, for test_upstream_memory.py of known differences. An earlier version beside the
installed torch: `pip install --no-deps --target DIR transformers==4.48.1 tokenizers==0.21.0 huggingface_hub==0.27.1`
and `pip install --target DIR requests`, then PYTHONPATH=DIR.
"""

import json
import sys
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MODELS = Path(__file__).parents[1] / "data" / "upstream_models.json"
CONFIGS: dict[str, dict[str, Any]] = json.loads(MODELS.read_text())
MASKED = ("bert", "roberta", "electra", "distilbert")
CLASSES = dict.fromkeys(MASKED, "AutoModelForMaskedLM") | dict.fromkeys(("t5", "bart"), "AutoModelForSeq2SeqLM")
CLASSES |= {"vit": "AutoModelForImageClassification", "clip": "AutoModel"}
CASES: dict[str, dict[str, bool]] = {
    "plain": {},
    **{name: {name: True} for name in ("padding", "eager", "cache", "checkpoints")},
    "cache and checkpoints": {"cache": True, "checkpoints": True},
}
BATCH, LENGTH = 4, 128


class Storages(TorchDispatchMode):
    """Counts the bytes of the storages that operators give, as long as anything holds them; not those of `before`."""

    def __init__(self, before: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: dict[int, Any] = {id(one.untyped_storage()): one.untyped_storage() for one in before}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(given):
            if isinstance(tensor, torch.Tensor) and id(tensor.untyped_storage()) not in self.known:
                self.add(tensor.untyped_storage())
        return given

    def add(self, storage: Any) -> None:
        key, size = id(storage), storage.nbytes()

        def gone(_: Any) -> None:
            del self.known[key]
            self.now -= size

        self.known[key] = weakref.ref(storage, gone)
        self.now += size
        self.most = max(self.most, self.now)


def held(
    model: str, *, padding: bool = False, eager: bool = False, cache: bool = False, checkpoints: bool = False
) -> list[int]:
    """Bytes at most in the forward pass, when it has ended, and at most in the step."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model, **CONFIGS[model] | {"use_cache": cache})
    kind = getattr(transformers, CLASSES.get(model, "AutoModelForCausalLM"))
    net = kind.from_config(config, **({"attn_implementation": "eager"} if eager else {}))
    net.to(torch.bfloat16).train()
    if checkpoints:
        net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        net.enable_input_require_grads()
    ids = torch.randint(3, 512, (BATCH, LENGTH))
    given: dict[str, Any] = {"input_ids": ids, "labels": ids}
    if model in ("vit", "clip"):
        images = {"pixel_values": torch.randn(BATCH, 3, 32, 32, dtype=torch.bfloat16)}
        given = images | ({"labels": ids[:, 0] % 8} if model == "vit" else {"input_ids": ids, "return_loss": True})
    if padding and model != "vit":
        mask = torch.ones_like(ids)
        mask[:, 100:] = 0
        given["attention_mask"] = mask
    storages = Storages([*net.parameters(), *net.buffers()])
    with storages:
        made = net(**given)
        forward, loss, after = storages.most, made["loss"], storages.now
        del made
        loss.backward()
    return [forward, after, storages.most]


def every(models: Iterable[str] = CONFIGS) -> dict[str, dict[str, list[int] | None]]:
    """By model and case; None where this version has no such model or cannot do it, and why on standard error."""

    def tried(model: str, name: str) -> list[int] | None:
        try:
            return held(model, **CASES[name])
        except (ValueError, KeyError, AttributeError, TypeError, RuntimeError) as error:
            print(f"{model}, {name}: {error!r}", file=sys.stderr)
            return None

    return {model: {name: tried(model, name) for name in CASES} for model in models}


if __name__ == "__main__":
    import transformers

    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    print(json.dumps(versions | {"held": every(sys.argv[1:] or CONFIGS)}))
