"""``python -m bench <command> ...``: each command is a module with ``SUMMARY``, ``add_arguments`` and ``run``."""

from __future__ import annotations

import argparse
import importlib
import sys

from bench import arguments, report

# command: its module
COMMANDS = {
    name: f"commands.{name}"
    for name in ("measure", "gate", "score", "references", "audit", "tune", "plot", "overhead", "soak", "chaos", "evidence", "tables")
}
COMMANDS["profile"] = "tuning.ncu"  # a module named profile would hide the standard library's in a notebook started here


def build_parser(only: str | None = None) -> argparse.ArgumentParser:
    """The parser of all commands, or of one: its module alone is imported then, so ``evidence --check`` needs nothing."""
    parser = arguments.Parser(prog="python -m bench", description="Measure, gate, score, tune, profile and soak attention kernels.")
    subparsers = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, module_name in COMMANDS.items() if only is None else [(only, COMMANDS[only])]:
        module = importlib.import_module(f"bench.{module_name}")
        sub = subparsers.add_parser(name, help=module.SUMMARY, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        sub.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Exit status: the command's own; 3 for bad usage of a command, 130 after Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    only = argv[0] if argv and argv[0] in COMMANDS else None
    shown = f"bench {only}" if only else "bench"
    args = argparse.Namespace()
    try:
        args = build_parser(only).parse_args(argv)
        return int(args.run(args) or 0)
    except report.UsageError as error:
        print(f"{shown}: {error}", file=sys.stderr)
        return 3
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        print(f"{shown}: this needs NumPy, which is not installed; `evidence --check` does without it", file=sys.stderr)
        return 3
    except KeyboardInterrupt:
        print(f"\n{shown}: interrupted; {kept(only, args)}", file=sys.stderr)
        return 130


def kept(command: str | None, args: argparse.Namespace) -> str:
    """The words on what an interrupted command has left behind."""
    output = getattr(args, "output", None)
    if command == "gate":
        return f"problems that have a verdict are {f'in {output}' if output else 'above'}; the one under way is lost"
    if command in ("measure", "score", "references") and not output:
        return "without --output nothing is kept"
    if command in ("measure", "score", "references", "tune", "evidence"):
        return f"what was finished is in {output or 'its record'}, and the same line carries on"
    return "nothing is kept"


if __name__ == "__main__":
    if sys.argv[1:2] in (["gate"], ["score"]):  # which run what nobody trusts
        from bench.trial import keeper

        sys.exit(keeper.keep(main))
    sys.exit(main())
