"""This project: the steps of baseline.py, distributed_ddp.py and distributed_fsdp.py on packed batches."""

import argparse

from benchmarks.steps import Choice, Setting
from common.model.attention import register_attention
from common.run import distributed, world
from common.run.environment import as_it_ran
from common.run.settings import choose_kernels


def train(bench):
    args = argparse.Namespace(shape=bench.shape, precision=bench.precision)
    vars(args).update(
        attention="auto", attention_dropout=0.0, deterministic=False, compile=None, cuda_graphs=None, eval_tokens=None
    )
    here = (distributed.World if bench.world_size > 1 else world.World)(bench.device.type)
    bench.device = here.device
    choose_kernels(args, here.device)
    register_attention()
    here.connect()
    strategy = bench.way.options.get("strategy", "baseline" if bench.world_size == 1 else "ddp")
    batch_size = bench.way.batch_size * bench.world_size
    setting = Setting(Choice(strategy, batch_size), args, bench.features, here)
    bench.ran = as_it_ran(setting.model, args.cuda_graphs)
    while True:
        setting.step()
        if bench.step():
            break
    del setting
    here.finish()
