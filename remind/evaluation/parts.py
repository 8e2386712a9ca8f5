"""What an evaluation is made of: models, judge, encoder, dialogue files; each loaded only by the stages that use it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from remind.core.errors import ConfigError
from remind.data.dialogue import Corpus
from remind.evaluation.answerers import Answerer, ChatAnswers, LocalAnswers
from remind.evaluation.conditions import Prompter
from remind.evaluation.config import EvaluateConfig
from remind.evaluation.contexts import Contexts
from remind.evaluation.identity import corpus_hashes
from remind.evaluation.items import Asked, load_asked
from remind.evaluation.judge import load_judge
from remind.evaluation.names import CONDITIONS
from remind.llm.chat_models import Chats

if TYPE_CHECKING:
    from remind.llm.request import ChatModel, Stage
    from remind.models.encoder import SentenceEncoder
    from remind.states.auxiliary import AuxiliaryLLM


class Parts:
    """The parts of one evaluation.

    Args:
        manifest: of the states.
        judge, llm, chat, answerer: in place of what the configuration names.

    Attributes:
        answering: whether this run answers.
        known: what the identity of the answers needs to know of the parts.
        chats: the endpoints.
    """

    def __init__(
        self,
        cfg: EvaluateConfig,
        manifest: Mapping[str, Any],
        judge: AuxiliaryLLM | None = None,
        llm: AuxiliaryLLM | None = None,
        chat: ChatModel | None = None,
        answerer: Answerer | None = None,
    ) -> None:
        self.cfg, self.manifest = cfg, manifest
        self.judge, self._llm, self._chat, self._answerer = judge, llm, chat, answerer
        self._encoder: SentenceEncoder | None = None
        self.chats = Chats(cfg.llm)
        self.answering = cfg.stage in ("all", "answer")
        self.judging = cfg.stage in ("all", "judge")
        self.known: dict[str, Any] = {}

    def asked(self) -> Asked:
        """The questions, and their prompts if this run answers.

        Raises:
            DataError, FormatError: states or dialogue files that cannot be used.
            ConfigError: a condition that needs dialogue files that are not named.
        """
        cfg = self.cfg
        if not self.answering:
            return load_asked(cfg.states, cfg.split, (), None, cfg.limit)
        needy = [name for name in cfg.names if CONDITIONS[name].corpus]
        if not needy:
            return load_asked(cfg.states, cfg.split, cfg.names, None, cfg.limit)
        if not cfg.corpus:
            raise ConfigError(f"{needy[0]} shows the dialogues: set corpus to the files the states were made of")
        from remind.data.readers import read

        self.known["corpus"] = corpus_hashes(cfg.corpus, self.manifest, cfg.states)
        corpus = Corpus.merge([read(path, cfg.corpus_format) for path in cfg.corpus], cfg.corpus)
        if "altered" in needy:
            _ = self.answerer  # summaries may cost money: the model that answers must be there first
            self._llm = self._llm or self._summariser()
            self.known["llm"] = self._llm.name
        contexts = Contexts(self.encoder, cfg.context)
        return load_asked(cfg.states, cfg.split, cfg.names, Prompter(cfg.names, corpus, contexts, self._llm), cfg.limit)

    def load(self) -> None:
        """Load what the stages need, so that what is missing is known before anything is written.

        Raises:
            ModelError: a model that cannot be loaded or does not generate.
            ConfigError: an unknown judge.
        """
        if self.cfg.stage in ("all", "report"):
            _ = self.encoder
        if self.judging and self.judge is None:
            self.judge = self._judge()
        if not self.judging:
            self.judge = None
        if self.answering:
            self.known["model"] = self.answerer.key

    @property
    def encoder(self) -> SentenceEncoder:
        if self._encoder is None:
            from remind.models.encoder import SentenceEncoder

            self._encoder = SentenceEncoder(self.cfg.encoder, self.cfg.device)
        return self._encoder

    @property
    def answerer(self) -> Answerer:
        cfg = self.cfg
        if self._answerer is None and cfg.answers == "server":
            self._answerer = ChatAnswers(self._chat or self._server("answer"), cfg.max_new_tokens)
        elif self._answerer is None:
            from remind.models.load import load_backbone

            backbone = load_backbone(cfg.model, dtype=cfg.dtype, device=cfg.device)
            self._answerer = LocalAnswers(backbone, cfg.model, cfg.max_new_tokens, cfg.batch_size)
        return self._answerer

    def about(self) -> dict[str, Any]:
        """The answering model, for the report; its name alone where this run loads none."""
        if not self.answering:
            return {"name": self.cfg.model, "kind": None, "max_length": None}
        return self.answerer.about()

    def costs(self) -> dict[str, Any] | None:
        """What the endpoints were asked and what it cost, by the books of this run; None where nothing was asked."""
        books = self.chats.ledger.summary()
        return books if books["total"]["requests"] else None

    def stood_in(self) -> dict[str, Any]:
        """By stage how many items the offline stand-in wrote because an endpoint failed."""
        failures = [] if self._llm is None else list(self._llm.failures)
        return dict(Counter(failure.stage for failure in failures))

    def _server(self, stage: Stage) -> ChatModel:
        chat = self.chats.stage(stage)
        if chat is None:
            raise ConfigError(f"there is no endpoint for stage {stage}; set llm.{stage} or llm.default")
        return chat

    def _judge(self) -> AuxiliaryLLM:
        if self.cfg.judge != "llm":
            return load_judge(self.cfg.judge)
        from remind.llm.auxiliary import ChatLLM

        return ChatLLM({"judge": self._server("judge")})

    def _summariser(self) -> AuxiliaryLLM:
        from remind.llm.auxiliary import ChatLLM
        from remind.llm.offline import OfflineLLM

        stand_in, chat = OfflineLLM(self.encoder), self.chats.stage("summary")
        return stand_in if chat is None else ChatLLM({"summary": chat}, stand_in)
