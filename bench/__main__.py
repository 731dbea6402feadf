"""``python -m bench <command> ...``: each command is a module with ``SUMMARY``, ``add_arguments`` and ``run``."""

from __future__ import annotations

import argparse
import importlib
import sys

from bench import report

# command: its module
COMMANDS = {name: name for name in ("measure", "gate", "score", "references", "tune", "plot", "overhead", "evidence", "tables")}
COMMANDS["profile"] = "ncu"  # a module named profile would hide the standard library's in a notebook started here


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """The parser of all commands, or of one: its module alone is imported then, so ``evidence --check`` needs nothing."""
    parser = argparse.ArgumentParser(
        prog="python -m bench", description="Measure, gate, score, tune and profile attention kernels."
    )
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, module_name in COMMANDS.items() if only is None else [(only, COMMANDS[only])]:
        module = importlib.import_module(f"bench.{module_name}")
        sub = subparsers.add_parser(
            name,
            help=module.SUMMARY,
            description=module.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Exit status: the command's own; 3 for bad usage of a command, 130 after Ctrl-C (partial results are kept)."""
    argv = sys.argv[1:] if argv is None else argv
    args = build_parser(argv[0] if argv and argv[0] in COMMANDS else None).parse_args(argv)
    try:
        return int(args.run(args) or 0)
    except report.UsageError as error:
        print(f"bench {args.command}: {error}", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print(f"\nbench {args.command}: interrupted; what was measured so far is kept", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
