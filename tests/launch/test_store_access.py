"""An etcd with TLS, certificates of its clients, users and passwords lets a coordinator in, or says why not."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from megatron_recycle.control.etcd import Access, Entry, Etcd, Place, StoreRefused, StoreUnreachable
from megatron_recycle.errors import ConfigError
from tests.launch.test_store import ETCD, free_port

LIMIT = 60.0


def openssl(*words: object) -> None:
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True, timeout=LIMIT)


def certificates(folder: Path, name: str) -> Access:
    """An authority's, and one of 127.0.0.1 for both sides: etcd's gateway is its member's client."""
    ca, key, asked, cert = (folder / name for name in ("ca.pem", "key.pem", "asked.pem", "cert.pem"))
    options = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *options, "-keyout", folder / "ca-key.pem", "-out", ca, "-subj", "/CN=authority")
    openssl("req", *options, "-keyout", key, "-out", asked, "-subj", f"/{name}")
    names = folder / "names"
    names.write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
    openssl("x509", "-req", "-in", asked, "-CA", ca, "-CAkey", folder / "ca-key.pem", "-CAcreateserial", "-out", cert,
            "-days", 2, "-extfile", names)
    return Access(str(ca), str(cert), str(key))


@contextmanager
def etcd(folder: Path, access: Access) -> Iterator[str]:
    """A member that asks for certificates; its address."""
    client, peer = (f"127.0.0.1:{free_port()}" for _ in range(2))
    command = [ETCD, "--name", "m", "--data-dir", str(folder / "data"), "--listen-client-urls", f"https://{client}",
               "--advertise-client-urls", f"https://{client}", "--listen-peer-urls", f"http://{peer}",
               "--initial-advertise-peer-urls", f"http://{peer}", "--initial-cluster", f"m=http://{peer}",
               "--cert-file", access.cert, "--key-file", access.key, "--client-cert-auth", "--trusted-ca-file",
               access.ca, "--logger", "zap"]
    with (folder / "etcd.out").open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield client
    finally:
        process.kill()
        process.wait(LIMIT)


@contextmanager
def plain(handler: type[BaseHTTPRequestHandler] = BaseHTTPRequestHandler) -> Iterator[str]:
    """Somebody who speaks HTTP without TLS."""
    server = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join(LIMIT)
        server.server_close()


def answering(data: bytes) -> type[BaseHTTPRequestHandler]:
    """Says this, whatever it is asked."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler


def refused(url: str, access: Access, why: str) -> None:
    with pytest.raises(StoreRefused if "perhaps" not in why else (StoreRefused, StoreUnreachable), match=why):
        Etcd(Place.parse(url), access).range("k")


@pytest.mark.processes
@pytest.mark.skipif(not Path(ETCD).exists() or shutil.which("openssl") is None, reason="no etcd, or no openssl")
def test_certificates_and_passwords_let_a_coordinator_in_and_what_is_wrong_with_them_is_said(tmp_path: Path) -> None:
    given = certificates(tmp_path, "O=ours")  # with users the gateway wants no CommonName
    with etcd(tmp_path, given) as where:
        store, until = Etcd(Place.parse(f"etcds://{where}"), given), time.monotonic() + LIMIT
        while True:
            try:
                lease = store.grant(5)
                break
            except StoreUnreachable:
                assert time.monotonic() < until, (tmp_path / "etcd.out").read_text()[-2000:]
        assert store.put_if({"k": 0}, {"k": b"v"}, lease, ("k",)) and store.keep(lease)
        assert [one.value for one in store.range("k")] == [b"v"]
        refused(f"etcds://{where}", Access(), "not believed.*ETCDCTL_CACERT")
        refused(f"etcds://{where}", Access(given.ca), "(perhaps )?it wants a certificate.*ETCDCTL_CERT")
        refused(f"etcd://{where}", given, "perhaps it speaks TLS")
        for path, body in (("user/add", {"name": "root", "password": "sesame"}), ("role/add", {"name": "root"}),
                           ("user/grant", {"user": "root", "role": "root"}), ("enable", {})):
            store._post(f"/v3/auth/{path}", body)
        refused(f"etcds://{where}", given, "wants a user, in ETCDCTL_USER")
        environ = {"ETCDCTL_CACERT": given.ca, "ETCDCTL_CERT": given.cert, "ETCDCTL_KEY": given.key,
                   "ETCDCTL_USER": "root", "ETCDCTL_PASSWORD": "wrong"}
        refused(f"etcds://{where}", Access.read(environ), "invalid user ID or password")
        known = Etcd(Place.parse(f"etcds://{where}"), Access.read({**environ, "ETCDCTL_USER": "root:sesame"}))
        assert known.keep(lease) and [one.value for one in known.range("k")] == [b"v"]
        known._token = "one that has ended"
        assert known.range("k")
    with plain() as where:
        refused(f"etcds://{where}", given, "does not speak TLS")
        with pytest.raises(StoreUnreachable, match="is no etcd"):
            Etcd(Place.parse(f"etcd://{where}")).range("k")
    assert "sesame" not in repr(Access.read({"ETCDCTL_USER": "root:sesame"}))


def test_certificates_that_are_of_no_use_are_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ETCDCTL_CACERT is .* cannot be read"):
        Access(ca=str(tmp_path / "none")).context()
    file = tmp_path / "text"
    file.write_text("no certificate")
    with pytest.raises(ConfigError, match="of no use"):
        Access(ca=str(file)).context()


@pytest.mark.parametrize("data", [b"x", b"[]", b"null", b'{"kvs": 3}', b'{"kvs": [{"value": "dg=="}]}',
                                  b'{"kvs": [{"key": "?", "create_revision": "3"}]}', b'{"header": {"revision": []}}'])
def test_an_answer_of_another_form_is_no_etcds(data: bytes) -> None:
    with plain(answering(data)) as where, pytest.raises(StoreUnreachable, match="is no etcd"):
        Etcd(Place.parse(f"etcd://{where}")).range("k")


def test_what_an_answer_leaves_out_is_empty_or_nothing() -> None:
    with plain(answering(b'{"header": {"revision": "7"}, "kvs": [{"key": "aw==", "create_revision": "3"}]}')) as where:
        store = Etcd(Place.parse(f"etcd://{where}"))
        assert store.range("k") == [Entry("k", b"", 3)]
        assert (store.put_if({}, {"k": b"v"}), store.keep(1)) == (0, False)
