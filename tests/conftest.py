"""Helpers and fixtures of several tests: a tiny trial as plain values, and small sweeps with real workers."""

import ast
import base64
import contextlib
import copy
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest
import unchanged
from _pytest.capture import CaptureResult
from unchanged import pytest_addoption, pytest_configure

from vramsweep import __main__ as front_door
from vramsweep.harness.machine import gpu_readiness, machine
from vramsweep.harness.process.attempt import Launcher
from vramsweep.harness.rows.schema import Row
from vramsweep.harness.sweep import plan, run_trials

__all__ = ["pytest_addoption", "pytest_configure"]

hypothesis.settings.register_profile("untimed", deadline=None)  # a busy machine must not fail a test
hypothesis.settings.load_profile("untimed")

os.environ["VRAMSWEEP_CACHE"] = ""  # no test reads or writes the user's cache
os.environ.pop("COLUMNS", None)  # pytest-xdist sets it to 80 for its workers; a test that needs a width sets it

ROOT = Path(__file__).resolve().parents[1]
TARGETS = ROOT / "tests" / "targets"

_GIVEN = json.loads((ROOT / "tests" / "data" / "tiny.json").read_text())
TINY: dict[str, Any] = _GIVEN["TINY"]
SETTINGS: dict[str, Any] = _GIVEN["SETTINGS"]


def wait_for(condition: Callable[[], bool], seconds: float = 120) -> None:
    """Wait until the condition holds; fail the test if that takes longer than `seconds`."""
    limit = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.05)


def gone(pid: int) -> bool:
    """Return whether the process has ended."""
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def on_terminal(code: str, *words: str, columns: int = 80) -> tuple[int, str]:
    """Run Python code on a pseudo-terminal; return its exit status and all that it wrote there."""
    parent, child = pty.openpty()
    environ = os.environ | {"TERM": "xterm", "COLUMNS": str(columns), "LINES": "24"}
    environ.pop("NO_COLOR", None)
    process = subprocess.Popen([sys.executable, "-c", code, *words], stdout=child, stderr=child, env=environ, cwd=ROOT)
    os.close(child)
    said = b""
    with contextlib.suppress(OSError):  # raised when the terminal is closed
        while piece := os.read(parent, 65536):
            said += piece
    os.close(parent)
    return process.wait(), said.decode()


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of `base` with the values of `over`, key by key."""
    out = copy.deepcopy(base)
    for key, value in over.items():
        out[key] = merged(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out


def tiny(**over: Any) -> dict[str, Any]:
    """Return the tiny trial's values with some of them replaced."""
    return merged(TINY, over)


def custom(function: str, **over: Any) -> dict[str, Any]:
    """Return the values of a trial that runs a function of tests/targets/faults.py."""
    return tiny(runner={"name": "custom", "target": f"{TARGETS / 'faults.py'}:{function}"}, **over)


def refusal(kind: type[BaseException], call: Callable[..., object], /, *given: Any, **named: Any) -> str:
    """Return the message of the exception of this kind that the call must raise."""
    with pytest.raises(kind) as raised:
        call(*given, **named)
    return str(raised.value)


def _lines(name: str) -> list[tuple[str, ...]]:
    lines = (ROOT / "tests" / "data" / "tables" / f"{name}.tsv").read_text().removesuffix("\n").split("\n")
    return [tuple(line.split("\t")) for line in lines]


def cases(name: str) -> list[tuple[str, ...]]:
    """Read the cases of tests/data/tables/NAME.tsv: one per line below the headings, with tabs between cells."""
    return _lines(name)[1:]


def literal_cases(name: str) -> list[tuple[Any, ...]]:
    """Read the cases of tests/data/tables/NAME.tsv, whose cells are Python literals; a last cell may be a # remark."""
    return [tuple(ast.literal_eval(cell) for cell in line if not cell.startswith("#")) for line in cases(name)]


def source(name: str) -> str:
    """Return the text of a program or file that a test gives to a process: tests/data/children/NAME."""
    return (ROOT / "tests" / "data" / "children" / name).read_text()


def parametrized(name: str, **more: Any) -> pytest.MarkDecorator:
    """Parametrize a test with the literal cases of tests/data/tables/NAME.tsv, whose headings name arguments."""
    names = [one for one in _lines(name)[0] if not one.startswith("#")]
    rows = literal_cases(name)
    return pytest.mark.parametrize(",".join(names), rows if len(names) > 1 else [value for (value,) in rows], **more)


def save_tokenizer(folder: Path) -> None:
    """Save a tokenizer of five whole words, as transformers loads it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {word: n for n, word in enumerate(["<eos>", "<unk>", "a", "b", "c"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)


@pytest.fixture(autouse=True)
def _left_alone_afterwards() -> Iterator[None]:
    """Restore the environment and remove the group of ranks after a test, because no worker process ends here."""
    found = dict(os.environ)
    yield
    if os.environ != found:
        os.environ.clear()
        os.environ.update(found)
    torch, accelerate = sys.modules.get("torch"), sys.modules.get("accelerate.state")
    if torch is not None and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if accelerate is not None:
        accelerate.AcceleratorState._reset_state(True)


Run = Callable[..., list[Row]]


class Cli:
    """The command line, run in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], main: Callable[[list[str]], int] = front_door.main) -> None:
        self.capsys, self.main = capsys, main

    def run(self, *words: object, status: int = 0) -> CaptureResult[str]:
        """Run the verb, which must end with this status; return what it prints (`out`, `err`)."""
        self.capsys.readouterr()
        ended = self.main([str(word) for word in words])
        printed = self.capsys.readouterr()
        assert ended == status, printed.err
        return printed

    def json(self, *words: object, status: int = 0) -> Any:
        return json.loads(self.run(*words, "--json", status=status).out)

    def refuse(self, *words: object) -> str:
        """Run the verb with a user's mistake, so with status 2; return its message."""
        return self.run(*words, status=2).err


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


@pytest.fixture
def as_in_a_terminal() -> Iterator[None]:
    """Set Python's handler of SIGINT, which tests that run in the background would inherit as ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the test's own folder the current one, and return it."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Note in the test's report if its result is kept."""
    unchanged.note_kept(item)


@pytest.fixture(autouse=True)
def _locks_of_cards_of_its_own(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test process its own lock folder, because concurrent tests invent GPUs of the same names."""
    monkeypatch.setattr(gpu_readiness, "PLACE", tmp_path_factory.getbasetemp() / "locks")


@pytest.fixture(scope="session")
def warm_launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    """Yield one launcher for all sweeps of this process: its fork servers import torch once, not once a trial."""
    with Launcher("warm", tmp_path_factory.mktemp("fork-servers")) as launcher:
        yield launcher


@pytest.fixture
def run_sweep(tmp_path: Path, request: pytest.FixtureRequest) -> Run:
    """Run trials as a sweep in tmp_path/t; keywords are settings. Returns the terminal rows in the trials' order.

    Sweeps share a warm launcher, except those with `isolation="cold"`.
    """

    def run(*values: dict[str, Any], **settings: Any) -> list[Row]:
        launcher = None if settings.get("isolation") == "cold" else request.getfixturevalue("warm_launcher")
        chosen = plan.Settings(**(SETTINGS | {"isolation": "warm"} | settings))
        expanded = plan.expand_trials(values, chosen.repeats)
        rows, _ = run_trials.run(plan.order_trials(expanded), chosen, tmp_path / "t", launcher=launcher)
        return [rows[p.trial_id] for trials in expanded for p in trials]

    return run


@pytest.fixture(autouse=True)
def _skip_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("gpu") and not machine.gpus():
        pytest.skip("needs an NVIDIA card, and this machine has none")
    yield


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """Yield a headless Chromium; without it or playwright the test is skipped."""
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (pip install playwright)"
    )
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium on this machine (apt-get install chromium)")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


def unpacked(page: str) -> str:
    """Return a page's text followed by what is packed in it: its rows and the data of its figures."""
    packed = re.findall(r'<script type="text/plain"[^>]*>([^<]*)</script>', page)
    return "\n".join([page, *(zlib.decompress(base64.b64decode(text)).decode() for text in packed)])
