"""What to measure, where, and how much of it."""

from __future__ import annotations

from dataclasses import dataclass

from rekindle.errors import ConfigError

USUAL = ("article", "document", "agents", "decode", "sampled", "crowd", "schema", "toolloop")
SCENARIO_NAMES = (*USUAL, "hybrid", "pictures")  # which need a hybrid model, one with a projector


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """One bench of one server; refuses a scenario it does not know."""

    base_url: str
    label: str | None = None  # the server's name in tables and plots; its address by default
    model: str | None = None  # the first model the server lists by default
    api_key: str | None = None
    scenarios: tuple[str, ...] = USUAL
    repeats: int = 3
    timeout_s: float = 600.0
    seed: str | None = None  # same seed, same texts; by default no text was ever sent before

    article_tokens: int = 1500
    turn_reply_tokens: int = 12
    document_tokens: int = 800
    questions: int = 10
    answer_tokens: int = 16
    agents: int = 6
    agent_tokens: int = 600
    agent_rounds: int = 4  # the first is cold and not counted
    tool_result_tokens: int = 80
    turns: int = 8
    turn_tokens: int = 300
    single_stream_tokens: int = 128
    streams: int = 8
    stream_tokens: int = 64
    kept: int = 64  # conversations that a server keeps before it is measured
    kept_tokens: int = 40  # of each
    kept_again: int = 8  # that go on

    def __post_init__(self) -> None:
        if unknown := [name for name in self.scenarios if name not in SCENARIO_NAMES]:
            raise ConfigError(
                f"unknown scenario: {', '.join(unknown)}; there are {', '.join(SCENARIO_NAMES)}"
            )
        if self.repeats < 1 or self.agent_rounds < 2:
            raise ConfigError("a bench needs at least one repeat and two rounds of agents")
        if self.kept < 1 or self.kept_again < 1:
            raise ConfigError("a crowd needs at least one conversation that goes on")

    @property
    def api_url(self) -> str:
        """The address with its /v1, which may be given or left out."""
        address = self.base_url.rstrip("/")
        return address if address.endswith("/v1") else f"{address}/v1"

    @property
    def name(self) -> str:
        return self.label or self.base_url
