"""A probe that watches nothing, without torch: what all probes share is tested on it, quickly."""

from collections.abc import Sequence

from probes.command_line import console, print_json, probe_parser, run_command, split_target, table
from probes.run_target import Outcome, find_target, program, run, show_failure


def main(argv: Sequence[str]) -> int:
    """Run the program and report how it ended."""
    own, words = split_target(argv)
    options = probe_parser("stub", "Watches nothing.", "python stub_probe.py -- script.py").parse_args(own)
    target = find_target(words)

    def report(outcome: Outcome) -> int:
        if options.json:
            print_json({"outcome": outcome, "not a number": float("nan")}, after_program=True)
        else:
            rows = table("title ✓", "name é", "why")
            rows.add_row("[red]thread[/foo] :smile:", "w" * 100 + "end")
            console().print(rows)
            show_failure(outcome)
        return int(outcome.failed)

    with program(target, report):
        outcome = run(target)
    return report(outcome)


if __name__ == "__main__":
    run_command(main)
