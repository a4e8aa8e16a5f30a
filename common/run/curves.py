"""TensorBoard curves: tags by step and by epoch, continued where a resumed run goes on."""

import contextlib

from common.errors import UserError

CHARTS = {  # TensorBoard's custom scalars: what a report shows side by side
    "by epoch": {
        "loss in training and on the dev set": ["Multiline", ["epoch/train_loss", "epoch/dev_loss"]],
        "exact match and F1": ["Multiline", ["epoch/(train_)?exact", "epoch/(train_)?f1"]],  # train_: --score-train
    }
}


class Curves:
    """Writes curves into a folder; with folder None, on the ranks that do not write, it does nothing.

    The folder is opened for the first point, since importing TensorBoard takes half a second.
    """

    def __init__(self, folder, saved):
        """saved: the state of the checkpoint that the run resumes from, or {}. Later points are removed."""
        self.folder, self.writer = folder, None
        self.last = {"step": saved["step"], "epoch": len(saved["epochs"])} if saved else {}

    def open(self):
        """Make the writer, with the points of earlier starts, unless there is one."""
        if self.writer:
            return
        from torch.utils.tensorboard import SummaryWriter

        folder = self.folder
        try:
            earlier = sorted(folder.glob("events.*"))
            points = read_points(earlier)
            self.writer = SummaryWriter(folder)
            self.writer.add_custom_scalars(CHARTS)
            for (tag, at), (value, seconds) in points.items():
                if at <= self.last.get(tag.split("/")[0], -1):
                    self.writer.add_scalar(tag, value, at, walltime=seconds)
            self.writer.flush()
            for path in earlier:
                path.unlink()
        except OSError as error:
            raise UserError(f"{folder}: cannot be written: {error}") from None

    def add(self, axis, at, figures):
        """Add points at this step or epoch. axis: "step" or "epoch". figures: {name: number}; None is left out.

        Points of an epoch are written at once.
        """
        if self.folder is None:
            return
        self.open()
        for name, value in figures.items():
            if value is not None:
                self.writer.add_scalar(f"{axis}/{name}", value, at)
        if axis == "epoch":
            self.flush()

    def flush(self):
        if self.writer:
            self.writer.flush()

    def close(self):
        if self.folder:
            self.open()  # a run that resumed after its last point has points to remove
            self.writer.close()


def read_points(paths):
    """{(tag, step or epoch): (value, time)} of TensorBoard files, each up to where it is damaged."""
    return {
        (value.tag, event.step): (value.simple_value, event.wall_time)
        for path in paths
        for event in read_events(path)
        for value in event.summary.value
        if value.tag.startswith(("step/", "epoch/")) and value.HasField("simple_value")
    }


def read_events(path):
    """The events in a TensorBoard file, up to where it is damaged."""
    from google.protobuf.message import DecodeError
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    with contextlib.suppress(DecodeError):
        yield from LegacyEventFileLoader(str(path)).Load()
