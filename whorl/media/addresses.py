"""Which addresses of the network a server may fetch from: those of the whole internet, none of its own network."""

import ipaddress

_UNICAST = ipaddress.IPv6Network("2000::/3")  # mapped, compatible and translated addresses are all outside
_TUNNELS = [ipaddress.IPv6Network(text) for text in ("2002::/16", "2001::/32")]  # 6to4, Teredo: they hold another one


def is_public(text: str) -> bool:
    """Whether it is an ordinary address of the internet: not private, of this machine, of the link or of a group, nor
    one that stands for another."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and (
        address not in _UNICAST or any(address in network for network in _TUNNELS)
    ):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved
