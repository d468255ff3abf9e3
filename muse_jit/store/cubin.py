"""What an artifact says about its GPU code: registers, shared and local memory of each kernel.

A library of this cache carries one cubin as data: an ELF file (machine 190, EM_CUDA) inside the ELF file. Its
sections name the kernels; `.nv.info` holds attributes as records of format, code, size and payload. The codes used
here were read off cubins of sm_90a, sm_100a, sm_103a and sm_120a and agree with what nvdisasm prints for them.
"""

import struct
from collections.abc import Iterator
from typing import Any

_MAGIC = b"\x7fELF\x02\x01"
_EM_CUDA = 190
_SIZED = 4  # the format of an attribute that carries a payload
_FRAME_SIZE, _REGISTERS, _MAX_THREADS = 0x11, 0x2F, 0x05


def cubins(artifact: bytes) -> Iterator[bytes]:
    """The cubins inside an object file or library, in order of appearance."""
    start = artifact.find(_MAGIC)
    while start >= 0:
        image = artifact[start:]
        if len(image) >= 64 and struct.unpack_from("<H", image, 18)[0] == _EM_CUDA:
            end = _end_of(image)
            if end is not None:
                yield image[:end]
        start = artifact.find(_MAGIC, start + 1)


def resources(artifact: bytes) -> list[dict[str, Any]]:
    """For each GPU kernel: name, registers a thread, static shared memory and local memory (stack and spills) in
    bytes, most threads a block where the code was compiled for a limit, and bytes of machine code.

    A field whose source the cubin lacks is None. Bytes that are not a cubin give an empty list.
    """
    result = []
    for cubin in cubins(artifact):
        try:
            result += _kernels(cubin)
        except (struct.error, UnicodeDecodeError, IndexError):
            continue
    return result


def _end_of(image: bytes) -> int | None:
    """Length of an ELF image: the furthest end of its header, section table, program table and sections."""
    program, sections = struct.unpack_from("<QQ", image, 32)
    _, program_size, program_count, section_size, section_count, _ = struct.unpack_from("<6H", image, 52)
    end = max(64, program + program_size * program_count, sections + section_size * section_count)
    if end > len(image):
        return None
    for index in range(section_count):
        _, kind, _, _, offset, size = struct.unpack_from("<IIQQQQ", image, sections + index * section_size)
        if kind != 8:  # NOBITS occupies no bytes
            end = max(end, offset + size)
    return end if end <= len(image) else None


def _kernels(cubin: bytes) -> list[dict[str, Any]]:
    table = struct.unpack_from("<Q", cubin, 40)[0]
    size, count, names_index = struct.unpack_from("<3H", cubin, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * size) for i in range(count)]
    names_at = sections[names_index][4]
    by_name = {_text(cubin, names_at + section[0]): section for section in sections}
    symbols = _symbols(cubin, sections)
    attributes: dict[str, dict[int, int]] = {}
    for code, payload in _attributes(cubin, by_name.get(".nv.info")):
        if code in (_FRAME_SIZE, _REGISTERS) and len(payload) >= 8:
            symbol, value = struct.unpack_from("<II", payload)
            attributes.setdefault(symbols[symbol], {})[code] = value
    result = []
    for name, section in by_name.items():
        if not name.startswith(".text."):
            continue
        kernel = name.removeprefix(".text.")
        threads = [
            struct.unpack_from("<3I", payload)
            for code, payload in _attributes(cubin, by_name.get(f".nv.info.{kernel}"))
            if code == _MAX_THREADS and len(payload) >= 12
        ]
        shared = by_name.get(f".nv.shared.{kernel}")
        found = attributes.get(kernel, {})
        result.append(
            {
                "name": kernel,
                "registers": found.get(_REGISTERS),
                "shared_bytes": shared[5] if shared else 0,
                "local_bytes": found.get(_FRAME_SIZE),
                "max_threads": threads[0][0] * threads[0][1] * threads[0][2] if threads else None,
                "code_bytes": section[5],
            }
        )
    return result


def _symbols(cubin: bytes, sections: list[tuple[int, ...]]) -> list[str]:
    for section in sections:
        if section[1] == 2:  # SYMTAB; its link is the string table
            strings = sections[section[6]][4]
            return [
                _text(cubin, strings + struct.unpack_from("<I", cubin, section[4] + offset)[0])
                for offset in range(0, section[5], 24)
            ]
    return []


def _attributes(cubin: bytes, section: tuple[int, ...] | None) -> Iterator[tuple[int, bytes]]:
    if section is None:
        return
    position, end = section[4], section[4] + section[5]
    while position + 4 <= end:
        form, code, size = struct.unpack_from("<BBH", cubin, position)
        position += 4
        if form == _SIZED:
            yield code, cubin[position : position + size]
            position += size


def _text(data: bytes, start: int) -> str:
    return data[start : data.index(b"\0", start)].decode()
