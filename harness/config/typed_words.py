"""Words as people type them, turned into the words of conf/, with values in Hydra's grammar for overrides.

Examples: --seq-len 512, batch_size=8, gpu=H100-80GB, model=Qwen/Qwen3-8B, seq_len=1..4096. A word that is no setting is
refused before Hydra, or anything else that is heavy, is imported.
"""

import argparse
import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from vramsweep.harness.config import conf_files
from vramsweep.harness.config.conf_files import ALIASES, whole_numbers
from vramsweep.harness.files import redaction
from vramsweep.harness.messages import suggestions, units
from vramsweep.harness.messages.argument_parser import FLAGS, VALUED
from vramsweep.harness.messages.errors import UserError
from vramsweep.harness.spec import command_template, gpu_names

KEY = re.compile(r"[A-Za-z_][\w-]*", re.ASCII)
_PLAIN = re.compile(r"[A-Za-z_][\w./:-]*", re.ASCII)
QUOTED = re.compile(r"'[^']*'|\"[^\"]*\"")
_WHOLE = re.compile(rf"{QUOTED.pattern}|\([^()]*\)|\[[^\[\]]*\]|\{{[^{{}}]*\}}")
_FLAG = re.compile(r"-{1,2}[A-Za-z][\w.-]*", re.ASCII)
_SETTING = re.compile(r"[+~]?[A-Za-z_][\w./@:-]*=", re.ASCII)
_SPAN = re.compile(r"(-?\d+)\.\.(-?\d+)(?:(?::|\.\.)(-?\d+))?")
_FUNCTION = re.compile(r"range\((-?\d+),(-?\d+)(?:,(-?\d+))?\)")
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)
_HUB = re.compile(r"(?:https?://)?(?:huggingface|hf)\.co/([^/?#]+(?:/[^/?#]+)?)(?:/\w+/main(?:/.*)?)?/?(?:[?#].*)?")
_THOUSANDS = re.compile(r"(?<!\d)\d{1,3}(?:,\d{3})*,0\d\d(?:,\d{3})*(?!\d)")  # no list has 024, but 16,384 may be one
_GPUS = re.compile(r"[\w.*:, -]*(?<!\d)[A-Za-z]\d[\w.*:, -]*|\d+[xX]\w+")  # gpus=8xh100, 4,h100
_STAGE = re.compile(r"(?:deepspeed[-_ ])?(?:zero)?[-_ ]?(?:stage)?[-_ ]?([0-3])", re.IGNORECASE)  # ZeRO's, in tools
_SWITCH = {"1": "true", "on": "true", "yes": "true", "0": "false", "no": "false", "off": "false"}
_OWN_FILES = ("-cd", "--config-dir", "-cp", "--config-path", "hydra.searchpath")  # where a user's own settings are


@dataclass(frozen=True)
class Line:
    """A command line: the verb's own options, the names in its command (`own`), and the settings that were typed.

    `closed`: no files of the user add a setting or an option.
    """

    parser: argparse.ArgumentParser
    own: Collection[str]
    settings: Sequence[str] = ()
    closed: bool = True


def understand(
    verb: str, typed: Sequence[str], parser: argparse.ArgumentParser, closed: bool = True
) -> tuple[list[str], list[str]]:
    """Return a verb's words in today's names, and remarks on those that are read otherwise than typed.

    The verb's own options (of `parser`), Hydra's and the command behind `--` stay as they are. Unless `closed`, the
    user's files may add settings and options. Raises UserError for an unknown setting, option of a group or GPU.
    """
    at = typed.index("--") if "--" in typed else len(typed)
    if verb == "run" and at == len(typed):  # the verb itself says what is missing
        return [*typed], []
    if secret := redaction.secrets_problem(list(typed[:at])):
        raise UserError(secret)
    _refuse_apart(typed[:at])
    own = command_template.placeholder_names(" ".join(typed[at:]))
    pairs = list(_spell_flags(typed[:at], Line(parser, own)))
    closed &= not any(word.partition("=")[0].lstrip("+") in _OWN_FILES for word in typed[:at])
    free = conf_files.LEFT_OUT.difference(own) if closed else frozenset()
    left = [word for word, setting in pairs if setting and conf_files.find_name(word.partition("=")[0]) in free]
    pairs = [pair for pair in pairs if pair[0] not in left]
    line = Line(parser, own, [word for word, setting in pairs if setting], closed)
    read = _leave_out([(word, _read(word, line) if setting else [word]) for word, setting in pairs])
    words = [spell_range(one, own) for _, now in read for one in now]
    notes = [note for word, now in read for note in _notes(word, " ".join(now))]
    names = ", ".join(dict.fromkeys(word.partition("=")[0] for word in left))
    notes += [f"left out, because memory and speed of a step do not depend on them: {names}"] * bool(left)
    said = {word.partition("=")[0]: word.partition("=")[2] for word in words}
    if verb in ("sweep", "plan", "run") and said.get("device.gpu", "null") not in ("", "null") and "device" not in said:
        words.append("device=simulated")
        notes.append("gpu= predicts for that GPU (device=simulated); without it the GPU here is measured")
    return [*words, *typed[at:]], notes


def refuse_bare_model(typed: Sequence[str]) -> None:
    """Raise UserError for the bare name of a model, unless a setting gives one or a file or folder has that name."""
    given = any(re.match(r"[-+]*(base[_-])?model([_-]\w+)*(=|$)", word, re.IGNORECASE) for word in typed)
    for before, word in zip(["=", *typed], typed, strict=False):
        named = word.casefold() in conf_files.hub_ids() or conf_files.find_model(word)
        if not given and "=" in before and named and not Path(word).exists():
            raise UserError(f"{word}: settings are given as KEY=VALUE; write model={word}")


def _refuse_apart(typed: Sequence[str]) -> None:
    """Raise UserError for a setting apart from its value: `model gpt2`, `seq_len=128, 256`, `model = gpt2`."""
    for at, (before, word) in enumerate(zip(["", *typed], typed, strict=False)):
        after = [*itertools.takewhile(lambda one: not _FLAG.match(one) and not _SETTING.match(one), typed[at + 1 :])]
        whole = word
        for count, part in enumerate(after, 1):
            if not (whole.endswith(("=", ",")) or part.startswith(",") or (part.startswith("=") and "=" not in whole)):
                break
            whole, said = f"{whole}{part}", " ".join([word, *after[:count]])
        if whole != word:
            raise UserError(f"{said}: no space at a comma or an =; write {whole.rstrip(',')}")
        if _SETTING.match(word) and word.endswith(","):
            raise UserError(f"{word}: a comma stands only between two values; write {word.rstrip(',')}")
        several = re.fullmatch(r"-*([\w.-]+)[= ](\d+(?: \d+)+)", " ".join([word, *after]))
        if several and ALIASES.get(name := f"{conf_files.find_name(several[1])}", name) in whole_numbers():
            raise UserError(f"{several[0]}: commas separate values; write {name}={several[2].replace(' ', ',')}")
        name, _, text = word.partition(":")
        bare = "=" not in word and not word.startswith("-") and not before.startswith("-")
        if bare and (text or after) and not Path(word).exists() and (found := conf_files.find_name(name)):
            said = word if text else f"{word} {after[0]}"
            raise UserError(f"{said}: settings are given as KEY=VALUE; write {found}={text or after[0]}")


def _leave_out(read: Sequence[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
    """Return the settings without those that agree with one by another name. Raises UserError if two differ."""
    kept = []
    for at, (word, now) in enumerate(read):
        name, key = word.partition("=")[0], now[0].partition("=")[0]
        others = {one for _, also in read for one in also if one != now[0] and one.startswith(f"{key}=")}
        on, off = str(ALIASES.get(f"{name}=true")), name != key and ALIASES.get(f"{name}=false") == now[0]
        again = any(one != word and also == now for one, also in read[:at])
        again |= on == now[0] and any(one.startswith(f"{on}_") for one in others)  # bf16=true next to bf16_pure
        if not again and not (off and others and not any(one.startswith(on) for one in others)):
            kept.append((word, now))
    given = [(one.partition("=")[0], one, word) for word, now in kept for one in now]
    renamed = {key: (one, word) for key, one, word in given if word.partition("=")[0] not in (key, "model")}
    for key, _, word in given:
        one, other = renamed.get(key, ("", word))
        if other != word:
            also = word.partition("=")[0]
            raise UserError(f"{other} is {one} by another name, and {also} is given too; leave one out")
    return kept


def _spell_flags(typed: Sequence[str], line: Line) -> Iterator[tuple[str, bool]]:
    """Yield each word, and whether it is a setting: `--seq-len 512` becomes seq_len=512. Raises UserError."""
    options, rest = line.parser._option_string_actions, list(typed)
    while rest:
        word = rest.pop(0)
        flag, equals, text = word.partition("=")
        follows = bool(rest) and not re.match(r"-{1,2}[A-Za-z]", rest[0]) and not _SETTING.match(rest[0])
        if not _FLAG.fullmatch(flag):
            yield word, bool(_SETTING.match(word)) and word[0] not in "+~"
        elif flag in options or flag in FLAGS:
            yield word, False
            if follows and not equals and (flag in VALUED if flag in FLAGS else options[flag].nargs != 0):
                yield rest.pop(0), False
        elif name := _name(flag.lstrip("-"), line):
            key = ALIASES.get(name, name)
            default = conf_files.written_defaults().get(key)
            switch = default in ("true", "false") or not {f"{name}=true", f"{key}=true"}.isdisjoint(ALIASES)
            if not (equals or follows or switch or name in conf_files.LEFT_OUT):
                raise UserError(f"{flag} has no value; write {key}=VALUE")
            yield f"{name}={text if equals else rest.pop(0) if follows else 'true'}", True
        elif not flag.startswith("--") and flag[1] in "cimprs":  # Hydra's, with a value in the same word
            yield word, False
        else:
            raise UserError(_unknown(flag.lstrip("-"), f"unrecognized arguments: {flag}", line))


def _name(typed: str, line: Line) -> str | None:
    """Return the setting's name if it is the command's own, in an open dictionary, or known; else None."""
    if typed in line.own or any(f"{typed}.".startswith(f"{place}.") for place in (*suggestions.OPEN, "hydra")):
        return typed
    return conf_files.find_name(typed)


def _unknown(typed: str, said: str, line: Line) -> str:
    """Return a message with a guess at what an unknown setting or option means; it never suggests Hydra's options."""
    flags = [flag for flag in line.parser._option_string_actions if flag not in FLAGS or flag in ("--json", "--all")]
    own = {flag.lstrip("-").replace("-", "_"): flag for flag in flags}
    return conf_files.describe_unknown(typed, said, line.parser.prog, own)


def _read(word: str, line: Line) -> list[str]:
    """Return a setting in today's words. Raises UserError for an unknown setting and for unreadable values."""
    typed, _, text = word.partition("=")
    name = _name(typed, line)
    if name is None and line.closed and re.fullmatch(r"\w[\w-]*", typed):
        raise UserError(_unknown(typed, f"{word}: there is no setting {typed!r}", line))
    if name is None or typed in line.own or name not in conf_files.all_names() - conf_files.LEFT_OUT:
        return [word]
    key = ALIASES.get(name, name)
    items = [item.strip() for item in split_values(text)]
    if key == "world_size" and _GPUS.fullmatch(text):
        key, items = "device.gpu", [text] if any(map(str.isdigit, items)) else items
    if key in whole_numbers() and (plain := _THOUSANDS.sub(lambda found: found[0].replace(",", ""), text)) != text:
        raise UserError(f"{word}: a comma separates two values; write {key}={plain}, without thousands separators")
    read = [_model(word, item, line) if key == "model" else _value(word, key, item, line) for item in items]
    (now, *more), values = sorted({one.partition("=")[0] for one in read}), [one.partition("=")[2] for one in read]
    if more:
        raise UserError(f"{word}: a folder or a hub model is a sweep of its own; leave the built-in models out")
    if now not in conf_files.setting_names():
        allowed = [f"{alias}, which is {what}" for alias, what in ALIASES.items() if alias.startswith(f"{name}=")]
        elsewhere = conf_files.ELSEWHERE.get(name)
        raise UserError(f"{word}: allowed is {', or '.join(allowed)}{f'; {elsewhere}' if elsewhere else ''}")
    hub = ["model=hub"] if now == "model.path" != key else []
    return [*hub, f"{now}={text if values == items else ','.join(values)}"]


def _value(word: str, key: str, item: str, line: Line) -> str:
    """Return KEY=VALUE of one value; some values change the key. Raises UserError, which names `word`."""
    if alias := ALIASES.get(f"{key}={item.casefold()}") or ALIASES.get(f"{key}={_SWITCH.get(item.casefold())}"):
        return alias
    if item.isdigit() and word.partition("=")[0].endswith("strategy"):
        raise UserError(f"{word}: write sharding=fsdp2 for FSDP's FULL_SHARD (1), sharding=ddp for NO_SHARD (3)")
    if key in ("sharding", "ds_config") and (stage := _STAGE.fullmatch(item)):
        return f"sharding=zero{stage[1]}"
    if key == "ds_config" and item != "null" and re.fullmatch(r"[\w./~-]+", item) and not Path(item).is_file():
        near = suggestions.did_you_mean_path(Path(item)) or "; ZeRO 3 without a file is runner=deepspeed sharding=zero3"
        raise UserError(f"{word}: there is no such file{near}")
    if key == "model.path" and item.endswith("/config.json"):
        return f"{key}={item.removesuffix('/config.json')}"
    plain = bool(re.fullmatch(r"[\w.*:, -]+", item)) and item != "null"  # neither quoted nor Hydra's grammar
    if key == "device.gpu" and re.fullmatch(r"\d\d?", item):
        raise UserError(f"{word}: gpu= is the kind of GPU, world_size= how many; CUDA_VISIBLE_DEVICES selects them")
    if key in ("device.gpu", "predict") and plain:
        found = gpu_names.find_name(item)
        if found is None and key == "device.gpu":
            raise UserError(gpu_names.unknown_gpu(word, item))
        return f"{key}={found or item}"
    if key in whole_numbers():
        _refuse_number(word, key, item)
    if plain:  # these raise for an unknown unit
        units.parse_seconds(item, f"{key}={item}") if key == "budget" else units.in_its_unit(key, item)
    names = conf_files.list_options(key)
    same = item if item in names else next((name for name in names if name.casefold() == item.casefold()), None)
    if same is None and names and plain and line.closed:
        there = conf_files.ELSEWHERE.get(item.casefold())  # sharding=fsdp, adapter=qlora
        raise UserError(f"{word}: {there}" if there else suggestions.unknown_option(key, item, names))
    return f"{key}={same or item}"


def _refuse_number(word: str, key: str, item: str) -> None:
    """Raise UserError for a range or number in other tools' spelling: 1-1024, 64:128, 2k, 1e3, [1,2], 1;2."""
    if re.fullmatch(r"\d+[-:]\d+(:\d+)?", item):
        spelled = re.sub("[-:]", "..", item, count=1)
        raise UserError(f"{word}: a range is FIRST..LAST or FIRST..LAST:STEP; write {spelled}")
    if found := re.fullmatch(r"(\d+)k", item, re.IGNORECASE):
        raise UserError(f"{word}: a whole number has no unit; write {int(found[1]) * 1024} (or {found[1]}000)")
    if re.fullmatch(r"\d+(\.\d*)?e\+?\d", item, re.IGNORECASE) and float(item).is_integer():
        raise UserError(f"{word}: a whole number has no exponent; write {float(item):.0f}")
    if re.fullmatch(r"\[\d+(, *\d+)*\]|\d+([;|/]\d+)+", item):
        raise UserError(f"{word}: commas separate values; write {key}={','.join(re.findall(r'[0-9]+', item))}")
    if key == "world_size" and item.isalpha() and item != "null":
        raise UserError(f"{word}: world_size= is the number of GPUs; write a whole number, such as world_size=8")


def _model(word: str, item: str, line: Line) -> str:
    """Return model=NAME, or model.path=PATH for a folder, a config.json or a model of the hub. Raises UserError."""
    item = found[1] if (found := _HUB.fullmatch(item)) else item
    if re.match(r"\w+://", item) or re.match(r"(spaces|datasets)/", item):
        raise UserError(f"{word}: write model=ORG/NAME for the main branch of a model of the hub; else model=./FOLDER")
    item = item if item.startswith((".", "/")) else item.rstrip("/")
    files = re.compile(r"weights=(?!random$)|data=(?!synthetic$|['\"]?lengths:)")  # only a hub's model has these
    built_in = None if any(map(files.match, line.settings)) else conf_files.hub_ids().get(item.casefold())
    folder = Path(item).parent if item.endswith("config.json") else Path(item)
    if (folder / "config.json").is_file() and item not in conf_files.list_options("model"):
        return f"model.path={value(str(folder))}"
    if built_in is None and (_HUB_ID.fullmatch(item) or re.match(r"\.{0,2}/", item)):
        return f"model.path={value(item)}"
    return _value(word, "model", built_in or (line.closed and conf_files.find_model(item)) or item, line)


def _notes(word: str, now: str) -> Iterator[str]:
    """Yield remarks on a setting that is read otherwise than typed; gpu= and device.gpu= count as the same."""
    key, _, text = word.partition("=")
    if now.partition("=")[0].endswith("_gib") and re.fullmatch(r"[\d.]+[KMGTP]B", text):
        yield f"{text} is {units.gib(text):,.2f} GiB"
    if key == "lora_target_modules" and len([*split_values(text)]) > 1 and text[0] not in "'[\"":
        yield f"{word} is one trial for each name; for one trial with all, write {key}={text.replace(',', '+')}"
    now = now.removeprefix("device.") if key == "gpu" else now
    if "/" in text and now != word and set(now.removeprefix("model=").split(",")) <= {*conf_files.file_names("model")}:
        yield f"{word} is built in, as {now}"
    elif now != word:
        more = " (fp32 weights; bf16_pure has them in bf16)" if f"{key} {now}".endswith("dtype precision=bf16") else ""
        yield f"{word} is read as {now}{', on each GPU' if now.startswith('micro_batch=') else more}"


def spell_range(word: str, own: Collection[str] = ()) -> str:
    """Return a word with ranges in Hydra's spelling; others unchanged. Names of a command's `own` settings may have
    ranges too. Raises UserError for an invalid range."""
    key, _, text = word.partition("=")
    items = [item.strip() for item in split_values(text)]
    whole = key in whole_numbers() or (key in own and all(map(_SPAN.fullmatch, items)))
    spans = [item for item in items if _SPAN.fullmatch(item) or (whole and (".." in item or _FUNCTION.fullmatch(item)))]
    if not spans or (len(items) == 1 and _FUNCTION.fullmatch(items[0])):
        return word
    if not whole:
        only = f"only whole numbers have ranges: {', '.join(sorted(whole_numbers()))}"
        raise UserError(f"{word}: {only}; for a text, type {suggestions.quote_words(key, text)}")
    if len(items) == 1:
        span = _span(word, items[0])
        return f"{key}=range({span.start},{span.stop},{span.step})"
    return f"{key}={','.join(str(n) for item in items for n in (_span(word, item) if item in spans else [item]))}"


def list_numbers(word: str) -> list[int]:
    """Return the whole numbers of seq_len=1..2048 or micro_batch=1,2,4..16, in order. Raises UserError."""
    key, _, text = word.partition("=")
    items = [item.strip().replace("_", "") for item in split_values(text)]
    found = {number for item in items for number in ([int(item)] if item.isdigit() else _span(word, item))}
    if min(found, default=0) < 1:
        raise UserError(f"{word}: {key} starts at 1")
    return sorted(found)


def _span(word: str, item: str) -> range:
    if found := _FUNCTION.fullmatch(item):
        return range(int(found[1]), int(found[2]), int(found[3] or 1))
    if (found := _SPAN.fullmatch(item)) is None:
        raise UserError(f"{word}: {item} is not a range; write FIRST..LAST or FIRST..LAST:STEP, as 1..2048")
    first, last, step = int(found[1]), int(found[2]), int(found[3] or 1)
    if step < 1:
        raise UserError(f"{word}: the step of {item} must be 1 or more")
    if last < first:
        raise UserError(f"{word}: {item} is empty, because ranges go up; write {last}..{first}")
    return range(first, last + 1, step)


def value(of: Any) -> str:
    """Return a value in Hydra's override grammar, quoted if ambiguous. Raises UserError for a key it cannot express."""
    if of is None or isinstance(of, bool):
        return "null" if of is None else str(of).lower()
    if isinstance(of, (int, float)):
        return repr(of)
    if isinstance(of, list):
        return f"[{','.join(map(value, of))}]"
    if isinstance(of, Mapping):
        for key in of:
            if not KEY.fullmatch(str(key)):
                raise UserError(f"the key {key!r} cannot be written on the command line")
        return f"{{{','.join(f'{key}:{value(v)}' for key, v in of.items())}}}"
    text = str(of)
    if _PLAIN.fullmatch(text) and text.lower() not in ("null", "true", "false", "nan", "inf"):
        return text
    text = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)  # otherwise it would be an interpolation
    return "'" + re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), text) + "'"


def split_values(text: str) -> Iterator[str]:
    """Yield the texts between the commas; commas in quotes or brackets do not separate."""
    masked, changed = text, 1
    while changed:
        masked, changed = _WHOLE.subn(lambda match: "-" * len(match[0]), masked)
    at = [n for n, sign in enumerate(masked) if sign == ","]
    return (text[low + 1 : high] for low, high in pairwise([-1, *at, len(text)]))
