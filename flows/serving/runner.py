"""What `grpo serve` runs once it has set up the server: offer the deployments, and run what is triggered."""

from __future__ import annotations

from flows.serving.environment import keep_temporary_files_at_home
from flows.serving.output import outlive_output
from grpo_core.system.processes import importing, run_and_leave


def main() -> None:
    outlive_output()
    keep_temporary_files_at_home()
    with importing():
        from flows.serving.deployments import serve

    serve()


if __name__ == "__main__":
    run_and_leave(main)
