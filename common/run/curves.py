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
    """Writes curves into a folder; with folder None, on the ranks that do not write, it does nothing."""

    def __init__(self, folder, saved):
        """saved: the state of the checkpoint that the run resumes from, or {}. Later points are removed."""
        self.writer = None
        if folder is None:
            return
        from torch.utils.tensorboard import SummaryWriter  # slow to import

        try:
            earlier = sorted(folder.glob("events.*"))
            points = read_points(earlier)
            self.writer = SummaryWriter(folder)
            self.writer.add_custom_scalars(CHARTS)
            for (tag, at), (value, seconds) in points.items():
                if saved and at <= (saved["step"] if tag.startswith("step/") else len(saved["epochs"])):
                    self.writer.add_scalar(tag, value, at, walltime=seconds)
            self.writer.flush()
            for path in earlier:
                path.unlink()
        except OSError as error:
            raise UserError(f"{folder}: cannot be written: {error}") from None

    def add(self, axis, at, figures):
        """Add points at this step or epoch. axis: "step" or "epoch". figures: {name: number}; None is left out."""
        if self.writer:
            for name, value in figures.items():
                if value is not None:
                    self.writer.add_scalar(f"{axis}/{name}", value, at)

    def flush(self):
        if self.writer:
            self.writer.flush()

    def close(self):
        if self.writer:
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
