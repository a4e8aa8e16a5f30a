"""The loop of the course reports: one device, every window padded, the loss read back at every step.

python -m benchmarks.peers.course_loop --pad-to 512 --batch-size 8 --precision fp32
"""

import torch
from torch.utils.data import DataLoader

from benchmarks.peers.harness import Bench, build_parser
from common import errors


def main():
    args = build_parser(__doc__).parse_args()
    bench = Bench(args, "course-loop")
    network, dataset, collate = bench.load_padded()
    device, model = bench.device, network.to(bench.device)
    loader = DataLoader(dataset, batch_size=args.batch_size, shuffle=True, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    model.train()
    total_loss = 0.0
    for batch in loader:
        optimizer.zero_grad()
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        total_loss += loss.item()
        if bench.step():
            break
    bench.report()


if __name__ == "__main__":
    errors.run(main)
