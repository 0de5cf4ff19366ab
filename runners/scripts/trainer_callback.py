"""`vramsweep.TrainerCallback()`: watch.py around a Hugging Face Trainer's training.

The Trainer tells its callbacks where a training begins and where it ends well, and nothing of one that raises; of that
they are told here. With auto_find_batch_size each attempt has a row.
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

_open: list[TrainerCallback] = []  # the one whose training goes on


class TrainerCallback(transformers.TrainerCallback):
    """`Trainer(callbacks=[vramsweep.TrainerCallback("mine")])`: the same around `Trainer.train()`.

    Batch and accumulation are those of the arguments, precision that of arguments and weights; what is given counts
    before. Raises UserError for a value that a setting cannot have.
    """

    def __init__(self, name: str = "watch", **settings: Any) -> None:
        self._name, self._settings = name, settings
        self.watch = Watch(name, **settings)  # what is wrong with them is said before the model is loaded

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
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
        self.ended()

    def ended(self, error: BaseException | None = None) -> None:
        """The training is over, by an exception or well."""
        if self in _open:
            _open.remove(self)
            self.watch.__exit__(None if error is None else type(error), error, None)


def precision(args: Any, model: torch.nn.Module) -> str | None:
    """As runner=trainer has them; None for a mixture that has no name there."""
    autocast = "bf16" if args.bf16 else "fp16" if args.fp16 else None
    weights = {weight.dtype for weight in model.parameters() if weight.is_floating_point()}
    if weights == {torch.float32} or (autocast and args.deepspeed):  # which keeps master copies in fp32
        return autocast or ("tf32" if args.tf32 else "fp32")
    return "bf16_pure" if weights == {torch.bfloat16} and autocast is None else None


@atexit.register
def close_open_training() -> None:
    """A training is still open and yet over: of a Trainer with a loop of its own, which nothing was told of."""
    for one in list(_open):
        error = getattr(sys, "last_value", None)  # of a process that an exception ends
        one.ended(error or RuntimeError("the training was left before its end"))


def _wrap_loop(loop: Callable[..., Any]) -> Callable[..., Any]:
    """The Trainer's loop, with our callbacks told of what it raises."""

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


# Not `train`, within which auto_find_batch_size tries again and again. It stays so: it costs nothing.
transformers.Trainer._inner_training_loop = _wrap_loop(  # type: ignore[method-assign]
    transformers.Trainer._inner_training_loop
)
