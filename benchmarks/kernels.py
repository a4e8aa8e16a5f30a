"""What the compiler reports of every kernel for every card: registers, spilled bytes, shared memory. Needs no GPU.

    python -m benchmarks.kernels          # compile what changed, write the record, print it as a table
    python -m benchmarks.kernels --all    # compile all: 564 launches, about five minutes on two cores

Launches are recorded, not written down a second time. The fused layer and embeddings run forward and backward on
tensors without memory. Triton's launch is replaced by one that keeps the kernel with its arguments. So the compiler
gets here what it gets on a card. Needs Triton: `pip install --no-deps triton`.
"""

import argparse
import concurrent.futures
import contextlib
import csv
import functools
import hashlib
import io
import itertools
import multiprocessing
import os
import re
import tempfile
import tokenize
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from common import errors
from common.errors import Parser
from common.model.fused import kernels
from common.model.fused.embeddings import FusedEmbedding
from common.model.fused.layer import FusedLayer

RECORD = Path(__file__).parent / "records" / "kernels" / "kernels.csv"
# The most shared memory of a block in bytes (CUDA C++ Programming Guide, compute capabilities).
LIMITS = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
LIMITS = {card: 1024 * size for card, size in LIMITS.items()}
TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32}
HEADS = {16: 4, 32: 12, 64: 12, 128: 8}  # of each width; 32 as MiniLM has them, 64 as BERT-base
TOKENS = 64
COLUMNS = (
    "triton", "architecture", "kernel", "width", "precision", "digest", "registers", "spill_bytes",
    "shared_bytes", "warps",
)  # fmt: skip


class Launch(NamedTuple):
    """A kernel as it was launched, and what the launch was recorded for.

    width: of a head for attention, else of the hidden state. source, target, options: what triton.compile takes.
    """

    architecture: int
    kernel: str
    width: int
    precision: str
    digest: str
    source: ASTSource
    target: GPUTarget
    options: dict


@functools.cache
def code(kernel):
    """The tokens of a kernel and of the functions it calls, without docstrings and comments."""
    found, last = [], None
    for token in tokenize.generate_tokens(io.StringIO(kernel.src).readline):
        docstring = token.type == tokenize.STRING and last == tokenize.INDENT
        if not docstring and token.type not in (tokenize.COMMENT, tokenize.NL):
            found.append(token.string)
            last = token.type
    called = [
        getattr(kernels, name) for name in sorted(set(found)) if name != kernel.__name__ and hasattr(kernels, name)
    ]
    return " ".join(found + [code(function) for function in called if isinstance(function, JITFunction)])


@contextlib.contextmanager
def recording(card):
    """A list that receives (kernel, arguments, options) of each launch for a card of this architecture."""
    found = []

    def keep(kernel, *arguments, grid, warmup, **options):
        found.append((kernel, arguments, options))

    with (
        mock.patch.object(JITFunction, "run", keep),
        mock.patch.object(kernels, "architecture", lambda device: card),
    ):
        yield found


def run_layer(width, dtype, dropout, weights_in):
    """One layer and the embeddings forward, and backward if there is dropout: evaluation has neither.

    weights_in: the type of the weights; in mixed precision fp32, beside copies of `dtype`.
    """
    heads = HEADS[width]
    wide = heads * width
    tensor = functools.partial(torch.empty, device="meta")
    square, bias, up, down = (wide, wide), (wide,), (4 * wide, wide), (wide, 4 * wide)
    shapes = [square, bias] * 4 + [bias, bias, up, (4 * wide,), down, bias, bias, bias]
    weights = [tensor(shape, dtype=weights_in, requires_grad=True) for shape in shapes]
    halves = [tensor(shape, dtype=dtype) for shape in ((3 * wide, wide), (3 * wide,), square, up, down)]
    tables = [
        tensor(shape, dtype=weights_in, requires_grad=True) for shape in ((99, wide), (99, wide), (2, wide), bias, bias)
    ]
    ids, cu_seqlens = tensor(TOKENS, dtype=torch.int64), tensor(2, dtype=torch.int32)
    seeds, seed = (tensor(2, dtype=torch.int32), tensor(1, dtype=torch.int32)) if dropout else (cu_seqlens, ids)
    x = FusedEmbedding.apply(ids, ids, ids, 1e-12, dropout, seed, None, dtype, None, *tables)
    copies = None if weights_in == dtype else halves
    x = FusedLayer.apply(x, heads, cu_seqlens, TOKENS, dropout, 1e-12, seeds, copies, None, *weights)
    if dropout:
        x.sum().backward()


def prepared(kernel, arguments, options, card):
    """What triton.compile takes for a launch: as JITFunction.run makes it, with the target given."""
    target = GPUTarget("cuda", card, 32)
    backend = make_backend(target)
    options = options | {"debug": False, "instrumentation_mode": ""}
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, kinds, options = bind(*arguments, **options)
    parsed, signature, constants, attributes = kernel._pack_args(backend, options, bound, kinds, options)
    named = {key: value for key, value in options.items() if value is not None}
    text = repr((triton.__version__, card, code(kernel), signature, constants, attributes, sorted(named.items())))
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    return digest, ASTSource(kernel, signature, constants, attributes), target, parsed.__dict__


def launches(card):
    """Every launch on a card of this architecture; each variant that Triton compiles stands once.

    Attention: all widths of heads in all precisions. Other kernels: the hidden sizes of MiniLM and BERT-base. For
    BERT-base also weights in half precision, as FSDP has them.
    """
    found = {}
    before = torch.get_float32_matmul_precision()
    for width, (precision, dtype), dropout in itertools.product(HEADS, TYPES.items(), (0.1, 0.0)):
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        for weights_in in dict.fromkeys([torch.float32, dtype if width == 64 else torch.float32]):
            with recording(card) as run:
                run_layer(width, dtype, dropout, weights_in)
            for kernel, *rest in run:
                name = kernel.__name__.removesuffix("_kernel")
                attention = name.startswith("attention")
                if attention or width in (32, 64):
                    digest, *compiled = prepared(kernel, *rest, card)
                    of = width if attention else HEADS[width] * width
                    found.setdefault(digest, Launch(card, name, of, precision, digest, *compiled))
    torch.set_float32_matmul_precision(before)
    return list(found.values())


def report(launch):
    """What the compiler says of a launch, a row of the record; the cache of kernels is left alone."""
    log = io.StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        triton.knobs.cache.scope(),
        triton.knobs.nvidia.scope(),
        triton.knobs.compilation.scope(),
        contextlib.redirect_stdout(log),
    ):
        triton.knobs.cache.dir = folder
        triton.knobs.nvidia.dump_ptxas_log = triton.knobs.compilation.always_compile = True
        compiled = triton.compile(launch.source, target=launch.target, options=launch.options)
    registers, spills = (
        int(re.search(pattern, log.getvalue())[1]) for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores")
    )
    values = (triton.__version__, *launch[:5], registers, spills, compiled.metadata.shared, compiled.metadata.num_warps)
    return dict(zip(COLUMNS, map(str, values), strict=True))


@functools.cache
def by_digest(card):
    torch.set_num_threads(1)
    return {launch.digest: launch for launch in launches(card)}


def report_of(card, digest):
    return report(by_digest(card)[digest])


def read_record():
    """The committed record: a list of rows, each a dict of strings by COLUMNS."""
    with open(RECORD, newline="") as file:
        return list(csv.DictReader(file))


def write_record(rows):
    RECORD.parent.mkdir(exist_ok=True)
    with open(RECORD, "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def table(rows):
    """Rows of a record as lines of text, one a launch."""
    shown = [name for name in COLUMNS if name not in ("triton", "digest")]
    lines = [shown, *([row[name] for name in shown] for row in rows)]
    sizes = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [" ".join(map(str.rjust, line, sizes)) for line in lines]


def main():
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="compile also what the record has")
    args = parser.parse_args()
    known = {row["digest"]: row for row in read_record()} if RECORD.exists() and not args.all else {}
    with concurrent.futures.ProcessPoolExecutor(
        len(os.sched_getaffinity(0)), multiprocessing.get_context("spawn")
    ) as pool:
        for card in LIMITS:
            jobs = [pool.submit(report_of, card, digest) for digest in by_digest(card) if digest not in known]
            known |= {row["digest"]: row for row in (job.result() for job in jobs)}
            write_record(list(known.values()))  # what is done stays if the next ones are stopped
    rows = [known[digest] for card in LIMITS for digest in by_digest(card)]
    write_record(rows)
    print("\n".join(table(rows)))


if __name__ == "__main__":
    errors.run(main)
