"""The public function `vramsweep.estimate`, and what it returns."""

import html
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map

from vramsweep.harness.allocator import config as allocator_config
from vramsweep.harness.allocator.replay import grid
from vramsweep.harness.hardware import gpu_lookup
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.messages.suggestions import check_listed
from vramsweep.harness.messages.units import format_size
from vramsweep.harness.process.interpreter import draw_page
from vramsweep.harness.search.axis_search import SecantSearch, drive
from vramsweep.harness.spec import fit_text
from vramsweep.harness.spec.trial import MOST
from vramsweep.runners.estimate import training_step
from vramsweep.runners.estimate.training_step import MISTAKES, PRECISIONS, SHARDINGS, Request, Sizes
from vramsweep.runners.predict import explanation as explaining
from vramsweep.runners.predict.explanation import Moment
from vramsweep.runners.predict.memory_timeline import timeline
from vramsweep.runners.trace.trace_data import Trace

ALLOCATORS = {"default": "", "expandable": "expandable_segments:True"}  # names for settings, as allocator= has them
MOST_GPUS = 3  # that fit, in advice
LONGEST = 1 << 17  # of a model that does not say how many positions it has


@dataclass(frozen=True)
class Change:
    """A change of the run, as words, and what is predicted with it: peaks in bytes, and whether it fits."""

    change: str
    peak_allocated: int
    peak_reserved: int
    fits: bool

    def __str__(self) -> str:
        fits = "fits" if self.fits else "does not fit"
        return f"{self.change}: peak reserved {format_size(self.peak_reserved)}, {fits}"


@dataclass(frozen=True)
class Page:
    """A figure as a page of HTML, which a notebook shows."""

    text: str = field(repr=False)

    def save(self, path: str | Path) -> Path:
        """Write the page to a file and return its path."""
        Path(path).write_text(self.text, encoding="utf-8")
        return Path(path)

    def _repr_html_(self) -> str:
        return f'<iframe srcdoc="{html.escape(self.text)}" width="100%" height="620" frameborder="0"></iframe>'


@dataclass(frozen=True, repr=False)
class Estimate:
    """Predicted memory of a training step on one GPU; all sizes are in bytes.

    `fits`: no request fails under `limit`, the bytes that PyTorch's allocator can have of the GPU. If one fails, the
    peaks are those of a run without a limit. `peak_reserved_most` is the upper bound if the CPU runs ahead of the GPU;
    None if that changes nothing. `parts` are the bytes by category at the peak; they sum to
    `peak_allocated`. `phases` are loading and the last step's phases, each at its peak. `not_covered` says, after a
    code and a colon, what the peaks do not include and what an object was taken as.
    """

    fits: bool
    peak_allocated: int
    peak_reserved: int
    peak_reserved_most: int | None
    limit: int
    parts: Mapping[str, int]
    phases: tuple[Moment, ...]
    not_covered: tuple[str, ...]
    _request: Request
    _trace: Trace

    def timeline(self) -> Page:
        """Return the figure of memory from event to event, as `vramsweep timeline` draws it, in another process.

        Raises UserError if it cannot be drawn.
        """
        trial = self._request.trial()
        names = ("seq_len", "micro_batch", "precision", "sharding", "world_size")
        about = {name: getattr(trial, name) for name in names}
        about |= {"model": trial.model.name, "runner": "estimate", "allocator": trial.allocator.name}
        found = timeline(self._trace, allocator_config.parse(self._request.allocator), self.limit)
        assert found is not None  # because something is traced
        record = {"trial_id": "estimate", "about": about | {"gpu": trial.device.gpu}, "timeline": asdict(found)}
        with tempfile.TemporaryDirectory() as folder:
            page = Path(folder) / "timeline.html"
            draw_page(json.dumps([record]), page)
            return Page(page.read_text(encoding="utf-8"))

    def largest(self, dimension: str) -> int | None:
        """Return the largest size of a dimension of the batch that fits, within 3 %; None if no size fits.

        `dimension` is "batch", the first of every tensor, or "seq_len", the second, of token ids. Each try traces
        again, about six in all. Raises UserError if the dimension cannot be told, or a try cannot be traced.
        """
        start, places = _find_dimension(self._request, dimension)
        longest = getattr(getattr(self._request.model, "config", None), "max_position_embeddings", None) or LONGEST
        most = max(start, longest if dimension == "seq_len" else MOST)

        def need(value: int) -> int:
            changed = _resized(self._request, places, value)
            found = self if value == start else _estimate(changed)
            return found.peak_reserved if found.fits else max(found.peak_reserved, self.limit + 1)

        search = SecantSearch(start, most, self.limit)
        drive([search], lambda asked: {0: {value: need(value) for value in asked[0]}})
        return search.found()

    def advise(self) -> tuple[Change, ...]:
        """Return changes that save memory, each predicted alone: first those that fit, by peak reserved.

        They are settings of the allocator, half of the batch, activation checkpointing if the model offers it, bf16,
        and GPUs that are large enough. Changes that cannot be traced, or save nothing, are left out.
        """
        found = [self._best_setting(), *self._other_runs()]
        found = [one for one in found if one.peak_reserved < self.peak_reserved or (one.fits and not self.fits)]
        return tuple(sorted(found, key=lambda one: (not one.fits, one.peak_reserved))) + tuple(self._larger_gpus())

    def _best_setting(self) -> Change:
        """Return the allocator's setting with the lowest peak, the simplest of equal ones, by replay."""
        results = [(conf, replace(self._request, allocator=conf)) for conf in grid(limited=True)]
        found = [(f"PYTORCH_CUDA_ALLOC_CONF={conf}", _result(asked, self._trace, ())) for conf, asked in results]
        return min((_change(*one) for one in found), key=lambda one: (not one.fits, one.peak_reserved))

    def _other_runs(self) -> Iterator[Change]:
        asked, runs = self._request, dict[str, Request]()
        try:
            start, places = _find_dimension(asked, "batch")
            runs[f"batch {start // 2} instead of {start}"] = _resized(asked, places, start // 2)
        except UserError:
            start = 1
        if start < 2:
            runs.clear()
        if hasattr(asked.model, "gradient_checkpointing_enable") and not asked.checkpointing:
            runs["activation checkpointing (gradient_checkpointing_enable)"] = replace(asked, checkpointing=True)
        if asked.precision in (None, "fp32", "tf32"):
            runs['precision="bf16" (autocast)'] = replace(asked, precision="bf16")
        for name, request in runs.items():
            try:
                found = _estimate(request)
            except UserError:
                continue
            yield _change(name, found)

    def _larger_gpus(self) -> Iterator[Change]:
        share = allocator_config.parse(self._request.allocator).per_process_memory_fraction
        least = self._request.trial().device.card.capability
        enough = gpu_lookup.gpus_with_enough(int(self.peak_reserved / share) + 1, 0.0, least)
        for gpu in () if self.fits else enough[:MOST_GPUS]:
            yield Change(f'gpu="{gpu.name}"', self.peak_allocated, self.peak_reserved, True)

    def __repr__(self) -> str:
        return "\n".join([f"<Estimate: {self._verdict()}", *(f"  {line}" for line in self._lines())]) + ">"

    def _repr_html_(self) -> str:
        lines = "".join(f"<li>{html.escape(line)}</li>" for line in self._lines())
        return f"<p><b>{html.escape(self._verdict())}</b></p><ul>{lines}</ul>"

    def _verdict(self) -> str:
        need, limit = self.peak_reserved, self.limit
        most = fit_text.bound_reserved(need, self.peak_reserved_most)
        text = fit_text.describe_fit(need, most, limit) if self.fits else fit_text.describe_misfit(need, limit)
        return f"{self._request.trial().model.name} on {self._request.trial().device.card.name}, predicted: {text}"

    def _lines(self) -> Iterator[str]:
        yield f"peak allocated {format_size(self.peak_allocated)}: " + ", ".join(
            f"{name.replace('_', ' ')} {format_size(size)}"
            for name, size in sorted(self.parts.items(), key=lambda one: -one[1])
            if size
        )
        names = (f"{'loading' if one.step is None else one.phase} {format_size(one.allocated)}" for one in self.phases)
        yield "phases: " + ", ".join(names)
        yield from (f"not covered: {text}" for text in self.not_covered)


def estimate(
    model: torch.nn.Module | Callable[[], torch.nn.Module],
    batch: Any,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    loss: Callable[[Any, Any], torch.Tensor] | None = None,
    gpu: str = "l4-24gb",
    precision: str | None = None,
    allocator: str = "default",
    world_size: int = 1,
    sharding: str | None = None,
) -> Estimate:
    """Predict the GPU memory of training steps of your own objects, in this process, which stays as it was.

    No weight is copied, no GPU is used: three steps run on fake tensors. A step is forward, loss, backward, optimizer
    step and zero_grad. The output is freed once the loss exists; a loop that keeps it needs its bytes more.

    `model` is a module, on any device, or a function that makes one. `batch` is a tensor, a dict (given by name), a
    tuple or list (in order), or such with (shape, dtype) for tensors. `optimizer` is an instance, a class or a function
    of parameters; default: AdamW. `loss` is a function of (output, batch); default: the output's `loss`, or its mean.
    With `loss`, a tuple's first elements go to the model, as many as its forward requires; of a dict, the names that it
    has. `precision` is as in a trial: fp32, tf32, bf16 and fp16 (autocast, fp32 weights), bf16_pure; default: as the
    model is. `allocator` is default, expandable, or a PYTORCH_CUDA_ALLOC_CONF. `sharding` is ddp, fsdp1 or fsdp2 over
    `world_size` GPUs, of which each gets `batch`. Sizes of the result are in bytes.

    Raises UserError, in a line or two, for what the caller can fix.

    >>> found = vramsweep.estimate(model, batch, torch.optim.AdamW, gpu="l4-24gb", precision="bf16")
    >>> found.fits, found.peak_reserved, found.advise()
    """
    inner, ranks, notes = training_step.unwrap(model)
    if not callable(inner):
        raise UserError(f"model: a {type(model).__name__}; give a torch.nn.Module, or a function that makes one")
    sizes, facts = training_step.read_batch(batch)
    if ranks and sharding is None:
        sharding, world_size = "ddp", ranks
    check_listed(f"gpu={gpu}", "GPU", gpu, [one.name for one in gpu_lookup.GPUS])
    check_listed(f"sharding={sharding}", "sharding", sharding or "none", SHARDINGS)
    check_listed(f"precision={precision}", "precision", precision or "fp32", PRECISIONS)
    if type(world_size) is not int or not 1 <= world_size <= MOST:
        raise UserError(f"world_size={world_size}: allowed is a whole number of GPUs from 1 on")
    if world_size > 1 and sharding in (None, "none"):
        raise UserError(f'world_size={world_size} needs a sharding; add sharding="fsdp2", "fsdp1" or "ddp"')
    conf = allocator_config.parse(ALLOCATORS.get(allocator, allocator)).render()
    optimizer = getattr(optimizer, "optimizer", optimizer)  # inside accelerate's
    if isinstance(optimizer, torch.optim.Optimizer):
        own = {id(one) for one in inner.parameters()} if isinstance(inner, torch.nn.Module) else set()
        if not any(id(one) in own for group in optimizer.param_groups for one in group["params"]):
            raise UserError(MISTAKES["other_optimizer"])
    elif optimizer is not None and not callable(optimizer):
        raise UserError(f"optimizer: a {type(optimizer).__name__}; give an instance, a class or a function")
    return _estimate(
        Request(inner, sizes, optimizer, loss, gpu, precision, conf, world_size, sharding or "none", facts, notes=notes)
    )


def _estimate(request: Request) -> Estimate:
    return _result(request, *training_step.trace_request(request))


def _result(request: Request, trace: Trace, notes: tuple[str, ...]) -> Estimate:
    trial = request.trial()
    limit = trial.memory_limit()
    config = allocator_config.parse(request.allocator)
    found = explaining.explanation(trace, config, gpu_lookup.memory_limit(trial.device.card))
    assert found is not None  # because something is traced
    return Estimate(
        fits=found.refused is None,
        peak_allocated=found.peak.allocated,
        peak_reserved=found.peak_reserved,
        peak_reserved_most=found.peak_reserved_most,
        limit=limit,
        parts=found.peak.parts,
        phases=found.phases,
        not_covered=notes,
        _request=request,
        _trace=trace,
    )


def _change(name: str, found: Estimate) -> Change:
    return Change(name, found.peak_allocated, found.peak_reserved, found.fits)


Places = Callable[[Sizes], list[int]]  # the dimensions of a tensor that are meant


def _find_dimension(request: Request, name: str) -> tuple[int, Places]:
    """Return a dimension's size, and which dimensions of each tensor it is. Raises UserError if that cannot be told."""
    sizes = training_step.sizes_of(request.batch)
    if name == "batch":
        found = {one.shape[0] for one in sizes if one.shape}
        if len(found) == 1:
            return found.pop(), lambda one: [0] if one.shape else []
        why = f"the first dimensions of the tensors differ ({', '.join(map(str, sorted(found)))})"
    elif name == "seq_len":
        tokens = {one.shape[1] for one in sizes if len(one.shape) == 2 and not one.dtype.is_floating_point}
        if len(tokens) == 1:
            length = tokens.pop()
            return length, lambda one: [i for i, size in enumerate(one.shape) if i and size == length]
        why = "no tensor of whole numbers has two dimensions, or several differ"
    else:
        why = "there is no such dimension"
    raise UserError(f'largest("{name}"): {why}; "batch" is the first dimension of all tensors, "seq_len" the second')


def _resized(request: Request, places: Places, value: int) -> Request:
    def change(one: Any) -> Any:
        if not training_step.is_sizes(one):
            return one
        changed = places(one)
        return Sizes(tuple(value if i in changed else size for i, size in enumerate(one.shape)), one.dtype)

    return replace(request, batch=tree_map(change, request.batch, is_leaf=training_step.is_sizes))
