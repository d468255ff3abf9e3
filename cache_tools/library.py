"""What a host library says about itself, read as data: is it a shared library of this machine type, and what
does it export. Nothing is opened by the dynamic loader."""

import struct

_MAGIC = b"\x7fELF\x02\x01"
_SHARED_OBJECT = 3
_MACHINES = {"x86_64": 62, "aarch64": 183}
_DYNSYM = 11


class BadLibrary(ValueError):
    """The bytes are not the library that was asked for; one line says why."""


def check_library(data: bytes, host: str, symbol: str) -> None:
    """Check that the bytes are a shared library for a host architecture that exports a kernel's entry.

    Raises:
        BadLibrary: it is no ELF shared library, of another machine, cut, or does not export the symbol.
    """
    if data[:6] != _MAGIC or len(data) < 64:
        raise BadLibrary("kernel library is not a 64-bit ELF file")
    kind, machine = struct.unpack_from("<HH", data, 16)
    if kind != _SHARED_OBJECT:
        raise BadLibrary(f"kernel library is an ELF file of type {kind}, not a shared library")
    if host in _MACHINES and machine != _MACHINES[host]:
        raise BadLibrary(f"kernel library is for machine {machine}, not for {host}")
    if f"__tvm_ffi_{symbol}" not in exported_symbols(data):
        raise BadLibrary(f"kernel library does not export __tvm_ffi_{symbol}")


def exported_symbols(data: bytes) -> list[str]:
    """Names of the functions and objects that a library defines for others.

    Raises:
        BadLibrary: its tables point outside of it.
    """
    try:
        result = []
        for kind, offset, size, link in _sections(data):
            if kind != _DYNSYM:
                continue
            names = _sections(data)[link][1]
            for at in range(offset, offset + size, 24):
                name, info, _, section = struct.unpack_from("<IBBH", data, at)
                if section and info >> 4 in (1, 2):  # defined here; global or weak
                    result.append(_text(data, names + name))
        return result
    except (struct.error, IndexError, ValueError) as error:
        raise BadLibrary(f"kernel library has damaged tables ({error})") from None


def _sections(data: bytes) -> list[tuple[int, int, int, int]]:
    """Type, offset, size and link of each section."""
    table = struct.unpack_from("<Q", data, 40)[0]
    size, count = struct.unpack_from("<HH", data, 58)
    rows = [struct.unpack_from("<IIQQQQIIQQ", data, table + i * size) for i in range(count)]
    return [(row[1], row[4], row[5], row[6]) for row in rows]


def _text(data: bytes, start: int) -> str:
    return data[start : data.index(b"\0", start)].decode("ascii", "replace")
