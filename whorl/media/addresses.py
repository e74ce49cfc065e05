"""Which network addresses a server may fetch from: public ones only, none of its own network."""

import ipaddress

_UNICAST = ipaddress.IPv6Network("2000::/3")  # excludes IPv4-mapped, IPv4-compatible and translated addresses
_TUNNELS = [ipaddress.IPv6Network(text) for text in ("2002::/16", "2001::/32")]  # 6to4, Teredo: they embed an IPv4 one


def is_public(text: str) -> bool:
    """Return whether a text is a public unicast address: not private, loopback, link-local, multicast or reserved, and
    not one that embeds another address."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and (
        address not in _UNICAST or any(address in network for network in _TUNNELS)
    ):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved
