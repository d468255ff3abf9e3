import struct

from muse_jit.store.cubin import cubins, resources


def test_bytes_without_a_cubin_have_no_resources():
    assert resources(b"") == []
    assert resources(b"\x7fELF\x02\x01" + bytes(10)) == []
    assert resources(b"noise" * 1000) == []


def test_a_cut_or_host_elf_is_not_taken_for_a_cubin():
    host = bytearray(64)
    host[:6] = b"\x7fELF\x02\x01"
    struct.pack_into("<H", host, 18, 62)
    assert list(cubins(bytes(host))) == []
    device = bytearray(host)
    struct.pack_into("<H", device, 18, 190)
    struct.pack_into("<Q", device, 40, 10**9)
    struct.pack_into("<HH", device, 58, 64, 3)
    assert list(cubins(bytes(device))) == []
