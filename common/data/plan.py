"""The plan of an epoch and its division: pure functions of lengths, sizes and seeds, the same on every rank."""

import heapq

import numpy as np


def plan_epoch(windows, batch_size, seed, epoch):
    """The global batches of one epoch: a permutation of `windows`, cut; the last batch may be smaller.

    windows: int [N], numbers of the windows to train on. Returns a list of int arrays, the same on every rank.
    """
    order = np.random.default_rng([seed, epoch]).permutation(windows)
    return [order[i : i + batch_size] for i in range(0, len(order), batch_size)]


def share(windows, lengths, parts):
    """Share the windows of one batch among `parts`, balanced by tokens: longest first, to the part with the fewest.

    lengths: tokens of every window of the data set, indexed by window number. Returns a list of `parts` int arrays;
    parts beyond the number of windows are empty.
    """
    loads = [(0, part) for part in range(parts)]
    shares = [[] for _ in range(parts)]
    for window in windows[np.argsort(-lengths[windows], kind="stable")]:
        load, part = heapq.heappop(loads)
        shares[part].append(window)
        heapq.heappush(loads, (load + int(lengths[window]), part))
    return [np.array(one, np.int64) for one in shares]


def split_batch(windows, lengths, world_size, accumulation, max_tokens=None):
    """One global batch as [micro-batch][rank] arrays of window numbers.

    Every rank gets the same number of micro-batches: `accumulation`, or more where a share would exceed max_tokens.
    """
    count = accumulation
    if max_tokens:
        count = max(count, -(-int(lengths[windows].sum()) // (max_tokens * world_size)))
    while True:
        shares = share(windows, lengths, count * world_size)
        if not max_tokens or max(int(lengths[one].sum()) for one in shares) <= max_tokens or count >= len(windows):
            return [shares[i : i + world_size] for i in range(0, len(shares), world_size)]
        count += 1


def evaluation_chunks(lengths, max_tokens):
    """Cut all windows into chunks of at most `max_tokens` tokens, windows of like length together.

    Chunks depend on the lengths alone, so that a window is computed in the same company on any number of ranks and
    its logits are equal to the bit.
    """
    order = np.argsort(lengths, kind="stable")
    chunks, begin, total = [], 0, 0
    for i, window in enumerate(order):
        if total + lengths[window] > max_tokens and i > begin:
            chunks.append(order[begin:i])
            begin, total = i, 0
        total += lengths[window]
    return [*chunks, order[begin:]] if len(order) else []


def largest_batch(features, plan, world_size=1, accumulation=1, max_tokens=None):
    """The global batch of `plan` that needs the most memory: whose largest micro-batch has the most tokens."""
    lengths = features.lengths

    def largest(windows):
        micro_batches = split_batch(windows, lengths, world_size, accumulation, max_tokens)
        return max(int(lengths[one].sum()) for shares in micro_batches for one in shares)

    # Shares without a limit are nearly equal, so that the sum tells.
    return max(plan, key=largest if max_tokens else lambda windows: int(lengths[windows].sum()))
