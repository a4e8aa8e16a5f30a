"""On paper: what DDP's all-reduce would cost BERT-base's step between nodes on a slow link.

    python -m benchmarks.estimate

Given are figures measured elsewhere: A100s, two a node, 96 windows each in 70 ms, of which the backward pass is 47; one
fp32 gradient between two nodes over HDR100 (12.5 GB/s) in 43 ms. A ring's time grows with 2 (n - 1) / n, n being the
nodes. A bucket leaves when its last gradient is ready and the bucket before it has gone; what arrives after the
backward pass is exposed. A fused layer's gradients come all at once, the embeddings' last.
"""

from common import errors
from common.errors import Parser

STEP, BACKWARD, TWO_NODES = 70.0, 47.0, 43.0  # ms
LAYERS, LAYER, WORD = 12, 7_087_872, 768  # numbers in a layer's gradient, and in a row of the word embeddings'
WORDS, REST = 30_522, 397_826  # rows of the word embeddings; the other embeddings and the head
ALL = LAYERS * LAYER + WORDS * WORD + REST
# Rows that 96 windows of SQuAD v1.1 on each GPU touch, filled up as common.data.packing.distinct_token_ids does.
ROWS = {4: 10_240, 16: 18_432, 64: 24_576}


def communication(nodes, rows, layers_a_bucket=1, bytes_a_number=4):
    """(ms that the buckets take to be sent, ms of them that are exposed).

    rows: of the word embeddings' gradient that are sent.
    """
    a_number = TWO_NODES / ALL * bytes_a_number / 4 * 2 * (nodes - 1) / nodes
    filled = range(layers_a_bucket, LAYERS + 1, layers_a_bucket)  # layers done as a bucket leaves
    ready = [(BACKWARD * layers / LAYERS, layers_a_bucket * LAYER) for layers in filled]
    ready.append((BACKWARD, REST + rows * WORD))
    end = sent = 0.0
    for moment, numbers in ready:
        end = max(end, moment) + numbers * a_number
        sent += numbers * a_number
    return sent, end - BACKWARD


def table():
    """Lines of Markdown: by number of GPUs and type of the gradients."""
    lines = ["| A100 | gradients | rows sent | sent | exposed | efficiency |", "| --- | --- | --- | --- | --- | --- |"]
    for gpus, some in ROWS.items():
        for name, size, rows in (("fp32", 4, WORDS), ("fp32", 4, some), ("bf16", 2, WORDS), ("bf16", 2, some)):
            sent, exposed = communication(gpus // 2, rows, bytes_a_number=size)
            where = f"{gpus // 2} × 2"
            lines.append(
                f"| {where} | {name} | {rows:,} | {sent:.0f} ms | {exposed:.0f} ms | {STEP / (STEP + exposed):.0%} |"
            )
    return lines


def main():
    Parser(prog="python -m benchmarks.estimate", description=__doc__.split("\n")[0]).parse_args()
    print("\n".join(table()))
    exposed = {layers: communication(2, ROWS[4], layers)[1] for layers in (1, 2, 4)}
    print(
        "\n2 × 2, fp32, exposed with buckets of 1, 2 and 4 layers: "
        + ", ".join(f"{ms:.1f} ms" for ms in exposed.values())
    )


if __name__ == "__main__":
    errors.run(main)
