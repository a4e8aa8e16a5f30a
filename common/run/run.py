"""What happens around the steps of a training; the steps themselves are the scripts'."""

import contextlib
import importlib
import time

from common.model.loading import save_model
from common.run.agreement import Agreement
from common.run.checkpoint import Saver
from common.run.clocks import Clocks
from common.run.curves import Curves
from common.run.devices import PeakMemory, by_rank
from common.run.environment import describe, model_settings
from common.run.epochs import arithmetic, epoch_line, sample_hardware
from common.run.interrupts import StopRequest, watchdog
from common.run.losses import Losses
from common.run.profiler import Profiler
from common.run.progress import Progress
from common.run.record import RunFolder
from common.run.results import write_epoch
from common.run.resume import experiment, resume
from common.run.sampler import Sampler
from common.run.state import whole_state
from common.scoring.evaluation import empty_score, evaluate
from common.scoring.selection import Selection, first_threshold, tune_threshold
from common.start import ended


class Run:
    """Puts together the parts that a training needs and tells them what happens.

    RunFolder: the record and the lock. StopRequest: asks the run to stop. Agreement: all ranks stop and save alike.
    Losses, Clocks, Curves, Progress, Sampler, Profiler: what is measured and shown. Saver: checkpoints. Selection:
    which epoch is best. All ranks have a Run and call all its methods alike.

    step: optimizer steps done, over all starts of the run.
    """

    def __init__(self, strategy, args, world, data, model, optimizer, scaler):
        """Resume from a checkpoint, if --resume asks for it, in the tensors of model and optimizer."""
        ended("largest batch, twice")  # wrapping and optimizer included
        self.strategy, self.args, self.world, self.data = strategy, args, world, data
        self.model = getattr(model, "module", model)  # DistributedDataParallel wraps it
        self.optimizer, self.scaler = optimizer, scaler
        self.saved = resume(args, world, data.sets, self.model, optimizer)  # {} for a new run
        self.step = self.saved.get("step", 0)
        scaler.load_state_dict(self.saved.get("scaler") or scaler.state_dict())
        self.threshold = self.saved.get("threshold", first_threshold(data.features))  # None: v1.1, never abstains
        self.selection = Selection(args.select, args.patience, **self.saved.get("selection", {}))
        self.lengths = data.features["train"].lengths  # once: the property computes them anew each time
        self.seconds = {"prepare_data": data.seconds, "load": time.perf_counter() - world.connected}

    def __enter__(self):
        with contextlib.ExitStack() as parts:
            self.open(parts)
            self.parts = parts.pop_all()
        return self

    def open(self, parts):
        """Claim the folder and begin the record; make all parts. parts: closes them in turn, whatever happens."""
        args, world, first = self.args, self.world, self.world.rank == 0
        folder = RunFolder(args.runs_dir, args.run_name, write=first, resume=args.resume is not None)
        self.folder = parts.enter_context(folder)
        request = parts.enter_context(StopRequest(folder.path / "stop" if first else None))
        saving = experiment(args, self.data.sets), folder.background, not args.save_in_background
        self.saver = Saver(folder.path / "checkpoints", world, *saving)
        folder.resume_from(self.saved)
        folder.update(describe(args, self.strategy, self.model, self.data, world, self.seconds))
        self.agreement = Agreement(world, args.save_minutes, request)
        self.clocks, self.memory = Clocks(world.device, self.saved, self.seconds), PeakMemory(world.device)
        self.sampler = Sampler(world.places if world.local_rank == 0 else [])
        skip = (4 if args.cuda_graphs else 1) * Clocks.WARMUP  # graphs are made within the first steps
        self.profiler = Profiler(args.profile and first, world.device, folder.path, skip, log=world.log)
        self.curves = Curves(folder.path / "tensorboard" if first else None, self.saved)
        steps = self.data.total_steps
        self.losses = Losses(self.agreement, self.curves, self.saved, steps, tolerant=args.precision == "fp16")
        self.epoch, self.trained = self.saved.get("epoch", 1), None
        if first:
            folder.background.run(importlib.import_module, "torch.utils.tensorboard")  # while the first steps run

    def __exit__(self, *error):
        return self.parts.__exit__(*error)

    def epochs(self):
        """Yields the number of each epoch that is left, until the last, or until --patience ends the run."""
        args, log = self.args, self.world.log
        ended("run folder")
        log("answering nothing: EM {:.2f}, F1 {:.2f}".format(*empty_score(self.data.sets["dev"].data)))
        if args.score_untrained and not self.saved:
            log(f"untrained model: dev {self.score('dev')}")
            ended("untrained model's score")
        for epoch in range(self.saved.get("epoch", 1), args.epochs + 1):
            plan = self.data.plan(epoch, self.step)
            self.progress = Progress(self.data.count_tokens(plan), f"epoch {epoch}", show=self.world.rank == 0)
            self.sampler.begin()
            self.epoch = epoch
            partial = self.saved if self.saved.get("epoch") == epoch else {}
            self.losses.begin_epoch(partial)
            self.clocks.begin_epoch(partial)
            self.agreement.look_soon()
            self.end_tail()
            yield epoch
            if self.selection.stop:
                log(f"no better {args.select} for {args.patience} epochs: stopping early")
                break
        self.folder.background.wait()
        self.end_tail()
        self.sampler.close()
        self.curves.close()
        log(f"best epoch: {self.selection.epoch}; run folder: {self.folder.path}")

    def end_tail(self):
        """Record how long it took from the last epoch's training to now, when the next one's begins or the run ends."""
        if self.trained:
            self.folder.record["epochs"][-1]["tail_seconds"] = time.perf_counter() - self.trained

    def log_step(self, windows, loss, norm, rate):
        """Take one step's figures. They stay on the device until a log line. Save if it is time, stop if asked.

        windows: numbers of the windows in the global batch. loss: this rank's part. norm, rate: of the whole.
        """
        self.step += 1
        self.losses.add(self.step, windows, loss, norm, rate)
        tokens = int(self.lengths[windows].sum())
        self.clocks.step(len(windows), tokens)
        watchdog.beat()
        due = self.agreement.is_due()  # counts, so at log lines too
        note = self.losses.read() if due or self.step % self.args.log_every == 0 else ""
        self.progress(tokens, note)
        self.profiler.step()
        if self.agreement.save_wanted or (self.args.save_steps and self.step % self.args.save_steps == 0):
            self.save()

    def end_training(self):
        """Stop the clocks of this epoch's training. Before, make a checkpoint if --save-epochs asks for one."""
        if self.args.save_epochs and self.epoch % self.args.save_epochs == 0:
            self.save()
        self.memory.end("training")
        self.losses.read()
        self.progress.close()
        self.profiler.stop()
        self.training = {"epoch": self.epoch, "train_loss": self.losses.mean(self.epoch), **self.clocks.end_epoch()}
        self.agreement.look_soon()
        self.trained = time.perf_counter()

    def tune_threshold(self):
        """With --tune-fraction: set the no-answer threshold by the held-out training questions."""
        if "tune" in self.data.sets:
            self.threshold = tune_threshold(self.score("tune"))

    def score(self, name):
        """The Evaluation of the model on a question set; all ranks take part and get the same one."""
        features = self.data.features[name]
        self.progress = Progress(int(features.lengths.sum()), "evaluating", show=self.world.rank == 0)
        data = self.data.sets[name].data
        result = evaluate(self.model, features, data, self.args, self.world, self.threshold, self.after_pass)
        self.progress.close()
        self.memory.end("evaluation")
        self.scored = time.perf_counter()
        return result

    def after_pass(self, tokens):
        """Between the passes of an evaluation: show progress, and stop if all ranks have agreed to."""
        self.progress(tokens)
        watchdog.beat()
        if self.agreement.must_stop():
            self.save()

    def keep(self, result):
        """Whether this epoch is the best so far by --select. Its model is written while training goes on.

        The best model goes to model/, with its predictions beside it, another one to model-last/. All ranks take part.
        """
        self.training["evaluation_seconds"] = self.scored - self.trained
        if "seen" in self.data.sets:  # --score-train
            seen = self.score("seen").figures
            self.training |= {"train_f1": seen["f1"], "train_exact": seen["exact"]}
        best = self.selection.update(self.epoch, result.figures)
        begin = time.perf_counter()
        weights = whole_state(self.model, keep=self.world.rank == 0)
        if self.world.rank == 0:
            settings = model_settings(self.args, self.data.features["train"].meta["version"], self.threshold)
            parts = self.model, weights, self.data.tokenizer
            save = lambda: save_model(*parts, self.folder.model_path(best), settings)
            self.folder.background.run(write_epoch, self.folder.path, save, result if best else None, self.args.n_best)
        self.memory.end("saving")
        self.training["checkpoint_seconds"] = time.perf_counter() - begin
        return best

    def log_epoch(self, result, best):
        """Log the epoch, and put it into TensorBoard and the record; all ranks take part."""
        record = self.folder.record
        figures = {name: value for name, value in result.figures.items() if value is not None}
        epoch = self.training | figures | {"best": best}
        epoch |= arithmetic(epoch["tokens_per_second"], self.model, self.lengths, self.world, self.args.precision)
        self.world.log(epoch_line(epoch, result))
        tags = ("train_loss", "dev_loss", "f1", "exact", "train_f1", "train_exact")
        self.folder.background.run(self.curves.add, "epoch", self.epoch, {tag: epoch.get(tag) for tag in tags})
        record["epochs"].append(epoch | sample_hardware(self.world, self.sampler, self.folder))
        record["attempts"][-1]["steps"] = self.step
        record["peak_memory"] = by_rank(self.world.gather(self.memory.peaks))
        self.folder.save()

    def save(self):
        """Write a checkpoint. If the ranks have agreed to stop, this is the last thing that is done."""
        self.losses.read()
        self.memory.end("evaluation" if self.clocks.trained is not None else "training")  # this may be between passes
        begin = time.perf_counter()
        self.folder.record["attempts"][-1]["steps"] = self.step
        watchdog.beat()
        state = {"step": self.step, "scaler": self.scaler.state_dict(), "threshold": self.threshold}
        state |= {"selection": self.selection.state(), "epoch": self.epoch, "train_seconds": self.clocks.seconds}
        state |= {"loss_sum": self.losses.loss_sum, "windows_seen": self.losses.windows_seen}
        self.saver.save(self.model, self.optimizer, state | {"epochs": self.folder.record["epochs"]})
        took = time.perf_counter() - begin
        self.memory.end("saving")
        self.clocks.leave_out(took)
        self.losses.leave_out(took)
        self.agreement.saved()
        self.folder.record["attempts"][-1].setdefault("saving_seconds", []).append(took)
        self.curves.flush()
        watchdog.beat()
        if self.agreement.stop_wanted:
            raise self.saver.stopped(self.step)
