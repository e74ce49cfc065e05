"""The supported torch_npu releases, and the signatures of an installed one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from .table import CONTRACTS

# By release: what differs in the signatures of the rotary operators.
SUPPORTED_TORCH_NPU: Final[dict[str, str]] = {
    "2.9": "npu_mrope has no cache_mode (interleaved sections are not fused), npu_rotary_mul has no rotate",
    "2.10": "cache_mode and rotate exist; npu_apply_rotary_pos_emb still defaults to layout BSH",
    "2.11": "npu_apply_rotary_pos_emb defaults to layout BSND",
    "2.12": "as 2.11",
    "2.13": "the signatures of CONTRACTS; proven against the wheel",
}


def release(version: str) -> tuple[int, int]:
    """Return (major, minor) of a version such as '2.10.0.post7+git1a2b'; raises ValueError for another form."""
    major, minor = version.split("+")[0].split(".")[:2]
    if not (major.isdigit() and minor.isdigit()):
        raise ValueError(f"torch_npu version {version!r}: expected MAJOR.MINOR[.PATCH...]")
    return int(major), int(minor)


def call_arguments(op: str, available: Sequence[str], **requested: Any) -> dict[str, Any]:
    """Return the keyword arguments to call `op` with, where the installed schema has the arguments in `available`.

    Every requested argument that the schema has is passed, also when it equals the default, because defaults differ
    between versions. An argument that the schema lacks is left out if its value is None or the default; otherwise it
    raises RuntimeError. Raises TypeError for an argument that no version has.
    """
    parameters = {p.name: p for p in CONTRACTS[op].parameters}
    arguments = {}
    for name, value in requested.items():
        if name not in parameters:
            raise TypeError(f"{op}: no parameter {name!r}. Has: {list(parameters)}")
        if name in available:
            arguments[name] = value
        elif value is not None and value is not parameters[name].default and value != parameters[name].default:
            argument = f"{name}={value!r}" if isinstance(value, str | int | float | list | tuple) else name
            library = CONTRACTS[op].library
            needed = f"torch_npu {parameters[name].since} or newer" if library == "torch_npu" else f"another {library}"
            raise RuntimeError(f"{op}: {argument} needs {needed}; the installed schema has {list(available)}")
    return arguments


@dataclass(frozen=True, kw_only=True, slots=True)
class Installed:
    """An installed torch_npu: its version and, by operator, the argument names of its schema."""

    version: str
    arguments: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def call_arguments(self, op: str, **requested: Any) -> dict[str, Any]:
        """Return the keyword arguments for `op` in this version.

        Raises RuntimeError, with the version to install, when it lacks the operator or an argument.
        """
        if op not in self.arguments:
            raise RuntimeError(
                f"torch_npu {self.version} has no {op}: it needs torch_npu {CONTRACTS[op].since} or newer"
            )
        return call_arguments(op, self.arguments[op], **requested)


def check_installed(version: str, schema_arguments: Mapping[str, Sequence[str]]) -> Installed:
    """Return the Installed of a torch_npu version and its schemas' arguments, which `schema_arguments` reads.

    Raises RuntimeError for an unsupported version.
    """
    major_minor = "{}.{}".format(*release(version))
    if major_minor not in SUPPORTED_TORCH_NPU:
        raise RuntimeError(
            f"torch_npu {version} is not supported. Supported: {', '.join(SUPPORTED_TORCH_NPU)}. "
            f"Install one of these, or force another backend."
        )
    return Installed(version=version, arguments={op: tuple(names) for op, names in schema_arguments.items()})


def schema_arguments(torch_ops: Any) -> dict[str, tuple[str, ...]]:
    """Return the argument names of every operator of CONTRACTS that `torch.ops` has.

    `torch.ops` is an argument, because this package does not import torch.
    """
    arguments = {}
    for contract in CONTRACTS.values():
        packet = getattr(getattr(torch_ops, contract.namespace or "", None), contract.name, None)
        if contract.namespace is not None and packet is not None:
            arguments[contract.name] = tuple(a.name for a in packet.default._schema.arguments)
    return arguments
