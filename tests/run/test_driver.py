"""What is said where the NVIDIA driver is older than the CUDA that torch is built for."""

import subprocess
import sys

import pytest
from tiny import ROOT

from common.run import driver


@pytest.mark.parametrize(
    "cuda, built_for, expected",
    [
        (None, "13.0", None),
        (None, None, None),
        ((13, 0), "13.0", None),
        ((13, 2), "12.6", None),
        ((12, 8), "12.6", None),
        ((12, 8), "13.0", "--index-url https://download.pytorch.org/whl/cu126"),
        ((12, 8), None, "--index-url https://download.pytorch.org/whl/cu126"),
        ((13, 0), None, "CPU build"),
    ],
)
def test_advice(monkeypatch, cuda, built_for, expected):
    monkeypatch.setattr(driver, "driver_cuda", lambda: cuda)
    line = driver.advice(built_for)
    if expected is None:
        assert line is None
    else:
        assert expected in line and "\n" not in line and f"torch=={driver.torch_pin()}" in line
        assert ("--index-url" in line) == (cuda < (13, 0))


def test_setup_stops_before_the_download(monkeypatch, capsys):
    monkeypatch.setattr(driver, "driver_cuda", lambda: (12, 8))
    assert driver.main() == 2
    assert "make install TORCH_INDEX=https://download.pytorch.org/whl/cu126" in capsys.readouterr().err
    monkeypatch.setattr(driver, "driver_cuda", lambda: (13, 0))
    assert driver.main() == 0


def test_runs_without_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('set-up asks before torch is installed')")
    code = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]; from common.run import driver; driver.main()"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_make_lists_its_targets():
    done = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert all(f"make {target}" in done.stdout for target in ("install", "train", "test", "style", "fetch"))
