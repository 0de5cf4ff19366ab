"""`vramsweep.TrainerCallback()`: watching.py around a Hugging Face Trainer's training."""

from __future__ import annotations

from typing import Any

import transformers

from vramsweep.runners.watching import Watch


class TrainerCallback(transformers.TrainerCallback):
    """`Trainer(callbacks=[vramsweep.TrainerCallback("mine")])`: the same around `Trainer.train()`.

    Batch, accumulation and precision are those of the arguments.
    """

    def __init__(self, name: str = "watch", **settings: Any) -> None:
        self._name, self._settings = name, settings
        self.watch: Watch | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        known = {
            "micro_batch": args.per_device_train_batch_size,
            "grad_accum": args.gradient_accumulation_steps,
            "precision": "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32",
        }
        self.watch = Watch(self._name, **(known | self._settings))
        self.watch.__enter__()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.watch is not None:
            self.watch.__exit__(None, None, None)
