"""ELF files made by hand, the same on every machine: a library as the cache holds it, with a cubin inside."""

import struct

_HEADER = "<16sHHIQQQIHHHHHH"


def _image(kind, machine, sections):
    """`sections`: (name, type, content, link, size of what occupies no bytes). Section 0 and the names are added."""
    names = b"\0"
    sections = [("", 0, b"", 0, 0), *sections, (".shstrtab", 3, b"", 0, 0)]
    offsets = []
    for name, *_ in sections:
        offsets.append(len(names) if name else 0)
        names += name.encode() + b"\0" if name else b""
    sections[-1] = (".shstrtab", 3, names, 0, 0)
    body, rows = b"", []
    for (_, section, content, link, size), at in zip(sections, offsets, strict=True):
        rows.append((at, section, 0, 0, 64 + len(body), size or len(content), link, 0, 1, 0))
        body += content
    table = b"".join(struct.pack("<IIQQQQIIQQ", *row) for row in rows)
    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    header = struct.pack(
        _HEADER, ident, kind, machine, 1, 0, 0, 64 + len(body), 0, 64, 0, 0, 64, len(rows), len(rows) - 1
    )
    return header + body + table


def cubin(kernels):
    """A cubin with `kernels`: name to (registers, local bytes, shared bytes, code bytes)."""
    strings, symbols, info, sections = b"\0", bytes(24), b"", []
    for number, (name, (registers, local, shared, code)) in enumerate(kernels.items(), start=1):
        symbols += struct.pack("<IBBHQQ", len(strings), 0x12, 0, 1, 0, 0)
        strings += name.encode() + b"\0"
        for attribute, value in ((0x2F, registers), (0x11, local)):
            info += struct.pack("<BBHII", 4, attribute, 8, number, value)
        sections += [(f".text.{name}", 1, bytes(code), 0, 0), (f".nv.shared.{name}", 8, b"", 0, shared)]
    head = [(".strtab", 3, strings, 0, 0), (".symtab", 2, symbols, 1, 0), (".nv.info", 1, info, 0, 0)]
    return _image(2, 190, head + sections)


def library(symbol, content=b"", machine=62):
    """A shared library that exports a kernel's entry, with `content` (a cubin) as data."""
    strings = b"\0" + f"__tvm_ffi_{symbol}".encode() + b"\0imported\0"
    symbols = bytes(24) + struct.pack("<IBBHQQ", 1, 0x12, 0, 3, 0, 8)
    symbols += struct.pack("<IBBHQQ", strings.index(b"imported"), 0x12, 0, 0, 0, 0)
    sections = [(".dynstr", 3, strings, 0, 0), (".dynsym", 11, symbols, 1, 0), (".lrodata", 1, content, 0, 0)]
    return _image(3, machine, sections)
