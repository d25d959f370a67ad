"""The package's front door: version, public names, laziness of the names."""

from __future__ import annotations

from importlib import metadata, resources

import pytest

import kda2


def test_version_is_the_installed_one() -> None:
    try:
        installed = metadata.version("kda2")
    except metadata.PackageNotFoundError:
        pytest.skip("kda2 runs from its sources and is not installed")
    assert kda2.__version__ == installed


@pytest.mark.parametrize("name", kda2.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(kda2, name).__name__ == name
    assert name in dir(kda2)


def test_unknown_name_says_so() -> None:
    with pytest.raises(AttributeError, match="module 'kda2' has no attribute 'flash'"):
        kda2.flash  # noqa: B018


def test_every_exception_is_a_kda2_error() -> None:
    for name in ("InvalidType", "InvalidValue", "MissingExtra", "UnsupportedTarget"):
        assert issubclass(getattr(kda2, name), kda2.KDA2Error)


def test_types_are_shipped() -> None:
    assert resources.files("kda2").joinpath("py.typed").is_file()
