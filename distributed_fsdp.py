"""Fine-tune BERT for question answering on SQuAD on many devices: FSDP2.

    torchrun --standalone --nproc-per-node=2 distributed_fsdp.py    (sbatch run_distributed.sh fsdp)

The three scripts are one text. `diff baseline.py distributed_ddp.py` shows what DDP adds,
`diff distributed_ddp.py distributed_fsdp.py` what FSDP changes.
"""

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.optim.lr_scheduler import LambdaLR

from common import errors
from common.args import build_parser
from common.data.data import Data
from common.model.loading import build_model
from common.model.precision import HALF
from common.model.span import encoder_layers, parameter_groups, span_loss
from common.run.distributed import SHARDS, World, sharding_mesh
from common.run.graphs import StepGraphs, memory_for
from common.run.results import evaluate_only
from common.run.run import Run
from common.run.seeds import seed_dropout
from common.run.settings import resolve, resolve_hardware


def train_step(model, optimizer, scaler, max_grad_norm, micro_batches, num_windows):
    """One optimizer step: this rank's part of the loss, and the gradient's norm before clipping."""
    loss_sum = 0  # nothing here waits for the device: on CUDA the whole step becomes a graph
    for batch in micro_batches:
        model.set_requires_gradient_sync(batch is micro_batches[-1])  # send gradients once a step
        start_logits, end_logits = model(batch)
        loss = span_loss(start_logits, end_logits, batch) / num_windows  # of the global batch
        scaler.scale(loss * torch.distributed.get_world_size()).backward()  # the mean becomes a sum
        loss_sum += loss.detach()
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm).full_tensor()
    optimizer.found_inf = (~norm.isfinite()).float()  # 1 makes the fused step change nothing
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return loss_sum, norm


def main():
    parser = build_parser(__doc__)
    parser.add_argument("--shard", choices=SHARDS, default="zero2", help="what is sharded")
    parser.add_argument("--reduce", choices=["fp32", "bf16"], default="fp32", help="type to send")
    args = resolve(parser)
    world = World(args.device)
    resolve_hardware(args, world)  # precision, attention, graphs, seeds
    data = Data(args, world)
    world.connect(args.hang_minutes)  # only now: its time limit must not end the wait for data
    model = build_model(args, world, data.vocabulary)
    if args.evaluate_only:
        return evaluate_only(args, world, data, model)
    weights, gradients = HALF.get(args.precision), HALF.get(args.reduce, torch.float32)
    policy = MixedPrecisionPolicy(weights, gradients, cast_forward_inputs=False)
    fsdp = {"mesh": sharding_mesh(args.shard, world.device), "mp_policy": policy}
    fully_shard(model.network.qa_outputs, mesh=fsdp["mesh"])  # the head computes in fp32
    for unit in (*encoder_layers(model), model):  # the weights of one unit are gathered at a time
        fully_shard(unit, **fsdp, reshard_after_forward=args.shard != "zero2")

    adamw = {"lr": torch.tensor(args.learning_rate, device=world.device), "fused": True}
    adamw |= {"capturable": True}  # the step count stays on the device, as a CUDA graph needs it
    optimizer = torch.optim.AdamW(parameter_groups(model, args.weight_decay), **adamw)
    scaler = torch.amp.GradScaler(world.device.type, enabled=args.precision == "fp16")

    # Run the largest batch twice with zero loss. This compiles the layers, fixes the order of DDP's
    # buckets (a resumed run must have the same) and reserves memory for all smaller batches.
    largest = data.largest_step()
    with memory_for(largest[0]):
        for batch in 2 * [batch.to(world.device) for batch in largest[0]]:
            optimizer.zero_grad()
            (0 * span_loss(*model(batch), batch)).backward()
    optimizer.zero_grad()
    fixed = (model, optimizer, scaler, args.max_grad_norm)
    run_step = StepGraphs(train_step, fixed, world.device, args.cuda_graphs, largest)

    with Run(f"fsdp-{args.shard}", args, world, data, model, optimizer, scaler) as run:  # resumes
        # The rate climbs linearly for `up` steps, then falls linearly to 0. n: steps of this start.
        done, up, down = run.step, data.warmup_steps, data.total_steps - data.warmup_steps
        factor = lambda n: min((done + n + 1) / up, (up + down - done - n) / max(1, down))
        scheduler = LambdaLR(optimizer, factor)
        for epoch in run.epochs():
            for windows, micro_batches in data.steps(epoch, run.step):
                seed_dropout(args.seed, run.step, world.rank)
                loss, norm = run_step(micro_batches, len(windows))
                run.log_step(windows, loss, norm, scheduler.get_last_lr()[0])  # may save or stop
                scheduler.step()
            run.end_training()
            run.tune_threshold()  # on held-out questions, if there are any
            result = run.score("dev")  # each rank predicts its share of the windows
            best = run.keep(result)  # in model/ if it is the best by --select, else in model-last/
            run.log_epoch(result, best)


if __name__ == "__main__":
    errors.run(main, World.finish)
