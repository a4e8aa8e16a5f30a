"""This project: the steps of baseline.py, distributed_ddp.py and distributed_fsdp.py on packed batches."""

import argparse

from benchmarks.steps import Choice, Setting
from common.model.attention import register_attention
from common.run.devices import choose_device
from common.run.distributed import finish, start
from common.run.settings import resolve_hardware


def train(bench):
    args = argparse.Namespace(shape=bench.shape, precision=bench.precision)
    vars(args).update(
        attention="auto", attention_dropout=0.0, deterministic=False, compile=None, cuda_graphs=None, eval_tokens=None
    )
    if bench.device.type == "cuda":  # and its stream
        bench.device = choose_device("cuda", bench.device.index)
    resolve_hardware(args, bench.device)
    register_attention()
    if bench.world_size > 1:

        start(bench.device)
    strategy = bench.way.options.get("strategy", "baseline" if bench.world_size == 1 else "ddp")
    batch_size = bench.way.batch_size * bench.world_size
    place = bench.device, bench.rank, bench.world_size
    setting = Setting(Choice(strategy, batch_size), args, bench.features, *place)
    bench.attention, bench.compile = setting.model.attention, setting.model.compiled
    while True:
        setting.step()
        if bench.step():
            break
    if bench.world_size > 1:
        del setting
        finish()
