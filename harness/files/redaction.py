"""Secrets in names, texts and plain data: finding them, naming them, masking them. Pure functions.

The results are published, and contain what users type, what is recorded and what errors say. A secret is recognised by
its name, by the form that a service gives it, or by its place in an address. It is also recognised by its value, if the
environment has it under such a name. Other secrets are not found. What a worker or a script writes itself (logs, its
own files) is not searched. Every search takes time in proportion to the text.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import lru_cache, reduce
from pathlib import Path
from typing import Any, Literal

SHORTEST = 8  # letters of a secret that is searched by its value; a shorter one would occur in any text
WINDOW = 128  # letters by which a value or a name is judged; otherwise many long ones would take too long
WRITTEN = "***"
HUB = "hf_..."
# What a name says of its value: always a secret; a secret unless it is a number; a secret if it looks random.
Kind = Literal["password", "token", "key"]


# Words of names and of values, as patterns: first the owners whose tokens and keys are secret.
_LISTS = json.loads(Path(__file__).with_name("secret_words.json").read_text("utf-8")).values()
_OWNERS, _OF_KEYS, _OF_TOKENS, _ENDS, _BEFORE, _NO_VALUES = (f"(?:{'|'.join(words.split())})" for words in _LISTS)
_PASSWORD = r"\w*(?:passw(?:or)?d|passphrase|passcode|secret|credential|pwd)s?"
_LAST = re.compile(
    rf"(?:\w+_)?(?:(?P<password>{_PASSWORD})|(?:{_OWNERS}|{_OF_KEYS})_?keys?|(?:{_OWNERS}|{_OF_TOKENS})_?tokens?|"
    rf"authorization|auth|(?:{_OWNERS}_)?pat|(?:user|db|smtp|ssh|mysql|redis|admin|root|http|ftp)_?pass|cookies?)"
)
_ALONE = re.compile("token|auth|bearer|pat|pass|pw|creds?|jwt|cookies?")
_MAYBE = re.compile(
    rf"(?:^|_)(?:\w*tokens?|keys?|apikey|o?auths?|pats?|cookies?|jwt|bearer|signature|sig|{_PASSWORD})(?=_|$)"
)
# and words that make a name harmless
_ABOUT = re.compile(rf"(?:^|_)(?:{_ENDS}|(?:{_BEFORE})_(?:tokens?|keys?|pat|auth|pass|signature))$")
_ENDING = re.compile(r"(?:_(?:\d+|value|text|string|str|raw|plain|old|new))+$")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")

# Names with what follows: NAME=VALUE, "NAME": "VALUE", --NAME VALUE, ["--NAME", "VALUE"], ENV["NAME"] = "VALUE".
_EQUALS = r"""(?:'"'"'|\\{0,3}["']?)\]?[ \t]{0,8}(?::=|=>|=|:(?![:/]))(?!=)[ \t]{0,8}"""
_PAIR = re.compile(
    rf"""(?<![\w.-])(?:(?P<switch>--?[A-Za-z][\w.-]*+)(?:{_EQUALS}|(?P<space>(?:'"'"'|\\{{0,3}}["']?),?\s{{1,20}}))|(?P<name>\w[\w.-]*+){_EQUALS})"""
)
_QUOTED = re.compile(
    r"""[\[(]{0,2}(?:(?P<quote>\\+["']|'"'"')(?P<other>(?:(?!(?P=quote))[^\n])*)|"(?P<double>(?:[^"\\\n]|\\.)*)|"""
    r"""'(?P<single>(?:[^'\\\n]|\\.)*))"""
)
# The content of brackets, with quoted text and three more levels inside; to the line's end if they do not close.
_PASSED = r"""(?:"(?:[^"\\]|\\.)*+"|'(?:[^'\\]|\\.)*+'|[^\[\](){}"'\\]|\\.)"""
_NESTED = reduce(lambda inner, _: rf"(?:{_PASSED}|[\[({{]{inner}*+[\])}}])", range(3), _PASSED)
_INSIDE = re.compile(rf"[\[({{](?P<value>{_NESTED}*+)[\])}}]|[\[({{](?P<rest>[^\n]*)", re.DOTALL)
_OPENS = re.compile(r"""(?:[\[({]\s*+)++(?:\\*["']|[\w.-]+\s*:)""")
_ITEM = re.compile(r"""(?:^|[:,\[({])\s*+\\*+["']*+([^\s"',:\\\[\](){}]++)(?!\\*["']*\s*:)""")
_SCHEME = re.compile(r"""["']?(?:basic|bearer|token|digest|negotiate|apikey)[ \t]+(?=[^\s-])""", re.IGNORECASE)
_PLAIN = re.compile(r"""[\[(]{0,2}(?P<value>(?:[^\s"']|["'](?![\s,;:)}\]\\]|$))+)""")
_IN_QUERY = re.compile(r"""(?P<value>[^&\s"'<>]+)""")
_TO_LINE_END = re.compile(r"""(?P<value>[^\n"']+)""")
_UNTIL = {'"': re.compile(r'(?P<value>[^"\n]+)'), "'": re.compile(r"(?P<value>[^'\n]+)")}
# Values that are no secrets: empty, masked, given elsewhere, a switch's, a way to sign in, or a word of a sentence.
_NONE = re.compile(
    r"\{?[*.…]*|\w{0,8}\.{3}|\$(?:\w+|[({].*)|<[^>]*>|=.*|\{[\w.{}]*\}.*|os\.(?:environ|getenv).*|\d|" + _NO_VALUES,
    re.IGNORECASE | re.DOTALL,
)
_SWITCH = re.compile(r"--?[A-Za-z][\w.-]*")
_CLOSING = ",;)}]\\"
_NUMBER = re.compile(r"[-+]?[\d.]+(?:e[-+]?\d+)?", re.IGNORECASE)
_PLACE = re.compile(
    r"(?:~|\.{0,2})/(?![A-Za-z0-9/+=]{39}$).*|[\w./~-]+\.(?:json|ya?ml|toml|txt|pem|key|crt|env|ini|cfg|py)", re.DOTALL
)

# The forms of secrets that are found without a name, and their kinds.
_LINES = Path(__file__).with_name("secret_forms.tsv").read_text("utf-8").splitlines()[1:]
_FORM = {kind: re.compile(form, re.DOTALL) for kind, form in (line.split("\t") for line in _LINES)}
_ANYONE = re.compile(r"://[^/\s]*@|\b[\w.-]{1,64}:[^\s:@/]{3,64}@\w")
_RUN = re.compile(r"[A-Za-z0-9+=]{20,}")
_LONG_RUN = re.compile(r"[\w+=-]{32,}", re.ASCII)
_UUID = re.compile(r"(?:GPU-|MIG-)?[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)


@lru_cache(maxsize=4096)
def secret_kind(name: str) -> Kind | None:
    """Return the kind of secret that a setting, field or variable of this name holds; None if its name says nothing."""
    parts = ["_".join(_WORD.findall(part)).lower() for part in name[-WINDOW:].rpartition(".")[::2]]
    own, words = (_ENDING.sub("", one) for one in (parts[1], "_".join(filter(None, parts))))
    if "/" in name or _ABOUT.search(words):
        return None
    if (last := _LAST.fullmatch(words)) or _ALONE.fullmatch(own):
        return "password" if last and last["password"] else "token"
    if not _MAYBE.search(words):
        return None
    return "token" if name.isupper() and "_" in words else "key"  # in capitals: an environment variable


def is_secret(value: Any, name: str, of: Kind | None) -> bool:
    """Return whether a value is a secret, under a name of kind `of`; a placeholder or a path is none."""
    text = str(value).rstrip(_CLOSING)
    if of is None or not isinstance(value, (str, int, float)) or _NONE.fullmatch(text) or _PLACE.fullmatch(text):
        return False
    if of == "key":
        return _random(_RUN, text)
    name, same = (re.sub(r"\W", "_", f"_{one}").lower() for one in (name, text))
    return not name.endswith(same) and (of == "password" or not _NUMBER.fullmatch(text))


def _random(run: re.Pattern[str], text: str) -> bool:
    return any(sum(c.isdigit() for c in one) >= 4 and not one.isdigit() for one in run.findall(text))


def _secrets(text: str) -> Iterator[tuple[int, int, str]]:
    """Yield begin and end of each secret in a text, and its name or that of its form."""
    at = 0
    while pair := _PAIR.search(text, at):
        at, name = pair.end(), (pair["switch"] or pair["name"])[-WINDOW:]
        of = secret_kind(name)
        if of is None or (pair["space"] and text.startswith("-", at)):  # another switch
            continue
        of, value, at = _value(text, pair, name, of)
        short = value.match(text, at, at + WINDOW)
        held = short[short.lastgroup or 0] if short else ""
        if short and any(is_secret(item, name, of) for item in (_ITEM.findall(held) if value is _INSIDE else [held])):
            full = value.match(text, at, at + 32 * WINDOW if value is _INSIDE else len(text)) or short
            begin, at = full.span(full.lastgroup or 0)
            yield begin, begin + len(text[begin:at].rstrip(_CLOSING)), name
    for name, form in _FORM.items():
        yield from ((*match.span(match.lastgroup or 0), name) for match in form.finditer(text))


def _value(text: str, pair: re.Match[str], name: str, of: Kind) -> tuple[Kind, re.Pattern[str], int]:
    """Return a value's kind, the pattern that reads it, and where it begins. Its surroundings may change the kind."""
    begin, at = pair.span()
    opened, gap = text[max(0, begin - 1) : begin], text[max(pair.end("switch"), pair.end("name")) : at]
    if opened and opened in "?&":
        return "token" if of == "key" else of, _IN_QUERY, at
    if opened in _UNTIL and opened not in gap and text[at : at + 1] not in _UNTIL:
        return of, _UNTIL[opened], at
    before = text[max(0, begin - 3) : begin].rstrip(" \t")
    in_words = ":" in gap and opened not in _UNTIL and before and before[-1] not in "{,([\n>"  # unexpected token: x
    lone: Kind = "key" if in_words and _ALONE.fullmatch(name) else of
    if _OPENS.match(text, at, at + WINDOW):
        return lone, _INSIDE, at
    if ":" not in gap or opened in _UNTIL or _QUOTED.match(text, at, at + WINDOW):
        return of, (_QUOTED if _QUOTED.match(text, at, at + WINDOW) else _PLAIN), at
    scheme = _SCHEME.match(text, at)
    return lone, (_TO_LINE_END if "ookie" in name else _PLAIN), scheme.end() if scheme else at


@lru_cache(maxsize=1024)  # nearly all trials of a sweep have the same texts
def secret_problem(text: str) -> str | None:
    """Return a message if a text holds a password or the like, because all that is typed is recorded; else None."""
    return next((_said(name) for _, _, name in _secrets(text)), None)


def _said(name: str) -> str:
    variable = re.sub(r"\W", "_", name.strip("-.").rpartition(".")[2].upper())
    if name == HUB or re.fullmatch(r"(AUTH_)?TOKEN|.*_?HUB_TOKEN", variable):
        variable = "HF_TOKEN"
    how = "or from a file" if name in _FORM and name != HUB else f"as {variable}"
    return f"{name} would be written into the results; let the script read it from the environment, {how}"


def suspicious(text: str) -> bool:
    """Return whether a variable's value may hold a secret, whatever the variable's name; a GPU's uuid is none."""
    return bool(_ANYONE.search(text) or secret_problem(text) or _random(_LONG_RUN, _UUID.sub("", text)))


def mask_text(text: str, known: Collection[str] = ()) -> str:
    """Return the text with its secrets, and those in `known`, replaced by ***."""
    for secret in known:
        text = text.replace(secret, WRITTEN)
    parts, at = [], 0
    for begin, end, _ in sorted(_secrets(text)):
        if begin >= at:
            parts += [text[at:begin], WRITTEN]
        at = max(at, end)
    return "".join([*parts, text[at:]])


def _each(value: Any, change: Callable[[Any, str, Kind | None], Any], name: str = "", of: Kind | None = None) -> Any:
    """Return plain data with each leaf replaced by `change(leaf, its name, the name's kind)`."""
    if isinstance(value, Mapping):
        inherited = of if of != "key" else None
        return {key: _each(inner, change, str(key), secret_kind(str(key)) or inherited) for key, inner in value.items()}
    if not isinstance(value, (list, tuple)):
        return change(value, name, of)
    names = [one if isinstance(one, str) and _SWITCH.fullmatch(one) else name for one in ("", *value)]
    pairs = zip(value, names, strict=False)
    return [_each(inner, change, own, of if own == name else secret_kind(own)) for inner, own in pairs]


def redact(value: Any, known: Collection[str] = ()) -> Any:
    """Return plain data with secrets in all its texts, those in `known`, and values under a secret's name as ***."""

    def clean(leaf: Any, name: str, of: Kind | None) -> Any:
        return WRITTEN if is_secret(leaf, name, of) else mask_text(leaf, known) if isinstance(leaf, str) else leaf

    return _each(value, clean)


def secrets_problem(value: Any) -> str | None:
    """Return the message of `secret_problem` for the first secret in plain data; None if there is none."""
    every: list[str | None] = []
    _each(
        value,
        lambda leaf, name, of: every.append(_said(name) if is_secret(leaf, name, of) else secret_problem(str(leaf))),
    )
    return next(filter(None, every), None)


def contains_secret(value: Any, known: Collection[str]) -> bool:
    """Return whether plain data holds one of the `known` secrets."""
    return bool(redact(value, known) != redact(value))
