"""Draws the front of a run folder: `python docs/make_front.py RUN [docs/front.png]`. Needs the extra `viz`."""

import sys
from pathlib import Path

import quantsieve
from quantsieve.reports.figures import front_picture

if __name__ == "__main__":
    run, *rest = sys.argv[1:]
    Path(rest[0] if rest else "docs/front.png").write_bytes(front_picture(quantsieve.report(run).summary))
