"""What a run trains on and is scored on: question sets, their windows, and the steps of each epoch."""

import time
from functools import cached_property

from common.data.cache import prepare
from common.data.packing import pack_steps, prefetch, with_token_ids
from common.data.plan import largest_batch, plan_epoch
from common.data.splits import question_sets
from common.data.tokenizer import load_tokenizer, vocabulary_size
from common.data.windows import trainable_windows
from common.start import ended


class Data:
    """The data of one run, as one rank sees it.

    tokenizer: of the model. vocabulary: how many token ids it needs. sets: {name: QuestionSet}, of which "train" and
    "dev" are always there, "tune" and "seen" if asked for. features: {name: Features}. seconds: what all this took.
    """

    def __init__(self, args, world):
        """Read or build the windows of each question set; one rank of each node builds, the others wait."""
        begin = time.perf_counter()
        self.args, self.world = args, world
        self.tokenizer = load_tokenizer(args.model_path)
        self.vocabulary = vocabulary_size(self.tokenizer)
        ended("tokenizer")
        self.sets = question_sets(**args.questions)
        shape, builds = (args.max_length, args.overlap, args.cache_dir), world.local_rank == 0
        self.features = {
            name: prepare(questions, self.tokenizer, *shape, world.log, builds) for name, questions in self.sets.items()
        }
        self.seconds = time.perf_counter() - begin
        ended("data")

    @cached_property
    def trainable(self):
        """Numbers of the windows that have a label, int64 [N]."""
        return trainable_windows(self.features["train"])

    @property
    def total_steps(self):
        """Optimizer steps in all epochs; the last of an epoch may be smaller."""
        return self.args.epochs * -(-len(self.trainable) // self.args.batch_size)

    @property
    def warmup_steps(self):
        """Optimizer steps in which the learning rate climbs; at least 1."""
        return max(1, round(self.total_steps * self.args.warmup))

    def plan(self, epoch, done=0):
        """The global batches of an epoch, without those among the first `done` steps of the run.

        Returns a list of int arrays, the numbers of the windows. It is the same on every rank.
        """
        plan = plan_epoch(self.trainable, self.args.batch_size, self.args.seed, epoch)
        return plan[max(0, done - (epoch - 1) * len(plan)) :]

    def count_tokens(self, plan):
        """Tokens in all global batches of `plan`."""
        lengths = self.features["train"].lengths
        return int(sum(lengths[windows].sum() for windows in plan))

    def pack(self, plan):
        """This rank's micro-batches of each global batch of `plan`; every rank has the same number of them."""
        args, world = self.args, self.world
        split = world.rank, world.size, args.accumulation, args.max_tokens_per_device
        steps = pack_steps(self.features["train"], plan, *split, args.cuda_graphs)
        if getattr(args, "reduce", "").startswith("rows"):
            return with_token_ids(steps, self.features["train"], plan, args.cuda_graphs)
        return steps

    def largest_step(self):
        """(this rank's micro-batches, number of windows) of the global batch that needs the most memory."""
        split = self.world.size, self.args.accumulation, self.args.max_tokens_per_device
        windows = largest_batch(self.features["train"], self.plan(epoch=1), *split)
        return next(self.pack([windows])), len(windows)

    def steps(self, epoch, done=0):
        """Yields (numbers of the windows in the global batch, this rank's micro-batches of it) for each step left."""
        plan = self.plan(epoch, done)
        yield from zip(plan, prefetch(self.pack(plan), self.world.device), strict=True)
