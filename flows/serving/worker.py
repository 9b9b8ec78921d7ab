"""What `grpo worker` runs once it has set up the server: Prefect's command line."""

from __future__ import annotations

import runpy

from flows.serving.environment import keep_temporary_files_at_home
from flows.serving.output import outlive_output

if __name__ == "__main__":
    outlive_output()
    keep_temporary_files_at_home()
    runpy.run_module("prefect", run_name="__main__", alter_sys=True)
