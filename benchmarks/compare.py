"""This project beside the usual ways to train the same: windows a second on the same windows, network and card.

    python -m benchmarks.compare --out FOLDER                       # SQuAD v1.1, BERT-base's shape, on one GPU
    python -m benchmarks.compare --out FOLDER --ranks 2             # on two
    python -m benchmarks.compare --out FOLDER --shape tiny --seconds 0.2 --rounds 1 --ways course-loop-8-fp32
    python -m benchmarks.compare --out FOLDER --ways hf-trainer-32 -- --epochs 2    # also whole runs, to their F1

Each way is built once, in a process of its own (one a rank), and stands still until it is its turn: all ways take turns
in each of --rounds rounds, a few seconds each. A peer is measured in both settings: with its own attention dropout, and
with 0 as here. The number in a way's name is a rank's windows in a batch. Every way leaves a run record, NAME.json, in
--out, written anew after each turn. On a CPU all is fp32 and uncompiled, gloo joins the ranks, and the ways that need
GPUs say so.
"""

import argparse
import concurrent.futures
import importlib.util
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path

import torch

from benchmarks.peers.harness import Way
from benchmarks.whole_runs import equal_f1, has_whole_run, machine, train_whole
from benchmarks.workload import add_workload, build_network, load_windows
from common import errors
from common.args import above_zero, positive, whole
from common.data.windows import trainable_windows
from common.errors import Parser, UserError
from common.model.span import count_parameters
from common.run.devices import cpu_count
from common.run.environment import environment
from common.run.record import SCHEMA, write_json

LIMIT = 240  # seconds until a turn is given up
SETTINGS = ("own", "matched")  # a peer's attention dropout: the model's own, or 0 as here
LEAD = 3  # steps before the clock of each turn starts
HF = {"module": "hf_trainer", "needs": "accelerate"}
LIGHTNING = {"module": "lightning_trainer", "needs": "lightning"}

WAYS = [
    Way("this-project-8", "this_project", 8, warmup=30),  # until most shapes have their graph
    Way("this-project-32", "this_project", 32, warmup=30),
    Way("this-project-8-fp32", "this_project", 8, "fp32", ranks="one", warmup=30),
    Way("this-project-8-tf32", "this_project", 8, "tf32", ranks="one", warmup=30),
    Way("this-project-8-fsdp", "this_project", 8, options={"strategy": "fsdp-zero2"}, ranks="many", warmup=30),
    Way("this-project-32-fsdp", "this_project", 32, options={"strategy": "fsdp-zero2"}, ranks="many", warmup=30),
    # Hugging Face Trainer: run_qa's defaults; the same without padding to 384; tuned in three ways
    Way("hf-trainer-8", batch_size=8, precision="fp32", pad_to=384, **HF),
    Way("hf-trainer-8-dynamic", batch_size=8, precision="fp32", **HF),
    Way("hf-trainer-32", batch_size=32, precision="bf16", pad_to=384, **HF),
    Way("hf-trainer-32-compiled", batch_size=32, precision="bf16", pad_to=384, options={"compile": True}, **HF),
    Way("hf-trainer-32-grouped", batch_size=32, precision="bf16", options={"grouped": True}, cycle=50, **HF),
    # the course reports: their loop, and what they brought it to several GPUs with
    Way("course-loop-8-fp32", "course_loop", 8, "fp32", 512, ranks="one"),
    Way("course-loop-8-tf32", "course_loop", 8, "tf32", 512, ranks="one"),
    Way("lightning-ddp-8", batch_size=8, precision="tf32", pad_to=512, options={"strategy": "ddp"}, **LIGHTNING),
    Way("lightning-ddp-32", batch_size=32, precision="bf16", pad_to=384, options={"strategy": "ddp"}, **LIGHTNING),
    Way(
        "lightning-fsdp-8",
        batch_size=8,
        precision="tf32",
        pad_to=512,
        options={"strategy": "fsdp"},
        gpus_from=1,
        **LIGHTNING,
    ),
    Way("data-parallel-8", "data_parallel", 8, "tf32", 512, ranks="many", alone=True, gpus_from=2),
    Way("deepspeed-zero2-8", "deepspeed_zero2", 8, "tf32", 512, needs="deepspeed"),
    Way("accelerate-32", "accelerate_loop", 32, "bf16", needs="accelerate"),
]


def build_parser():
    parser = Parser(
        prog="python -m benchmarks.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_workload(parser)
    names = [way.name for way in WAYS]
    parser.add_argument("--out", required=True, help="folder of the records")
    parser.add_argument("--ways", nargs="+", choices=names, metavar="WAY", help=f"default: all; {', '.join(names)}")
    parser.add_argument("--ranks", type=positive, default=1, help="processes, one a GPU")
    parser.add_argument("--rounds", type=whole, default=3, help="0 shows the records that are in --out")
    parser.add_argument("--seconds", type=above_zero, default=2.0, help="of a turn")
    parser.add_argument("--warmup", type=positive, default=10, help="steps of each way before its first turn")
    parser.add_argument("--together", type=positive, help="ways that warm up at once; default: 4 on GPUs, else 1")
    parser.add_argument("--dropout", nargs="+", choices=SETTINGS, default=SETTINGS, help="of the peers; default: both")
    parser.add_argument("arguments", nargs="*", metavar="-- ARGUMENTS", help="for whole runs after the turns")
    return parser


def chosen_ways(args, on_cuda):
    """The ways to measure: what was asked for, and this project at the same sizes to compare it with.

    Ways that differ on GPUs alone are measured once on a CPU, under the first one's name.
    """
    asked = [way for way in WAYS if not args.ways or way.name in args.ways]
    ours = {f"this-project-{way.batch_size}" for way in asked}
    found = {}  # by what makes a way another one
    for way in WAYS:
        fits = way.ranks in ("any", "one" if args.ranks == 1 else "many")
        if fits and (way in asked or way.name in ours):
            options = {name: value for name, value in way.options.items() if on_cuda or name != "compile"}
            for dropout in ["own"] if way.ours else args.dropout:
                kind = [way.module, way.batch_size, way.pad_to, options, on_cuda and way.precision, dropout]
                found.setdefault(json.dumps(kind), replace(way, dropout=dropout))
    return list(found.values())


def obstacle(way, ranks, on_cuda):
    """What keeps a way from running here, or None."""
    if way.needs and importlib.util.find_spec(way.needs) is None:
        return f"{way.needs} is not installed: `pip install -r requirements-bench.txt`"
    if way.gpus_from and ranks >= way.gpus_from and not on_cuda:
        return "runs on GPUs only"
    return None


class Failure(Exception):
    """What stopped a way, in one line."""


class Processes:
    """The processes of one way, one a rank, that wait for their turns. log: file of all they print."""

    def __init__(self, way, args, ranks, log):
        given = {"way": asdict(way), "args": vars(args), "ranks": ranks}
        command = [sys.executable, "-m", "benchmarks.peers.harness", json.dumps(given)]
        self.log, self.ranks, port = log, [], free_port()
        with open(log, "w") as complaints:
            for rank in range(1 if way.alone else ranks):
                self.ranks.append(
                    subprocess.Popen(
                        command,
                        env=surroundings(way, args.device, ranks, rank, port),
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=complaints,
                        text=True,
                        start_new_session=True,
                    )
                )

    def turn(self, untimed, timed):
        """What the ranks reply to so many steps, a list of dicts (harness.Bench.step); Failure if one has ended."""
        watchdog = threading.Timer(LIMIT, self.kill)
        watchdog.start()
        try:
            for process in self.ranks:
                process.stdin.write(f"[{untimed}, {timed}]\n")
                process.stdin.flush()
            replies = [process.stdout.readline() for process in self.ranks]
        except BrokenPipeError:
            replies = [""]
        expired = not watchdog.is_alive()
        watchdog.cancel()
        if all(replies):
            return [json.loads(reply) for reply in replies]
        self.kill()
        if expired:
            raise Failure(f"no result after {LIMIT} s, see {self.log}")
        text = self.log.read_text()
        why = re.search(r"^(?:\[rank\d+\]: *)?((?:[\w.]*(?:Error|Exception): \S|error: ).*)", text, flags=re.M)
        raise Failure(f"{why[1][:300] if why else f'exit status {self.ranks[0].returncode}'}, see {self.log}")

    def close(self):
        """No more turns: the training loops end, and with them the processes."""
        for process in self.ranks:
            process.stdin.close()
        try:
            for process in self.ranks:
                process.wait(30)
        except subprocess.TimeoutExpired:
            print(f"note: {self.log.stem} did not end by itself", flush=True)
        self.kill()
        self.log.unlink(missing_ok=True)

    def kill(self):
        for process in self.ranks:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def surroundings(way, device, ranks, rank, port):
    """The environment of a rank: that of torchrun where there are several, or where the way wants a launcher."""
    environ = os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if device == "cuda":  # some ways use every GPU they see
        visible = environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(ranks)))
        environ["CUDA_VISIBLE_DEVICES"] = ",".join(visible.split(",")[:ranks])
    if (ranks > 1 and not way.alone) or way.module == "deepspeed_zero2":  # which looks for MPI else
        environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        environ |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environ["TORCHELASTIC_RUN_ID"] = "compare"  # by which Lightning knows torchrun
    return environ


def start_record(way, ranks, args, questions, features, surrounding):
    """The record of a way before its first turn."""
    meta = features.meta
    data = {"file": questions.path.name, "sha256": questions.sha256}
    data |= {key: meta[key] for key in ("version", "questions", "windows", "tokens")}
    with torch.device("meta"):
        network = build_network(args.shape)
    parameters, outside = count_parameters(network)
    dropout = 0.0 if way.ours or way.dropout == "matched" else network.config.attention_probs_dropout_prob
    arguments = {"batch_size": way.batch_size * ranks, "pad_to": way.pad_to, **way.options}
    arguments |= {"max_length": 384, "overlap": 128, "attention_dropout": dropout, "seconds": args.seconds}
    return {
        "schema": SCHEMA,
        "status": "running",
        "started": time.time(),
        **surrounding,
        "way": way.name,
        "dropout": {"setting": way.dropout},  # what was applied joins it after a turn
        "strategy": way.full_name,
        "arguments": arguments,
        "data": {"name": questions.path.name, "train": data},
        "model": {
            "name": args.shape,
            "type": network.config.model_type,
            "dropout": network.config.hidden_dropout_prob,
            "parameters": parameters,
            "parameters_outside_embeddings": outside,
        },
        "world_size": ranks,
        "nodes": 1,
        "hosts": [socket.gethostname()] * ranks,
        "gpus": [],
        "cpus": cpu_count(),
        "precision": way.precision,
        "attention": "padded",
        "compile": False,
        "seconds": {},
        "epochs": [],  # none is whole
        "rounds": [],
    }


def add_round(record, replies, on_cuda):
    """Put one turn into a way's record. replies: see Processes.turn; windows a second are the median of all turns."""
    first = replies[0]
    devices = [device for reply in replies for device in reply["devices"]]
    names = [device["name"] for device in devices]
    speed = record["arguments"]["batch_size"] * first["steps"] / first["seconds"]
    record["rounds"].append(
        {"windows_per_second": speed, **{key: first[key] for key in ("steps", "seconds", "cpu_seconds")}}
    )
    setting = record["dropout"]["setting"]
    record |= {key: first[key] for key in ("threads", "precision")} | first["ran"]
    record["dropout"] = {"setting": setting, **first["ran"]["dropout"]}
    record["arguments"]["attention_dropout"] = record["dropout"]["attention"]
    record |= {"gpus": names} if on_cuda else {"device": names[0]}
    record["ranks"] = devices  # their UUIDs tell a report whether two records are of one machine
    record |= {
        "status": "finished",
        "windows_per_second": statistics.median(speeds(record)),
        "peak_memory": {"training": [count for reply in replies for count in reply["peak_memory"]]},
    }
    return record


def speeds(record):
    """Windows a second of each turn."""
    return [one["windows_per_second"] for one in record["rounds"]]


def read_records(folder):
    """{way's name and ranks: record} of a folder that --out names; empty if there is none."""
    records = {}
    for path in sorted(Path(folder).glob("*.json")):
        try:
            record = json.loads(path.read_text())
        except (OSError, ValueError):
            record = None
        if not isinstance(record, dict) or not {"way", "world_size", "rounds"} <= record.keys():
            raise UserError(f"{path}: not a record of benchmarks.compare; name another --out")
        records[path.stem] = record
    return records


def leads(records, record):
    """How many times as fast this project is as a way: (at its default precision, at the way's); None if unknown.

    Only a record of the same machine with as many windows on as many ranks counts.
    """
    ranks, batch, precision = record["world_size"], record["arguments"]["batch_size"], record["precision"]
    names = [f"this-project-{batch // ranks}{end}-x{ranks}" for end in ("", f"-{precision}")]
    ours = [records.get(name) for name in names]
    ours = [one if one and one["rounds"] and machine(one) == machine(record) else None for one in ours]
    equal = next((one for one in ours if one and one["precision"] == precision), None)
    return [one and one["windows_per_second"] / record["windows_per_second"] for one in (ours[0], equal)]


def closest(records):
    """Of each peer the record of the setting in which this project leads by less, and this project's own records."""
    found = {}
    for name, record in records.items():
        lead = (leads(records, record)[0] if record["rounds"] else None) or float("inf")
        key = record["way"], record["world_size"]
        if key not in found or lead < found[key][0]:
            found[key] = lead, name
    return {name: records[name] for _, name in found.values()}


def rows(records):
    """What the tables say, a dict for each measured way. records: see `read_records`.

    "ours ÷ it" has this project at its default precision, "at its precision" at the other way's. Neither is given for
    records of other cards or another torch: see `place`.
    """
    order = [way.name for way in WAYS]

    def place(record):
        return record["world_size"], order.index(record["way"]), -record["arguments"]["attention_dropout"]

    found = []
    for record in sorted((one for one in records.values() if one["rounds"]), key=place):
        ranks, batch = record["world_size"], record["arguments"]["batch_size"]
        lead, equal = (f"{times:.2f}" if times else "–" for times in leads(records, record))
        median, least, most = (f(speeds(record)) for f in (statistics.median, min, max))
        found.append(
            {
                "way": record["way"],
                "ranks": str(ranks),
                "batch": str(batch),
                "precision": record["precision"],
                "padded to": str(record["arguments"]["pad_to"] or "longest")
                if record["attention"] == "padded"
                else "–",
                "attention dropout": f"{record['arguments']['attention_dropout']:g}",
                "windows/s": speed_text(median),
                "least": speed_text(least),
                "most": speed_text(most),
                "ours ÷ it": lead,
                "at its precision": equal,
                "s to equal F1": equal_f1(record, records.get(f"this-project-{batch // ranks}-x{ranks}")),
                "GB a rank": f"{max(record['peak_memory']['training']) / 1e9:.1f}",
            }
        )
    return found


def speed_text(speed):
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.1f}"


def table(found):
    """Rows (dicts of texts with the same keys) as lines of a Markdown table."""
    cells = [tuple(found[0]), *(tuple(row.values()) for row in found)] if found else []
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, tuple("-" * width for width in widths))
    return "\n".join("| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells)


def missing(records):
    """A line for each way that could not be measured, or not to the end."""
    return [
        f"{one['strategy']} on {one['world_size']}: {one['error']}"
        for one in records.values()
        if one["status"] == "failed"
    ]


class Comparison:
    """All ways of one call, built once, which take turns. records: {way's name and ranks: record}, in `out` as well."""

    def __init__(self, args, out, on_cuda):
        self.args, self.out, self.on_cuda, self.began = args, out, on_cuda, time.perf_counter()
        self.ways = {f"{way.full_name}-x{args.ranks}": way for way in chosen_ways(args, on_cuda)}
        self.records, self.running, self.steps = {}, {}, {}

    def log(self, text):
        print(f"{time.perf_counter() - self.began:6.1f} s  {text}", flush=True)

    def save(self, name, **changes):
        self.records[name] |= changes
        write_json(self.out / f"{name}.json", self.records[name], indent=1)

    def fail(self, name, error):
        self.save(name, status="failed", error=str(error))
        self.running.pop(name, None)
        self.log(f"{name}: {error}")

    def start(self):
        """Start the processes of all ways, with their records."""
        args = self.args
        questions, _, features = load_windows(args)  # the ways find them in the cache
        largest = max(way.batch_size for way in WAYS) * args.ranks
        if len(trainable_windows(features)) < largest:
            raise UserError(f"{questions.path}: has fewer than the {largest} windows of the largest batch")
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{self.out}: cannot be made: {error.strerror}; name another --out") from None
        surrounding = environment()
        for package in filter(importlib.util.find_spec, ("accelerate", "lightning", "deepspeed")):
            surrounding["versions"][package] = metadata.version(package)
        for name, way in self.ways.items():
            self.records[name] = start_record(way, args.ranks, args, questions, features, surrounding)
            hindrance = obstacle(way, args.ranks, self.on_cuda)
            if hindrance:
                self.fail(name, hindrance)
            else:
                self.running[name] = Processes(way, args, args.ranks, self.out / f"{name}.log")

    def warm(self, name):
        """Seconds until a way has made its untimed steps."""
        started = time.perf_counter()
        self.running[name].turn(1, self.args.warmup * (self.ways[name].warmup if self.on_cuda else 1))
        return time.perf_counter() - started

    def warm_all(self):
        with concurrent.futures.ThreadPoolExecutor(self.args.together or (4 if self.on_cuda else 1)) as pool:
            warming = {pool.submit(self.warm, name): name for name in self.running}
            for future in concurrent.futures.as_completed(warming):
                name = warming[future]
                try:
                    self.save(name, seconds={"start": future.result()})
                    self.log(f"{name}: warm")
                except Failure as error:
                    self.fail(name, error)

    def take_turns(self, number):
        """A turn of each way. Round 0 finds how many steps a turn has."""
        for name in list(self.running):
            cycle = self.ways[name].cycle
            try:
                replies = self.running[name].turn(LEAD, max(self.steps.get(name, 5), cycle))
            except Failure as error:
                self.fail(name, error)
                continue
            if number == 0:
                a_second = replies[0]["steps"] / replies[0]["seconds"]
                self.steps[name] = max(1, round(a_second * self.args.seconds / cycle)) * cycle
                continue
            record = add_round(self.records[name], replies, self.on_cuda)
            self.save(name)
            speed = speed_text(speeds(record)[-1])
            self.log(f"round {number}/{self.args.rounds}  {name}: {speed} windows/s")

    def measure(self):
        try:
            self.start()
            self.warm_all()
            for number in range(self.args.rounds + 1):
                self.take_turns(number)
        finally:
            with concurrent.futures.ThreadPoolExecutor(32) as pool:
                list(pool.map(Processes.close, self.running.values()))

    def train_whole(self):
        """Whole runs of the measured ways that have a command for one."""
        for name, way in self.ways.items():
            if name in self.records and has_whole_run(way, self.args.ranks):
                result = train_whole(way, self.args)
                self.save(name, whole_run=result)
                self.log(f"{name}: {result.get('error') or result['epochs']}")


def main():
    args = build_parser().parse_args()
    out = Path(args.out)
    records = read_records(out)
    if args.rounds and records:
        raise UserError(f"{out}: holds records already; name another --out, or --rounds 0 to show them")
    if not args.rounds and not records:
        raise UserError(f"{out}: holds no records to show")
    if args.rounds or args.arguments:
        gpus = torch.cuda.device_count() if args.device != "cpu" else 0
        on_cuda = args.device == "cuda" or gpus > 0
        args.device = "cuda" if on_cuda else "cpu"
        if on_cuda and args.ranks > gpus:
            raise UserError(f"--ranks {args.ranks}: {gpus} GPUs are visible")
        comparison = Comparison(args, out, on_cuda)
        if args.rounds:
            comparison.measure()
        else:
            comparison.records = records
        if args.arguments:
            comparison.train_whole()
        records = comparison.records
    found = rows(records)
    if found:
        print(table(found))
    for line in missing(records):
        print(f"not measured: {line}")
    return int(not found)


if __name__ == "__main__":
    errors.run(main)
