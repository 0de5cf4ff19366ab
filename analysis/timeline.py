"""`timeline DATA OUT.html`: draw the timelines of a replayed recording."""

import argparse
import json
import sys
from pathlib import Path

from analysis.figures_allocator import allocator_timelines


def main(argv: list[str]) -> int:
    """Draw what `harness` wrote as JSON (WhatIf.to_json) into a self-contained page. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="timeline", description="Draw the timelines of a replayed recording.")
    parser.add_argument("data", type=Path, help="the what-if table as JSON, with timelines")
    parser.add_argument("out", type=Path, help="the HTML page to write")
    args = parser.parse_args(argv)
    try:
        figure = allocator_timelines(json.loads(args.data.read_text()))
        figure.write_html(args.out, include_plotlyjs=True)
    except OSError as error:
        print(f"cannot write {args.out}: {error.strerror or error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
