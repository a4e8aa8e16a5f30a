"""Whether the installed NVIDIA driver can run the CUDA that torch is built for, and what to install if not.

    python -m common.run.driver       before torch is installed: stops if the default build would not run here

A build runs on every driver of its CUDA major version, so 12.6 serves the drivers of all CUDA 12.x; the default torch
wheel is built for CUDA 13. Needs nothing but the standard library.
"""

import ctypes
import os
import re
import sys

from common import ROOT

OLD_DRIVER_INDEX = "https://download.pytorch.org/whl/cu126"
DEFAULT_BUILD = "13.0"  # of the wheel that PyPI gives for the version in requirements.txt


def torch_pin():
    """The torch version that requirements.txt names."""
    text = (ROOT / "requirements.txt").read_text()
    return re.search(r"^torch==(\S+)", text, re.MULTILINE).group(1)


def driver_cuda():
    """The newest CUDA that the driver supports, (major, minor); None where there is no driver or no card."""
    version = ctypes.c_int()
    try:
        library = ctypes.CDLL("libcuda.so.1")
        if library.cuDriverGetVersion(ctypes.byref(version)) != 0:
            return None
    except OSError:
        return None
    return (version.value // 1000, version.value % 1000 // 10) if version.value else None


def advice(built_for):
    """One line with the command that installs a fitting torch, or None if this one fits or there is no driver.

    built_for: torch.version.cuda, such as "13.0"; None for a CPU build.
    """
    driver = driver_cuda()
    if driver is None or (built_for is not None and driver[0] >= int(built_for.split(".")[0])):
        return None
    has = f"the NVIDIA driver here supports CUDA {driver[0]}.{driver[1]}, but torch is "
    has += f"built for CUDA {built_for}" if built_for else "a CPU build"
    old = driver[0] < int(DEFAULT_BUILD.split(".")[0])
    python = os.path.relpath(sys.executable) if sys.prefix != sys.base_prefix else "python"
    command = f"{python} -m pip install --force-reinstall torch=={torch_pin()}"
    command += f" --index-url {OLD_DRIVER_INDEX}" if old else ""
    return f"{has}; `{command}` installs a build that fits"


def main():
    driver = driver_cuda()
    if driver is not None and driver[0] < int(DEFAULT_BUILD.split(".")[0]):
        print(
            f"error: the NVIDIA driver here supports CUDA {driver[0]}.{driver[1]}, the default torch wheel is built "
            f"for CUDA {DEFAULT_BUILD}; run `make install TORCH_INDEX={OLD_DRIVER_INDEX}`",
            file=sys.stderr,
        )
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
