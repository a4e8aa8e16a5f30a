import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read at import: tests never reach for the network
TESTS = Path(__file__).resolve().parent
for folder in (TESTS / "tools", TESTS / "run", TESTS, TESTS.parent):  # rooms whose fixtures other rooms' tests use
    sys.path.insert(0, str(folder))
