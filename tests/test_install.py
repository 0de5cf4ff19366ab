"""Test the wheel, installed into an environment of its own outside the checkout."""

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest
from conftest import ROOT

from vramsweep import __version__

pytestmark = pytest.mark.slow


def call(*command: str | Path, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | more
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment that has the wheel; its dependencies come from the one that runs the tests."""
    place = tmp_path_factory.mktemp("install")
    call("git", "clone", "--quiet", ROOT, place / "clone", cwd=place)
    wheel = ("-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    call(sys.executable, *wheel, "-w", place / "dist", place / "clone", cwd=place)
    call(sys.executable, "-m", "venv", place / "env", cwd=place)
    (built,) = (place / "dist").glob("*.whl")
    names = zipfile.ZipFile(built).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"vramsweep", "hydra_plugins", f"vramsweep-{__version__}.dist-info"}
    assert "vramsweep/conf/model/qwen0.5b.yaml" in names and "vramsweep/analysis/report/report.css" in names
    python = place / "env" / "bin" / "python"
    call(python, "-m", "pip", "install", "--quiet", "--no-deps", built, cwd=place)
    purelib = call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=place).stdout.strip()
    # a plain path: the .pth files in it, the checkout's editable install among them, are not read
    (Path(purelib) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return place / "env" / "bin"


def test_a_sweep_and_its_report_outside_the_checkout(installed: Path, tmp_path: Path) -> None:
    for name in ("analysis", "harness", "runners", "conf"):  # a user's own folders
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('not this one')")
    vramsweep = installed / "vramsweep"
    words = ["model=tiny", "device=cpu", "precision=fp32", "protocol=brief", "seq_len=16,32,64", "name=out"]
    done = call(vramsweep, "sweep", "-m", *words, "report=false", cwd=tmp_path)
    assert "[3/3] ok" in done.stdout
    found = call(installed / "python", "-c", "import vramsweep.harness as h; print(h.__file__)", cwd=tmp_path).stdout
    assert str(installed.parent) in found
    call(vramsweep, "report", "results/out", "--images", "none", cwd=tmp_path)
    assert "tiny" in (tmp_path / "results" / "out" / "report.html").read_text()
    assert call(vramsweep, "--version", cwd=tmp_path).stdout == f"vramsweep {__version__}\n"


def test_the_check_on_a_card_from_a_copy_that_is_not_installed(tmp_path: Path) -> None:
    """As on a rented node: an interpreter that has never heard of us, wheels on PYTHONPATH, traps in the folder."""
    clone, out = tmp_path / "clone", tmp_path / "out"
    call("git", "clone", "--quiet", ROOT, clone, cwd=tmp_path)
    package = clone / "vramsweep" / "version.py"
    package.write_text(package.read_text().replace(f'"{__version__}"', '"0.0.1"'))
    (tmp_path / "json.py").write_text("raise SystemExit('trapped')")
    bare = [sys._base_executable, clone / "benchmarks" / "gpu_check.py", out, "--device", "cpu", "--only"]
    found = call(*bare, "gpt2_trainer,sweep", cwd=tmp_path, PYTHONPATH=sysconfig.get_path("purelib"))
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    assert len(rows) > 1 and {(row["outcome"], row["vramsweep_version"]) for row in rows} == {("ok", "0.0.1")}, found
    assert (out / "report.html").exists()
