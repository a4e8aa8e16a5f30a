"""An epoch in the record and in the log: its figures, its line, what the hardware did."""

from common.model.span import flops_per_token
from common.run.devices import peak_flops
from common.run.sampler import append_rows


def arithmetic(tokens_per_second, model, lengths, world, precision):
    """Model FLOP/s and their share of all cards' peak, None where the peak is not known; {} without a rate.

    lengths: int [W], tokens of each training window.
    """
    if not tokens_per_second:
        return {}
    flops, peak = tokens_per_second * flops_per_token(model, lengths), peak_flops(world.device, precision)
    return {"model_flops_per_second": flops, "share_of_peak": flops / (peak * world.size) if peak else None}


def epoch_line(epoch, result):
    """An epoch as one line of the log."""
    rate = epoch["windows_per_second"]
    return (
        f"epoch {epoch['epoch']}: train loss {epoch['train_loss']:.4f} in {epoch['train_seconds']:.1f} s"
        + (f" ({rate:,.0f} windows/s)" if rate else "")
        + (f", EM {epoch['train_exact']:.2f}, F1 {epoch['train_f1']:.2f}" if "train_f1" in epoch else "")
        + f"; dev {result}, {epoch['evaluation_seconds']:.1f} s"
        + ("  <- best" if epoch["best"] else "")
    )


def sample_hardware(world, sampler, folder):
    """What the samplers of all nodes read in this epoch, for the record; their rows go to hardware.csv.

    All ranks take part. The epoch is training, evaluation and saving.
    """
    samples = world.gather(sampler.end())
    rows = [row for _, node, _ in samples for row in node]
    if rows and world.rank == 0:
        append_rows(folder.path / "hardware.csv", rows)
    return {
        "hardware": {rank: figures for node, _, _ in samples for rank, figures in node.items()},
        "infiniband": [traffic for _, _, traffic in samples if traffic],
    }
