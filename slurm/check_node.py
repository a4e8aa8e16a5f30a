"""What one node of a job offers, before any rank starts: slurm/launch.sh runs it once on each node.

    python slurm/check_node.py --cache-dir cache --min-free-gb 1

Prints one line of three fields with tabs between them: a verdict, the number of GPUs that ranks may use, and the node
in words or what is wrong with it. The verdict is `ok`, `no-space`, `no-cuda` or `no-grant`. With --job-id the first
node prints a second line: `port`, the port for the rendezvous, a note if it is not the job's own; or `no-port`, 0, why.
"""

import argparse
import os
import platform
import re
import shutil
import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from common.run.driver import advice

FIRST_PORT, LAST_PORT = 10000, 65535  # below are well-known services, Slurm's own ports among them


def port_range(path="/proc/sys/net/ipv4/ip_local_port_range"):
    """(first, last) port outside the range from which the kernel gives ports to outgoing connections."""
    try:
        low, high = map(int, Path(path).read_text().split())
    except (OSError, ValueError):
        low, high = 32768, 60999  # Linux's default
    below, above = (FIRST_PORT, low - 1), (high + 1, LAST_PORT)
    first, last = max(below, above, key=lambda ports: ports[1] - ports[0])
    return (first, last) if last - first >= 100 else (FIRST_PORT, LAST_PORT)  # the kernel takes all: no better choice


def is_free(port):
    """Whether a server could listen on this port of all interfaces."""
    for family, address in ((socket.AF_INET6, "::"), (socket.AF_INET, "")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as server:
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the store does: skip old connections
                server.bind((address, port))
                server.listen()
        except OSError as error:
            if family == socket.AF_INET or error.errno in (98, 13):  # a machine without IPv6 is no reason
                return False
    return True


def choose_port(job_id, free=is_free):
    """(port, note): the job's own port, or the next free one with a note that says so; (None, note) if none is free."""
    first, last = port_range()
    count = last - first + 1
    own = first + job_id % count
    for step in range(20):
        port = first + (own - first + step) % count
        if free(port):
            held = f"port {own}, this job's, is held by another process: taking {port}" if step else ""
            return port, held
    return None, f"port {own} and the 19 after it are held by other processes"


def free_gigabytes(folder):
    """(gigabytes, existing folder): the space for `folder`, which need not exist yet."""
    folder = Path(folder).absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free / 1e9, folder


def driver_version():
    """The NVIDIA kernel driver's version, or None."""
    try:
        found = re.search(r"\d{3}\.\d+(\.\d+)?", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return None
    return found and found.group()


def inspect(cache_dir, min_free_gb, cpu):
    """(verdict, GPUs, text) of this node."""
    place = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    free, existing = free_gigabytes(cache_dir)
    if free < min_free_gb:
        return "no-space", 0, f"{place}: {existing} has {free:.2f} GB free, the cache needs {min_free_gb:g}"
    if not os.access(existing, os.W_OK):
        return "no-space", 0, f"{place}: {existing}, where the cache {cache_dir} belongs, cannot be written"

    import torch  # takes seconds

    granted = os.environ.get("SLURM_GPUS_ON_NODE")
    visible = 0 if cpu else torch.cuda.device_count()
    gpus = int(granted) if granted else visible
    if visible and not granted and os.environ.get("SLURM_JOB_ID") and "CUDA_VISIBLE_DEVICES" not in os.environ:
        return (
            "no-grant",
            gpus,
            f"{place}: Slurm granted no GPU, and the {visible} that torch sees may be in others' use",
        )
    if gpus > visible and not cpu:
        mend = advice(torch.version.cuda) or "another torch build or driver is needed"
        return "no-cuda", gpus, f"{place}: Slurm granted {gpus} GPUs, torch {torch.__version__} sees {visible}; {mend}"

    if cpu:
        cards = f"no GPU wanted ({gpus} granted)" if gpus else "no GPU"
    else:
        cards = f"{gpus} × {torch.cuda.get_device_name(0)}" if gpus else "no GPU"
    cpus = len(os.sched_getaffinity(0))
    host = socket.gethostname()
    text = place if place == host else f"{place} (host {host})"
    text += f": {cards}, {cpus} CPUs, {free:.0f} GB free for the cache; Python {platform.python_version()}, "
    text += f"torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}, driver {driver_version() or 'none'}"
    return "ok", gpus, text


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cache-dir", required=True)
    parser.add_argument("--min-free-gb", type=float, required=True)
    parser.add_argument("--cpu", action="store_true", help="the ranks will run on the CPU")
    parser.add_argument("--job-id", type=int, help="choose the rendezvous port of this job, on its first node")
    args = parser.parse_args()
    lines = [inspect(args.cache_dir, args.min_free_gb, args.cpu)]
    if args.job_id is not None and os.environ.get("SLURM_NODEID", "0") == "0":
        port, note = choose_port(args.job_id)
        lines.append(("port", port, note) if port else ("no-port", 0, note))
    print("\n".join("\t".join(map(str, line)) for line in lines), flush=True)


if __name__ == "__main__":
    main()
