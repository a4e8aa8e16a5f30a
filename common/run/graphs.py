"""A training step as CUDA graphs: launched at once instead of kernel by kernel, since the host cannot keep up."""

import contextlib
import gc

import torch

from common.run.devices import memory_for

WARMUP = 11  # steps before the first capture: DistributedDataParallel needs as many to settle
MOST = 64  # graphs; each holds a few MB of the card, and steps of shapes beyond these run kernel by kernel


def shape(micro_batches, windows):
    """What a graph is of: windows and words of the global batch, tokens and windows of each micro-batch."""
    words = micro_batches[0].words
    sizes = ((len(batch.input_ids), len(batch.window)) for batch in micro_batches)
    return (windows, 0 if words is None else len(words), *sizes)


class StepGraphs:
    """Calls `function(micro_batches, windows)` and, once a shape has been seen before, replays it as a CUDA graph.

    function: takes a list of PackedBatch on the device and the number of windows in the global batch, and returns a
    tuple of scalars on the device. It must not read anything back, and it must leave no gradients behind. All ranks
    see the same shapes, so that they capture at the same steps.
    """

    def __init__(self, function, device, enabled, largest):
        """largest: the arguments of the largest call. Its graph is made first: all take their memory from one pool, in
        which the smaller ones then find room, where each larger one would take new blocks.
        """
        self.function, self.device, self.enabled, self.largest = function, device, enabled, largest
        self.calls, self.seen, self.graphs = 0, set(), {}
        self.pool = torch.cuda.graph_pool_handle() if enabled else None  # the graphs run in turn: one memory for all

    def __call__(self, micro_batches, windows):
        with memory_for(micro_batches):
            return self.step(micro_batches, windows)

    def step(self, micro_batches, windows):
        key = shape(micro_batches, windows)
        self.calls += 1
        if key not in self.graphs:
            if not self.enabled or self.calls <= WARMUP or key not in self.seen or len(self.graphs) >= MOST:
                self.seen.add(key)
                return self.function([batch.to(self.device) for batch in micro_batches], windows)
            if not self.graphs:
                torch.cuda.empty_cache()  # what is kept for steps without a graph is out of a capture's reach
                self.capture(*self.largest)
            if key not in self.graphs:
                self.capture(micro_batches, windows)
        return self.replay(key, micro_batches)

    def capture(self, micro_batches, windows):
        """Make the graph of a step of this shape; nothing is computed."""
        on_device = [batch.to(self.device) for batch in micro_batches]
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph, which empties the allocator's cache first: that costs the next step more than the rest.
        # thread_local: the threads that prepare batches and watch NCCL go on with calls that a graph may not hold.
        gc.disable()  # nothing that it frees may be freed within a capture
        try:
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                results = torch.stack(self.function(on_device, windows))
            except BaseException:
                with contextlib.suppress(RuntimeError):  # that the capture is broken is not what is to be told
                    graph.capture_end()
                raise
            graph.capture_end()
        finally:
            gc.enable()
        self.graphs[shape(micro_batches, windows)] = graph, on_device, results

    def replay(self, key, micro_batches):
        """Run a captured step on these micro-batches."""
        graph, on_device, results = self.graphs[key]
        for target, batch in zip(on_device, micro_batches, strict=True):
            target.copy_(batch)
        graph.replay()
        return results.clone().unbind()
