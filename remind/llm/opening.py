"""From configuration to chat models: a server, a model in this process, or a dry run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, get_args

from remind.core.errors import ConfigError
from remind.llm.cache import ReplyCache
from remind.llm.dry import DryChat, DryRun
from remind.llm.endpoints import EndpointConfig, LLMConfig
from remind.llm.ledger import Ledger
from remind.llm.request import ChatModel, Stage

if TYPE_CHECKING:
    from remind.models.backbone import Backbone


def open_chat(
    endpoint: EndpointConfig,
    cache: ReplyCache | None = None,
    ledger: Ledger | None = None,
    dry: DryRun | None = None,
    backbone: Backbone | None = None,
) -> ChatModel:
    """The chat model of an endpoint.

    Args:
        dry: given: nothing is asked, and what would be is noted there.
        backbone: the loaded model of a local endpoint; None: it is loaded.

    Raises:
        ConfigError: an endpoint without a model, or with a value out of range.
        ModelError: no key in the environment, a missing package, or a model that cannot be loaded or does not generate.
    """
    endpoint.check()
    if not endpoint.model:
        raise ConfigError("no model is named; set the endpoint's model")
    if dry is not None:
        return DryChat(endpoint, dry, cache)
    if not endpoint.local:
        from remind.llm.client import OpenAIChat

        return OpenAIChat(endpoint, cache, ledger)
    from remind.llm.local import LocalChat
    from remind.models.load import load_backbone

    loaded = load_backbone(endpoint.model, endpoint.dtype, endpoint.device) if backbone is None else backbone
    return LocalChat(loaded, endpoint.concurrency, cache, ledger, endpoint=endpoint)


class Chats:
    """The chat models of a run, one per endpoint, opened when first asked for; they share cache and ledger.

    Attributes:
        ledger: what was asked and what it cost.
        dry: the dry run, if this is one.
    """

    def __init__(self, cfg: LLMConfig) -> None:
        self.cfg = cfg
        self.ledger = Ledger()
        self.dry = None if cfg.dry_run is None else DryRun(cfg.dry_run)
        self._cache: ReplyCache | None = None
        self._open: list[tuple[EndpointConfig, ChatModel]] = []

    def stage(self, stage: Stage) -> ChatModel | None:
        """The chat model for a stage; None: it has no endpoint, and the offline stand-in does it.

        Raises:
            ConfigError, ModelError: as `open_chat`.
            DataError: the cache cannot be used.
        """
        endpoint = self.cfg.endpoint(stage)
        if endpoint is None:
            return None
        for known, model in self._open:
            if known == endpoint:
                return model
        if self._cache is None and self.cfg.cache is not None:
            self._cache = ReplyCache(self.cfg.cache)
        model = open_chat(endpoint, self._cache, self.ledger, self.dry)
        self._open.append((endpoint, model))
        return model

    def check(self, stages: Iterable[Stage] = get_args(Stage)) -> None:
        """Open what the stages need now, so that a missing key is told before hours of work. Raises as `stage`."""
        for stage in stages:
            self.stage(stage)
