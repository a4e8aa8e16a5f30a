"""Runs of the training scripts, each in processes of its own, without importing torch anew for each: a server forks.

    status, output = forking.server().run("distributed_ddp.py", 2, ["--epochs", "1"])

stands in for `torchrun --nproc-per-node=2 distributed_ddp.py --epochs 1`: when a rank fails, the others are ended.
"""

import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

SERVER = """
import atexit, contextlib, json, os, runpy, signal, sys, time
import torch, transformers, pandas, torch.utils.tensorboard, torch.distributed.fsdp, torch.distributed.optim
from transformers.models.bert import modeling_bert
from tensorboard.backend.event_processing import event_file_loader
from common.data import data
from common.model import loading
from common.run import distributed, run, settings

def rank_process(job, rank):
    sys.stdin.close()
    output = os.open(job["output"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(output, 1), os.dup2(output, 2)
    ranks = str(job["ranks"])
    os.environ.update(job["env"])
    if job["ranks"] > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks)
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(job["port"]))
    sys.argv = [job["script"], *job["arguments"]]
    status = 1
    try:
        if job["before"]:
            exec(job["before"], {"rank": rank})
        runpy.run_path(job["script"], run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        import traceback
        traceback.print_exc()
    atexit._run_exitfuncs()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(status)

for line in sys.stdin:
    job = json.loads(line)
    running = {}
    for rank in range(job["ranks"]):
        pid = os.fork()
        if not pid:
            rank_process(job, rank)
        running[pid] = rank
    print(json.dumps(list(running)), flush=True)
    status, ending = [None] * job["ranks"], None
    while running:
        pid, code = os.wait()
        if pid not in running:
            continue
        rank = running.pop(pid)
        status[rank] = os.waitstatus_to_exitcode(code)
        if status[rank] and running and not ending:
            ending = os.fork()  # as torchrun does: a while to end by themselves, then SIGKILL
            if not ending:
                time.sleep(3)
                for other in running:
                    os.kill(other, signal.SIGKILL)
                os._exit(0)
    print(json.dumps(status), flush=True)
    if ending:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(ending, signal.SIGKILL)
            os.waitpid(ending, 0)
"""


class Server:
    """One process with everything imported, which forks the ranks of one run at a time."""

    def __init__(self):
        env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVER], cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def start(self, script, ranks, arguments, env=None, before=""):
        """Start a run; the process numbers of its ranks. before: Python for each rank to run first, which knows `rank`.

        Its result comes from `result`.
        """
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with tempfile.NamedTemporaryFile(delete=False) as file:
            self.output = Path(file.name)
        job = {"script": str(script), "ranks": ranks, "arguments": [str(one) for one in arguments], "env": env or {}}
        job |= {"port": port, "output": str(self.output), "before": before}
        print(json.dumps(job), file=self.process.stdin, flush=True)
        self.ranks = json.loads(self.process.stdout.readline())
        return self.ranks

    def result(self, seconds=240):
        """(each rank's exit status, everything written) once the run has ended."""
        timer = threading.Timer(seconds, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        output = self.output.read_text(errors="replace")
        self.output.unlink()
        if not line:
            server.cache_clear()
            raise AssertionError(f"no end after {seconds} s: {output[-3000:]}")
        return json.loads(line), output

    def run(self, script, ranks, arguments, env=None, before="", seconds=240):
        self.start(script, ranks, arguments, env, before)
        return self.result(seconds)


@functools.cache
def server():
    """The one of this test process; it ends when its standard input does."""
    return Server()
