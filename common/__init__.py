"""What the three training scripts share, in rooms: see README.md. An import goes down a floor, never up."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
