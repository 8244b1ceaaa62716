"""What OpenAI's older APIs have in common: sampling fields, stop strings, grammars.

Names beside OpenAI's are those of engines: `regex` and `ebnf` as SGLang has them, `guided_*` and
`structured_outputs` as vLLM. Invariant: null means absent, unknown keys are accepted, and a
constraint that we cannot put to an engine is refused rather than ignored. Driven by chat.py and
completions.py.
"""

import re
from typing import Annotated

import msgspec

from rollmesh.core.errors import DECODE_ERRORS
from rollmesh.core.types import Grammar
from rollmesh.runtime.chat import SamplingAsk
from rollmesh.serve.interception.dialects.frames import present, refusal
from rollmesh.serve.interception.dialects.unopened import AnySchema, Schema, absent

MAX_SEED = 2**63 - 1
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
ANY_OBJECT = '{"type": "object"}'
_REGEX_MARK = re.compile(r"[\\.^$*+?{}\[\]()|]")
_ESCAPED = r"\\\g<0>"

AtLeastOne = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""Journals hold no larger integers."""
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Portion = Annotated[float, msgspec.Meta(ge=0, le=1)]
NumChoices = Annotated[int, msgspec.Meta(ge=1, le=MAX_CHOICES)]
NumTops = Annotated[int, msgspec.Meta(ge=0, le=MAX_TOP_LOGPROBS)]
Bias = Annotated[float, msgspec.Meta(ge=-100, le=100)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class StreamOptions(msgspec.Struct):
    """`stream_options`."""

    include_usage: bool | None = None


class JsonSchema(msgspec.Struct):
    """`response_format.json_schema`."""

    schema: Schema = absent()


class ResponseFormat(msgspec.Struct):
    """`response_format`."""

    type: str = "text"
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct):
    """`structured_outputs`."""

    json: AnySchema = absent()
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class SamplingBody(msgspec.Struct, kw_only=True):
    """The keys that chat and text completions share; OpenAI's reference has their meanings."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: NotNegative | None = None
    top_p: Share | None = None
    top_k: Int64 | None = None
    min_p: Portion | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[TokenId, Bias] | None = None
    seed: int | None = None
    max_tokens: AtLeastOne | None = None
    stop: str | list[str] | None = None
    n: NumChoices | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    json_schema: AnySchema = absent()
    regex: str | None = None
    ebnf: str | None = None
    guided_json: AnySchema = absent()
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    return_token_ids: bool | None = None

    @property
    def includes_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def ask(self, max_tokens: int | None) -> SamplingAsk:
        """The sampling fields in our words."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingAsk(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=tuple((self.logit_bias or {}).items()),
            seed=None if self.seed is None else self.seed & MAX_SEED,
            max_tokens=max_tokens,
            stop=tuple(filter(None, stop)),
            grammar=self._grammar(),
        )

    def _grammar(self) -> Grammar | None:
        forms = (self.response_format, self.structured_outputs, self.json_schema)
        guides = (self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        if not any((*forms, self.regex, self.ebnf, *guides)):
            return None
        outputs = self.structured_outputs or _NO_OUTPUTS
        schemas = (self.guided_json, self.json_schema, outputs.json)
        regexes = (self.guided_regex, self.regex, outputs.regex)
        choices = (self.guided_choice, outputs.choice)
        ebnfs = (self.guided_grammar, self.ebnf, outputs.grammar)
        found = [
            *format_grammar(self.response_format),
            *[Grammar("json_schema", _schema_text(each)) for each in map(present, schemas) if each],
            *[Grammar("regex", each) for each in regexes if each],
            *[Grammar("regex", _any_of(each)) for each in choices if each],
            *[Grammar("ebnf", each) for each in ebnfs if each],
        ]
        if len(found) > 1:
            raise refusal("invalid_request", "more than one constraint on the answer's form")
        return found[0] if found else None


_NO_OUTPUTS = StructuredOutputs()


def format_grammar(asked: ResponseFormat | None) -> list[Grammar]:
    """The constraint of a `response_format`, if it is one."""
    if asked is None or asked.type == "text":
        return []
    if asked.type == "json_object":
        return [Grammar("json_schema", ANY_OBJECT)]
    if asked.type == "json_schema":
        raw = bytes(asked.json_schema.schema) if asked.json_schema else b""
        return [Grammar("json_schema", schema_text(raw, "response_format.json_schema.schema"))]
    why = f"response_format: {asked.type!r} is not text, json_object or json_schema"
    raise refusal("unsupported_response_format", why)


def schema_text(raw: bytes, key: str) -> str:
    """A JSON schema as given; SessionError 400 where it is none."""
    try:
        msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        return raw.decode()
    except DECODE_ERRORS as error:
        why = f"{key}: expected a JSON schema, which is an object: {error}"
        raise refusal("invalid_request", why) from None


def _schema_text(raw: bytes) -> str:
    """vLLM and SGLang take schemas as objects and as JSON texts."""
    if raw.startswith(b'"'):
        raw = msgspec.json.decode(raw, type=str).encode()
    return schema_text(raw, "guided_json")


def _any_of(choices: list[str]) -> str:
    """A regular expression that matches these texts alone."""
    return f"({'|'.join([_REGEX_MARK.sub(_ESCAPED, choice) for choice in choices])})"
