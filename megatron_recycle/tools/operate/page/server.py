"""Server of a job's page with aiohttp, in a thread beside the watcher. Read-only: it gives no orders.

On a loopback address all users of this machine may look. Anywhere else a secret is needed, which follows from the job's
token and is good for nothing else. Nothing is loaded from other places.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from concurrent import futures
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from aiohttp import web

from megatron_recycle.errors import ConfigError

SECRET = "page.token"
"""File in a run's folder with the secret."""
_HERE = Path(__file__).parent
_FILES = {"/": ("page.html", "text/html"), "/page.css": ("page.css", "text/css"),
          "/page.js": ("page.js", "text/javascript")}
_COOKIE = "recycle"
_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
            "img-src data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
            "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}
_LOCAL = ("localhost", "127.0.0.1", "[::1]", "::1")
_START = 10.0
_FRESH = 0.5
"""Seconds for which an answer is cached for other visitors."""

Show = Callable[[], Mapping[str, Any]]
"""Returns the page's state; called in a thread."""
ShowPlan = Callable[[int | None], Mapping[str, Any]]
"""Returns the schedule, of a pipeline or of all; called in a thread."""


def secret_of(token: str) -> str:
    """The visitors' secret, derived from the job's token."""
    return hmac.new(token.encode(), b"recycle page", hashlib.sha256).hexdigest()[:32]


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach this address."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class Server:
    """The page at an address.

    Args:
        show, plan: its content.
        secret: that a visitor must know; None: none, on a loopback address.
    """

    def __init__(self, show: Show, plan: ShowPlan, secret: str | None) -> None:
        self._show = show
        self._plan = plan
        self._secret = secret
        self._state: tuple[float, Mapping[str, Any]] | None = None
        self._asking: asyncio.Lock
        self._loop = asyncio.new_event_loop()
        self._done: asyncio.Event
        self._thread: threading.Thread | None = None

    def start(self, host: str, port: int) -> int:
        """Serve; returns the port. Raises ConfigError."""
        listening: Future[int] = Future()
        served = self._serve(host, port, listening)
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(served,), name="recycle-page",
                                        daemon=True)
        self._thread.start()
        try:
            return listening.result(_START)
        except (OSError, futures.TimeoutError) as error:
            why = getattr(error, "strerror", None) or "it does not start"
            raise ConfigError(f"nobody can listen on {host}, port {port} ({why}): give another --page HOST:PORT"
                              ) from error

    def close(self) -> None:
        """Stop serving."""
        if self._thread is not None and self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._done.set)
            self._thread.join(5.0)

    async def _serve(self, host: str, port: int, listening: Future[int]) -> None:
        self._done, self._asking = asyncio.Event(), asyncio.Lock()
        app = web.Application(middlewares=[self._guarded])
        for path in _FILES:
            app.router.add_get(path, self._file)
        app.router.add_get("/state", self._state_now)
        app.router.add_get("/schedule", self._schedule)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        try:
            site = web.TCPSite(runner, host, port, shutdown_timeout=1.0)
            await site.start()
            listening.set_result(int(runner.addresses[0][1]))
            await self._done.wait()
        except OSError as error:
            listening.set_exception(error)
        finally:
            await runner.cleanup()

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
                       ) -> web.StreamResponse:
        answer = self._refusal(request) or await handler(request)
        answer.headers.update(_HEADERS)
        return answer

    def _refusal(self, request: web.Request) -> web.StreamResponse | None:
        """Refusal of a visitor, if due. A visitor brings the secret once, in the address, and gets a cookie for it."""
        if self._secret is None:
            name = request.host.rpartition(":")[0] if request.host.rpartition(":")[2].isdecimal() else request.host
            if name in _LOCAL:
                return None
            return web.Response(status=421, text="this page is for 127.0.0.1 alone\n")  # a site's name for it
        given = request.query.get("token")
        if given is not None and _equal(given, self._secret):
            redirect = web.Response(status=303, headers={"Location": request.path})
            redirect.set_cookie(_COOKIE, self._secret, httponly=True, samesite="Strict")
            return redirect
        if _equal(request.cookies.get(_COOKIE, ""), self._secret):
            return None
        return web.Response(status=403, text=f"this page needs ?token=..., as {SECRET} in the run's folder has it\n")

    async def _file(self, request: web.Request) -> web.StreamResponse:
        name, kind = _FILES[request.path]
        return web.Response(text=(_HERE / name).read_text(encoding="utf-8"), content_type=kind)

    async def _state_now(self, request: web.Request) -> web.StreamResponse:
        async with self._asking:
            if self._state is None or time.monotonic() - self._state[0] > _FRESH:
                self._state = (time.monotonic(), await asyncio.to_thread(self._show))
        return web.json_response(self._state[1])

    async def _schedule(self, request: web.Request) -> web.StreamResponse:
        text = request.query.get("pipeline", "")
        async with self._asking:
            found = await asyncio.to_thread(self._plan, int(text) if text.isdecimal() and len(text) < 9 else None)
        return web.json_response(found)


def _equal(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode(), other.encode())
