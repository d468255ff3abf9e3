"""A headless Chromium that opens a file and answers questions, through its debugging pipe and nothing else."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time

PROGRAM = next((p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None)


class Browser:
    """One page. `problems` collects console errors, exceptions and refused resources; `requests` what was fetched."""

    def __init__(self):
        self.profile = tempfile.mkdtemp(prefix="muse_jit-browser-")
        to_child, self._out = os.pipe()
        self._in, from_child = os.pipe()
        options = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
        profile = f"--user-data-dir={self.profile}"

        def pipes():  # the browser reads its pipe at 3 and writes at 4
            ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 50) for end in (to_child, from_child)]
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        self._process = subprocess.Popen(
            [PROGRAM, *options, "--no-first-run", "--remote-debugging-pipe", profile, "about:blank"],
            preexec_fn=pipes, pass_fds=(3, 4), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        os.close(to_child)
        os.close(from_child)
        self._number, self._buffer, self._session = 0, b"", None
        self.problems, self.requests, self._loaded = [], [], 0
        target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        """One command and its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, path, width=1200, height=900, dark=False):
        """Load a file and wait until it is there."""
        self.problems.clear()
        self.requests.clear()
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        loaded = self._loaded
        self.call("Page.navigate", url=f"file://{path}")
        deadline = time.monotonic() + 60
        while self._loaded == loaded and time.monotonic() < deadline:
            self._read()

    def ask(self, expression):
        """The value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key):
        """A key, Tab or ArrowRight for instance."""
        codes = {"Tab": 9, "ArrowRight": 39, "ArrowLeft": 37, "Escape": 27, "Enter": 13}
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key], **text)

    def close(self):
        """End the browser and remove its profile."""
        os.close(self._out)
        os.killpg(self._process.pid, signal.SIGKILL)  # its helpers, too
        self._process.wait()
        os.close(self._in)
        shutil.rmtree(self.profile, ignore_errors=True)

    def _read(self):
        while b"\0" not in self._buffer:
            block = os.read(self._in, 1 << 20)
            assert block, "the browser ended"
            self._buffer += block
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded += 1
        elif method == "Runtime.exceptionThrown":
            self.problems.append(parameters["exceptionDetails"]["text"])
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.problems.append(str(parameters["args"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.problems.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        return message
