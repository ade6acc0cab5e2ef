"""Runs LangChain's standard tests with its three chat models that can use this server."""

from __future__ import annotations

from typing import Any

from langchain_anthropic import ChatAnthropic
from langchain_core.language_models import BaseChatModel
from langchain_ollama import ChatOllama
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

MODEL, SEED, KEY = "tiny", 1, "none"


class Standard(ChatModelIntegrationTests):
    @property
    def model_override_value(self) -> str | None:
        return MODEL


class TestChatOpenAI(Standard):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        # By default the client asks for streamed usage only at OpenAI's own host.
        return {"model": MODEL, "seed": SEED, "api_key": KEY, "stream_usage": True}


class TestChatAnthropic(Standard):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatAnthropic

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": MODEL, "model_kwargs": {"extra_body": {"seed": SEED}}, "api_key": KEY}

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True


class TestChatOllama(Standard):
    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOllama

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"model": MODEL, "seed": SEED}
