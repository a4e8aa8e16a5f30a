"""What a run stands on: device, precision, seeds, clocks, progress, TensorBoard, profiler."""

import math
import time

import torch

from common.errors import UserError
from common.model.span import flops_per_token
from common.run.clocks import process_seconds
from common.run.curves import curves
from common.run.devices import peak_flops, peak_memory, synchronize
from common.run.interrupts import watchdog
from common.run.profiler import Profiler
from common.run.progress import Progress, printer
from common.run.sampler import Sampler, append_rows


class Monitor:
    """Everything that watches the loop: clocks, loss and norm by step, progress, TensorBoard, profiler, the record.

    Losses and norms stay on the device and are read together every args.log_every steps: reading one waits for all
    work before it. With them the ranks agree whether it is time to save or to stop, and when to look again.
    """

    WARMUP = 10  # steps of the run that throughput leaves out
    LOOK = 2.0  # seconds between looks for a request to stop, where steps are so slow that log lines are rarer

    def __init__(self, args, features, total_steps, device, folder, places, rank, all_sum, gather, saved, request):
        """places: `place` of each rank. all_sum: the sum of a tensor over the ranks. gather: all ranks' values.

        All ranks take part in both, whenever a method here calls them.

        saved: the state of the checkpoint that the run goes on from, or {}.
        request: the StopRequest of this run.
        """
        self.args, self.lengths, self.total_steps, self.device = args, features.lengths, total_steps, device
        self.folder, self.rank, self.world_size = folder, rank, len(places)
        self.all_sum, self.gather, self.log = all_sum, gather, printer(rank)
        self.tolerant = args.precision == "fp16"  # the gradient scaler skips steps that overflow: no error
        self.steps_seen, self.warmup_seconds = 0, None
        self.earlier_seconds = 0.0  # of training in this start's epochs before this one
        self.saved, self.request = saved, request
        self.stop_wanted = self.save_wanted = False  # as all ranks have agreed
        self.until_look, self.units, self.last_look = 1, 0, time.monotonic()
        self.last_save = time.monotonic()
        self.start_clocks(saved.get("epoch", 1))
        self.trained_seconds = self.seconds_before  # until the first epoch begins
        self.sampler = Sampler(places if places[rank]["local_rank"] == 0 else [])
        skip = 4 * self.WARMUP if args.cuda_graphs else self.WARMUP  # graphs are made within the first steps
        self.profiler = Profiler(args.profile and rank == 0, device, folder.path, skip, log=self.log)
        self.writer = None
        if rank == 0:
            self.writer = curves(folder.path / "tensorboard", saved)

    def begin_epoch(self, epoch, plan):
        """Begin an epoch that will train on the global batches of `plan`."""
        tokens = int(sum(self.lengths[windows].sum() for windows in plan))
        self.progress = Progress(tokens, f"epoch {epoch}", show=self.rank == 0)
        self.sampler.begin()
        synchronize(self.device)
        self.start_clocks(epoch)

    def start_clocks(self, epoch):
        self.epoch, self.until_look = epoch, 1
        self.pending, self.saving_seconds, self.trained_seconds = [], 0.0, None
        partial = self.saved if self.saved.get("epoch") == epoch else {}
        self.loss_sum, self.windows_seen = partial.get("loss_sum", 0.0), partial.get("windows_seen", 0)
        self.seconds_before = partial.get("train_seconds", 0.0)
        self.started = self.steady = self.last_read = time.perf_counter()
        self.steady_windows = self.steady_tokens = 0

    def step(self, step, loss, norm, rate, windows):
        """Take one optimizer step: loss (this rank's part of the global mean), norm and rate are on the device."""
        tokens = int(self.lengths[windows].sum())
        self.pending.append((step, loss, norm, rate, windows))
        self.steps_seen += 1
        self.steady_windows += len(windows)
        self.steady_tokens += tokens
        if self.steps_seen == 1:
            synchronize(self.device)
            self.folder.record["seconds"]["first_step"] = process_seconds()
        if self.steps_seen == self.WARMUP:
            synchronize(self.device)
            self.steady = time.perf_counter()
            self.warmup_seconds = self.earlier_seconds + self.steady - self.started - self.saving_seconds
            self.steady_windows = self.steady_tokens = 0
        watchdog.beat()
        look = self.is_time_to_look()  # counts, so at log lines too
        note = self.read() if look or step % self.args.log_every == 0 else ""
        self.progress(tokens, note)
        self.profiler.step()

    def read(self):
        """Read the pending losses and norms, check and log them; waits for the device. All ranks take part."""
        if not self.pending:
            return ""
        steps, losses, norms, rates, batches = zip(*self.pending, strict=True)
        self.pending = []
        losses = self.agree(torch.stack(losses))
        norms, rates = torch.stack(norms).tolist(), torch.stack(rates).tolist()
        now = time.perf_counter()
        count = sum(len(windows) for windows in batches)
        speed = count / max(now - self.last_read, 1e-9)
        self.last_read = now
        for step, loss, norm, rate, windows in zip(steps, losses, norms, rates, batches, strict=True):
            if not (math.isfinite(loss) and (self.tolerant or math.isfinite(norm))):
                raise UserError(
                    f"step {step}: loss {loss}, gradient norm {norm}: not finite, and the step was not applied; its "
                    f"windows: {windows.tolist()}; try a lower --learning-rate, or --precision bf16 or fp32"
                )
            self.loss_sum += loss * len(windows)
            self.windows_seen += len(windows)
            if self.writer:
                self.writer.add_scalar("step/loss", loss, step)
                self.writer.add_scalar("step/learning_rate", rate, step)
                self.writer.add_scalar("step/grad_norm", norm, step)
        if self.writer:
            self.writer.add_scalar("step/windows_per_second", speed, steps[-1])
        return f"step {steps[-1]}/{self.total_steps}, loss {losses[-1]:.3f}, {speed:,.0f} windows/s"

    def is_time_to_look(self):
        """Count one step of training or pass of evaluation; the ranks have agreed after how many to look again."""
        self.units += 1
        self.until_look -= 1
        return self.until_look <= 0

    def agree(self, losses):
        """The sums of `losses` over all ranks, which agree on the way whether to save or to stop; all ranks take part.

        In double precision a sum of fp32 values is exact, whatever their order: an all-reduce chooses it by the place
        in the tensor, and how many losses are read together depends on when the run was saved or resumed.
        """
        now = time.monotonic()
        due = self.args.save_minutes and now - self.last_save > 60 * self.args.save_minutes
        wait = self.LOOK * self.units / max(now - self.last_look, 1e-9)  # steps, or passes
        own = [self.request.made(), *((due, min(wait, 1e6)) if self.rank == 0 else (0, 0))]
        own = torch.tensor([float(value) for value in own], dtype=torch.double, device=self.device)
        *sums, stop, due, wait = self.all_sum(torch.cat([losses.double(), own])).tolist()
        self.stop_wanted, self.save_wanted = stop > 0, stop > 0 or due > 0
        self.until_look, self.units, self.last_look = max(1, int(wait)), 0, now
        return sums

    def wants_checkpoint(self, step):
        """Whether to save after this step of training: it is time, or all ranks have agreed to stop."""
        return self.save_wanted or bool(self.args.save_steps and step % self.args.save_steps == 0)

    def must_stop(self):
        """Take one pass of evaluation; whether all ranks have agreed to stop. All ranks take part now and then."""
        if self.is_time_to_look():
            self.agree(torch.zeros(0, device=self.device))
        return self.stop_wanted

    def state(self):
        """What a checkpoint keeps of the epoch so far; call it after `saving_begins`."""
        return {
            "epoch": self.epoch,
            "loss_sum": self.loss_sum,
            "windows_seen": self.windows_seen,
            "train_seconds": self.train_seconds(),
            "epochs": self.folder.record["epochs"],
        }

    def train_seconds(self):
        """Seconds of training in this epoch, over all starts, without those of saving."""
        if self.trained_seconds is not None:
            return self.trained_seconds
        return self.seconds_before + time.perf_counter() - self.started - self.saving_seconds

    def saving_begins(self, step):
        """Read what is pending, so that `state` is whole; all ranks take part."""
        self.read()
        self.saving_started = time.perf_counter()
        self.folder.record["attempts"][-1]["steps"] = step
        watchdog.beat()

    def saving_ends(self):
        """Leave the time of saving out of training's."""
        took = time.perf_counter() - self.saving_started
        self.saving_seconds += took
        self.steady += took
        self.last_read += took
        self.save_wanted, self.last_save = False, time.monotonic()
        self.folder.record["attempts"][-1].setdefault("saving_seconds", []).append(took)
        self.writer and self.writer.flush()
        watchdog.beat()

    def end_epoch(self):
        """Read what is left and stop the clocks: a dict of the epoch's training figures."""
        self.read()
        self.progress.close()
        self.profiler.stop()
        synchronize(self.device)
        now = time.perf_counter()
        if not self.windows_seen:
            raise UserError(f"epoch {self.epoch}: nothing left to train on: the checkpoint's state.json is damaged")
        warm = self.warmup_seconds is not None and self.steady_windows
        steady = max(now - self.steady, 1e-9) if warm else math.inf  # no throughput of what was warm-up alone
        self.trained_seconds, self.until_look = self.train_seconds(), 1
        self.earlier_seconds += self.trained_seconds - self.seconds_before
        return {
            "epoch": self.epoch,
            "train_loss": self.loss_sum / self.windows_seen,
            "train_seconds": self.trained_seconds,
            "windows_per_second": self.steady_windows / steady or None,
            "tokens_per_second": self.steady_tokens / steady or None,
        }

    def log_epoch(self, model, step, training, result, seconds, best):
        """Log an epoch and its evaluation, and put both into the record.

        training: from end_epoch. result: Evaluation. seconds: {"evaluation": …, "checkpoint": …}.
        """
        figures = {name: value for name, value in result.figures.items() if value is not None}
        epoch = training | figures | {f"{name}_seconds": value for name, value in seconds.items()} | {"best": best}
        if training["tokens_per_second"]:
            flops = training["tokens_per_second"] * flops_per_token(model, self.lengths)
            peak = peak_flops(self.device, self.args.precision)
            epoch["model_flops_per_second"] = flops
            epoch["share_of_peak"] = flops / (peak * self.world_size) if peak else None
        if self.writer:
            for tag in ("train_loss", "dev_loss", "f1", "exact", "train_f1", "train_exact"):
                if epoch.get(tag) is not None:
                    self.writer.add_scalar(f"epoch/{tag}", epoch[tag], epoch["epoch"])
            self.writer.flush()
        rate = epoch["windows_per_second"]
        self.log(
            f"epoch {epoch['epoch']}: train loss {epoch['train_loss']:.4f} in {epoch['train_seconds']:.1f} s"
            + (f" ({rate:,.0f} windows/s)" if rate else "")
            + (f", EM {epoch['train_exact']:.2f}, F1 {epoch['train_f1']:.2f}" if "train_f1" in epoch else "")
            + f"; dev {result}, {seconds['evaluation']:.1f} s"
            + ("  <- best" if best else "")
        )
        samples = self.gather(self.sampler.end())  # of the whole epoch: training, evaluation, saving
        epoch["hardware"] = {rank: figures for node, _, _ in samples for rank, figures in node.items()}
        epoch["infiniband"] = [traffic for _, _, traffic in samples if traffic]
        rows = [row for _, node, _ in samples for row in node]
        if rows and self.rank == 0:
            append_rows(self.folder.path / "hardware.csv", rows)
        record = self.folder.record
        record["epochs"].append(epoch)
        record["attempts"][-1]["steps"] = step
        record["seconds"]["warmup"] = self.warmup_seconds
        record["peak_memory_bytes"] = self.gather(peak_memory(self.device))
        self.folder.save()

    def close(self):
        self.progress.close()
        self.profiler.stop()
        self.sampler.close()
        if self.writer:
            self.writer.close()
