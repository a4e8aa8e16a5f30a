"""A training step as CUDA graphs: launched at once instead of kernel by kernel, since the host cannot keep up."""

import contextlib
import gc

import torch

from common.errors import UserError

WARMUP = 11  # steps before the first capture: DistributedDataParallel needs as many to settle
MOST = 64  # graphs; each holds a few MB of the card, and steps of shapes beyond these run kernel by kernel


@contextlib.contextmanager
def memory_for(micro_batches):
    """Turn running out of memory on these PackedBatches into one line that says what takes less."""
    try:
        yield
    except torch.OutOfMemoryError:
        tokens = max(len(batch.input_ids) for batch in micro_batches)
        less = max(tokens // 2 // 64 * 64, micro_batches[0].max_length)
        way = "`--checkpoint-activations` takes less"
        if less < tokens:
            way = f"`--max-tokens-per-device {less}` splits each step further and leaves the experiment the same"
        raise UserError(f"out of memory on a micro-batch of {tokens} tokens: {way}") from None


def shape(micro_batches, num_windows):
    """What a graph is made for: windows and token ids of the global batch, tokens and windows of each micro-batch."""
    ids = micro_batches[0].token_ids
    sizes = ((len(batch.input_ids), len(batch.window)) for batch in micro_batches)
    return (num_windows, 0 if ids is None else len(ids), *sizes)


class StepGraphs:
    """Calls a script's `train_step` and, once a shape has occurred before, replays it as a CUDA graph.

    The function takes the fixed arguments, then a list of PackedBatch on the device and the number of windows in the
    global batch. It returns a tuple of scalars on the device. It must not read anything back, and it must leave no
    gradients behind. All ranks see the same shapes, so they capture at the same steps.
    """

    def __init__(self, function, fixed, device, enabled, largest):
        """fixed: the function's first arguments. enabled: False calls it kernel by kernel. largest: (micro-batches,
        number of windows) of the largest step. Its graph is made first, so that the memory pool of all graphs is large
        enough for the others; each larger one would take new blocks.
        """
        self.train_step, self.fixed, self.device = function, fixed, device
        self.enabled, self.largest = enabled, largest
        self.calls, self.seen, self.graphs = 0, set(), {}
        self.pool = torch.cuda.graph_pool_handle() if enabled else None  # graphs run in turn: one memory for all

    def run(self, micro_batches, num_windows):
        """Call the function with the batches on the device."""
        return self.train_step(*self.fixed, [batch.to(self.device) for batch in micro_batches], num_windows)

    def __call__(self, micro_batches, num_windows):
        with memory_for(micro_batches):
            return self.step(micro_batches, num_windows)

    def step(self, micro_batches, num_windows):
        key = shape(micro_batches, num_windows)
        self.calls += 1
        if key not in self.graphs:
            if not self.enabled or self.calls <= WARMUP or key not in self.seen or len(self.graphs) >= MOST:
                self.seen.add(key)
                return self.run(micro_batches, num_windows)
            if not self.graphs:
                torch.cuda.empty_cache()  # memory cached by steps without a graph is out of a capture's reach
                self.capture(*self.largest)
            if key not in self.graphs:
                self.capture(micro_batches, num_windows)
        return self.replay(key, micro_batches)

    def capture(self, micro_batches, num_windows):
        """Make the graph of a step of this shape; nothing is computed."""
        on_device = [batch.to(self.device) for batch in micro_batches]
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph, which empties the allocator's cache first: that costs the next step more than the rest.
        # thread_local: the threads that prepare batches and watch NCCL go on with calls that a graph may not hold.
        gc.disable()  # nothing that it frees may be freed within a capture
        try:
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                results = torch.stack(self.train_step(*self.fixed, on_device, num_windows))
            except BaseException:
                with contextlib.suppress(RuntimeError):  # the first error says more than the broken capture
                    graph.capture_end()
                raise
            graph.capture_end()
        finally:
            gc.enable()
        self.graphs[shape(micro_batches, num_windows)] = graph, on_device, results

    def replay(self, key, micro_batches):
        """Run a captured step on these micro-batches."""
        graph, on_device, results = self.graphs[key]
        for target, batch in zip(on_device, micro_batches, strict=True):
            target.copy_(batch)
        graph.replay()
        return results.clone().unbind()
