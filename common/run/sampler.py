"""What the hardware did: one sampler a node reads GPU load, power, temperature, memory and InfiniBand each second.

NVIDIA's library (nvidia-ml-py, in requirements-report.txt) is optional: without it, and on CPUs, nothing is sampled.
"""

import contextlib
import csv
import itertools
import os
import socket
import threading
import time
from pathlib import Path

FIELDS = ("time", "host", "rank", "utilisation", "power_watts", "temperature", "memory_bytes")
INFINIBAND = Path("/sys/class/infiniband")


def load_nvml():
    """The NVIDIA management library, started, or None where it or a driver is missing."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml
    except Exception:  # the package or the driver is absent or of another age: sampling is optional
        return None


def gpu_handle(nvml, uuid):
    """NVML's handle of the card with this UUID, as torch names it."""
    return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")


def other_processes(uuid):
    """How many other processes hold memory on a card that this process uses; None where that is not known."""
    nvml = load_nvml()
    if nvml is None or uuid is None:
        return None
    try:
        return max(0, len(nvml.nvmlDeviceGetComputeRunningProcesses(gpu_handle(nvml, uuid))) - 1)
    except nvml.NVMLError:
        return None


def has_nvlink(uuid):
    """Whether the card's first NVLink is up; None where that is not known."""
    nvml = load_nvml()
    if nvml is None or uuid is None:
        return None
    try:
        return bool(nvml.nvmlDeviceGetNvLinkState(gpu_handle(nvml, uuid), 0))
    except nvml.NVMLError:
        return False


def infiniband_bytes():
    """Bytes (sent, received) by all InfiniBand ports of this node since it started; None without InfiniBand."""
    sent = received = 0
    ports = list(INFINIBAND.glob("*/ports/*/counters"))
    try:
        for port in ports:  # the counters count words of four bytes
            sent += 4 * int((port / "port_xmit_data").read_text())
            received += 4 * int((port / "port_rcv_data").read_text())
    except (OSError, ValueError):
        return None
    return (sent, received) if ports else None


def transports(places):
    """How NCCL's ranks can reach each other, as one line: links within a node, networks between nodes."""
    hosts = [place["host"] for place in places]
    parts = []
    if len(set(hosts)) < len(hosts):
        link = has_nvlink(places[0]["uuid"])
        parts.append("within a node " + {True: "NVLink", False: "PCIe or shared memory", None: "not known"}[link])
    if len(set(hosts)) > 1:
        ports = sorted(port.name for port in INFINIBAND.glob("*")) if INFINIBAND.is_dir() else []
        disabled = os.environ.get("NCCL_IB_DISABLE", "0") == "1"
        parts.append(
            "between nodes " + (f"InfiniBand ({', '.join(ports)})" if ports and not disabled else "sockets (Ethernet)")
        )
    return "NCCL transport: " + ", ".join(parts) if parts else ""


class Sampler:
    """Reads the cards of this node's ranks once a second in a thread, from `begin` on.

    places: place of all ranks; those on this host with a card are sampled. Without any, it does nothing.
    """

    def __init__(self, places, interval=1.0):
        self.interval = interval
        self.rows, self.lock, self.closed = [], threading.Lock(), threading.Event()
        self.nvml = load_nvml()
        self.cards = {}
        host = socket.gethostname()
        if self.nvml is not None:
            mine = [place for place in places if place["host"] == host and place["uuid"]]
            with contextlib.suppress(self.nvml.NVMLError):
                self.cards = {place["rank"]: gpu_handle(self.nvml, place["uuid"]) for place in mine}
        if self.cards:
            threading.Thread(target=self._run, daemon=True).start()
        self.begin()

    def _run(self):
        while not self.closed.wait(self.interval - time.time() % self.interval):
            self._sample()

    def _sample(self):
        nvml, host = self.nvml, socket.gethostname()
        for rank, card in self.cards.items():
            try:
                row = (
                    time.time(),
                    host,
                    rank,
                    nvml.nvmlDeviceGetUtilizationRates(card).gpu,
                    nvml.nvmlDeviceGetPowerUsage(card) / 1000,
                    nvml.nvmlDeviceGetTemperature(card, nvml.NVML_TEMPERATURE_GPU),
                    nvml.nvmlDeviceGetMemoryInfo(card).used,
                )
            except nvml.NVMLError:
                continue
            with self.lock:
                self.rows.append(row)

    def _counters(self):
        """The cards' own energy counters, in joules, where they have one."""
        counters = {}
        for rank, card in self.cards.items():
            try:
                counters[rank] = self.nvml.nvmlDeviceGetTotalEnergyConsumption(card) / 1000
            except self.nvml.NVMLError:
                counters[rank] = None
        return counters

    def begin(self):
        """Start a new interval; `end` reports it."""
        if self.cards:
            self._sample()
        self.energy, self.infiniband = self._counters(), infiniband_bytes()
        with self.lock:
            self.rows = self.rows[-len(self.cards) :] if self.cards else []

    def end(self):
        """({rank: figures}, rows, InfiniBand bytes) since `begin`, and start the next interval.

        figures: mean utilisation (per cent) and power (watts), highest temperature (°C) and memory (bytes), seconds,
        energy_joules (power integrated over the samples) and energy_counter_joules (by the card's own counter).
        """
        if self.cards:
            self._sample()
        with self.lock:
            rows = list(self.rows)
        counters, traffic = self._counters(), infiniband_bytes()
        figures = {}
        for rank in self.cards:
            own = [row for row in rows if row[2] == rank]
            if len(own) < 2:
                continue
            spans = [(later[0] - earlier[0], (later[4] + earlier[4]) / 2) for earlier, later in itertools.pairwise(own)]
            before, after = self.energy[rank], counters[rank]
            figures[rank] = {
                "utilisation": sum(row[3] for row in own) / len(own),
                "power_watts": sum(row[4] for row in own) / len(own),
                "temperature": max(row[5] for row in own),
                "memory_bytes": max(row[6] for row in own),
                "seconds": own[-1][0] - own[0][0],
                "energy_joules": sum(seconds * watts for seconds, watts in spans),
                "energy_counter_joules": None if before is None or after is None else after - before,
            }
        sent = None
        if traffic and self.infiniband:
            sent = {"sent_bytes": traffic[0] - self.infiniband[0], "received_bytes": traffic[1] - self.infiniband[1]}
        self.begin()
        return figures, rows, sent

    def close(self):
        self.closed.set()


def append_rows(path, rows):
    """Append samples to a CSV file, with a header if it is new."""
    new = not Path(path).exists()
    with open(path, "a", newline="") as file:
        writer = csv.writer(file)
        if new:
            writer.writerow(FIELDS)
        writer.writerows(rows)
