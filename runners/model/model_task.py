"""The auto class that a model's configuration names, and one sample of inputs that the class trains on.

The class is that of `architectures`; without it, the first of `TASKS` that knows the model type. One image goes with
each sample of a vision-language model, its tokens first. `seq_len` is the number of token ids, placeholders of the
image among them, or of labels (speech recognition). A class that a model brings as code, or that none of `TASKS` has,
is taken for a causal language model. Not covered: CTC, whose loss reads values.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf

from vramsweep.harness.spec.trial import InvalidTrial

Sample = dict[str, torch.Tensor]
IGNORED = -100  # a label that the loss ignores


@dataclass(frozen=True)
class Task:
    """What a model is trained for: the auto class, and the inputs for its configuration and a row of token ids."""

    auto: Any
    inputs: Callable[[Any, torch.Tensor], Sample] | None = None  # None: token ids, which are the labels as well

    def model_class(self, config: Any) -> Any:
        """Return the class for a configuration, whose module it imports; None if the auto class has none."""
        return self.auto._model_mapping.get(type(config), None)


def find_task(config: Any) -> Task:
    """Return the task of the class that the configuration names. Raises InvalidTrial for a class that has none."""
    names = {task: task.auto._model_mapping._model_mapping.get(config.model_type) for task in TASKS}
    own = list(config.architectures or ())
    named = [task for task, name in names.items() if {*((name,) if isinstance(name, str) else name or ())} & {*own}]
    bare = not config.sub_configs and all(one.endswith("Model") for one in own)  # a model without a head gets one
    if not named and not bare and any(hasattr(hf, one) for one in own):
        raise InvalidTrial(f"config.json names {own[0]}, which no task here trains; name the class that you train")
    return next(iter([*named, *(task for task, name in names.items() if name)]), CAUSAL)


def _labelled(config: Any, labels: torch.Tensor, **inputs: torch.Tensor) -> Sample:
    return {**inputs, "labels": labels % config.num_labels}


def _image(config: Any) -> torch.Tensor:
    """Return pixels of shape (channels, height, width), 224 a side by default; Idefics drops black images."""
    size = getattr(config, "image_size", None) or 224
    return torch.ones(getattr(config, "num_channels", 3), *((size, size) if isinstance(size, int) else size))


def _image_text(config: Any, ids: torch.Tensor) -> Sample:
    """Return ids that begin with an image's placeholders, and its pixels. Qwen-VL takes patches, Idefics a list."""
    vision, arguments = config.vision_config, inspect.signature(IMAGE_TEXT.model_class(config).forward).parameters
    patch, sample = getattr(vision, "patch_size", 1), {}
    if "image_grid_thw" in arguments:  # of 16 merged patches a side, as no size is in the configuration
        side, count = 16 * vision.spatial_merge_size, 16**2
        pixels = torch.ones(side**2, getattr(vision, "in_channels", 3) * vision.temporal_patch_size * patch**2)
        sample = {"image_grid_thw": torch.tensor([1, side, side])}
    else:
        pixels = _image(vision)
        many = (pixels.shape[-1] // (patch if isinstance(patch, int) else patch[0])) ** 2
        told = getattr(config, "mm_tokens_per_image", None) or getattr(config, "image_seq_length", None)
        count = told or many // getattr(config, "scale_factor", 1) ** 2
        pixels = pixels[None] if "pixel_attention_mask" in arguments else pixels
    if len(ids) <= count:
        raise InvalidTrial(f"seq_len {len(ids)} leaves no token beside the {count} of an image; use a larger one")
    is_image = torch.arange(len(ids)) < count
    ids = (ids % max(1, config.image_token_id)).masked_fill(is_image, config.image_token_id)
    sample |= {name: is_image.long() for name in ("token_type_ids", "mm_token_type_ids") if name in arguments}
    return sample | {"input_ids": ids, "pixel_values": pixels, "labels": ids.masked_fill(is_image, IGNORED)}


def _spectrogram(config: Any, ids: torch.Tensor) -> Sample:
    """Return the mel spectrogram that fills the encoder; the token ids are the labels."""
    return {"input_features": torch.ones(config.num_mel_bins, 2 * config.max_source_positions), "labels": ids}


CAUSAL = Task(hf.AutoModelForCausalLM)
IMAGE_TEXT = Task(hf.AutoModelForImageTextToText, _image_text)
TASKS = (
    Task(hf.AutoModelForSpeechSeq2Seq, _spectrogram),
    *map(Task, (hf.AutoModelForSeq2SeqLM, hf.AutoModelForMaskedLM)),
    *(IMAGE_TEXT, CAUSAL),
    Task(hf.AutoModelForImageClassification, lambda of, ids: _labelled(of, ids[0], pixel_values=_image(of))),
    Task(hf.AutoModelForSequenceClassification, lambda of, ids: _labelled(of, ids[0], input_ids=ids)),
    Task(hf.AutoModelForTokenClassification, lambda of, ids: _labelled(of, ids, input_ids=ids)),
)
