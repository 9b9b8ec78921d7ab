"""`python -m tasks.processes.restarting ARGUMENTS…`: run a vLLM server, `python ARGUMENTS`, and start it again whenever
it ends.

All processes that it left running are killed first. Ends on SIGTERM; its supervisor then ends what is left.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time

from grpo_core.system.descendants import adopt_orphans, kill_descendants
from tasks.processes.run import SIGNALLED, TOLD, describe_status

PAUSE_SECONDS = 2.0  # before a process that died is started again
AGAIN = "and is started again"


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TOLD))
    adopt_orphans()
    while True:
        code = subprocess.Popen([sys.executable, *sys.argv[1:]]).wait()
        status = describe_status(code if code >= 0 else SIGNALLED - code)
        print(f"the vLLM server ended with {status} {AGAIN}", flush=True)
        kill_descendants()
        time.sleep(PAUSE_SECONDS)


if __name__ == "__main__":
    main()
