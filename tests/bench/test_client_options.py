from __future__ import annotations

import pytest

from rekindle.bench import BenchOptions
from rekindle.errors import ConfigError


@pytest.mark.parametrize(
    "address", ["http://a:1", "http://a:1/", "http://a:1/v1", "http://a:1/v1/"]
)
def test_a_url_is_accepted_with_or_without_v1(address: str) -> None:
    assert BenchOptions(base_url=address).api_url == "http://a:1/v1"


def test_an_unknown_scenario_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"novel.*article"):
        BenchOptions(base_url="http://a", scenarios=("novel",))


def test_agents_need_a_warm_round() -> None:
    with pytest.raises(ConfigError, match="two agent rounds"):
        BenchOptions(base_url="http://a", agent_rounds=1)
