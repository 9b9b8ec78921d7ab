"""Python in the sandbox. Importing this module tries the sandbox, and raises SandboxError if there is none."""

from __future__ import annotations

from grpo_core.system.sandbox.bubblewrap import ESCAPE, SCRATCH_FILES, SandboxError, require
from grpo_core.system.sandbox.session import LONGEST_CODE, Session, SessionLimits

LIMITS = SessionLimits()


class Interpreter:
    """An interpreter for one conversation after the other."""

    def __init__(self) -> None:
        self.session: Session | None = None

    def reset(self) -> None:
        """Forget what the last conversation has left."""
        if self.session:
            self.session.close()
        self.session = None

    def python(self, code: str) -> str:
        """Runs Python code, as a cell of a notebook: variables and definitions are kept for the next call. Returns what it prints and the value of its last expression.

        Args:
            code: Python 3 with the standard library; it reaches no files and no network.
        """  # noqa: E501
        size = len(code.encode(errors="surrogatepass"))
        if size > LONGEST_CODE:
            raise ValueError(f"the code has {size:,} bytes; {LONGEST_CODE:,} are the most")
        self.session = self.session or Session(LIMITS)
        text = self.session.run(code)
        if text is None:
            self.session = None
            raise RuntimeError(
                f"the interpreter was ended: the code took more than {LIMITS.wall_seconds:g} s, more memory than it "
                f"has or more than {SCRATCH_FILES:,} files, or ended it. Its variables are gone; the next call starts "
                "with none"
            )
        return text or "(no output)"


try:
    require("bubblewrap")
except SandboxError as error:
    raise SandboxError(str(error).removesuffix(ESCAPE)) from None
python = Interpreter().python
