"""Fine-tune BERT for extractive question answering on SQuAD: many devices with DistributedDataParallel.

    torchrun --standalone --nproc-per-node=2 distributed_ddp.py --epochs 2    (cluster: sbatch run_distributed.sh ddp)

The loop is `train_one_epoch`. The three scripts are one text: `diff baseline.py distributed_ddp.py` shows what
DistributedDataParallel adds, `diff distributed_ddp.py distributed_fsdp.py` what sharding changes.
"""

import contextlib
import functools
import time

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from common import errors
from common.args import build_parser, seed
from common.data.cache import prepare
from common.data.packing import pack_steps, prefetch
from common.data.plan import largest_batch, plan_epoch
from common.data.splits import question_sets
from common.data.tokenizer import load_tokenizer, vocabulary_size
from common.data.windows import trainable_windows
from common.model.fused.gradients import keep_gradient_buffers
from common.model.loading import load_model, save_model
from common.model.precision import HALF, compile_layers, compute_in
from common.model.span import parameter_groups, span_loss
from common.run.checkpoint import Saver
from common.run.devices import choose_device, memory_for, place, topology
from common.run.distributed import SUMS, all_sum, finish, gather, part_of, read_ranks, start
from common.run.environment import describe, model_settings
from common.run.graphs import StepGraphs
from common.run.interrupts import StopRequest
from common.run.monitor import Monitor
from common.run.progress import linear_schedule, printer
from common.run.record import RunFolder
from common.run.results import evaluate_only, write_results
from common.run.resume import resume
from common.run.seeds import quiet_warnings, seed_dropout, seed_everything
from common.run.settings import banner, resolve, resolve_hardware
from common.run.state import whole_state
from common.scoring.evaluation import empty_score, evaluate
from common.scoring.selection import Selection, first_threshold, tune_threshold


def train_step(model, optimizer, scaler, max_grad_norm, device, world_size, micro_batches, windows):
    """One optimizer step on this rank's micro-batches of a global batch of `windows` windows.

    Returns its part of the loss and the gradient's norm before clipping. Nothing here waits for the device: on CUDA,
    the step as a whole becomes a graph.
    """
    loss_sum = torch.zeros((), device=device)
    for batch in micro_batches:
        last = batch is micro_batches[-1]
        with contextlib.nullcontext() if last else model.no_sync():  # gradients travel once a step
            start_logits, end_logits = model(batch)
        loss = span_loss(start_logits, end_logits, batch) / windows  # the global count, not this rank's
        scaler.scale(loss).backward()
        loss_sum += loss.detach()

    scaler.unscale_(optimizer)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_grad_norm)
    getattr(optimizer, "optim", optimizer).found_inf = (~norm.isfinite()).float()  # .optim: what --zero1 wraps
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return loss_sum, norm


def train_one_epoch(run_step, scheduler, plan, step, features, args, device, rank, world_size, monitor, save):
    """Train on the global batches of `plan` (arrays of window numbers); returns the number of steps done so far.

    Every rank walks the same plan and takes its share of each global batch, in the same number of micro-steps.
    """
    shares = pack_steps(
        features, plan, rank, world_size, args.accumulation, args.max_tokens_per_device, fixed_shapes=args.cuda_graphs
    )
    for windows, micro_batches in zip(plan, prefetch(shares, device), strict=True):
        seed_dropout(seed, step, rank)
        loss, norm = run_step(micro_batches, len(windows))  # train_step, or its graph
        rate = scheduler.get_last_lr()[0]
        scheduler.step()
        step += 1
        monitor.step(step, loss, norm, rate, windows)  # waits for the device at log lines only
        if monitor.wants_checkpoint(step):
            save(step)
    return step


def main():
    parser = build_parser(__doc__.split("\n")[0])
    parser.add_argument("--zero1", action="store_true", help="share the optimizer's state out over the ranks")
    parser.add_argument("--reduce", choices=["fp32", "bf16"], default="fp32", help="type in which gradients travel")
    args = resolve(parser)
    rank, local_rank, world_size = read_ranks()
    gather, all_sum = gather, all_sum  # over all ranks
    device = choose_device(args.device, local_rank)
    quiet_warnings()
    resolve_hardware(args, device)
    seed_everything(seed, args.deterministic)
    log = printer(rank)
    log(banner(args))

    # Data: windows of tokens, from the cache if it holds them.
    clock = time.perf_counter()
    tokenizer = load_tokenizer(args.model_path)
    sets = question_sets(**args.questions)
    features = {
        name: prepare(questions, tokenizer, args.max_length, args.overlap, args.cache_dir, log, builds=local_rank == 0)
        for name, questions in sets.items()
    }
    seconds = {"prepare_data": time.perf_counter() - clock}

    # Not before: its time limit must not end the wait for the rank that prepares data.
    start(device, args.hang_minutes)
    places = gather(place(rank, local_rank, device))
    log(topology(places))

    # Model, optimizer, schedule.
    clock = time.perf_counter()
    model = load_model(
        args.model_path,
        args.attention,
        args.dropout,
        args.attention_dropout,
        vocabulary=vocabulary_size(tokenizer),
        needs_head=bool(args.evaluate_only),
        log=log,
    ).to(device)
    compute_in(model, HALF.get(args.precision))
    args.cuda_graphs &= model.attention != "padded"  # a network of others' code may wait for the device
    if args.compile:
        compile_layers(model)
    if args.checkpoint_activations:
        model.network.gradient_checkpointing_enable({"use_reentrant": False})
    if args.evaluate_only:
        return evaluate_only(model, features, sets, args, device, places, rank, world_size, gather, seconds, log)
    trainable = trainable_windows(features["train"])
    total_steps = args.epochs * -(-len(trainable) // args.batch_size)
    replica = DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True, bucket_cap_mb=25)
    replica.register_comm_hook(model, SUMS[args.reduce])  # a sum, no mean; 25 MB: the first bucket's too
    groups = parameter_groups(model, args.weight_decay)
    adamw = {"lr": torch.tensor(args.learning_rate, device=device), "fused": True, "capturable": True}
    optimizer = torch.optim.AdamW(groups, **adamw)
    if args.zero1:
        optimizer = ZeroRedundancyOptimizer(groups, torch.optim.AdamW, **adamw)
    # Two passes without a gradient: they compile the layers, and DDP makes its buckets anew after the first backward
    # pass, which changes the order of sums: a run that goes on from a checkpoint must not differ there. They are the
    # largest step's, in whose memory the others find room.
    model.train()
    split = world_size, args.accumulation, args.max_tokens_per_device
    largest = largest_batch(features["train"], plan_epoch(trainable, args.batch_size, seed, epoch=1), *split)
    shares = next(pack_steps(features["train"], [largest], rank, *split, fixed_shapes=args.cuda_graphs))
    with memory_for(shares):
        for batch in 2 * [share.to(device) for share in shares]:
            optimizer.zero_grad()
            (0 * span_loss(*replica(batch), batch)).backward()
    keep_gradient_buffers(model)  # from now on gradients are written into DDP's buckets
    optimizer.zero_grad()
    # All ranks take part; {} in a new run.
    saved = resume(args, model, optimizer, sets, rank, gather, log, part_of)
    step = saved.get("step", 0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, linear_schedule(total_steps, args.warmup, step))
    scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")
    scaler.load_state_dict(saved.get("scaler", {}) or scaler.state_dict())
    step_function = functools.partial(train_step, replica, optimizer, scaler, args.max_grad_norm, device, world_size)
    run_step = StepGraphs(step_function, device, args.cuda_graphs, (shares, len(largest)))
    threshold = saved.get("threshold", first_threshold(features))  # None: trained on v1.1, never abstains
    seconds["load"] = time.perf_counter() - clock

    def score_set(name):  # all ranks take part
        data = sets[name].data
        return evaluate(model, features[name], data, args, device, threshold, rank, world_size, gather, between)

    def between():  # the passes of an evaluation
        if monitor.must_stop():
            save(step)

    def save(step):  # all ranks take part
        monitor.saving_begins(step)
        state = {"step": step, "scaler": scaler.state_dict(), "threshold": threshold, "selection": selection.state()}
        saver.save(model, optimizer, state | monitor.state())
        monitor.saving_ends()
        if monitor.stop_wanted:
            raise saver.stopped(step)

    with (
        RunFolder(args.runs_dir, args.run_name, write=rank == 0, resume=args.resume is not None) as folder,
        StopRequest(folder.path / "stop" if rank == 0 else None) as request,
        Saver(args, sets, folder, rank, gather, log) as saver,
    ):
        folder.go_on(saved)
        folder.update(describe(args, "ddp", model, sets, features, world_size, places, seconds))
        monitor = Monitor(
            args, features["train"], total_steps, device, folder, places, rank, all_sum, gather, saved, request
        )
        selection = Selection(args.select, args.patience, **saved.get("selection", {}))
        log("answering nothing: EM {:.2f}, F1 {:.2f}".format(*empty_score(sets["dev"].data)))
        if args.score_untrained and not saved:
            log(f"untrained model: dev {score_set('dev')}")

        for epoch in range(saved.get("epoch", 1), args.epochs + 1):
            plan = plan_epoch(trainable, args.batch_size, seed, epoch)
            plan = plan[step - (epoch - 1) * len(plan) :]  # a resumed run has done a part of it
            monitor.begin_epoch(epoch, plan)
            step = train_one_epoch(
                run_step, scheduler, plan, step, features["train"], args, device, rank, world_size, monitor, save
            )
            if args.save_epochs and epoch % args.save_epochs == 0:
                save(step)
            training = monitor.end_epoch()

            clock = time.perf_counter()
            if "tune" in sets:
                threshold = tune_threshold(score_set("tune"))
            result = score_set("dev")
            seconds = {"evaluation": time.perf_counter() - clock}
            if "seen" in sets:
                seen = score_set("seen").figures
                training |= {"train_f1": seen["f1"], "train_exact": seen["exact"]}
            best = selection.update(epoch, result.figures)
            clock = time.perf_counter()
            state = whole_state(model, keep=rank == 0)  # all ranks take part
            if rank == 0:
                save_model(model, state, tokenizer, folder.model_path(best), model_settings(args, features, threshold))
                if best:
                    write_results(folder.path, result)
            seconds["checkpoint"] = time.perf_counter() - clock
            monitor.log_epoch(model, step, training, result, seconds, best)
            if selection.stop:
                log(f"no better {args.select} for {args.patience} epochs: stopping early")
                break
        monitor.close()
        log(f"best epoch: {selection.epoch}; run folder: {folder.path}")


if __name__ == "__main__":
    errors.run(main, finish)
