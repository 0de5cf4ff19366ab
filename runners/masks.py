"""What transformers asks masks and positions by value, answered for a traced step from the samples on the host.

Whether a mask hides anything, and whether the positions restart, decides which masks are made and which kernels run; on
fake tensors neither has a value. A trial's batches are taken as alike: padded if any of its samples is, packed if any
holds several documents.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import _disable_current_modes
from transformers import masking_utils
from transformers import modeling_flash_attention_utils as flash
from transformers.utils import import_utils

from vramsweep.harness.trial import InvalidTrial, Trial
from vramsweep.runners import build


@dataclass(frozen=True)
class Facts:
    """Of a trial's samples: the lengths without padding that occur, the most documents in one, the longest of them."""

    padded: bool
    lengths: frozenset[int]
    documents: int
    longest: int


def facts(data: build.Data, micro_batch: int = 1) -> Facts:
    """What is true of these samples, in batches of so many."""
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


def _in_batches(data: build.Data, micro_batch: int) -> Iterator[build.Sample]:
    """The samples as their batches have them."""
    for first in range(0, len(data.samples), micro_batch):
        every = range(first, min(first + micro_batch, len(data.samples)))
        yield from data.alike([data.samples[number] for number in every])


@contextlib.contextmanager
def known(trial: Trial) -> Iterator[None]:
    """transformers' questions are answered until the context is left; those of a custom target stay unanswered."""
    if trial.runner.name == "custom":
        yield
        return
    if trial.runner.command:  # its batches have their values (known_values.py)
        with mock.patch.object(masking_utils, "is_tracing", _compiles(import_utils.is_tracing)):
            yield
        return
    of_trial = cache(lambda: facts(build.data(trial), trial.micro_batch))
    with contextlib.ExitStack() as stack:
        for owner, name, make in REPLACED:
            if hasattr(owner, name):
                stack.enter_context(mock.patch.object(owner, name, make(getattr(owner, name), of_trial)))
        mapping = masking_utils.AttentionMaskInterface._global_mapping
        flash_mask = {"flash_attention_2": masking_utils.flash_attention_mask}
        stack.enter_context(mock.patch.dict(mapping, flash_mask))
        yield


def _compiles(original: Callable[..., bool]) -> Callable[..., bool]:
    """Whether something is traced that is to be compiled: fake tensors alone do not say so."""
    return lambda tensor=None: original(None)


Ask = Callable[[], Facts]


def _find_packed(original: Any, ask: Ask) -> Any:
    def find_packed_sequence_indices(position_ids: torch.Tensor) -> torch.Tensor | None:
        if ask().documents == 1:
            return None
        steps = torch.diff(position_ids, prepend=position_ids[:, :1] - 1, dim=-1)
        return (steps != 1).cumsum(-1)

    return find_packed_sequence_indices


def _ignore_causal(original: Any, ask: Ask) -> Any:
    def _ignore_causal_mask_sdpa(padding_mask: torch.Tensor | None, *args: Any, **kwargs: Any) -> bool:
        if padding_mask is not None and ask().padded:
            return False
        return bool(original(None, *args, **kwargs))

    return _ignore_causal_mask_sdpa


def _flash_mask(original: Any, ask: Ask) -> Any:
    def flash_attention_mask(*args: Any, attention_mask: Any = None, **kwargs: Any) -> torch.Tensor | None:
        return attention_mask if attention_mask is not None and ask().padded else None

    return flash_attention_mask


def _is_packed(original: Any, ask: Ask) -> Any:
    def _is_packed_sequence(position_ids: Any, batch_size: int) -> bool:
        found = original(position_ids, batch_size)  # a tensor where the positions decide
        return ask().documents > 1 if isinstance(found, torch.Tensor) else bool(found)

    return _is_packed_sequence


def _documents(original: Any, ask: Ask) -> Any:
    def prepare_fa_kwargs_from_position_ids(position_ids: torch.Tensor) -> tuple[Any, Any]:
        starts = position_ids.new_empty(ask().documents + 1, dtype=torch.int32)
        return (starts, starts), (ask().longest, ask().longest)

    return prepare_fa_kwargs_from_position_ids


def _unpadded(original: Any, ask: Ask) -> Any:
    def _get_unpad_data(attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
        lengths = ask().lengths
        if len(lengths) > 1:
            raise InvalidTrial(
                "attention=flash_attention_2 with padding of many lengths cannot be simulated: how many tokens "
                "are left differs from batch to batch; use data=synthetic with padding=, packing, or attention=sdpa"
            )
        (length,) = lengths
        tokens = attention_mask.sum(dim=-1, dtype=torch.int32)
        places = attention_mask.new_empty(attention_mask.size(0) * length, dtype=torch.int64)
        return places, F.pad(torch.cumsum(tokens, dim=0, dtype=torch.int32), (1, 0)), length

    return _get_unpad_data


REPLACED: tuple[tuple[Any, str, Callable[[Any, Ask], Any]], ...] = (
    (masking_utils, "find_packed_sequence_indices", _find_packed),
    (masking_utils, "_ignore_causal_mask_sdpa", _ignore_causal),
    (masking_utils, "flash_attention_mask", _flash_mask),
    (flash, "_is_packed_sequence", _is_packed),
    (flash, "prepare_fa_kwargs_from_position_ids", _documents),
    (flash, "_get_unpad_data", _unpadded),
)
