"""Model, optimizer, data and precision, from the trial's axes.

Random weights and synthetic token ids are the default: neither changes memory or speed. Pretrained weights and text
data sets (padded and truncated to the sequence length, as users do, or packed) come from local folders or a hub.

The share `padding` of every synthetic sample's tokens is padding, an equal number in each. packing=wrapped joins
documents, with an end-of-text token after each, and cuts them at the sequence length; the remainder is dropped.
packing=documents also restarts the positions with each document, whose tokens see no other document. A synthetic
sample holds `DOCUMENTS` documents of one length, the last perhaps shorter.

Samples of varying lengths (harness/spec/length_distribution.py) are padded batch by batch, as a collator does, or
packed.
"""

import contextlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch.utils._python_dispatch import _disable_current_modes
from transformers import AutoConfig

from vramsweep.harness.files import plain_json
from vramsweep.harness.messages.errors import describe
from vramsweep.harness.spec import length_distribution
from vramsweep.harness.spec.trial import InvalidTrial, Trial
from vramsweep.harness.spec.trial_parser import require_unchanged_files
from vramsweep.harness.spec.version_differences import uses_sdpa
from vramsweep.runners.model import apply_techniques, model_task
from vramsweep.runners.model.model_task import IGNORED, Sample
from vramsweep.runners.trace import fake_placement

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
BF16_WEIGHTS = ("bf16_pure", "bf16_master")  # weights in bf16, without autocast
POOL = 64  # distinct samples; steps cycle through them
DOCUMENTS = 4  # documents in a packed synthetic sample
# Columns that are null if samples have no tokens
OF_TOKENS = ("tokens_per_s", "calibrated_tokens_per_s", "estimated_tokens_per_s", "estimated_tokens_per_s_no_overlap")
Samples = Sequence[Sample]


@dataclass(frozen=True)
class Data:
    """Samples of `seq_len` token ids each, on the host, and the row's columns on them, `padding_fraction` among them.

    If lengths vary, samples keep their own lengths, and `alike` makes those of a batch equally long. With `pinned`,
    batches are in page-locked memory, because a copy from pageable memory would wait for the device.
    """

    samples: Samples
    columns: Mapping[str, Any]
    pinned: bool = False
    alike: Callable[[list[Sample]], list[Sample]] = field(default=lambda samples: samples)

    def batch(self, index: int, size: int) -> dict[str, torch.Tensor]:
        """Return micro-batch number `index`: tensors of shape (size, seq_len), or narrower if lengths vary.

        It is stacked from `size` tensors even if samples repeat, because an operator's bytes follow from its tensors.
        """
        batch = self.collate([self.samples[(index * size + i) % len(self.samples)] for i in range(size)])
        return {key: value.pin_memory() for key, value in batch.items()} if self.pinned else batch

    def collate(self, samples: list[Sample]) -> Sample:
        """Return the batch of these samples."""
        with _disable_current_modes():
            chosen = self.alike(samples)
            rows = {key: [sample[key].detach() for sample in chosen] for key in chosen[0]}
            alone = {key: int(row[0]) for key, row in rows.items() if len(row) == row[0].numel() == 1}
        made = {key: torch.stack(row) for key, row in rows.items() if key not in alone}
        # because a trace takes one real element for a constant, which has no memory
        return made | {key: torch.full((1, *rows[key][0].shape), number) for key, number in alone.items()}


def prepare(trial: Trial) -> None:
    """Import, seed, and set the precision of fp32 matrix products; the settings are global to the worker.

    Raises EnvironmentFault if a file that the trial names has changed, because they are read from now on.
    """
    require_unchanged_files(trial)
    apply_techniques.imported(trial)
    torch.manual_seed(trial.seed)
    tf32 = trial.precision == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = tf32
    torch.backends.cudnn.allow_tf32 = tf32


# Largest sizes of a model, under each name for a size. With larger ones, making the model or transformers' lists of its
# layers would take for ever, or all memory.
MOST: dict[str, int] = json.loads(Path(__file__).with_name("largest_sizes.json").read_text("utf-8"))


def model(trial: Trial, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """Return the model in training mode on `device`. `dtype` defaults to the precision's: fp32 except `BF16_WEIGHTS`.

    Raises InvalidTrial if the architecture is unknown or the sequence is longer than the model's positions.
    """
    dtype = dtype or (torch.bfloat16 if trial.precision in BF16_WEIGHTS else torch.float32)
    config = read_config(trial)
    limit = getattr(config, "max_target_positions", None) or getattr(config, "max_position_embeddings", None)
    if limit is not None and trial.seq_len > limit:
        raise InvalidTrial(f"seq_len {trial.seq_len} is longer than {trial.model.name}'s {limit} positions")
    # Import the class's module now: tensors that modules keep (torchaudio's, 4 bytes) would else land on the device.
    task = model_task.find_task(config)
    task.model_class(config)

    shared = {"attn_implementation": _attention(trial), "trust_remote_code": trial.model.trust_remote_code}

    def make(dtype: torch.dtype, device: torch.device = device) -> Any:
        with device:
            try:
                return task.auto.from_config(config, dtype=dtype, **shared)
            except ValueError as error:
                raise _own_code(trial, error) or _no_model(trial, error) or error from None
            except (TypeError, ArithmeticError, AssertionError, RuntimeError) as error:
                raise _no_model(trial, error) or error from None

    simulated = trial.device.name == "simulated"
    if trial.weights == "pretrained" and simulated and not (trial.sharding == "zero3" and trial.zero_init):
        net: Any = _as_read(config, dtype, make).to(device)
    elif trial.weights == "pretrained" and not simulated:
        special = apply_techniques.pretrained(trial, device)
        given = {"config": config, "dtype": dtype, **shared, **special}
        net = task.auto.from_pretrained(str(trial.model.path), **given)
        if not special:
            net.to(device)
    else:
        with fake_placement.on_host() if simulated and device == fake_placement.HOST else contextlib.nullcontext():
            net = apply_techniques.construct(trial, make, device, dtype)
    if trial.use_cache != "default":
        net.config.use_cache = trial.use_cache == "on"
    elif trial.runner.name != "trainer":  # which decides itself, and left the cache on before transformers 5
        net.config.use_cache = False
    net = apply_techniques.applied(trial, net, device)
    net.train()
    return net


def _attention(trial: Trial) -> str:
    """Return the attention for transformers to build with; it refuses flash_attention_2 without a GPU."""
    if uses_sdpa(trial):
        return "sdpa"
    return "eager" if trial.attention == "flash_attention_2" and trial.device.name == "simulated" else trial.attention


def _as_read(config: Any, dtype: torch.dtype, make: Callable[..., Any]) -> Any:
    """Return the fake model as `from_pretrained` leaves it, on the host.

    transformers makes a model without memory and gives each weight its part of the file that safetensors mapped. If
    dtypes differ, it gives a copy (transformers 5, core_model_loading._materialize_copy). All ranks share the pages of
    a mapped file, and they can be given back, so they are not counted. Under `zero.Init` this is not called: weights
    are divided at once, and one rank alone maps the file (modeling_utils._load_pretrained_model).
    """
    mapped = (config.dtype or torch.float32) == dtype  # the checkpoint's dtype by its configuration
    net = make(dtype, fake_placement.HOST)
    with fake_placement.on_host():
        for tensor in () if mapped else (*net.parameters(), *net.buffers()):
            tensor.data = torch.empty_like(tensor)
    return net


def read_config(trial: Trial) -> Any:
    """Return the model's configuration. Raises InvalidTrial if there is none, or if it is no model's."""
    axis = trial.model
    _refuse_absurd(trial, axis.config if axis.path is None else _own_file(Path(axis.path) / "config.json"))
    if axis.path is not None:
        try:
            return AutoConfig.from_pretrained(axis.path, trust_remote_code=axis.trust_remote_code)
        except (OSError, ValueError, TypeError, ArithmeticError, StrictDataclassError) as error:
            if "connect" in str(error):  # no fault of the trial: a crash, which retry_failed=true runs again
                raise
            if (refused := _own_code(trial, error)) is not None:
                raise refused from None
            first = str(error).strip().splitlines()[0]
            if Path(axis.path).is_absolute() and not Path(axis.path).is_dir():
                first = "there is no such folder; give a local model directory or a hub id"
            raise InvalidTrial(f"model.path {axis.path}: {first}") from None
    try:
        return AutoConfig.for_model(str(axis.model_type), **axis.config)
    except (ValueError, KeyError, TypeError, ArithmeticError, StrictDataclassError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InvalidTrial(f"model {axis.name}: transformers does not accept it: {first}") from None


def _own_file(path: Path) -> Any:
    """Return the content of a model folder's config.json; {} if there is no such file, as for a hub's model.

    Raises InvalidTrial if the file cannot be read or holds no JSON object.
    """
    try:
        found = plain_json.read(path.read_bytes()) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise InvalidTrial(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise InvalidTrial(f"{path} is not a configuration, because it is not a JSON object")
    return found


def _refuse_absurd(trial: Trial, config: Mapping[str, Any]) -> None:
    """Raise InvalidTrial for sizes beyond those of any model (`MOST`)."""
    for name, most in MOST.items():
        value = config.get(name)
        numbers = value if isinstance(value, list) and value else [value]  # a number for each stage
        if value is not None and not all(type(one) is int and 1 <= one <= most for one in numbers):
            raise InvalidTrial(
                f"model {trial.model.path or trial.model.name}: {name}={describe(value)} is not allowed; use a "
                f"number from 1 to {most:,}"
            )
    for inner in config.values():  # of a model's parts: text_config, vision_config
        if isinstance(inner, dict):
            _refuse_absurd(trial, inner)


def _own_code(trial: Trial, error: Exception) -> InvalidTrial | None:
    """Return the error if transformers did not load something because it comes with code; None for other errors.

    If transformers has the architecture itself, it silently takes its own, and the code is not missed.
    """
    if trial.model.trust_remote_code or "trust_remote_code" not in str(error):
        return None
    return InvalidTrial(
        f"model.path {trial.model.path} contains its own code, which does not run by default; read it, then set "
        "model.trust_remote_code=true"
    )


def _no_model(trial: Trial, error: Exception) -> InvalidTrial | None:
    """Return the error if transformers cannot make the model of a configuration; None for other failures.

    Most RuntimeErrors are about memory or the device. With a model that we ship, other errors may be a library's fault.
    """
    of_sizes = re.search("negative dimension|[Oo]verflow|expects std|Padding_idx", str(error))
    other = isinstance(error, RuntimeError) or (trial.model.path is None and not isinstance(error, ArithmeticError))
    if trial.model.trust_remote_code or (other and not of_sizes):
        return None
    said = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    named = trial.model.path or trial.model.name
    return InvalidTrial(f"model {named}: no model can be built from its configuration: {said}")


def optimizer(trial: Trial, parameters: Iterable[torch.nn.Parameter], device: torch.device) -> Any:
    """Return the trial's optimizer over the parameters that are trained."""
    kind, arguments = apply_techniques.optimizer(trial, device)
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return apply_techniques.stepping(trial, partial(kind, **arguments), trained)


def autocast(trial: Trial, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return the autocast context of the precision; one that does nothing for precisions without autocast."""
    dtype = AUTOCAST.get(trial.precision)
    return contextlib.nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def knows_values(trial: Trial) -> bool:
    """Return whether a trace keeps the values of batches, because the model may read them."""
    return trial.model.path is not None and model_task.find_task(read_config(trial)).inputs is not None


def vocabulary(trial: Trial) -> int:
    """Return the number of token ids that synthetic data may draw from."""
    if trial.model.path is None and "vocab_size" in trial.model.config:
        return int(trial.model.config["vocab_size"])
    return int(getattr(config := read_config(trial).get_text_config(), "vocab_size", None) or config.num_labels)


@_disable_current_modes()
def data(trial: Trial) -> Data:
    """Return synthetic or text samples on the host, real ones even if all else is traced on fake tensors."""
    if knows_values(trial) and (inputs := model_task.find_task(config := read_config(trial)).inputs) is not None:
        if trial.data != "synthetic" or trial.padding or trial.packing != "none":
            raise InvalidTrial(f"model {trial.model.name} needs data=synthetic, without padding and packing")
        try:
            sample = inputs(config, _ids(trial)[0])
        except (AttributeError, TypeError) as error:  # inputs of other kinds
            raise InvalidTrial(f"model {trial.model.name}: no batch is made for its configuration: {error}") from None
        if trial.precision in BF16_WEIGHTS:
            sample = {key: one.bfloat16() if one.is_floating_point() else one for key, one in sample.items()}
        unknown = [] if "input_ids" in sample else ["padding_fraction", *OF_TOKENS]
        unknown += ["seq_len"] * (bool(unknown) and sample["labels"].ndim == 0)  # an image has no length
        return Data([sample] * POOL, {"padding_fraction": 0.0} | dict.fromkeys(unknown), trial.device.name == "cuda")
    if length_distribution.names_lengths(trial.data):
        return _of_lengths(trial)
    samples: Samples = _synthetic(trial) if trial.data == "synthetic" else _text(trial)
    masks = [sample["attention_mask"] for sample in samples if "attention_mask" in sample]
    padding = 1 - float(torch.stack(masks).float().mean()) if masks else 0.0
    return Data(samples, {"padding_fraction": padding}, trial.device.name == "cuda")


def _of_lengths(trial: Trial) -> Data:
    """Return as many samples as the trial's steps use, without length columns if simulated: others give them."""
    drawn = length_distribution.documents(trial, trial.steps() * trial.samples_per_step())
    simulated = trial.device.name == "simulated"
    whole = trial.packing != "none"
    columns = {"padding_fraction": 0.0 if whole else None} if simulated else length_distribution.length_columns(trial)
    samples = _Drawn(_ids(trial), drawn, trial.packing)
    alike = partial(_padded, to=trial.padding_to, seq_len=trial.seq_len, left=trial.padding_side == "left")
    return Data(samples, columns, trial.device.name == "cuda", **({} if whole else {"alike": alike}))


@dataclass(frozen=True)
class _Drawn(Sequence[Sample]):
    """Samples of documents of these lengths, made on access; `ids` is a pool of token ids, `seq_len` in each row."""

    ids: torch.Tensor
    documents: Sequence[tuple[int, ...]]
    packing: str

    def __len__(self) -> int:
        return len(self.documents)

    @_disable_current_modes()  # on the host, even while counting or tracing
    def __getitem__(self, number: Any) -> Any:
        documents = self.documents[number]
        ids = self.ids[number % len(self.ids)][: sum(documents)]
        if self.packing == "documents":
            return _packed(ids, torch.cat([torch.arange(length) for length in documents]))
        return {"input_ids": ids, "labels": ids} if self.packing == "wrapped" else _masked(ids, torch.ones_like(ids))


def _padded(samples: list[Sample], to: str, seq_len: int, left: bool) -> list[Sample]:
    width = length_distribution.width(max(len(sample["input_ids"]) for sample in samples), to, seq_len)

    def one(key: str, row: torch.Tensor) -> torch.Tensor:
        missing, fill = width - len(row), IGNORED if key == "labels" else 0
        return torch.nn.functional.pad(row, (missing, 0) if left else (0, missing), value=fill)

    return [{key: one(key, row) for key, row in sample.items()} for sample in samples]


def _ids(trial: Trial) -> torch.Tensor:
    """Return a pool of token ids, (`POOL`, seq_len)."""
    generator = torch.Generator().manual_seed(trial.seed)
    return torch.randint(vocabulary(trial), (POOL, trial.seq_len), generator=generator)


def _synthetic(trial: Trial) -> Samples:
    ids = _ids(trial)
    if trial.packing == "documents":
        positions = torch.arange(trial.seq_len) % -(-trial.seq_len // DOCUMENTS)
        return [_packed(row, positions) for row in ids]
    kept = trial.seq_len - length_distribution.padded_tokens(trial.padding, trial.seq_len)
    if kept == trial.seq_len:
        return [{"input_ids": row, "labels": row} for row in ids]
    mask = (torch.arange(trial.seq_len) < kept).long()
    mask = mask.flip(0) if trial.padding_side == "left" else mask
    return [_masked(row, mask) for row in ids]


def _masked(ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORED)}


def _packed(ids: torch.Tensor, positions: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return a packed sample; a document's first token has no label (transformers' DataCollatorWithFlattening)."""
    return {"input_ids": ids, "position_ids": positions, "labels": ids.masked_fill(positions == 0, IGNORED)}


def _text(trial: Trial) -> Samples:
    from transformers import AutoTokenizer

    path, trusted = str(trial.model.path), trial.model.trust_remote_code
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trusted)
    except ValueError as error:
        raise _own_code(trial, error) or error from None
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    texts = _lines(trial.data)
    if not texts:
        raise InvalidTrial(f"data {trial.data} contains no text")
    if trial.packing != "none":
        return _joined(trial, tokenizer(texts)["input_ids"], tokenizer.eos_token_id)
    tokenizer.padding_side = trial.padding_side
    encoded = tokenizer(texts, padding="max_length", truncation=True, max_length=trial.seq_len, return_tensors="pt")
    return [_masked(*sample) for sample in zip(encoded["input_ids"], encoded["attention_mask"], strict=True)]


def _joined(trial: Trial, documents: list[list[int]], end: int | None) -> Samples:
    """Join documents and cut them at the sequence length; the rest of a cut document becomes one of its own.

    Raises InvalidTrial if the tokens fill no sample.
    """
    ended = [[*document, *([] if end is None else [end])] for document in documents]
    ids = torch.tensor([token for document in ended for token in document])
    positions = torch.tensor([place for document in ended for place in range(len(document))])
    rows, length = len(ids) // trial.seq_len, trial.seq_len
    if not rows:
        raise InvalidTrial(f"data {trial.data} has {len(ids)} tokens, fewer than one sample of seq_len {length}")
    cut = [ids[row * length : (row + 1) * length] for row in range(rows)]
    if trial.packing == "wrapped":
        return [{"input_ids": row, "labels": row} for row in cut]
    samples = []
    for row, sample in enumerate(cut):
        places = positions[row * length : (row + 1) * length].clone()
        first = int((places == 0).nonzero()[0]) if (places == 0).any() else length
        places[:first] -= places[0].item()
        samples.append(_packed(sample, places))
    return samples


def _lines(name: str) -> list[str]:
    """Return the first texts of a data set: lines of a local file, or the `text` column of a hub train split."""
    path = Path(name)
    if path.is_file():
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()][:POOL]
    try:
        import datasets
    except ModuleNotFoundError:
        text = f"data {name}: there is no such file; for a hub data set, run `pip install vramsweep[data]`"
        raise InvalidTrial(text) from None
    texts = (str(record["text"]) for record in datasets.load_dataset(name, split="train", streaming=True))
    return list(itertools.islice(filter(str.strip, texts), POOL))
