"""Chromium without a window, driven through its DevTools protocol over two pipes; a server of files for it to load."""

from __future__ import annotations

import contextlib
import functools
import http.server
import json
import os
import select
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = (
    "--headless=new",
    "--no-sandbox",  # a container's root may not have one
    "--disable-gpu-sandbox",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--enable-unsafe-webgpu",
    "--use-webgpu-adapter=swiftshader",
    "--window-size=1280,1000",
    "--remote-debugging-pipe",
)


def found() -> str | None:
    """The browser's path."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One page of a browser that this object starts and, on leaving its context, ends.

    errors: what the page complained of in its console, and exceptions that nothing caught.
    """

    def __init__(self, *options: str) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # The browser expects its pipes as descriptors 3 and 4.
        redirect = 'in=$1 out=$2; shift 2; exec "$@" 3<&"$in" 4>&"$out"'
        browser = [found(), *OPTIONS, *options, f"--user-data-dir={self._profile.name}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", redirect, "bash", str(theirs_in), str(theirs_out), *browser],
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._read, self._last, self._session = b"", 0, None
        self.errors: list[str] = []

    def __enter__(self) -> Page:
        targets = self._call("Target.getTargets", 30)["targetInfos"]
        page = next(t["targetId"] for t in targets if t["type"] == "page")
        self._session = self._call("Target.attachToTarget", 30, targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *exception) -> None:
        os.close(self._out)  # at which the browser ends
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        self._profile.cleanup()

    def call(self, method: str, timeout: float = 300, **parameters: Any) -> dict:
        """The result of a DevTools method on the page. Raises RuntimeError with its message, TimeoutError."""
        return self._call(method, timeout, **parameters)

    def evaluate(self, expression: str, timeout: float = 300) -> Any:
        """The value of a JavaScript expression, awaited if it is a promise. Raises RuntimeError where it throws."""
        said = self.call("Runtime.evaluate", timeout, expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in said:
            details = said["exceptionDetails"]
            raise RuntimeError(details.get("exception", {}).get("description", details["text"]))
        return said["result"].get("value")

    def open(self, address: str) -> None:
        """Go to an address and wait for the page's `load`."""
        self.call("Page.navigate", url=address)
        self.evaluate(
            "new Promise(done => document.readyState === 'complete' ? done() : addEventListener('load', () => done()))"
        )

    def _call(self, method: str, timeout: float, **parameters: Any) -> dict:
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + timeout
        while True:
            answer = self._next(end, method)
            if answer.get("id") == self._last:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self._note(answer.get("method"), answer.get("params", {}))

    def _next(self, end: float, method: str) -> dict:
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._in], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError(f"no answer to {method}; the page said {self.errors or 'nothing'}")
            part = os.read(self._in, 1 << 20)
            if not part:
                raise RuntimeError(f"the browser ended during {method}, code {self._process.wait()}")
            self._read += part
        message, _, self._read = self._read.partition(b"\0")
        return json.loads(message)

    def _note(self, event: str | None, about: dict) -> None:
        if event == "Runtime.exceptionThrown":
            details = about["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif event == "Runtime.consoleAPICalled" and about["type"] in ("error", "assert"):
            self.errors.append(" ".join(str(a.get("value", a.get("description"))) for a in about["args"]))
        elif event == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.errors.append(f"{about['entry']['text']} {about['entry'].get('url', '')}")


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *message) -> None:
        pass


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a folder, served on this machine alone as `python -m http.server` does."""
    handler = functools.partial(_Quiet, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
