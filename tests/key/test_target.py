import pytest

from muse_jit.errors import TargetError
from muse_jit.key import target
from muse_jit.key.target import Target, arch_of_capability, check_arch, device_arch


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("sm_80", 13, "x86_64"), "sm_80"),
        (("sm_90", 13, "x86_64"), "sm_90a"),
        (("sm_90a", 11, "x86_64"), "11"),
        (("sm_90a", 13.0, "x86_64"), "13.0"),
        (("sm_90a", 13, "riscv64"), "riscv64"),
    ],
)
def test_unknown_parts_are_refused_with_what_is_allowed(arguments, word):
    with pytest.raises(TargetError, match="allowed:") as caught:
        Target(*arguments)
    assert word in str(caught.value)


def test_capabilities_map_to_architectures():
    assert [arch_of_capability(c) for c in ((9, 0), (10, 0), (10, 3), (12, 0))] == [
        "sm_90a",
        "sm_100a",
        "sm_103a",
        "sm_120a",
    ]
    with pytest.raises(TargetError, match=r"compute capability 8\.0; supported: 9\.0 \(sm_90a\)"):
        arch_of_capability((8, 0))


class _Driver:
    """A stand-in for libcuda: each function returns a code; attributes are answered from a capability."""

    def __init__(self, capability=(9, 0), codes=(0, 0)):
        self.capability, self.codes, self.calls = capability, codes, []

    def cuInit(self, flags):
        self.calls.append("cuInit")
        return self.codes[0]

    def cuDeviceGet(self, pointer, ordinal):
        self.calls.append("cuDeviceGet")
        return self.codes[1]

    def cuDeviceGetAttribute(self, pointer, attribute, device):
        self.calls.append("cuDeviceGetAttribute")
        pointer._obj.value = self.capability[0 if attribute == 75 else 1]
        return 0


def test_device_is_asked_without_a_context(monkeypatch):
    driver = _Driver((10, 3))
    monkeypatch.setattr(target.ctypes, "CDLL", lambda name: driver)
    assert device_arch() == "sm_103a"
    assert set(driver.calls) == {"cuInit", "cuDeviceGet", "cuDeviceGetAttribute"}


@pytest.mark.parametrize("codes", [(100, 0), (0, 101)])
def test_no_device_says_what_to_name(monkeypatch, codes):
    monkeypatch.setattr(target.ctypes, "CDLL", lambda name: _Driver(codes=codes))
    with pytest.raises(TargetError, match=r"has no device 0 \(error 10[01]\); name the architecture \(--arch"):
        device_arch()


def test_no_driver_says_what_to_name(monkeypatch):
    def missing(name):
        raise OSError(name)

    monkeypatch.setattr(target.ctypes, "CDLL", missing)
    with pytest.raises(TargetError, match=r"no CUDA driver to ask; name the architecture"):
        device_arch()


def test_check_arch_returns_its_argument():
    assert check_arch("sm_120a") == "sm_120a"
