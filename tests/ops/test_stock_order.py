"""Whose order the boundary has: FlashInfer's where stock takes it from there, else Triton's."""

import pytest

from muse_jit.ops import stock_order
from muse_jit.ops.stock_order import stock_boundary_order, unknown_stock


@pytest.fixture
def installed(monkeypatch):
    """Versions of the distributions that are installed, by name."""
    versions = {}
    monkeypatch.setattr(stock_order, "_version", versions.get)
    stock_order.stock_order.cache_clear()
    stock_boundary_order.cache_clear()
    yield versions
    stock_order.stock_order.cache_clear()
    stock_boundary_order.cache_clear()


@pytest.mark.parametrize(
    ("arch", "flashinfer", "order", "said"),
    [
        ("sm_90a", "0.7.2.post1", "triton-3.6", False),
        ("sm_120a", "0.7.2.post1", "triton-3.6", False),
        ("sm_100a", "0.7.2.post1", "flashinfer-0.7", False),
        ("sm_103a", "0.7.9", "flashinfer-0.7", False),
        ("sm_103a", "0.6.1", "triton-3.6", False),
        ("sm_103a", None, "triton-3.6", False),
        ("sm_103a", "0.8.0", "flashinfer-0.7", True),
    ],
)
def test_the_boundarys_order(installed, caplog, arch, flashinfer, order, said):
    installed |= {"triton": "3.6.0"} | ({} if flashinfer is None else {"flashinfer-python": flashinfer})
    with caplog.at_level("INFO", "muse_jit"):
        assert stock_boundary_order(arch) == order
    assert ("bits may differ" in caplog.text) == said


def test_without_triton_the_newest_order(installed):
    assert stock_order.stock_order() == "triton-3.8"


@pytest.mark.parametrize(
    ("arch", "triton", "flashinfer", "row_norm", "boundary"),
    [
        ("sm_90a", "3.8.0", None, None, None),
        ("sm_90a", "3.6.0", "0.8.0", None, None),
        ("sm_90a", "3.9.0", None, "the order of Triton 3.9.0 is not known", "the order of Triton 3.9.0 is not known"),
        ("sm_90a", None, None, "Triton is not installed", "Triton is not installed"),
        ("sm_100a", "3.9.0", "0.7.2", "the order of Triton 3.9.0 is not known", None),
        ("sm_103a", "3.8.0", "0.8.0", None, "the order of FlashInfer 0.8.0 is not known"),
    ],
)
def test_what_is_not_known_is_said(installed, arch, triton, flashinfer, row_norm, boundary):
    given = {"triton": triton, "flashinfer-python": flashinfer}
    installed |= {name: version for name, version in given.items() if version}
    assert unknown_stock(arch, boundary=False) == row_norm
    assert unknown_stock(arch, boundary=True) == boundary
