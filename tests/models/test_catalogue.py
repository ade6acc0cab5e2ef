from __future__ import annotations

from rekindle.models.catalogue import CATALOGUE, DEFAULT_MODEL


def test_the_default_model_is_in_the_catalogue() -> None:
    assert CATALOGUE[DEFAULT_MODEL].name == DEFAULT_MODEL


def test_every_entry_is_pinned_and_licensed() -> None:
    for model in CATALOGUE.values():
        assert "==" in model.requirement
        assert len(bytes.fromhex(model.sha256)) == 32
        assert model.member.endswith(model.file_name)
        assert model.licence


def test_no_two_entries_share_a_file() -> None:
    assert len({model.file_name for model in CATALOGUE.values()}) == len(CATALOGUE)
