"""baseline.py as its users run it, on small models: the run folder, the record, curves, options, faults."""

import argparse
import json
import math
import re
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from squad_dir import squad_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import ROOT, SAMPLE, SAMPLE_V2, minilm_tokenizer, save_network

import baseline
from common.errors import UserError
from common.model import finding, loading
from common.run import run as run_module
from common.run import settings
from common.run.agreement import Agreement
from common.run.curves import CHARTS
from common.run.devices import choose_device
from common.run.progress import Progress


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
    """A small random BERT with the default vocabulary, in a folder with its tokenizer."""
    folder = tmp_path_factory.mktemp("small")
    save_network(folder, hidden_dropout_prob=0.1)
    minilm_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def train(monkeypatch, tmp_path, cache, small_model):
    """A function that runs baseline.py in this process and returns the run folder."""

    def run(name, *options, data=SAMPLE, examples=48):
        arguments = ["baseline.py", "--runs-dir", str(tmp_path / "runs"), "--run-name", name, "--cache-dir", str(cache)]
        if "--train-file" not in options and "--evaluate-only" not in options:
            arguments += ["--train-file", str(data / "train.json"), "--dev-file", str(data / "dev.json")]
            arguments += ["--max-train-examples", str(examples), "--max-dev-examples", "24"]
        if "--model" not in options and "--evaluate-only" not in options:
            arguments += ["--model", str(small_model)]
        if "--batch-size" not in options:
            arguments += ["--batch-size", "8"]
        monkeypatch.setattr(sys, "argv", [*arguments, "--device", "cpu", *options])
        baseline.main()
        return tmp_path / "runs" / name

    return run


def curve(folder, tag):
    """[(step, value)] of a TensorBoard tag."""
    events = EventAccumulator(str(folder / "tensorboard")).Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


def losses(folder):
    return [value for _, value in curve(folder, "step/loss")]


def record(folder):
    return json.loads((folder / "run.json").read_text())


def test_a_run_leaves_a_whole_folder(train, small_model):
    folder = train("whole", "--epochs", "2", "--log-every", "4", "--learning-rate", "1e-3")
    run = record(folder)
    assert run["status"] == "finished" and run["schema"] == 2 and run["strategy"] == "baseline"
    assert run["world_size"] == 1 and run["attempts"][0]["steps"] == 12 and len(run["epochs"]) == 2
    assert run["data"]["train"]["questions"] == 48 and len(run["data"]["train"]["sha256"]) == 64
    assert run["arguments"]["batch_size"] == 8 and run["precision"] == "fp32" and run["attention"] == "sdpa"
    assert run["model"]["parameters"] > run["model"]["parameters_outside_embeddings"] > 0
    assert min(run["peak_memory"][phase][0] for phase in ("training", "evaluation", "saving")) > 1e7
    assert run["versions"]["torch"] == torch.__version__
    seconds = run["seconds"]
    assert {"prepare_data", "load", "warmup"} < set(seconds)
    assert seconds["load"] < seconds["first_step"] < seconds["total"]
    assert run["epochs"][1]["model_flops_per_second"] > 0 and run["epochs"][1]["share_of_peak"] is None
    for epoch in run["epochs"]:
        assert {"train_loss", "dev_loss", "exact", "f1", "train_seconds", "evaluation_seconds"} <= set(epoch)
    assert not (folder / "lock").exists()

    predictions = json.loads((folder / "predictions.json").read_text())
    nbest = json.loads((folder / "nbest.json").read_text())
    assert len(predictions) == 24 and predictions.keys() == nbest.keys()
    for question, entries in nbest.items():
        assert predictions[question] == entries[0]["text"]
        assert math.isclose(sum(entry["probability"] for entry in entries), 1, rel_tol=1e-6)
        assert len({entry["text"] for entry in entries}) == len(entries)

    steps = curve(folder, "step/loss")
    assert [step for step, _ in steps] == list(range(1, 13))
    assert [step for step, _ in curve(folder, "epoch/f1")] == [1, 2]
    rates = [value for _, value in curve(folder, "step/learning_rate")]
    assert rates[0] == pytest.approx(1e-3) and rates[-1] == pytest.approx(1e-3 / 11) and max(rates) == rates[0]
    tags = EventAccumulator(str(folder / "tensorboard")).Reload().Tags()
    assert {"step/grad_norm", "step/windows_per_second", "epoch/train_loss", "epoch/exact"} <= set(tags["scalars"])
    assert "custom_scalars__config__" in tags["tensors"]
    for _, shown in CHARTS["by epoch"].values():
        assert all(any(re.fullmatch(one, tag) for tag in tags["scalars"]) for one in shown)
    mean = sum(value for _, value in steps[:6]) / 6
    assert run["epochs"][0]["train_loss"] == pytest.approx(mean, rel=1e-6)


def test_the_saved_model_gives_the_predictions_again(train):
    folder = train("first", "--epochs", "1", "--learning-rate", "1e-3")
    dev = ["--dev-file", str(SAMPLE / "dev.json"), "--max-dev-examples", "24"]
    again = train("again", "--evaluate-only", str(folder / "model"), *dev)
    assert json.loads((again / "predictions.json").read_text()) == json.loads((folder / "predictions.json").read_text())
    assert record(again)["evaluation"]["f1"] == record(folder)["epochs"][0]["f1"]
    from transformers import AutoModelForQuestionAnswering, AutoTokenizer

    network = AutoModelForQuestionAnswering.from_pretrained(folder / "model")
    assert network.config.squad["version"] == "1.1" and network.config.squad["null_threshold"] is None
    assert AutoTokenizer.from_pretrained(folder / "model").is_fast


def test_accumulation_and_token_limit_give_the_same_losses(train):
    options = ["--epochs", "1", "--dropout", "0", "--learning-rate", "1e-3"]
    whole = losses(train("whole", *options))
    parts = losses(train("parts", *options, "--accumulation", "4"))
    limited = losses(train("limited", *options, "--max-tokens-per-device", "384"))
    assert whole == pytest.approx(parts, rel=1e-5) and whole == pytest.approx(limited, rel=1e-5)
    assert whole[0] > 3  # the loss of a model that knows nothing, so the curves are not all zero


def test_seeds_repeat_and_differ(train):
    first = losses(train("first", "--epochs", "1", "--seed", "3", "--deterministic"))
    second = losses(train("second", "--epochs", "1", "--seed", "3"))
    other = losses(train("other", "--epochs", "1", "--seed", "4"))
    torch.use_deterministic_algorithms(False)
    assert first == second != other


def test_last_batch_may_be_smaller(train):
    folder = train("uneven", "--epochs", "1", "--batch-size", "7")
    assert [step for step, _ in curve(folder, "step/loss")] == list(range(1, 8))  # 48 windows: six of 7 and one of 6


def test_early_stopping_and_best_and_last_model(train, monkeypatch):
    figures = iter([10.0, 30.0, 20.0, 25.0, 40.0])
    evaluate = run_module.evaluate

    def scripted(*arguments, **named):
        result = evaluate(*arguments, **named)
        result.figures["f1"] = next(figures)
        return result

    monkeypatch.setattr(run_module, "evaluate", scripted)
    folder = train("stopping", "--epochs", "5", "--patience", "2", "--learning-rate", "1e-3", examples=16)
    run = record(folder)
    assert [epoch["best"] for epoch in run["epochs"]] == [True, True, False, False] and run["status"] == "finished"

    best, last = (load_file(folder / name / "model.safetensors") for name in ("model", "model-last"))
    assert any(not torch.equal(best[name], last[name]) for name in best)
    assert len(run["epochs"]) == 4


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_that_is_not_finite_is_not_applied_and_stops_the_run(train, monkeypatch, precision):
    weights = []
    real_loss = baseline.span_loss

    def poisoned(start_logits, end_logits, batch):
        if sys._getframe(1).f_code.co_name != "train_step":  # the passes without a gradient before the first step
            return real_loss(start_logits, end_logits, batch)
        model = sys._getframe(1).f_locals["model"]
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        factor = math.nan if len(weights) == 3 else 1.0
        return real_loss(start_logits * factor, end_logits, batch)

    monkeypatch.setattr(baseline, "span_loss", poisoned)
    monkeypatch.setattr(Agreement, "INTERVAL", 1e9)  # after step 1 it reads at log lines alone
    with pytest.raises(UserError, match=r"step 3: .*not finite.*windows: \[\d+"):
        train("poisoned", "--epochs", "1", "--log-every", "5", "--precision", precision, "--learning-rate", "1e-3")
    assert not torch.equal(weights[1], weights[2]) and torch.equal(weights[2], weights[3])
    assert len(weights) == 5  # it went on to the log line


def test_a_failed_run_is_recorded(train, monkeypatch, tmp_path):
    monkeypatch.setattr(baseline, "seed_dropout", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        train("failing", "--epochs", "1")
    run = record(tmp_path / "runs" / "failing")
    assert run["status"] == "failed" and "ZeroDivisionError" in run["error"]
    assert not (tmp_path / "runs" / "failing" / "lock").exists()


def test_version_2_learns_a_threshold(train):
    folder = train("v2", "--epochs", "1", "--tune-fraction", "0.3", data=SAMPLE_V2, examples=70)
    run = record(folder)
    epoch = run["epochs"][0]
    assert run["data"]["tune"]["questions"] + run["data"]["train"]["questions"] == 70
    assert {"HasAns_f1", "NoAns_f1", "optimistic_f1", "optimistic_threshold", "threshold"} <= set(epoch)
    config = json.loads((folder / "model" / "config.json").read_text())
    assert config["squad"]["null_threshold"] == epoch["threshold"] != 0 and config["squad"]["version"] == "2.0"
    odds = json.loads((folder / "null_odds.json").read_text())
    predictions = json.loads((folder / "predictions.json").read_text())
    assert all((text == "") == (odds[key] > epoch["threshold"]) for key, text in predictions.items())
    assert epoch["optimistic_f1"] >= epoch["f1"]


def test_without_tuning_the_threshold_is_zero_and_a_v1_model_never_abstains(train):
    folder = train("v2", "--epochs", "1", data=SAMPLE_V2, examples=30)
    assert record(folder)["epochs"][0]["threshold"] == 0
    mixed = train(
        "mixed", "--epochs", "1", "--train-file", str(SAMPLE / "train.json"), "--dev-file", str(SAMPLE_V2 / "dev.json"),
        "--max-train-examples", "32",
    )  # fmt: skip
    assert all(json.loads((mixed / "predictions.json").read_text()).values())


def test_the_course_reports_experiment(train):
    """dev-v2.0 alone, its first questions, first answers, split 0.8 / 0.2, curves by epoch."""
    folder = train(
        "course", "--train-file", str(squad_file("dev-v2.0.json.gz")), "--max-train-examples", "100", "--dev-fraction",
        "0.2", "--split-by", "question", "--first-answer-only", "--epochs", "2", "--learning-rate", "5e-5",
    )  # fmt: skip
    run = record(folder)
    assert run["data"]["train"]["questions"] == 80 and run["data"]["dev"]["questions"] == 20
    for tag in ("epoch/train_loss", "epoch/dev_loss", "epoch/f1", "epoch/exact"):
        assert [step for step, _ in curve(folder, tag)] == [1, 2]


def test_training_questions_are_scored_on_wish(train, capsys):
    """Beside dev's curve theirs shows overfitting; the training itself stays what it is."""
    options = ["--epochs", "2", "--learning-rate", "1e-3"]
    folder, plain = train("seen", *options, "--score-train", "16"), train("plain", *options)
    run = record(folder)
    assert run["data"]["seen"]["questions"] == 16 and run["data"]["seen"]["cuts"] == [["first", 48], ["first", 16]]
    out = capsys.readouterr().out
    for epoch, other in zip(run["epochs"], record(plain)["epochs"], strict=True):
        assert f", EM {epoch['train_exact']:.2f}, F1 {epoch['train_f1']:.2f}; dev EM" in out
        assert epoch["train_loss"] == other["train_loss"] and epoch["f1"] == other["f1"] and "train_f1" not in other
    assert [step for step, _ in curve(folder, "epoch/train_f1")] == [1, 2]


def test_faults_count_in_the_training_set_and_not_in_its_scored_part(train, tmp_path, capsys):
    """Faults come in clusters, so the first few questions may be worse than what is tolerated of a whole set."""
    whole = json.loads((SAMPLE / "train.json").read_text())
    questions = [one for article in whole["data"] for text in article["paragraphs"] for one in text["qas"]]
    for question in questions[:4]:
        question["answers"][0]["text"] = "nowhere in it"
    (tmp_path / "faulty.json").write_text(json.dumps(whole))
    options = ["--train-file", str(tmp_path / "faulty.json"), "--dev-file", str(SAMPLE / "dev.json"), "--epochs", "1"]
    options += ["--max-train-examples", "48", "--max-dev-examples", "24", "--score-train", "8"]
    assert record(train("faulty", *options))["data"]["seen"]["faults"] == 4
    assert re.findall(r"\d+ of \d+ questions faulty", capsys.readouterr().out) == ["4 of 48 questions faulty"]


def test_profile_leaves_a_trace(train, capsys):
    folder = train("profiled", "--epochs", "1", "--profile", "--batch-size", "2")
    trace = json.loads((folder / "trace.json").read_text())
    assert any("addmm" in str(event.get("name")) for event in trace["traceEvents"])
    out = capsys.readouterr().out
    assert "Self CPU time total" in out and "trace of 3 steps" in out


def test_a_second_run_in_a_folder_is_refused(train):
    train("taken", "--epochs", "1", examples=8)
    with pytest.raises(UserError, match="holds a run already"):
        train("taken", "--epochs", "1", examples=8)


@pytest.mark.parametrize(
    "options, message",
    [
        (["--max-tokens-per-device", "100"], "less than one window"),
        (["--max-length", "600"], "more than the 512 tokens"),
        (["--overlap", "380"], "leaves no room"),
        (["--precision", "fp16"], "needs a GPU"),
        (["--attention", "flash"], "needs CUDA"),
        (["--model", "no-such-model"], "named owner/name"),
        (["--model", "no-such/model"], "tools.fetch no-such/model"),
        (["--run-name", "../elsewhere"], "plain name"),
        (["--train-file", str(SAMPLE / "train.json")], "needs --dev-file"),
        (["--evaluate-only", str(ROOT / "tests")], "no config.json"),
        (["--evaluate-only", "x", "--dev-fraction", "0.5"], "--dev-fraction has no meaning with --evaluate-only"),
        (["--tune-fraction", "0.2"], "training data is SQuAD v1.1"),
        (["--seed", "-5"], "--seed: '-5' is not a whole number from 0"),
        (["--epochs", "0"], "--epochs: '0' is not a whole number from 1"),
        (["--warmup", "1"], "less than 1"),
        (["--learning-rate", "nan"], "--learning-rate: 'nan' is not a number from 0"),
        (["--max-grad-norm", "0"], "a number above 0"),
        (["--patience", "-1"], "a whole number from 0"),
        (["--overlap", "-1"], "a whole number from 0"),
        (["--batch-size", "many"], "'many' is not a whole number"),
        (["--no-such-option"], "unrecognized arguments: --no-such-option"),
        (["--runs-dir", str(ROOT / "README.md")], "not a folder that can be written to"),
        (["--dev-fraction", "0.5"], "exclude each other"),
        (["--evaluate-only", ""], "--evaluate-only is empty: give it a value, or leave it out"),
        (["--hang-minutes", "1e9"], "a number above 0 and below a million"),
    ],
)
def test_settings_that_cannot_work_stop_at_once(train, options, message):
    with pytest.raises(UserError, match=message):
        train("refused", *options)


def changed_copy(source, target, file, change):
    """A model folder's copy in which one JSON file is changed."""
    shutil.copytree(source, target)
    value = json.loads((target / file).read_text())
    change(value)
    (target / file).write_text(json.dumps(value))
    return target


def test_model_folders_that_would_give_nonsense_are_refused(train, small_model, tmp_path):
    wordless = tmp_path / "wordless"
    shutil.copytree(small_model, wordless)
    for file in wordless.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(UserError, match=r"wordless: (its tokenizer knows no words|no usable tokenizer)"):
        train("wordless", "--model", str(wordless))
    small = changed_copy(small_model, tmp_path / "small", "config.json", lambda c: c.update(vocab_size=100))
    with pytest.raises(UserError, match="the tokenizer has 30522 entries, the model 100"):
        train("vocabulary", "--model", str(small))
    typed = changed_copy(small_model, tmp_path / "typed", "config.json", lambda c: c.update(hidden_size="x"))
    with pytest.raises(UserError, match=r"no usable config.json"):
        train("typed", "--model", str(typed))
    wide = changed_copy(small_model, tmp_path / "wide", "config.json", lambda c: c.update(intermediate_size=99))
    with pytest.raises(UserError, match=r"weights do not fit its config.json"):
        train("wide", "--model", str(wide))

    weights = load_file(small_model / "model.safetensors")
    for name, prefix, message in (
        ("headless", "qa_outputs.", "no trained span head"),
        ("hollow", "bert.encoder.layer.1.", "is it whole"),
    ):
        folder = tmp_path / name
        shutil.copytree(small_model, folder)
        kept = {key: tensor for key, tensor in weights.items() if not key.startswith(prefix)}
        save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UserError, match=message):
            train(name, "--evaluate-only", str(folder), "--dev-file", str(SAMPLE / "dev.json"))


def test_a_damaged_section_of_settings_is_refused(train, small_model, tmp_path):
    good = {"version": "2.0", "null_threshold": 0.5, "max_length": 128, "overlap": 32, "max_answer_tokens": 5}
    dev = ["--dev-file", str(SAMPLE_V2 / "dev.json"), "--max-dev-examples", "12"]
    for number, wrong in enumerate(({"max_length": "abc"}, {"null_threshold": "high"}, {"overlap": None})):
        folder = changed_copy(
            small_model, tmp_path / str(number), "config.json", lambda c, wrong=wrong: c.update(squad={**good, **wrong})
        )
        with pytest.raises(UserError, match='"squad" section is damaged'):
            train("damaged", "--evaluate-only", str(folder), *dev)
    folder = changed_copy(small_model, tmp_path / "good", "config.json", lambda c: c.update(squad=good))
    stored = record(train("stored", "--evaluate-only", str(folder), *dev))["arguments"]
    assert (stored["max_length"], stored["overlap"], stored["max_answer_tokens"]) == (128, 32, 5)
    asked = record(train("asked", "--evaluate-only", str(folder), *dev, "--max-length", "256"))["arguments"]
    assert (asked["max_length"], asked["overlap"], asked["max_answer_tokens"]) == (256, 32, 5)


def test_the_lock_names_its_holder(train, tmp_path):
    folder = tmp_path / "runs" / "held"
    folder.mkdir(parents=True)
    (folder / "lock").write_text('{"host": "n7", "pid": 41, "job_id": "9"}')
    with pytest.raises(UserError, match=r"host n7, pid 41, job_id 9\); .*remove .*lock if that run is gone"):
        train("held")


def test_a_broken_model_has_no_clean_dev_loss(train, monkeypatch):
    losses = run_module.evaluate.__globals__["window_losses"]
    monkeypatch.setitem(
        run_module.evaluate.__globals__, "window_losses", lambda *arguments: losses(*arguments) * float("nan")
    )
    folder = train("broken", "--epochs", "1", examples=8)
    assert math.isnan(record(folder)["epochs"][0]["dev_loss"])


def test_short_runs_report_no_throughput(train):
    epoch = record(train("short", "--epochs", "1", examples=16))["epochs"][0]
    assert epoch["windows_per_second"] is None and epoch["train_seconds"] > 0
    assert "model_flops_per_second" not in epoch


def test_the_default_learns(monkeypatch, tmp_path, capsys):
    """No options but a smaller part of the sample: the pretrained default model, rising F1, both yardsticks printed."""
    monkeypatch.setattr(
        sys, "argv",
        ["baseline.py", "--max-train-examples", "360", "--max-dev-examples", "60", "--runs-dir", str(tmp_path),
         "--cache-dir", str(tmp_path / "cache"), "--run-name", "default", "--device", "cpu"],
    )  # fmt: skip
    monkeypatch.setenv("SQUAD_DIR", str(tmp_path / "absent"))
    baseline.main()
    out = capsys.readouterr().out
    assert "small bundled sample" in out and "tools.fetch squad-v1.1" in out and "learning rate 0.0003" in out
    untrained = float(re.search(r"untrained model: dev EM [\d.]+, F1 ([\d.]+)", out).group(1))
    empty = float(re.search(r"answering nothing: EM [\d.]+, F1 ([\d.]+)", out).group(1))
    first, second = (epoch["f1"] for epoch in record(tmp_path / "default")["epochs"])
    assert second > first and second > max(untrained, empty) + 10
    predictions = json.loads((tmp_path / "default" / "predictions.json").read_text())
    assert sum(map(bool, predictions.values())) > len(predictions) / 2


def test_an_expected_error_is_one_line_and_status_2(tmp_path):
    command = [sys.executable, "baseline.py", "--train-file", str(tmp_path / "none.json"), "--dev-file", "x.json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1 and "none.json" in done.stderr


def test_under_a_gpu_allocation_the_cpu_is_not_taken_in_silence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("SLURM_JOB_GPUS", "0,1")
    with pytest.raises(UserError, match="torch sees no CUDA device"):
        choose_device("auto")
    assert choose_device("cpu").type == "cpu"
    monkeypatch.delenv("SLURM_JOB_GPUS")
    assert choose_device("auto").type == "cpu"


def test_one_of_several_visible_gpus_is_pinned(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    pinned, said = [], []
    monkeypatch.setattr(torch.cuda, "set_device", pinned.append)
    monkeypatch.setattr(torch.cuda, "Stream", lambda index: f"stream {index}")
    monkeypatch.setattr(torch.cuda, "set_stream", pinned.append)
    assert choose_device("auto", log=said.append) == torch.device("cuda", 0)
    assert pinned == [0, "stream 0"] and "2 GPUs are visible" in said[0]
    assert choose_device("auto", 1, said.append) == torch.device("cuda", 1) and len(said) == 1
    with pytest.raises(UserError, match="local rank 2 has no GPU"):
        choose_device("auto", 2)


def test_the_default_model_is_checked(monkeypatch):
    monkeypatch.setattr(finding, "MINILM_SHA256", "0" * 64)
    with pytest.raises(UserError, match="sha256"):
        finding.minilm_folder()


def test_progress_in_a_log_is_a_line_every_so_often(capsys):
    progress = Progress(100, "epoch 1", every=0.0)
    progress(25, "loss 1.5")
    assert "epoch 1  25%" in capsys.readouterr().out
    quiet = Progress(100, "epoch 1", every=1000.0)
    quiet(50)
    assert capsys.readouterr().out == ""


def test_a_shared_optimizer_takes_no_gradient_scaler(monkeypatch):
    monkeypatch.setattr(settings, "choose_precision", lambda name, device: name)
    with pytest.raises(UserError, match="--zero1 with --precision fp16"):
        settings.choose_kernels(argparse.Namespace(precision="fp16", zero1=True), torch.device("cuda"))


def test_the_rate_climbs_over_the_warm_up_and_falls_to_0(train):
    options = ["--epochs", "5", "--learning-rate", "1e-3", "--warmup", "0.3"]
    rates = [value for _, value in curve(train("schedule", *options, examples=32), "step/learning_rate")]
    assert len(rates) == 20  # 6 up, 14 down
    assert [rates[step] for step in (0, 2, 5)] == pytest.approx([1e-3 / 6, 0.5e-3, 1e-3])
    assert rates[13] == pytest.approx(0.5e-3) and rates[19] == pytest.approx(1e-3 / 14)


def test_a_warm_up_of_a_single_step(train):
    folder = train("single", "--epochs", "1", "--learning-rate", "1e-3", "--batch-size", "64")
    assert [value for _, value in curve(folder, "step/learning_rate")] == [pytest.approx(1e-3)]


@pytest.mark.parametrize("packed", [True, False])
def test_padded_networks_run_without_graphs(train, monkeypatch, packed):
    """Their code is not ours, and may copy from the host (DeBERTa-v2's does) or ask the device what it holds."""
    resolve_hardware, seen = baseline.resolve_hardware, []

    def with_graphs(args, world):
        resolve_hardware(args, world)
        args.cuda_graphs = True  # as on CUDA

    def graphs(function, fixed, device, enabled, largest):
        seen.append(enabled)
        raise UserError("seen enough")

    monkeypatch.setattr(baseline, "resolve_hardware", with_graphs)
    monkeypatch.setattr(baseline, "StepGraphs", graphs)
    monkeypatch.setattr(loading, "packs", lambda model: packed)
    with pytest.raises(UserError, match="seen enough"):
        train("graphs")
    assert seen == [packed]
