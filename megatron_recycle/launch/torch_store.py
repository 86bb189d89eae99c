"""Torch's store, in a process of its own: it outlives a coordinator that dies, with all that is in it.

Run as its own module. The launcher binds the socket and keeps it open, so that the port is never anybody else's and
clients wait in its queue while torch is loaded, or loaded again after the store itself has died.
"""

from __future__ import annotations

import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_recycle.control.ports import listen
from megatron_recycle.launch.child import Child
from megatron_recycle.launch.deaths import Deaths
from megatron_recycle.launch.network import check_listening

_END_LIMIT = 2.0


class TorchStore:
    """Torch's store on one interface, looked after.

    Args:
        port: 0 is any.
        log: what the process writes.

    Raises OSError if the port is in use.
    """

    def __init__(self, interface: str, port: int, environ: Mapping[str, str], log: Path) -> None:
        self._listener = listen(interface, port)
        self.port: int = self._listener.getsockname()[1]
        self._environ = {**environ, "OMP_NUM_THREADS": "1"}
        self._log = log
        self.deaths = Deaths("torch's store")
        self._child = self._start()

    @property
    def pid(self) -> int:
        return self._child.pid

    def tend(self) -> bool:
        """Start the process again if it has died; whether it had. The store's content is lost then, so that handles
        that are being made fail; the next ones find the new store.

        Raises:
            RecycleError: it has died too often.
        """
        if self._child.status() is None:
            return False
        self.deaths.died(self._log)
        self._child.release()
        self._child = self._start()
        return True

    def end(self) -> None:
        """Kill the process: nobody uses the store any more."""
        self._child.signal(signal.SIGKILL)
        self._child.wait(_END_LIMIT)
        self._child.release()
        self._listener.close()

    def _start(self) -> Child:
        number = self._listener.fileno()
        command = [sys.executable, "-m", "megatron_recycle.launch.torch_store", str(number)]
        return Child(command, self._environ, self._log, keep=(number,), deaf=True)


def keep_store(host: str, port: int, environ: Mapping[str, str], run_dir: Path) -> TorchStore:
    """The store of the job whose folder is `run_dir`. Raises ConfigError if nobody can listen there."""
    check_listening(host, port)
    return TorchStore(host, port, environ, run_dir / "coordinator.log")


def serve(descriptor: int) -> Any:
    """Torch's store on a socket that is bound already: left alone, it would listen on all interfaces."""
    from torch.distributed import TCPStore

    listener = socket.socket(fileno=descriptor)
    host, port = listener.getsockname()[:2]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


if __name__ == "__main__":
    store = serve(int(sys.argv[1]))
    while True:
        signal.pause()
