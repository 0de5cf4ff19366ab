"""Answers, for a traced step, to what transformers reads from the values of masks and positions.

transformers makes masks and runs kernels by two facts: whether a mask hides anything, and whether positions restart.
Fake tensors have no values, so the samples on the host answer. A trial's batches are taken as alike: padded if any of
its samples is, packed if any holds several documents.
"""

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import _disable_current_modes
from transformers import masking_utils
from transformers import modeling_flash_attention_utils as flash
from transformers.utils import import_utils

from vramsweep.harness.spec.runner_table import TARGETED
from vramsweep.harness.spec.trial import InvalidTrial, Trial
from vramsweep.runners.measure.patches import Replacement, patched
from vramsweep.runners.model import build, model_task

# Why a trial cannot be predicted, and what to do, in words that take more than a line.
UNPREDICTABLE: dict[str, str] = json.loads(Path(__file__).with_name("unpredictable.json").read_text("utf-8"))


@dataclass(frozen=True)
class Facts:
    """Facts about a trial's samples: lengths without padding, most documents in a sample, the longest document."""

    padded: bool
    lengths: frozenset[int]
    documents: int
    longest: int


def facts(data: build.Data, micro_batch: int = 1) -> Facts:
    """Collect the facts about these samples in batches of `micro_batch`."""
    lengths, documents, longest, padded = set(), 1, 0, False
    with _disable_current_modes():
        for sample in _in_batches(data, micro_batch):
            mask, positions = sample.get("attention_mask"), sample.get("position_ids")
            size = sample["input_ids"].numel()
            lengths.add(size if mask is None else int(mask.sum()))
            padded |= mask is not None and int(mask.sum()) < size
            starts = [0] if positions is None else (positions == 0).nonzero().flatten().tolist()
            documents = max(documents, len(starts))
            longest = max(longest, *(b - a for a, b in zip(starts, [*starts[1:], size], strict=True)))
    return Facts(padded, frozenset(lengths), documents, longest)


def _in_batches(data: build.Data, micro_batch: int) -> Iterator[model_task.Sample]:
    """Yield the samples as their batches have them."""
    for first in range(0, len(data.samples), micro_batch):
        every = range(first, min(first + micro_batch, len(data.samples)))
        yield from data.alike([data.samples[number] for number in every])


def answer_questions(trial: Trial) -> contextlib.AbstractContextManager[None]:
    """Answer transformers' questions until the context is left; those of a custom target stay unanswered."""
    if trial.runner.name in TARGETED:
        return contextlib.nullcontext()
    # batches with values (known_values.py); fake tensors alone do not mean compiling
    if trial.runner.command or build.knows_values(trial):
        original = import_utils.is_tracing
        return patched([(masking_utils, "is_tracing", lambda tensor=None: original(None))])
    return answers(cache(lambda: facts(build.data(trial), trial.micro_batch)))


def answers(ask: Callable[[], Facts]) -> contextlib.AbstractContextManager[None]:
    """Answer transformers' questions by these facts until the context is left."""
    return patched(_answers(ask))


def _answers(ask: Callable[[], Facts]) -> Iterator[Replacement]:
    """Yield stand-ins that answer questions about masks and positions; each transformers version asks some of them."""

    def find_packed_sequence_indices(position_ids: torch.Tensor) -> torch.Tensor | None:
        if ask().documents == 1:
            return None
        steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
        return (steps != 1).cumsum(-1)

    ignore_causal_mask: Any = getattr(masking_utils, "_ignore_causal_mask_sdpa", None)

    def _ignore_causal_mask_sdpa(padding_mask: torch.Tensor | None, *args: Any, **kwargs: Any) -> bool:
        if padding_mask is not None and ask().padded:
            return False
        return bool(ignore_causal_mask(None, *args, **kwargs))

    def flash_attention_mask(*args: Any, attention_mask: Any = None, **kwargs: Any) -> torch.Tensor | None:
        return attention_mask if attention_mask is not None and ask().padded else None

    is_packed: Any = getattr(flash, "_is_packed_sequence", None)

    def _is_packed_sequence(position_ids: Any, batch_size: int) -> bool:
        found = is_packed(position_ids, batch_size)  # a tensor if the positions decide
        return ask().documents > 1 if isinstance(found, torch.Tensor) else bool(found)

    def prepare_fa_kwargs_from_position_ids(position_ids: torch.Tensor) -> tuple[Any, Any]:
        starts = position_ids.new_empty(ask().documents + 1, dtype=torch.int32)
        return (starts, starts), (ask().longest, ask().longest)

    def _get_unpad_data(attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        lengths = ask().lengths
        if len(lengths) > 1:
            raise InvalidTrial(UNPREDICTABLE["varying_padding"])
        (length,) = lengths
        tokens = attention_mask.sum(dim=-1, dtype=torch.int32)
        places = attention_mask.new_empty(attention_mask.size(0) * length, dtype=torch.int64)
        return places, F.pad(torch.cumsum(tokens, dim=0, dtype=torch.int32), (1, 0)), length

    for owner, functions in (
        (masking_utils, (find_packed_sequence_indices, _ignore_causal_mask_sdpa, flash_attention_mask)),
        (flash, (_is_packed_sequence, prepare_fa_kwargs_from_position_ids, _get_unpad_data)),
    ):
        yield from ((owner, one.__name__, one) for one in functions if hasattr(owner, one.__name__))
    yield masking_utils.AttentionMaskInterface._global_mapping, "flash_attention_2", flash_attention_mask
