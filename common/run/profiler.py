"""--profile: where the time of a few steady steps goes, as a table of shares, a trace and a figure of one step."""

import re
from pathlib import Path

import torch

# Which kernels are what, by a part of their names, first match first. What nothing claims is elementwise: activation,
# dropout, LayerNorm, loss, sums, casts, copies.
KINDS = {
    "communication": r"nccl",
    "attention": r"flash|fmha|attention|cudnn.*sdpa",
    "GEMM": r"gemm|nvjet|cutlass|cublas|splitK|wgmma|s884|s16816",
    "optimizer": r"multi_tensor_apply(?!.*Copy)|[Aa]dam",  # copies are casts, or into buckets
}


def kind_of(kernel):
    """The kind of work that a kernel of this name does."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, kernel)), "elementwise")


def merge(spans):
    """Spans (begin, end) as disjoint ones in order."""
    merged = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            before = merged.pop()
            begin, end = before[0], max(end, before[1])
        merged.append((begin, end))
    return merged


def total(spans):
    return sum(end - begin for begin, end in spans)


def time_shares(kernels):
    """The time of each kind of work of one rank, a dict, from its kernels as (name, begin, end), in their unit.

    Time in which several kernels run counts once, for communication last: hidden is what runs beside other work,
    exposed what runs alone. Idle is what is left between the first kernel's begin and the last one's end.
    """
    spans = {kind: [] for kind in (*KINDS, "elementwise")}
    for name, begin, end in kernels:
        spans[kind_of(name)].append((begin, end))
    network = merge(spans.pop("communication"))
    times, covered = {}, []
    for kind in ("GEMM", "attention", "elementwise", "optimizer"):
        before = total(covered)
        covered = merge([*covered, *spans[kind]])
        times[kind] = total(covered) - before
    busy = total(merge([*covered, *network]))
    exposed = busy - total(covered)
    everything = max(end for _, _, end in kernels) - min(begin for _, begin, _ in kernels)
    return times | {
        "communication, hidden": total(network) - exposed,
        "communication, exposed": exposed,
        "idle": everything - busy,
        "all": everything,
    }


def shares_table(times, steps):
    """The shares as lines of text; times: from `time_shares`, in microseconds. Hidden time adds nothing."""
    lines = [f"{'':24}{'ms a step':>10}{'share':>8}"]
    for kind, time in times.items():
        lines.append(f"{kind:24}{time / 1000 / steps:10.2f}{time / times['all']:8.1%}")
    return "\n".join(lines)


def device_kernels(profiler):
    """(name, begin, end) of everything that ran on the GPU, in microseconds."""
    return [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    ]


def draw_step(kernels, steps, path):
    """A figure of one step: kernels over time, a row for each kind of work; ImportError where matplotlib is absent.

    The step drawn is the last of `steps` equal parts of the time.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    first, last = min(begin for _, begin, _ in kernels), max(end for _, _, end in kernels)
    begin_step = last - (last - first) / steps
    rows = ["communication", "GEMM", "attention", "elementwise", "optimizer"]
    figure, axes = plt.subplots(figsize=(12, 3), layout="constrained")
    for row, kind in enumerate(rows):
        spans = [
            ((begin - begin_step) / 1000, (end - begin) / 1000)
            for name, begin, end in kernels
            if kind_of(name) == kind and begin >= begin_step
        ]
        axes.broken_barh(spans, (row - 0.4, 0.8), color=f"C{row}")
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title("One training step on the GPU")
    figure.savefig(path, dpi=150)
    plt.close(figure)


class Profiler:
    """Traces a few steady steps of the first epoch. Call `step()` after each one; without `enabled` nothing happens."""

    def __init__(self, enabled, device, folder, skip, active=3, log=print):
        self.profiler = None
        if not enabled:
            return
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self.folder, self.device, self.active, self.log = Path(folder), device, active, log
        self.traced, self.needed = False, skip + 2 + active
        schedule = torch.profiler.schedule(wait=skip, warmup=2, active=active, repeat=1)
        self.profiler = torch.profiler.profile(activities=kinds, schedule=schedule, on_trace_ready=self.report)
        self.profiler.start()

    def report(self, profiler):
        """Write the trace and the figure, log the tables."""
        self.traced = True
        profiler.export_chrome_trace(str(self.folder / "trace.json"))
        order = "self_cuda_time_total" if self.device.type == "cuda" else "self_cpu_time_total"
        self.log(profiler.key_averages().table(sort_by=order, row_limit=12, max_name_column_width=60))
        kernels = device_kernels(profiler)
        if kernels:
            self.log(shares_table(time_shares(kernels), self.active))
            try:
                draw_step(kernels, self.active, self.folder / "step.png")
            except ImportError:
                self.log("no figure of a step: `pip install -r requirements-report.txt` brings matplotlib")
        self.log(
            f"trace of {self.active} steps: {self.folder}/trace.json (open it in https://ui.perfetto.dev); it slows "
            "the epoch"
        )

    def step(self):
        if self.profiler is not None:
            self.profiler.step()

    def stop(self):
        if self.profiler is not None:
            self.profiler.stop()
            self.profiler = None
            if not self.traced:
                self.log(f"warning: no trace: the epoch has fewer than the {self.needed} steps that one needs")
