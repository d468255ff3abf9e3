"""Whose order the boundary has: FlashInfer's where stock takes it from there, else Triton's."""

import pytest

from muse_jit.ops import stock_order
from muse_jit.ops.stock_order import stock_boundary_order


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
