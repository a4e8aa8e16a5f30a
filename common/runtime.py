"""What a run stands on: device, precision, seeds, clocks, progress, TensorBoard, profiler."""

import contextlib
import math
import os
import re
import resource
import socket
import sys
import time
import warnings
from pathlib import Path

import torch

from common import hardware
from common.driver import advice
from common.errors import UserError
from common.interrupts import watchdog
from common.model import flash_takes, flops_per_token, has_kernels
from common.profiler import Profiler

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}  # --precision: the type that matrix products run in

# Dense matrix peak in half precision, FLOP/s, by words of the name that CUDA gives the card (vendor's data sheets).
PEAK_FLOPS = {
    "GH200": 989e12,
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "A100": 312e12,
    "A30": 165e12,
    "L40S": 362e12,
    "V100": 125e12,
    "T4": 65e12,
}


# ---------------------------------------------------------------------------------------------------------------------
# Device


def choose_device(name, local_rank=None, log=print):
    """The torch.device for --device {auto, cuda, cpu}: exactly one, pinned.

    local_rank: this process's place among those of its node; None for a run of one process, which takes the first GPU
    and says so where there are more. UserError where CUDA was asked for, or granted by Slurm, and torch cannot use it:
    a run that quietly took the CPU instead would waste the allocation.
    """
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        mend = advice(torch.version.cuda)
        granted = next(
            (v for v in ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "SLURM_GPUS_ON_NODE") if os.environ.get(v)), None
        )
        if name == "cuda" or granted:
            why = f"the Slurm allocation has GPUs ({granted}={os.environ[granted]})" if granted else "--device cuda"
            raise UserError(f"{why}, but torch sees no CUDA device; {mend or 'check the driver, or pass --device cpu'}")
        if mend:
            log(f"warning: {mend}")
        return torch.device("cpu")
    visible = torch.cuda.device_count()
    if local_rank is None and visible > 1:
        log(f"{visible} GPUs are visible; this run uses the first alone (the distributed scripts use all)")
    index = local_rank or 0
    if index >= visible:
        raise UserError(f"local rank {index} has no GPU: {visible} visible; start at most {visible} processes a node")
    torch.cuda.set_device(index)
    torch.cuda.set_stream(torch.cuda.Stream(index))  # all work takes it: the default stream cannot become a graph
    return torch.device("cuda", index)


def device_uuid(device):
    """What tells a GPU from all others, machines of one name among them; None for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def place(rank, local_rank, device):
    """Where this rank runs: what one line of the topology table says, and the record keeps."""
    uuid = device_uuid(device)
    if uuid:
        torch.zeros(1, device=device)  # from here on the card counts this process among those that use it
    granted = os.environ.get("SLURM_CPUS_ON_NODE")
    return {
        "rank": rank,
        "host": socket.gethostname(),
        "local_rank": local_rank,
        "device": str(device),
        "name": device_name(device),
        "job": os.environ.get("SLURM_JOB_ID"),
        "node": os.environ.get("SLURMD_NODENAME"),
        "uuid": uuid,
        "other_processes": hardware.other_processes(uuid),  # that hold memory on this card
        "node_shared": bool(granted) and int(granted) < (os.cpu_count() or 1),  # others may have the other CPUs
    }


def topology(places):
    """The places of all ranks as a table, the transport between them, and warnings of what spoils timings."""
    columns = ("rank", "host", "local_rank", "device", "name", "job", "node")
    rows = [("rank", "host", "local rank", "device", "", "job", "node")]
    rows += [tuple("-" if one[column] is None else str(one[column]) for column in columns) for one in places]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    if len(places) > 1 and places[0]["uuid"]:
        lines.append(hardware.transports(places))
    for one in places:
        if one["other_processes"]:
            lines.append(
                f"warning: rank {one['rank']}: {one['other_processes']} other processes hold memory on its GPU; "
                "timings of this run are spoilt"
            )
    if places[0]["uuid"] and places[0]["other_processes"] is None:
        lines.append("note: no utilisation, power and energy in the record: `pip install -r requirements-report.txt`")
    shared = sorted({one["host"] for one in places if one["node_shared"]})
    if shared:
        lines.append(f"warning: {', '.join(shared)}: other jobs may share the node (--exclusive), which spoils timings")
    return "\n".join(lines)


def device_name(device):
    """The card's name, or the processor's."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return "CPU"


def peak_flops(device, precision):
    """The card's dense matrix peak in FLOP/s at this precision (tf32: half of bf16's).

    None if it is not known, as of a part of a card (MIG).
    """
    if device.type != "cuda" or precision == "fp32":
        return None
    name = torch.cuda.get_device_name(device)
    if re.search(r"\bMIG\b", name):
        return None
    peak = next((peak for words, peak in PEAK_FLOPS.items() if re.search(rf"\b{words}\b", name)), None)
    return peak / 2 if peak and precision == "tf32" else peak


def cpu_count():
    """Processors granted to this process (Slurm and containers grant fewer than the machine has)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ---------------------------------------------------------------------------------------------------------------------
# Precision and seeds


def choose_precision(name, device):
    """Resolve --precision for `device` and set torch's matrix-product mode accordingly."""
    capable = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if name == "auto":
        name = "bf16" if capable else "fp32"
    if name == "bf16" and device.type == "cuda" and not capable:
        raise UserError("--precision bf16: this card has no bf16 units; use fp16 or fp32")
    if name == "tf32" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        raise UserError("--precision tf32: this card has no TF32 units; use fp16 or fp32")
    if name in ("tf32", "fp16") and device.type == "cpu":
        raise UserError(f"--precision {name} needs a GPU; use fp32 or bf16 on the CPU")
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    torch.backends.cudnn.allow_tf32 = name == "tf32"
    return name


def quiet_warnings():
    """Silence the warnings of libraries about choices that are made on purpose here."""
    warnings.filterwarnings("ignore", message=".*`broadcast_buffers` is deprecated.*")  # its successor is too new
    warnings.filterwarnings("ignore", message=".*TensorFloat32 tensor cores.*")  # --precision decides
    warnings.filterwarnings("ignore", message=".*capturable=True.*without CUDA graph.*")  # the first steps do
    warnings.filterwarnings("ignore", message=".*Profiler clears events.*")


def seed_everything(seed, deterministic=False):
    """Seed the new head's weights; with `deterministic`, refuse kernels whose sums depend on timing."""
    torch.manual_seed(seed)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def seed_dropout(seed, step, rank):
    """Reseed dropout, so that it depends on where the run is and not on how it got there: a resumed run is exact.

    The micro-steps of a step draw on from here, one after the other.
    """
    torch.manual_seed(hash((seed, step, rank)) & 0x7FFFFFFFFFFFFFFF)


def resolve_hardware(args, device):
    """Fill in what depends on the device: precision, attention, compilation, graphs, tokens in an evaluation chunk."""
    args.precision = choose_precision(args.precision, device)
    if args.precision == "fp16" and getattr(args, "zero1", False):
        raise UserError(
            "--zero1 with --precision fp16: the shared optimizer would wait for the device at each step; "
            "use another precision, or distributed_fsdp.py"
        )
    if args.attention in ("fused", "flash") and not has_kernels(device):
        raise UserError(f"--attention {args.attention} needs CUDA and an Ampere card or newer; use sdpa")
    if args.attention == "flash" and not flash_takes(HALF.get(args.precision)):
        raise UserError(
            "--attention flash needs --precision bf16 or fp16, and torch.nn.attention.varlen; use fused or sdpa"
        )
    if args.attention in ("fused", "flash") and args.attention_dropout:
        raise UserError(f"--attention {args.attention} has no dropout; leave --attention-dropout at 0 or use sdpa")
    if args.attention == "auto":
        args.attention = "fused" if has_kernels(device) and not args.attention_dropout else "sdpa"
    if args.compile is None:
        args.compile = device.type == "cuda" and not args.deterministic
    if args.cuda_graphs and device.type != "cuda":
        raise UserError("--cuda-graphs needs a GPU")
    if args.cuda_graphs is None:
        args.cuda_graphs = device.type == "cuda" and not args.deterministic
    if args.eval_tokens is None:
        args.eval_tokens = 65536 if device.type == "cuda" else 4096


def linear_schedule(total_steps, warmup, done=0):
    """The factor on the learning rate at a step: linear from 0 over the warm-up part, then linear down to 0.

    done: steps of the run before the scheduler's first.
    """
    rising = max(1, round(total_steps * warmup))

    def factor(step):
        step += done
        return min((step + 1) / rising, max(0.0, (total_steps - step) / max(1, total_steps - rising)))

    return factor


# ---------------------------------------------------------------------------------------------------------------------
# Clocks, progress, TensorBoard, profiler


def process_seconds():
    """Seconds since this process was started, imports included."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):  # not Linux
        return None


def synchronize(device):
    """Wait for the device, so that a clock read after it tells the truth."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def memory_for(micro_batches):
    """Turn running out of memory on these PackedBatches into one line that says what takes less."""
    try:
        yield
    except torch.OutOfMemoryError:
        tokens = max(len(batch.input_ids) for batch in micro_batches)
        less = max(tokens // 2 // 64 * 64, micro_batches[0].max_length)
        way = "`--checkpoint-activations` takes less"
        if less < tokens:
            way = f"`--max-tokens-per-device {less}` splits each step further and leaves the experiment the same"
        raise UserError(f"out of memory on a micro-step of {tokens} tokens: {way}") from None


class Progress:
    """A tqdm bar on a terminal; elsewhere one line every `every` seconds, as a log file wants it."""

    def __init__(self, total, what, show=True, every=30.0):
        self.total, self.what, self.show, self.every = total, what, show, every
        self.done, self.note = 0, ""
        self.started = self.last = time.monotonic()
        self.bar = None
        if show and sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=total, desc=what, unit="tok", unit_scale=True, dynamic_ncols=True, leave=False)

    def __call__(self, amount, note=""):
        self.done += amount
        self.note = note or self.note
        if self.bar is not None:
            self.bar.update(amount)
            if note:
                self.bar.set_postfix_str(note)
        elif self.show and time.monotonic() - self.last >= self.every:
            self.last = time.monotonic()
            elapsed = self.last - self.started
            share = min(self.done / self.total, 1)  # of an evaluation rank 0 alone counts, for all ranks
            left = elapsed * (1 / max(share, 1e-9) - 1)
            print(f"{self.what} {share:4.0%} {elapsed:5.0f} s, {left:.0f} s left {self.note}", flush=True)

    def close(self):
        if self.bar is not None:
            self.bar.close()


def peak_memory(device):
    """Bytes at the peak: of the card, as torch allocated them, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


CHARTS = {  # of TensorBoard's custom scalars: what a report shows side by side
    "by epoch": {
        "loss in training and on the dev set": ["Multiline", ["epoch/train_loss", "epoch/dev_loss"]],
        "exact match and F1": ["Multiline", ["epoch/(train_)?exact", "epoch/(train_)?f1"]],  # train_: --score-train
    }
}


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
        request: the interrupts.StopRequest of this run.
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
        self.sampler = hardware.Sampler(places if places[rank]["local_rank"] == 0 else [])
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

        training: from end_epoch. result: evaluation.Evaluation. seconds: {"evaluation": …, "checkpoint": …}.
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
            hardware.append_rows(self.folder.path / "hardware.csv", rows)
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


def read_events(path):
    """The events in a TensorBoard file, up to where it is damaged."""
    from google.protobuf.message import DecodeError
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    with contextlib.suppress(DecodeError):
        yield from LegacyEventFileLoader(str(path)).Load()


def curves(folder, saved):
    """A TensorBoard writer. Of a run that goes on, it takes back what was written after the checkpoint.

    saved: the checkpoint's state, or {}.
    """
    from torch.utils.tensorboard import SummaryWriter  # slow to import

    try:
        earlier = sorted(folder.glob("events.*"))
        points = {
            (value.tag, event.step): (value.simple_value, event.wall_time)
            for path in earlier
            for event in read_events(path)
            for value in event.summary.value
            if value.tag.startswith(("step/", "epoch/")) and value.HasField("simple_value")
        }
        writer = SummaryWriter(folder)
        writer.add_custom_scalars(CHARTS)
        for (tag, at), (value, seconds) in points.items():
            if saved and at <= (saved["step"] if tag.startswith("step/") else len(saved["epochs"])):
                writer.add_scalar(tag, value, at, walltime=seconds)
        writer.flush()
        for path in earlier:
            path.unlink()
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error}") from None
    return writer


def printer(rank):
    """`print` on rank 0, silence elsewhere."""
    return (lambda text: print(text, flush=True)) if rank == 0 else (lambda text: None)
