"""Test the check whether a process has started CUDA: its queries, and the meaning of their answers."""

from pathlib import Path

from conftest import parametrized

from vramsweep.runners.measure import cuda_driver


def test_only_a_loaded_driver_library_is_asked(tmp_path: Path) -> None:
    maps = "7f00-7f01 r-xp 0000 08:01 12      /usr/lib/x86_64-linux-gnu/libc.so.6\n"
    assert cuda_driver.loaded(maps) is None
    for name in ("libcuda.so", "libcuda.so.1", "libcuda.so.550.54.15"):
        assert cuda_driver.loaded(f"{maps}7f02-7f03 r-xp 0000 08:01 13    /usr/lib/{name}\n") == f"/usr/lib/{name}"
    assert cuda_driver.loaded(f"{maps}7f02-7f03 r-xp 0000 08:01 13    /usr/lib/libcudart.so.12\n") is None
    assert cuda_driver.loaded(f"{maps}7f02-7f03 r-xp 0000 08:01 13    /usr/lib/libcuda.so.1 (deleted)\n")
    mine = tmp_path / "maps"
    mine.write_text("7f02-7f03 r-xp 0000 08:01 13    /nowhere/libcuda.so.1\n")
    assert "cannot report" in str(cuda_driver.unclean(mine))  # and is not loaded for the question
    assert cuda_driver.unclean() is None


@parametrized("driver_answers")
def test_anything_but_not_initialised_is_not_clean(code: int, active: bool, reason: str | None) -> None:
    found = cuda_driver.verdict(code, active)
    assert found is None if reason is None else reason in str(found)
