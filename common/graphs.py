"""A training step as CUDA graphs: launched at once instead of kernel by kernel, since the host cannot keep up."""

import contextlib
import gc

import torch

from common.runtime import memory_for

WARMUP = 11  # steps before the first capture: DistributedDataParallel needs as many to settle
MOST = 64  # graphs; each holds a few MB of the card, and steps of shapes beyond these run kernel by kernel


class StepGraphs:
    """Calls `function(micro_batches, windows)` and, once a shape has been seen before, replays it as a CUDA graph.

    function: takes a list of PackedBatch on the device and the number of windows in the global batch, and returns a
    tuple of scalars on the device. It must not read anything back, and it must leave no gradients behind. All ranks
    see the same shapes, so that they capture at the same steps.
    """

    def __init__(self, function, device, enabled):
        self.function, self.device, self.enabled = function, device, enabled
        self.calls, self.seen, self.graphs = 0, set(), {}
        self.pool = torch.cuda.graph_pool_handle() if enabled else None  # the graphs run in turn: one memory for all

    def __call__(self, micro_batches, windows):
        with memory_for(micro_batches):
            return self.step(micro_batches, windows)

    def step(self, micro_batches, windows):
        key = (windows, *((len(batch.input_ids), len(batch.window)) for batch in micro_batches))
        self.calls += 1
        if key in self.graphs:
            return self.replay(key, micro_batches)
        on_device = [batch.to(self.device) for batch in micro_batches]
        if not self.enabled or self.calls <= WARMUP or key not in self.seen or len(self.graphs) >= MOST:
            self.seen.add(key)
            return self.function(on_device, windows)
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph, which empties the allocator's cache first: that costs the next step more than the rest.
        # thread_local: the threads that prepare batches and watch NCCL go on with calls that a graph may not hold.
        gc.disable()  # nothing that it frees may be freed within a capture
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        try:
            results = torch.stack(self.function(on_device, windows))
        except BaseException:
            with contextlib.suppress(RuntimeError):  # that the capture is broken is not what is to be told
                graph.capture_end()
            raise
        finally:
            gc.enable()
        graph.capture_end()
        self.graphs[key] = graph, on_device, results
        return self.replay(key, micro_batches)

    def replay(self, key, micro_batches):
        """Run a captured step on these micro-batches."""
        graph, on_device, results = self.graphs[key]
        for target, batch in zip(on_device, micro_batches, strict=True):
            target.copy_(batch)
        graph.replay()
        return results.clone().unbind()
