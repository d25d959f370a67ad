"""The exception tree: what each class is, what its message holds, that it survives pickling."""

from __future__ import annotations

import pickle

import pytest

import kda2


def test_message_is_one_sentence_with_the_fix() -> None:
    e = kda2.InvalidValue("v", "[2, 8]", "(2, 9)", "drop a token")
    assert str(e) == "v must be [2, 8], got (2, 9); drop a token"
    assert str(kda2.InvalidType("v", "float32", "int64")) == "v must be float32, got int64"


@pytest.mark.parametrize(
    ("error", "builtin"),
    [
        (kda2.InvalidValue("a", "b", "c"), ValueError),
        (kda2.InvalidType("a", "b", "c"), TypeError),
        (kda2.UnsupportedTarget("no"), RuntimeError),
        (kda2.MissingExtra("typer", "workbench", "the command line"), ImportError),
    ],
)
def test_each_is_kda2s_own_and_a_builtin(error: Exception, builtin: type[Exception]) -> None:
    assert isinstance(error, kda2.KDA2Error) and isinstance(error, builtin)


def test_missing_extra_says_how_to_install() -> None:
    e = kda2.MissingExtra("typer", "workbench", "the command line")
    assert str(e) == "the command line needs typer; in kda2's checkout: pip install '.[workbench]'"


@pytest.mark.parametrize(
    "error", [kda2.InvalidValue("a", "b", "c", "d"), kda2.InvalidType("a", "b", "c"), kda2.MissingExtra("p", "e", "x")]
)
def test_pickled_errors_keep_their_fields(error: Exception) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error) and vars(again) == vars(error)
