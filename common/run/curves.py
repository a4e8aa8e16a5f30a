"""TODO."""

import contextlib

from common.errors import UserError

CHARTS = {  # of TensorBoard's custom scalars: what a report shows side by side
    "by epoch": {
        "loss in training and on the dev set": ["Multiline", ["epoch/train_loss", "epoch/dev_loss"]],
        "exact match and F1": ["Multiline", ["epoch/(train_)?exact", "epoch/(train_)?f1"]],  # train_: --score-train
    }
}


def read_events(path):
    """The events in a TensorBoard file, up to where it is damaged."""
    from google.protobuf.message import DecodeError
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    with contextlib.suppress(DecodeError):
        yield from LegacyEventFileLoader(str(path)).Load()


def curves(folder, saved):
    """A TensorBoard writer. Of a run that goes on, it takes back what was written after the checkpoint.

    saved: the checkpoint's state, or {}.
    """
    from torch.utils.tensorboard import SummaryWriter  # slow to import

    try:
        earlier = sorted(folder.glob("events.*"))
        points = {
            (value.tag, event.step): (value.simple_value, event.wall_time)
            for path in earlier
            for event in read_events(path)
            for value in event.summary.value
            if value.tag.startswith(("step/", "epoch/")) and value.HasField("simple_value")
        }
        writer = SummaryWriter(folder)
        writer.add_custom_scalars(CHARTS)
        for (tag, at), (value, seconds) in points.items():
            if saved and at <= (saved["step"] if tag.startswith("step/") else len(saved["epochs"])):
                writer.add_scalar(tag, value, at, walltime=seconds)
        writer.flush()
        for path in earlier:
            path.unlink()
    except OSError as error:
        raise UserError(f"{folder}: cannot be written: {error}") from None
    return writer
