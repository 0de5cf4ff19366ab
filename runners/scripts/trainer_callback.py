"""`vramsweep.TrainerCallback()`: watch.py around a Hugging Face Trainer's training.

The Trainer tells its callbacks when a training begins and when it ends well, but not when it raises. This module
tells them that too. With auto_find_batch_size each attempt has a row.
"""

from __future__ import annotations

import atexit
import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers

from vramsweep.runners.scripts.watch import Watch

_open: list[TrainerCallback] = []  # the callback whose training is running


class TrainerCallback(transformers.TrainerCallback):
    """`Trainer(callbacks=[vramsweep.TrainerCallback("mine")])`: a watched block around `Trainer.train()`.

    Batch and accumulation come from the arguments, precision from arguments and weights; given settings take
    precedence. Raises UserError for a value that a setting cannot have.
    """

    def __init__(self, name: str = "watch", **settings: Any) -> None:
        self._name, self._settings = name, settings
        self.watch = Watch(name, **settings)  # so that wrong settings are reported before the model is loaded

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin a watched block with the settings that the Trainer's arguments and weights show."""
        close_open_training()
        found = state.train_batch_size // max(1, args.n_gpu) if args.auto_find_batch_size else None
        known = {
            "micro_batch": found or args.per_device_train_batch_size,
            "grad_accum": args.gradient_accumulation_steps,
            "precision": precision(args, kwargs["model"]),
        }
        self.watch = Watch(self._name, **({k: v for k, v in known.items() if v is not None} | self._settings))
        self.watch.__enter__()
        _open.append(self)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the watched block without an error."""
        self.ended()

    def ended(self, error: BaseException | None = None) -> None:
        """End the watched block of the training, with the exception that ended it, if any."""
        if self in _open:
            _open.remove(self)
            self.watch.__exit__(None if error is None else type(error), error, None)


def precision(args: Any, model: torch.nn.Module) -> str | None:
    """Return the precision by its name for runner=trainer; None for a mixture that has no name there."""
    autocast = "bf16" if args.bf16 else "fp16" if args.fp16 else None
    weights = {weight.dtype for weight in model.parameters() if weight.is_floating_point()}
    if weights == {torch.float32} or (autocast and args.deepspeed):  # DeepSpeed keeps master copies in fp32
        return autocast or ("tf32" if args.tf32 else "fp32")
    return "bf16_pure" if weights == {torch.bfloat16} and autocast is None else None


@atexit.register
def close_open_training() -> None:
    """End a training that is over but still open, because a Trainer with its own loop did not report its end."""
    for one in list(_open):
        error = getattr(sys, "last_value", None)  # set if an exception ends the process
        one.ended(error or RuntimeError("the training stopped before its end"))


def _wrap_loop(loop: Callable[..., Any]) -> Callable[..., Any]:
    """Return the Trainer's loop, wrapped so that our callbacks learn of exceptions."""

    @functools.wraps(loop)
    def run(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return loop(trainer, *args, **kwargs)
        except BaseException as error:
            for one in trainer.callback_handler.callbacks:
                if isinstance(one, TrainerCallback):
                    one.ended(error)
            raise

    return run


# Not `train`, because auto_find_batch_size retries within it. The wrapper is never removed, because it costs nothing.
transformers.Trainer._inner_training_loop = _wrap_loop(  # type: ignore[method-assign]
    transformers.Trainer._inner_training_loop
)
