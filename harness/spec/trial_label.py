"""A trial as short text, for lines of progress and tables."""

from pathlib import Path

from vramsweep.harness.spec import command_template, length_distribution, trial_rules
from vramsweep.harness.spec.techniques import catalog
from vramsweep.harness.spec.trial import Trial
from vramsweep.harness.spec.trial_identity import ID_DEFAULTS


def describe_trial(trial: Trial) -> str:
    """Return the trial as one line: model, runner, length, batch, precision, and what is not the default."""
    if trial.runner.command is not None:
        return _describe_command(trial)
    parts = [trial.model.name, trial.runner.name, f"seq {trial.seq_len}", f"batch {trial.micro_batch}", trial.precision]
    if trial.sharding != "none":
        parts.insert(2, f"{trial.sharding} x {trial.world_size}")
    if trial.ds_config is not None:
        parts.append(f"ds_config={Path(trial.ds_config).name}")
    for name in ("offload_optimizer", "offload_param", "zero_init"):
        if getattr(trial, name) != ID_DEFAULTS[(name,)]:
            parts.append(f"{name}={str(getattr(trial, name)).lower()}")
    parts += [f"like {package} {version}" for package, version in trial.versions.items()]
    if trial.model.trust_remote_code:
        parts.append("its own code")
    for name in trial_rules.SIMULATED[1:]:
        if getattr(trial.device, name) != ID_DEFAULTS["device", name]:
            own = getattr(trial.device, name)
            parts.append(f"device.{name}={round(own, 2) if isinstance(own, float) else own}")
    if trial.data != ID_DEFAULTS[("data",)]:
        drawn_from = length_distribution.lengths_file(trial.data)
        parts.append(f"data={trial.data if drawn_from is None else length_distribution.PREFIX + drawn_from.name}")
    parts += catalog.changed_settings(trial)
    if trial.allocator.conf:
        parts.append(trial.allocator.name)
    return " · ".join(parts)


def _describe_command(trial: Trial) -> str:
    """Return the name of a script, and what its command is given."""
    told = command_template.placeholder_names(str(trial.runner.command))
    parts = [trial.model.name]
    for name, words in (("seq_len", "seq"), ("micro_batch", "batch")):
        parts += [f"{words} {getattr(trial, name)}"] * (name in told)
    others = [name for name in command_template.UNSAID if name in told - {"seq_len", "micro_batch"}]
    parts += [f"{name}={catalog.text(getattr(trial, name))}" for name in others]
    parts += [f"{name}={catalog.text(value)}" for name, value in trial.runner.options.items()]
    parts += [f"x {trial.world_size}"] * (trial.world_size > 1)
    return " · ".join([*parts, *([trial.allocator.name] if trial.allocator.conf else [])])
