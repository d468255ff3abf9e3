"""Run `muse-cache` on a terminal of a given width."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

from support.process import environment


def on_terminal(arguments, columns, **variables):
    """Exit code and what the terminal shows, lines ended by \\n."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    code = f"import sys; sys.argv[1:] = {[str(a) for a in arguments]!r}\nfrom cache_tools.cli import entry\nentry()"
    kept = {k: v for k, v in environment(**{"TERM": "xterm", **variables}).items() if k not in ("COLUMNS", "LINES")}
    if "NO_COLOR" not in variables:
        kept.pop("NO_COLOR", None)
    process = subprocess.Popen([sys.executable, "-c", code], stdin=child, stdout=child, stderr=child, env=kept)
    os.close(child)
    text = b""
    while True:
        try:
            block = os.read(parent, 65536)
        except OSError:
            break
        if not block:
            break
        text += block
    os.close(parent)
    return process.wait(timeout=60), text.decode().replace("\r\n", "\n")


def plain(text):
    """Without colours."""
    return re.sub(r"\x1b\[\d+m", "", text)
