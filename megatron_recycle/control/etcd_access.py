"""How an etcd lets its clients in: certificates, and users with passwords, from the variables that `etcdctl` reads.

They stay in the environment: command lines are public.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field

from megatron_recycle.errors import ConfigError

CACERT, CERT, KEY, USER, PASSWORD = (f"ETCDCTL_{name}" for name in ("CACERT", "CERT", "KEY", "USER", "PASSWORD"))
_HINTS = {
    "CERTIFICATE_VERIFY_FAILED": f"its certificate is not believed: give that of its authority in {CACERT}",
    "WRONG_VERSION_NUMBER": "it does not speak TLS: give --store etcd://...",
    "CERTIFICATE_REQUIRED": "",
    "BAD_CERTIFICATE": f"it does not believe the certificate in {CERT}",
    "UNKNOWN_CA": f"it does not believe the certificate in {CERT}",
}
_WANTED = f"it wants a certificate of its clients: give {CERT} and {KEY}"


@dataclass(frozen=True)
class Access:
    """`ca`: file of the authority whose certificates are believed ("": the system's); `cert`, `key`: this client's;
    `user`: NAME:PASSWORD."""

    ca: str = ""
    cert: str = ""
    key: str = ""
    user: str = field(default="", repr=False)

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Access:
        user = environ.get(USER, "")
        if user and ":" not in user:
            user = f"{user}:{environ.get(PASSWORD, '')}"
        return cls(environ.get(CACERT, ""), environ.get(CERT, ""), environ.get(KEY, ""), user)

    def context(self) -> ssl.SSLContext:
        """For connections to the members. Raises ConfigError."""
        for name, path in ((CACERT, self.ca), (CERT, self.cert), (KEY, self.key)):
            if path and not os.access(path, os.R_OK):
                raise ConfigError(f"{name} is {path}, which cannot be read")
        try:
            made = ssl.create_default_context(cafile=self.ca or None)
            if self.cert:
                made.load_cert_chain(self.cert, self.key or None)
        except (OSError, ValueError) as error:
            raise ConfigError(f"the certificates in {CACERT}, {CERT} and {KEY} are of no use: {error}") from error
        return made


def hint(error: Exception, access: Access) -> tuple[str, bool]:
    """What to do if a member does not answer as it should ("": nothing is known), and whether it never will."""
    if isinstance(error, ConnectionResetError):  # http.client.RemoteDisconnected is one
        return "it hangs up; perhaps it speaks TLS: give --store etcds://...", False
    if not isinstance(error, ssl.SSLError):
        return "", False
    for reason, told in _HINTS.items():
        if reason in f"{error.reason}".upper():
            return (told if access.cert or "does not believe" not in told else _WANTED) or _WANTED, True
    return ("" if access.cert else f"it hangs up; perhaps {_WANTED}"), False
