"""The sampler's arithmetic against a card that is made up, and the warnings of a shared card or node."""

import socket
from types import SimpleNamespace

import pytest
import torch

from common.errors import UserError
from common.run import sampler as hardware
from common.run.devices import peak_flops, topology
from common.run.settings import choose_precision


class FakeNvml:
    """A card that draws 100 W more every second, with a counter that agrees."""

    NVML_TEMPERATURE_GPU = 0
    NVMLError = RuntimeError

    def __init__(self):
        self.now = 1000.0

    def watts(self):
        return 100.0 * (self.now - 999.0)

    def nvmlDeviceGetHandleByUUID(self, uuid):
        assert uuid == "GPU-abc"
        return "card"

    def nvmlDeviceGetUtilizationRates(self, card):
        return SimpleNamespace(gpu=50)

    def nvmlDeviceGetPowerUsage(self, card):
        return self.watts() * 1000

    def nvmlDeviceGetTemperature(self, card, sensor):
        return 40 + self.now - 1000

    def nvmlDeviceGetMemoryInfo(self, card):
        return SimpleNamespace(used=int(self.now))

    def nvmlDeviceGetTotalEnergyConsumption(self, card):
        seconds = self.now - 1000.0
        return 1000 * (100.0 * seconds + 50.0 * seconds**2)  # the integral of watts, in millijoules

    def nvmlDeviceGetComputeRunningProcesses(self, card):
        return [SimpleNamespace(pid=1), SimpleNamespace(pid=2)]


@pytest.fixture
def nvml(monkeypatch):
    fake = FakeNvml()
    monkeypatch.setattr(hardware, "load_nvml", lambda: fake)
    monkeypatch.setattr(hardware.time, "time", lambda: fake.now)
    monkeypatch.setattr(hardware.threading.Thread, "start", lambda self: None)
    return fake


def place(**changes):
    return {
        "rank": 3, "host": socket.gethostname(), "local_rank": 0, "device": "cuda:0", "name": "H100", "job": None,
        "node": None, "uuid": "abc", "other_processes": 0, "node_shared": False, **changes,
    }  # fmt: skip


def test_energy_is_integrated_power(nvml):
    sampler = hardware.Sampler([place(), place(rank=4, host="elsewhere")])
    for _ in range(4):
        nvml.now += 1.0
        sampler._sample()
    nvml.now += 0.5
    figures, rows, _ = sampler.end()
    assert set(figures) == {3} and len(rows) == 6
    assert figures[3]["energy_joules"] == pytest.approx(figures[3]["energy_counter_joules"], rel=1e-6)
    assert figures[3]["seconds"] == 4.5 and figures[3]["utilisation"] == 50
    assert figures[3]["temperature"] == 44.5 and figures[3]["memory_bytes"] == 1004
    nvml.now += 2.0
    figures, rows, _ = sampler.end()  # the next interval begins where the last one ended
    assert figures[3]["seconds"] == 2.0 and len(rows) == 2


def test_samples_go_to_a_file(nvml, tmp_path):
    sampler = hardware.Sampler([place()])
    nvml.now += 1
    rows = sampler.end()[1]
    hardware.append_rows(tmp_path / "sampler.csv", rows)
    hardware.append_rows(tmp_path / "sampler.csv", rows)
    lines = (tmp_path / "sampler.csv").read_text().splitlines()
    assert lines[0].startswith("time,host,rank,utilisation") and len(lines) == 5


def test_without_the_library_nothing_is_sampled(monkeypatch):
    monkeypatch.setattr(hardware, "load_nvml", lambda: None)
    sampler = hardware.Sampler([place()])
    assert sampler.end()[:2] == ({}, [])
    assert hardware.other_processes("abc") is None


def test_infiniband_counters(monkeypatch, tmp_path):
    counters = tmp_path / "mlx5_0" / "ports" / "1" / "counters"
    counters.mkdir(parents=True)
    (counters / "port_xmit_data").write_text("1000\n")
    (counters / "port_rcv_data").write_text("500\n")
    monkeypatch.setattr(hardware, "INFINIBAND", tmp_path)
    assert hardware.infiniband_bytes() == (4000, 2000)
    assert "InfiniBand (mlx5_0)" in hardware.transports([place(), place(rank=1, host="other")])
    monkeypatch.setenv("NCCL_IB_DISABLE", "1")
    assert "sockets" in hardware.transports([place(), place(rank=1, host="other")])


def test_shared_cards_and_nodes_are_warned_of(nvml):
    assert hardware.other_processes("abc") == 1
    text = topology([place(other_processes=2), place(rank=4, host="n2", node_shared=True)])
    assert "rank 3: 2 other processes hold memory" in text and "n2: other jobs may share the node" in text
    assert "warning" not in topology([place()])
    table = topology([place(job="17", node="n1")]).splitlines()
    assert table[0].split() == ["rank", "host", "local", "rank", "device", "job", "node"]
    assert table[1].split()[0] == "3" and table[1].split()[-2:] == ["17", "n1"]


def test_the_peak_of_a_card(monkeypatch):
    """By whole words of its name: none for cards whose names begin alike, nor for a part of a card."""
    device = torch.device("cuda")
    for name, half in {
        "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA H200 NVL": 835e12,
        "NVIDIA GH200 480GB": 989e12,
        "NVIDIA A100-SXM4-40GB": 312e12,
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb": None,
        "NVIDIA RTX A3000 Laptop GPU": None,
        "NVIDIA T400 4GB": None,
    }.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(device, "bf16") == half
        assert peak_flops(device, "tf32") == (half and half / 2) and peak_flops(device, "fp32") is None


def test_tensor_cores_that_a_card_lacks_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    for name in ("bf16", "tf32"):
        with pytest.raises(UserError, match=f"{name}: this card has no .* use fp16 or fp32"):
            choose_precision(name, torch.device("cuda"))
