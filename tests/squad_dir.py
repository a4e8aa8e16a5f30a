"""Where the tests find SQuAD itself: the folder that SQUAD_DIR names, else data/squad in the project."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def squad_file(name):
    """Path of a file of the SQuAD folder, given by its name there (such as `reference/scores.json`).

    Where SQUAD_DIR is not set and the file is absent, the test is skipped; where SQUAD_DIR is set, it fails, so that a
    wrong SQUAD_DIR cannot pass for a green run. A relative SQUAD_DIR counts from the project's root.
    """
    named = os.environ.get("SQUAD_DIR")
    path = ROOT / (named or "data/squad") / name
    if not path.exists():
        if named:
            pytest.fail(f"SQUAD_DIR={named}, but {path} is not there", pytrace=False)
        pytest.skip(f"needs {path.relative_to(ROOT)}: set SQUAD_DIR to a folder that holds {name}")
    return path
