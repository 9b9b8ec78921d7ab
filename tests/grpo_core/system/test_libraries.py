"""Libraries say nothing about what nothing here uses."""

import subprocess
import sys

import pytest


@pytest.mark.e2e
def test_a_command_shows_no_warning_of_bitsandbytes_where_it_is_installed_and_not_used() -> None:
    program = """
import logging
logging.basicConfig()
from grpo_core.system.libraries import quiet_libraries
quiet_libraries()
import bitsandbytes
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout + done.stderr == ""
