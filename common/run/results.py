"""The result files of a run, and the run that only evaluates."""

import time
from concurrent.futures import ThreadPoolExecutor
from json.encoder import encode_basestring as quote
from pathlib import Path

from common.errors import UserError
from common.run.devices import PeakMemory, by_rank
from common.run.environment import describe
from common.run.interrupts import watchdog
from common.run.progress import Progress
from common.run.record import RunFolder, default_name, read_record, write_json, write_text
from common.scoring.answers import probabilities
from common.scoring.evaluation import evaluate
from common.scoring.selection import finished_threshold


def write_epoch(folder, save, result, n_best):
    """Call save(), which writes a model, and beside it write the files of `result`, unless that is None."""
    with ThreadPoolExecutor(1) as other:  # raises no error before both have ended
        model = other.submit(save)
        if result:
            write_results(folder, result, n_best)
        model.result()


ENTRY = '{"text": %s, "probability": %.9g, "start_logit": %.9g, "end_logit": %.9g}'  # 9 digits hold any fp32 number


def write_results(folder, result, n_best):
    """predictions.json and nbest.json in the official formats, and null_odds.json where the model can abstain."""
    folder, abstains = Path(folder), result.figures["threshold"] is not None
    write_json(folder / "predictions.json", result.predictions)
    write_text(folder / "nbest.json", n_best_lines(result.answers.n_best(n_best, abstains)))
    if abstains:
        write_json(folder / "null_odds.json", {key: odds for key, (_, odds) in result.answers.best.items()})


def n_best_lines(lists):
    """The lines of nbest.json, a question each. json.dumps would take twice as long: it finds the shortest digits."""
    before = "{"
    for key, entries in lists:
        shares = zip(entries, probabilities(entries), strict=True)
        texts = [ENTRY % (quote(text), share, start, end) for (text, start, end, *_), share in shares]
        yield f"{before}{quote(key)}: [{', '.join(texts)}]"
        before = ",\n"
    yield "}\n"


def evaluate_only(args, world, data, model):
    """--evaluate-only: score a finished model on the dev set and leave a run folder without training in it."""
    features = data.features["dev"]
    threshold = finished_threshold(args.settings, features.meta["version"])
    path = Path(args.runs_dir) / (args.run_name or default_name())
    if read_record(path).get("strategy", "evaluate-only") != "evaluate-only":
        raise UserError(f"{path}: holds a training, which --resume would replace; name another --run-name")
    progress = Progress(int(features.lengths.sum()), "evaluating", show=world.rank == 0)
    seconds = {"prepare_data": data.seconds}

    def after_pass(num_tokens):
        progress(num_tokens)
        watchdog.beat()

    with RunFolder(args.runs_dir, args.run_name, write=world.rank == 0, resume=args.resume is not None) as folder:
        folder.update(describe(args, "evaluate-only", model, data, world, seconds))
        begin = time.perf_counter()
        memory = PeakMemory(world.device)
        result = evaluate(model, features, data.sets["dev"].data, args, world, threshold, after_pass)
        memory.end("evaluation")
        progress.close()
        if world.rank == 0:
            write_results(folder.path, result, args.n_best)
        seconds["evaluation"] = time.perf_counter() - begin
        folder.update({"evaluation": result.figures, "peak_memory": by_rank(world.gather(memory.peaks))})
        world.log(f"dev {result}")
        world.log(f"run folder: {folder.path}")
