"""LongMemEval's five judge roles: which question each is for, and what a chat model is asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from experiments.official.longmemeval import Reference
from remind.core.errors import ConfigError
from remind.core.progress import Counter
from remind.llm.asking import VERDICT_SCHEMA, Verdict, request
from remind.llm.asking import verdicts as ask
from remind.llm.request import ChatModel, Request, code_for, fenced
from remind.states import prompts
from remind.states.pyramid import one_line

if TYPE_CHECKING:
    from remind.llm.chat_models import Chats
    from remind.llm.endpoints import LLMConfig

Role = Literal["default", "temporal", "update", "preference", "abstention"]
ROLES: tuple[Role, ...] = ("default", "temporal", "update", "preference", "abstention")
_BY_TYPE: dict[str, Role] = {
    "single-session-user": "default",
    "single-session-assistant": "default",
    "multi-session": "default",
    "temporal-reasoning": "temporal",
    "knowledge-update": "update",
    "single-session-preference": "preference",
}
#: What the gold text is to the judge.
_GOLD: dict[Role, str] = {"preference": "rubric", "abstention": "explanation"}


def role_of(reference: Reference) -> Role:
    """The role that judges a question: abstention for ids with `_abs` whatever their type, else by type.

    Raises:
        ConfigError: a type the benchmark does not have.
    """
    if reference.abstention:
        return "abstention"
    if reference.type not in _BY_TYPE:
        raise ConfigError(f"no judge for question type {reference.type!r}; there are {', '.join(_BY_TYPE)}")
    return _BY_TYPE[reference.type]


def template_of(role: Role) -> str:
    """Name of the role's template."""
    return f"judge_longmemeval_{role}"


def prompt_ids() -> dict[Role, str]:
    """Id of each role's template: name and hash."""
    return {role: prompts.prompt_id(template_of(role)) for role in ROLES}


def judge_request(reference: Reference, hypothesis: str) -> Request:
    """What is asked about one hypothesis; question, gold and hypothesis are fenced as data."""
    role = role_of(reference)
    asked, gold, said = (one_line(text) for text in (reference.question, reference.answer, hypothesis))
    code = code_for([asked, gold, said])
    return request(
        "judge",
        template_of(role),
        reference.question_id,
        VERDICT_SCHEMA,
        code=code,
        question=fenced("question", asked, code),
        reference=fenced(_GOLD.get(role, "reference answer"), gold, code),
        response=fenced("response", said, code),
    )


def prompted(
    model: ChatModel, on_verdict: Callable[[str, Verdict], None] | None = None
) -> Callable[[list[tuple[Reference, str]]], list[bool | None]]:
    """Verdicts of a chat model by role; None where it gave none, which counts neither for nor against.

    A blank hypothesis is rejected without asking, an abstention question's too: saying nothing notices nothing.

    Args:
        on_verdict: told question id and verdict of each that was asked, with the reason where there is none.
    """

    def verdicts(asked: list[tuple[Reference, str]]) -> list[bool | None]:
        wanted = [number for number, (_, said) in enumerate(asked) if said.strip()]
        found: Sequence[Verdict] = ()
        with Counter("judge", len(wanted)) as bar:
            found = ask(model, [judge_request(*asked[number]) for number in wanted], lambda _, __: bar.step())
        values: list[bool | None] = [False] * len(asked)
        for number, verdict in zip(wanted, found, strict=True):
            values[number] = verdict.value
            if on_verdict is not None:
                on_verdict(asked[number][0].question_id, verdict)
        return values

    return verdicts


def open_judge(cfg: LLMConfig) -> tuple[ChatModel, Chats]:
    """The endpoint that judges, and the books of what it is asked.

    Raises:
        ConfigError: there is none.
        ModelError: it cannot be used.
    """
    from remind.llm.chat_models import Chats

    chats = Chats(cfg)
    model = chats.stage("judge")
    if model is None:
        raise ConfigError("there is no endpoint for the judge; set llm.judge or llm.default")
    return model, chats
