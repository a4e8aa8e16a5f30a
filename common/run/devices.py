"""The device of a rank: choosing it, naming it, its peak and its memory."""

import contextlib
import os
import re
import socket
from pathlib import Path

import torch

from common.errors import UserError
from common.run.driver import advice
from common.run.sampler import other_processes, transports

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
        "other_processes": other_processes(uuid),  # that hold memory on this card
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
        lines.append(transports(places))
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


def synchronize(device):
    """Wait for the device, so that a clock read after it tells the truth."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class PeakMemory:
    """The peak memory of each phase, in bytes: on the card what torch allocated, on a CPU what the process held.

    peaks: {phase: bytes}, of the largest if a phase comes again. A CPU's need Linux; elsewhere they are {}.
    """

    STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")

    def __init__(self, device):
        self.device, self.peaks = device, {}
        self.reset()

    def reset(self):
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        else:
            with contextlib.suppress(OSError):
                self.RESET.write_text("5")  # sets VmHWM to what is held now, see man 5 proc

    def end(self, phase):
        """What came since the last phase's end was this phase."""
        with contextlib.suppress(OSError):
            self.peaks[phase] = max(self.peaks.get(phase, 0), self.read())
            self.reset()

    def read(self):
        """Bytes at the peak since the last reset."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        return 1024 * int(re.search(r"VmHWM:\s*(\d+)", self.STATUS.read_text())[1])


def by_rank(peaks):
    """{phase: [bytes of rank 0, of rank 1, …]} of the peaks of all ranks."""
    return {phase: [one.get(phase) for one in peaks] for phase in peaks[0]}
