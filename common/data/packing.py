"""The packed batch: windows laid end to end, made from the windows of a plan.

Everything here is a function of arrays: no files, no models, no process groups.
"""

import math
import queue
import threading
from dataclasses import dataclass, fields, replace
from itertools import chain

import numpy as np
import torch

from common.data.plan import split_batch


@dataclass
class PackedBatch:
    """B windows with T tokens in all, laid end to end without padding.

    input_ids, token_type_ids, position_ids: int64 [T]; positions restart at 0 in each window.
    cu_seqlens: int32 [B + 1], where each window begins; 0 first, T last.
    start, end: int64 [B], the labels as indices into T (of the window's [CLS] for no answer).
    window: int64 [B], the window's number, -1 for a filling window. weight: float32 [B], 0 where no loss is taken.
    max_length: no window of any batch is longer; longest: no window of this one is.
    token_ids: int64 [U], those of all tokens in this step's micro-batches on all ranks, each once; None unless DDP
    sends rows of words.
    """

    input_ids: torch.Tensor
    token_type_ids: torch.Tensor
    position_ids: torch.Tensor
    cu_seqlens: torch.Tensor
    start: torch.Tensor
    end: torch.Tensor
    window: torch.Tensor
    weight: torch.Tensor
    max_length: int
    longest: int
    token_ids: torch.Tensor | None = None

    def map(self, function):
        """The batch with `function` applied to each tensor."""
        tensors = {f.name: getattr(self, f.name) for f in fields(self)}
        return replace(self, **{k: function(v) for k, v in tensors.items() if isinstance(v, torch.Tensor)})

    def copy_(self, other):
        """Take over the contents of a batch of the same shape."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, torch.Tensor):
                value.copy_(getattr(other, field.name), non_blocking=True)

    def to(self, device):
        """The batch on `device`; from pinned memory the copy overlaps with what the device is doing."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))


def capacity(tokens, num_windows, max_length):
    """(T, B) that hold each of several packs of so many tokens and windows (lists), rounded up to a few shapes.

    T is a multiple of a power of 2 that batches of so many windows spread over about 15 times: 64 tokens for 8 windows,
    256 for 192. B is a multiple of 16 that leaves room for the filling windows, which hold 1 to max_length tokens each.
    """
    multiple = max(64, 2 ** int(math.log2(max(*tokens, 1) / (6 * math.sqrt(max(*num_windows, 1))))))
    room = -(-max(*tokens, 1) // multiple) * multiple
    while True:
        packs = [(room - count, number) for count, number in zip(tokens, num_windows, strict=True)]
        bound = max(number + -(-missing // max_length) for missing, number in packs)
        bound = -(-max(bound, max(num_windows) + -(-multiple // max_length)) // 16) * 16
        if all(bound - number <= missing for missing, number in packs):
            return room, bound
        room += multiple


def pack(features, windows, size=None):
    """The packed batch of the windows with these numbers; an empty list gives one filling window.

    features: see common.data.windows.Features. size: (T, B) to fill up to, from `capacity`; None adds nothing.
    """
    windows = np.asarray(windows, np.int64)
    lengths = features.offsets[windows + 1] - features.offsets[windows]
    tokens, count = int(lengths.sum()), len(windows)
    filled = size is not None
    if not filled:
        size = (tokens, count) if count else (8, 1)
    total, bound = size
    fill = filler_lengths(total - tokens, bound - count, features.max_length)
    all_lengths = np.concatenate([lengths, fill])
    cu_seqlens = np.concatenate([[0], np.cumsum(all_lengths)])
    position = np.arange(total) - np.repeat(cu_seqlens[:-1], all_lengths)
    source = np.repeat(features.offsets[windows], lengths) + position[:tokens]

    input_ids = np.full(total, features.pad_id, np.int64)
    input_ids[:tokens] = features.input_ids[source]
    types = np.zeros(total, np.int64)
    types[:tokens] = (position[:tokens] >= np.repeat(features.context_at[windows], lengths)) * features.token_type
    number, weight = np.full(bound, -1), np.zeros(bound, np.float32)
    number[:count], weight[:count] = windows, features.start[windows] >= 0  # a window without a label has no loss
    start, end = cu_seqlens[:-1].copy(), cu_seqlens[:-1].copy()
    start[:count] += np.maximum(features.start[windows], 0)
    end[:count] += np.maximum(features.end[windows], 0)
    return PackedBatch(
        input_ids=torch.from_numpy(input_ids),
        token_type_ids=torch.from_numpy(types),
        position_ids=torch.from_numpy(position),
        cu_seqlens=torch.from_numpy(cu_seqlens.astype(np.int32)),
        start=torch.from_numpy(start),
        end=torch.from_numpy(end),
        window=torch.from_numpy(number),
        weight=torch.from_numpy(weight),
        max_length=features.max_length,
        longest=features.max_length if filled else int(all_lengths.max()),
    )


def pack_steps(features, plan, rank, world_size, accumulation, max_tokens=None, fixed_shapes=False):
    """For each global batch of `plan`, this rank's micro-batches as a list of PackedBatch.

    fixed_shapes: fill each up to a capacity that recurs, the same for all micro-batches of a step on all ranks.
    """
    lengths = features.lengths
    for windows in plan:
        micro_batches = split_batch(windows, lengths, world_size, accumulation, max_tokens)
        size = share_capacity(features, [*chain(*micro_batches)]) if fixed_shapes else None
        yield [pack(features, shares[rank], size) for shares in micro_batches]


def with_token_ids(steps, features, plan, fixed_shapes=False):
    """The steps of `pack_steps`, with the token ids of each global batch of `plan` in its micro-batches."""
    for windows, micro_batches in zip(plan, steps, strict=False):  # a benchmark's plan has no end
        ids = distinct_token_ids(features, windows, fixed_shapes)
        yield [replace(batch, token_ids=ids) for batch in micro_batches]


def distinct_token_ids(features, windows, fixed_shapes):
    """The token ids that occur in these windows or fill them up, each once, int64 [U].

    With fixed_shapes other ids, below U, are added until U is a multiple of 1024, so that one shape occurs, or two. No
    id is there twice: sums of its copies could differ in the last digits, and ranks could keep different ones.
    """
    bounds = zip(features.offsets[windows], features.offsets[windows + 1], strict=True)
    tokens = np.concatenate([[features.pad_id], *(features.input_ids[begin:end] for begin, end in bounds)])
    ids = np.flatnonzero(np.bincount(tokens))
    if fixed_shapes:
        more = -len(ids) % 1024
        ids = np.append(ids, np.setdiff1d(np.arange(len(ids) + more), ids, assume_unique=True)[:more])
    return torch.from_numpy(ids)


def share_capacity(features, shares):
    """(T, B) that hold each of these shares, arrays of window numbers; see `capacity`."""
    tokens = [int((features.offsets[one + 1] - features.offsets[one]).sum()) for one in shares]
    return capacity(tokens, [len(one) for one in shares], features.max_length)


def filler_lengths(num_tokens, num_windows, max_length):
    """Lengths of filling windows with so many tokens in all, as equal as can be, each 1 to max_length."""
    if not num_windows <= num_tokens <= num_windows * max_length:
        raise ValueError(f"{num_tokens} tokens do not fit {num_windows} windows of 1 to {max_length} tokens")
    lengths = np.full(num_windows, num_tokens // max(num_windows, 1), np.int64)
    lengths[: num_tokens - int(lengths.sum())] += 1
    return lengths


def prefetch(steps, device, depth=4):
    """Yield the micro-batches of each step; on CUDA made ahead of their use, in pinned memory.

    steps: an iterator of lists of PackedBatch. On CUDA a thread makes them, so that the device does not wait for the
    batch to be put together; from pinned memory `PackedBatch.to` copies while the device works.
    """
    if device.type != "cuda":
        yield from steps
        return
    ready, closed = queue.Queue(depth), threading.Event()

    def put(item):
        while not closed.is_set():
            try:
                return ready.put(item, timeout=0.1)
            except queue.Full:
                pass

    def produce():
        try:
            for batches in steps:
                put([batch.map(torch.Tensor.pin_memory) for batch in batches])
                if closed.is_set():
                    return
            put(None)
        except BaseException as error:  # raised again where the batches are used
            put(error)

    threading.Thread(target=produce, daemon=True).start()
    try:
        while (item := ready.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        closed.set()
