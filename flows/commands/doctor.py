"""The command `rollmill doctor`: a line for each check of the machine."""

import asyncio
import json
import logging
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import asdict

import typer
from prefect.logging import disable_run_logger

from rollmill.flows.checks.machine_checks import CheckResult, check_machine_parts
from rollmill.flows.commands.service_trial import try_services

NAME_WIDTH = 24


def examine(python: str, root: str, *, with_services: bool, as_json: bool) -> bool:
    """Check the machine and print the results; returns False if a check failed.

    Args:
        python: serve.python.
        root: store.root.
        with_services: True to start a trainer and a server, unless a check before failed.
        as_json: print one JSON object at the end in place of lines.
    """
    results: list[CheckResult] = []

    def report(result: CheckResult) -> None:
        results.append(result)
        if not as_json:
            typer.echo("\n".join(format_result(result, shutil.get_terminal_size().columns)))

    for result in check_machine_parts(root, python):
        report(result)
    if with_services and any(each.status == "failed" for each in results):
        report(CheckResult("services", "skipped", "not started, since a check before failed"))
    elif with_services:
        # What services log goes to their own logs; an error's text has the last lines.
        logging.getLogger("prefect").setLevel(logging.CRITICAL)
        with disable_run_logger():
            asyncio.run(try_services(python, report))
    has_passed = all(each.status != "failed" for each in results)
    if as_json:
        typer.echo(json.dumps({"ok": has_passed, "checks": [asdict(each) for each in results]}, indent=1))
    return has_passed


def format_result(result: CheckResult, width: int) -> Sequence[str]:
    """Return the lines of a result, none longer than `width` characters where words allow it."""
    indent = " " * (9 + NAME_WIDTH)
    first, *others = [*result.detail.splitlines(), *([f"-> {result.remedy}"] if result.remedy else [])]
    head = f"{result.status:<9}{result.name:<{NAME_WIDTH}}"
    lines = textwrap.wrap(first, width, initial_indent=head, subsequent_indent=indent) or [head.rstrip()]
    for each in others:
        lines += textwrap.wrap(each, width, initial_indent=indent, subsequent_indent=indent)
    return lines
