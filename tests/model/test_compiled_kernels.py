"""Every Triton kernel compiles for every card within its shared memory and a budget of spills, without a card.

benchmarks/records/kernels/kernels.csv has what the compiler reports of each launch for six architectures. Attention has
all widths of heads in bf16, fp16, fp32 and tf32. The other kernels have hidden sizes 384 and 768, with and without
dropout. A row's digest is of all that the compiler was given. So a changed kernel or launch fails here until
`python -m benchmarks.kernels` has compiled it. Compiling all takes minutes, so only a sample is compiled here anew:
attention in bf16 with heads of 64 for each architecture, and each other kernel for one.
"""

import importlib.util
import itertools
import os
import re
import sys
from collections import Counter

import pytest

if importlib.util.find_spec("triton") is None and not os.environ.get("CI"):
    pytest.skip("triton is not installed: `pip install --no-deps triton`", allow_module_level=True)

import torch
import triton
from tiny import ROOT

from benchmarks import kernels
from common.model.fused import kernels as fused

RECORD = kernels.read_record()
CARDS = tuple(kernels.LIMITS)
SPILL_BYTES = 16  # of a thread at most
MEASURED = {("64", "fp32"): 348, ("64", "tf32"): 152}  # on 90, where these launches were chosen by their seconds

if {row["triton"] for row in RECORD} != {triton.__version__} and not os.environ.get("CI"):
    pytest.skip(f"the record is of another Triton than {triton.__version__}", allow_module_level=True)


@pytest.mark.parametrize("card", CARDS)
def test_the_record_has_every_launch(card):
    recorded = {row["digest"]: row for row in RECORD if row["architecture"] == str(card)}
    launches = kernels.launches(card)
    assert {launch.digest for launch in launches} == set(recorded), "run `python -m benchmarks.kernels`"
    names = {name.removesuffix("_kernel") for name in vars(fused) if name.endswith("_kernel")}
    assert names == {launch.kernel for launch in launches}
    attention = Counter(row["kernel"] for row in recorded.values() if row["kernel"].startswith("attention"))
    assert attention == {"attention_forward": 16, "attention_backward": 16}  # four widths, four precisions
    for row in recorded.values():
        assert int(row["shared_bytes"]) <= kernels.LIMITS[card], row
        budget = MEASURED.get((row["width"], row["precision"]), 0) if card == 90 else 0
        assert int(row["spill_bytes"]) <= max(budget, SPILL_BYTES), row


NOTES = re.findall(
    r"\| (forward|backward), (bf16|tf32|fp32), (\d+) \| (.+) \|", (ROOT / "benchmarks" / "NOTES.md").read_text()
)


@pytest.mark.parametrize("kernel, precision, width, cells", NOTES, ids=[" ".join(row[:3]) for row in NOTES])
def test_the_notes_have_the_records_bytes(kernel, precision, width, cells):
    last = [int(cell.split()[-1].replace(",", "")) for cell in cells.split(" | ")]
    for card, spilled in zip(CARDS, [*last[:2], *last[1:]], strict=True):  # 86 and 89 share a column
        key = {"architecture": str(card), "kernel": f"attention_{kernel}", "precision": precision, "width": width}
        assert [row["spill_bytes"] for row in RECORD if key.items() <= row.items()] == [str(spilled)]


def test_the_command_compiles_only_what_changed(monkeypatch, capsys, tmp_path):
    copy = tmp_path / "kernels.csv"
    copy.write_bytes(kernels.RECORD.read_bytes())
    monkeypatch.setattr(kernels, "RECORD", copy)
    monkeypatch.setattr(kernels, "report_of", None)
    monkeypatch.setattr(sys, "argv", ["kernels"])
    kernels.main()
    assert kernels.read_record() == RECORD
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(RECORD) and lines[0].split()[-3:] == ["spill_bytes", "shared_bytes", "warps"]


SAMPLE = [("attention_forward", card) for card in CARDS] + [("attention_backward", card) for card in CARDS]
SAMPLE += [
    (name, CARDS[number % len(CARDS)])
    for number, name in enumerate(sorted({row["kernel"] for row in RECORD if "attention" not in row["kernel"]}))
]


@pytest.mark.parametrize("kernel, card", SAMPLE)
def test_the_compiler_still_says_so(kernel, card):
    row = next(
        row
        for row in RECORD
        if (row["kernel"], row["architecture"], row["precision"]) == (kernel, str(card), "bf16")
        and ("attention" not in kernel or row["width"] == "64")
    )
    assert kernels.report(kernels.by_digest(card)[row["digest"]]) == row


def test_a_changed_kernel_or_launch_has_another_digest(monkeypatch):
    before = {launch.digest for launch in kernels.launches(80)}
    launches = tuple((*row[:4], row[4]._replace(stages=2)) for row in fused.LAUNCHES)
    monkeypatch.setattr(fused, "LAUNCHES", launches)
    fused.find_launch.cache_clear()
    changed = before - {launch.digest for launch in kernels.launches(80)}
    fused.find_launch.cache_clear()
    assert {row["kernel"] for row in RECORD if row["digest"] in changed} == {"attention_forward", "attention_backward"}
    code = kernels.code(fused.gelu_kernel)
    assert "density" in code, "the functions that a kernel calls are part of it"
    assert '"""' in fused.gelu_kernel.src and '"""' not in code and "#" not in code


def test_every_card_and_width_has_a_launch():
    for kernel, products in itertools.product(("forward", "backward"), ("half", "tf32", "fp32")):
        for card, width in itertools.product(fused.ARCHITECTURES, fused.WIDTHS):
            assert fused.find_launch(kernel, products, card, width).step >= 16
    with pytest.raises(ValueError, match="heads of width 48"):
        fused.find_launch("forward", "half", 80, 48)


@pytest.mark.parametrize("found, card", [((8, 0), 80), ((8, 7), 86), ((9, 0), 90), ((10, 3), 100), ((12, 1), 120)])
def test_a_card_that_the_table_lacks_is_taken_for_the_last_before_it(monkeypatch, found, card):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: found)
    assert fused.architecture.__wrapped__(torch.device("cuda")) == card
