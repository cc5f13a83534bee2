"""Who asks: whose share of the slots and of the memory a request takes, and by which name the server was asked."""

from __future__ import annotations

import hmac
import ipaddress
from collections import Counter
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.types import Scope

from castiron.pipelines.errors import PipelineError

# The bits of an IPv6 address that one customer's machines have in common.
NETWORK_BITS = 64


class TooMuch(PipelineError):
    """There is no memory for this request beside those that are under way; there may be later."""


@dataclass(frozen=True)
class Asker:
    """`client`: whose share a request takes. `owner`: who finds the beginnings of its prompts in the cache, "" for all.
    `key`: which of the server's keys it has, None without one."""

    client: str = ""
    owner: str = ""
    key: int | None = None


ANYBODY = Asker()
# Of the request that is being answered.
ASKER: ContextVar[Asker] = ContextVar("asker", default=ANYBODY)


def api_key(scope: Scope) -> bytes:
    """The API key that a request gives, empty without one: OpenAI's clients say Authorization, Anthropic's x-api-key."""
    headers = dict(scope["headers"])
    scheme, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"").strip()


class Access:
    """Who may ask, and as whom."""

    def __init__(self, keys: Sequence[str], origins: Sequence[str], shared_prefixes: bool = False, local: bool = False):
        """`origins`: whose pages may ask, "*" for all. `shared_prefixes`: whether what prompts with different keys begin with
        is read once for all. `local`: whether the server is for this machine alone."""
        self.keys, self.origins = [key.encode(errors="surrogateescape") for key in keys], origins
        self.apart, self.local = len(keys) > 1 and not shared_prefixes, local
        self.names = {urlsplit(origin).hostname for origin in origins}

    def asker(self, scope: Scope) -> Asker:
        """By the key; without one by the address, which is of a whole network where it is IPv6.

        The field `user` is not asked: it is what a client says of itself, and one could call itself many.
        """
        given = api_key(scope)
        # Every key is compared, so that the time tells nothing.
        found = [hmac.compare_digest(given, known) for known in self.keys]
        if any(found):
            key = found.index(True)
            return Asker(f"key {key}", f"key {key}" if self.apart else "", key)
        return Asker(_network((scope.get("client") or ("",))[0]))

    def named_here(self, scope: Scope) -> bool:
        """Whether a request may have its Host header.

        A page of any site can have its name resolve to this machine and so ask as if it were this server's own (DNS
        rebinding), where no key is asked for: only an address, a name without a dot, one below localhost, and those of the
        origins that are allowed cannot be such a site's.
        """
        host = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
        if not self.local or self.keys or "*" in self.origins or not host:
            return True
        try:
            name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
        except ValueError:
            return False
        return "." not in name or name.endswith(".localhost") or name in self.names or _address(name) is not None


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None


def _network(address: str) -> str:
    found = _address(address)
    if isinstance(found, ipaddress.IPv6Address) and not found.ipv4_mapped:
        return str(ipaddress.ip_network((int(found), NETWORK_BITS), strict=False))
    return address


class Shares:
    """Bytes that requests under way hold, from their first to the end of their answers."""

    def __init__(self, what: str, most: int, each: int):
        """Of `what`, for people: at most `most` together, and `each` of one client."""
        self.what, self.most, self.each, self.total = what, most, each, 0
        self.held: Counter[str] = Counter()

    def of(self, client: str) -> Share:
        return Share(self, client)


class Share:
    """What one request holds of `Shares`."""

    def __init__(self, shares: Shares, client: str):
        self.shares, self.client, self.count = shares, client, 0

    def take(self, count: int) -> None:
        """TooMuch if there is no room."""
        shares, held = self.shares, self.shares.held[self.client]
        for whose, there, most in (("this client's", held, shares.each), ("all", shares.total, shares.most)):
            if there + count > most:
                raise TooMuch(f"{whose} requests under way may have {shares.what} of {most} bytes together; try again later")
        shares.total += count
        shares.held[self.client] += count
        self.count += count

    def give_back(self) -> None:
        """For the end of the request."""
        shares, count, self.count = self.shares, self.count, 0
        shares.total -= count
        shares.held[self.client] -= count
        if not shares.held[self.client]:
            del shares.held[self.client]
