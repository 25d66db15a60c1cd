"""Where a request comes from, as a key to count attempts by, and whether it came by https."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping

from starlette.requests import Request


def client_address(request: Request) -> str:
    """The address that limits count by; "" where none is known.

    On a Space everybody comes through the Hub's proxy, which puts the address that it saw last in the list;
    elsewhere uvicorn has seen to the proxies that are trusted. Whoever has an IPv6 address has a network of
    2^64 of them, so the network is what counts.
    """
    listed = request.headers.get("x-forwarded-for", "") if os.environ.get("SPACE_ID") else ""
    given = listed.rsplit(",", 1)[-1].strip() or (request.client.host if request.client else "")
    try:
        address = ipaddress.ip_address(given.partition("%")[0])
    except ValueError:
        return given[:64]
    if isinstance(address, ipaddress.IPv6Address):
        mapped = address.ipv4_mapped
        return str(mapped) if mapped else str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)


def over_https(scheme: object, headers: Mapping[str, str]) -> bool:
    """True where the browser spoke https, to us or to the first of the proxies in front (which lists itself
    first). Decides no more than whether a cookie is marked `Secure`."""
    first = headers.get("x-forwarded-proto", "").partition(",")[0]
    return scheme == "https" or first.strip().lower() == "https"
