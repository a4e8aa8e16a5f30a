"""Tables, figures and a page to hand in, from run records alone.

    python -m tools.report RUNS... [--baseline NAME] [--f1 80] [--allow-unlike] [--out report]

RUNS are run folders, run.json files, or folders of either. A ratio of times is called a speed-up only between runs
alike in precision, model, data, global batch, epochs, card, kernels, dropout, versions and machine. Written are
OUT/report.html, which needs no other file, OUT/report.md, OUT/rows.csv and OUT/figures/ (PNG and SVG).
"""

from common import errors
from tools.report.page import report


def main():
    parser = errors.Parser(prog="python -m tools.report", description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("runs", nargs="+", metavar="RUNS", help="run folders, run.json files, or folders of either")
    parser.add_argument("--baseline", metavar="NAME", help="a strategy, a row or a run (default: baseline.py's)")
    parser.add_argument("--f1", type=int, choices=range(101), metavar="F1", help="give the seconds to this dev F1")
    parser.add_argument("--allow-unlike", action="store_true", help="give ratios of unlike runs too, marked with †")
    parser.add_argument("--out", default="report", metavar="DIR", help="folder to write into (default: report)")
    args = parser.parse_args()
    report(args.runs, args.baseline, args.f1, args.allow_unlike, args.out)


if __name__ == "__main__":
    errors.run(main)
