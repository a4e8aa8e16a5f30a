"""The Triton kernels without a GPU: by Triton's interpreter, which a process must choose before it imports Triton."""

import importlib.util
import os
import subprocess
import sys

import pytest
from tiny import ROOT


def test_kernels_agree_with_plain_torch():
    if importlib.util.find_spec("triton") is None:
        assert not os.environ.get("CI"), "triton is missing: .ci/run installs it"
        pytest.skip("triton is not installed: `pip install --no-deps triton`")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/interpreted_kernels.py"]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]
