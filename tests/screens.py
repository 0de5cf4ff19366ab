"""Write the screens of the verbs that answer questions, as golden files: `python tests/screens.py --write`.

A screen is what a command prints to a pipe of 100 columns, without progress. Only what varies from run to run is
masked. Look at each screen before committing it: a newcomer must understand every line.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "tests" / "data" / "screens"
GPT2 = "model=gpt2 seq_len=512 micro_batch=4"
SCREENS = {
    "predict_fits": f"predict {GPT2}",
    "predict_does_not_fit": "predict model=qwen0.5b seq_len=1024 micro_batch=16 gpu=a10g-24gb",
    "predict_8_gpus": "predict model=qwen0.5b sharding=fsdp2 world_size=8 seq_len=1024 micro_batch=4",
    "predict_many": "predict model=tiny seq_len=512..2048:512 micro_batch=64,512 allocator=default,expandable "
    "gpu=t4-16gb precision=fp16",
    "predict_largest": "predict --largest seq_len model=tiny micro_batch=256 gpu=t4-16gb precision=fp16",
    "explain": f"explain {GPT2}",
    "explain_does_not_fit": "explain model=gpt2 seq_len=1024 micro_batch=16 gpu=a10g-24gb",
    "advise": "advise model=tiny precision=fp32 seq_len=512 micro_batch=16 device.memory_gib=0.9 device.capability=8.6 "
    "--most 2 --accept precision",
    "plan_to_measure": "plan model=gpt2 seq_len=256,512,1024 micro_batch=1,4 device=cuda predict=h100-80gb "
    "price_per_hour=25",
    "plan_to_predict": "plan model=gpt2,qwen0.5b seq_len=256,512,1024 device=simulated price_per_hour=25",
    "sweep_end": "sweep model=tiny seq_len=512,1024,2048 micro_batch=64 allocator=default,expandable "
    "device=simulated gpu=t4-16gb precision=fp16 name=night",
}
PROGRESS = re.compile(r"\[\d+/\d+\]|tracing |.* finished before, .* to do")


def capture_screen(name: str, folder: Path) -> str:
    """Run the screen's command in an empty folder; return its output, with what varies masked."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("VRAMSWEEP")}
    environ |= {"COLUMNS": "100", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder)}
    command = [sys.executable, "-m", "vramsweep", *SCREENS[name].split()]
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    lines = [line.rstrip() for line in done.stdout.splitlines() if not PROGRESS.match(line)]
    text = "\n".join([f"$ vramsweep {SCREENS[name]}", *lines]) + "\n"
    text = text.replace(str(folder), ".")
    return re.sub(r"(?<=predicting 6 trials on this machine's CPU: )[^)]*", "...", text)


def main(words: list[str]) -> int:
    """Write the named screens, or all; return 2 if the first word is not --write."""
    if words[:1] != ["--write"]:
        print(__doc__)
        return 2
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name in words[1:] or SCREENS:
        place = Path(tempfile.mkdtemp(prefix="vramsweep-screen-"))
        (FOLDER / f"{name}.txt").write_text(capture_screen(name, place), encoding="utf-8")
        shutil.rmtree(place)
        print(f"{FOLDER / name}.txt", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
