"""`python -m tasks.processes.relay TRANSPORT ARGUMENTS…`: run `tasks.processes.machine run` on another machine.

TRANSPORT is a command, as JSON, that runs it there and passes input and output on, such as ssh. ARGUMENTS are for
`python` there. The relay sends the request and then signs of life. On SIGTERM it closes the input; the processes there
then save and end. The exit status is theirs, or LOST if the connection broke: then the relay returns only when they
must have ended, so that no two attempts at a training run concurrently.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from contextlib import suppress

from grpo_core.system.descendants import KILL_SECONDS
from tasks.processes.machine import SILENCE_SECONDS, shared_environment
from tasks.processes.run import GRACE_SECONDS, LOST

BEAT_SECONDS = 4.0
TRANSPORT_FAILED = 255  # exit status if ssh itself fails
# Processes there end after silence, or when the input closes, if only the connection died.
ENDING_SECONDS = max(SILENCE_SECONDS, GRACE_SECONDS) + KILL_SECONDS


def main() -> None:
    told: list[int] = []  # signals
    signal.signal(signal.SIGTERM, lambda number, frame: told.append(number))
    transport, arguments = json.loads(sys.argv[1]), sys.argv[2:]
    # In a session of its own: a signal to this process's group would end ssh before the processes that it started.
    process = subprocess.Popen(transport, stdin=subprocess.PIPE, start_new_session=True)
    assert process.stdin is not None
    request = {"environment": shared_environment(), "arguments": arguments}
    message, next_beat = json.dumps(request).encode() + b"\n", 0.0
    while (code := process.poll()) is None:
        if told:
            with suppress(OSError):
                process.stdin.close()
        elif time.monotonic() >= next_beat:
            with suppress(OSError):  # it has ended
                process.stdin.write(message)
                process.stdin.flush()
            message, next_beat = b"\n", time.monotonic() + BEAT_SECONDS
        time.sleep(0.1)
    if 0 <= code < TRANSPORT_FAILED:
        sys.exit(code)
    print(f"the connection is lost; waiting {ENDING_SECONDS:g} s until no process can be left there", flush=True)
    time.sleep(ENDING_SECONDS)
    sys.exit(LOST)


if __name__ == "__main__":
    main()
