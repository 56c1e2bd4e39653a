"""Lines of the logger "ocomm" reach stderr from their level on, and a script that configures logging decides itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import logging, sys
from ocomm.telemetry import log
logger = logging.getLogger("ocomm")
{before}
log.configure({level!r})
log.configure({level!r})  # init() again, after shutdown()
{after}
logger.debug("a detail"); logger.info("a fact"); logger.log(log.NOTICE, "a notice"); logger.warning("a %s", "warning")
"""


def said(level: str, before: str = "", after: str = "") -> list[str]:
    """What a script writes to stderr that says a detail, a fact, a notice and a warning."""
    script = SCRIPT.format(level=level, before=before, after=after)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100, check=True)
    return done.stderr.splitlines()


@pytest.mark.parametrize(
    ("level", "lines"),
    [
        ("", ["ocomm: a notice", "ocomm warning: a warning"]),
        ("notice", ["ocomm: a notice", "ocomm warning: a warning"]),
        ("warning", ["ocomm warning: a warning"]),
        ("info", ["ocomm info: a fact", "ocomm: a notice", "ocomm warning: a warning"]),
        ("debug", ["ocomm debug: a detail", "ocomm info: a fact", "ocomm: a notice", "ocomm warning: a warning"]),
        ("error", []),
    ],
)
def test_a_level_shows_what_is_as_serious(level: str, lines: list[str]) -> None:
    assert said(level) == lines


@pytest.mark.parametrize(
    ("before", "level", "lines"),
    [
        ("logging.basicConfig(level='INFO')", "", ["INFO:ocomm:a fact", "NOTICE:ocomm:a notice"]),
        ("logging.basicConfig()", "", []),
        ("logging.basicConfig()", "notice", ["NOTICE:ocomm:a notice"]),
        ("logger.setLevel('NOTSET'); logger.addHandler(logging.StreamHandler())", "info", ["a fact", "a notice"]),
    ],
)
def test_a_script_that_has_handlers_gets_each_line_once_and_in_its_own_form(
    before: str, level: str, lines: list[str]
) -> None:
    *others, warning = said(level, before)
    assert others == lines and warning.endswith("a warning")
    assert not warning.startswith("ocomm warning")


def test_a_level_that_the_script_has_set_stays() -> None:
    assert said("debug", "logger.setLevel('ERROR')") == []


def test_a_handler_that_comes_later_takes_over() -> None:
    assert said("", after="logging.basicConfig(format='%(message)s')") == ["a notice", "a warning"]


def test_a_line_is_not_worth_the_end_of_a_script_that_has_closed_stderr() -> None:
    assert said("", before="sys.stderr.close()") == []
