"""Request bodies. Unknown keys are ignored, null means "use the default"; values are checked where they are used."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

import pydantic
from pydantic import BaseModel, ConfigDict, Field

from exactspec.server.errors import ApiError

TokenId = Annotated[int, Field(strict=True)]  # "5", 5.0 and true are no token ids
IntOrList = int | list[int | None] | None
BoolOrList = bool | list[bool | None] | None
StrOrList = str | list[str] | None


class Body(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class SamplingBody(BaseModel):
    """The sampling_params of /generate, for the published schema: the values are checked in params.py."""

    model_config = ConfigDict(extra="forbid")

    max_new_tokens: int | None = Field(128, ge=0, description="null: as many as the context holds.")
    min_new_tokens: int | None = Field(0, ge=0)
    temperature: float | None = Field(1.0, ge=0, description="0 is greedy.")
    top_p: float | None = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(-1, ge=-1, description="-1: all.")
    min_p: float | None = Field(0.0, ge=0, le=1)
    frequency_penalty: float | None = Field(0.0, ge=-2, le=2)
    presence_penalty: float | None = Field(0.0, ge=-2, le=2)
    repetition_penalty: float | None = Field(1.0, gt=0, le=2)
    stop: StrOrList = None
    stop_regex: StrOrList = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = False
    skip_special_tokens: bool | None = True
    spaces_between_special_tokens: bool | None = True
    no_stop_trim: bool | None = False
    n: int | None = Field(1, ge=1)
    json_schema: str | None = Field(None, description="A JSON schema document as a string.")
    regex: str | None = None
    ebnf: str | None = None
    logit_bias: dict[str, float] | None = Field(None, description="Token ids to numbers.")
    sampling_seed: int | None = None
    stream_interval: int | None = Field(None, ge=1, description="Least tokens of a streamed event.")


class GenerateBody(Body):
    """POST /generate."""

    text: str | list[str] | None = Field(None, description="Prompt or prompts; send this or input_ids.")
    input_ids: list[TokenId] | list[list[TokenId]] | None = Field(None, description="Token prompts, used as they are.")
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    stream: bool | None = False
    return_logprob: BoolOrList = False
    logprob_start_len: IntOrList = -1
    top_logprobs_num: IntOrList = 0
    token_ids_logprob: list[TokenId] | list[list[TokenId] | None] | None = None
    return_text_in_logprobs: bool | None = False
    logprobs_kind: str | None = Field(None, description="raw, scaled (the default here) or processed.")
    return_hidden_states: bool | str | list[bool | str | None] | None = False
    return_sampling_mask: BoolOrList = False
    sampling_logprobs_mode: str | list[str | None] | None = None
    return_prompt_token_ids: bool | None = False
    return_token_sources: bool | None = Field(False, description="How each output token came to be.")
    max_drafts: int | None = Field(None, description="Most draft tokens a round; 0 decodes plainly. Speed only.")
    incremental_stream: bool | None = Field(None, description="Events hold new pieces only [default: the server's].")
    rid: StrOrList = None
    priority: int | None = None
    extra_key: StrOrList = None
    cache_salt: StrOrList = None
    session_params: Any = None
    input_embeds: Any = None
    lora_path: Any = None
    custom_logit_processor: Any = None
    image_data: Any = None
    video_data: Any = None
    audio_data: Any = None
    return_flat_raw_top_logprobs: bool | None = False
    return_flat_raw_output_top_logprobs: bool | None = False
    return_flat_raw_top_logprobs_b64: bool | None = False
    return_flat_raw_output_top_logprobs_b64: bool | None = False


class StreamOptions(Body):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class OpenAIBody(Body):
    """Fields that both OpenAI routes share."""

    model: str | None = "default"
    n: int | None = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: StrOrList = None
    stop_regex: StrOrList = None
    stop_token_ids: list[TokenId] | None = None
    no_stop_trim: bool | None = False
    ignore_eos: bool | None = False
    skip_special_tokens: bool | None = True
    seed: int | None = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    logprobs_kind: str | None = Field(None, description="raw (the default here), scaled or processed.")
    return_hidden_states: bool | Literal["last"] | None = Field(False, description="The last row, either way.")
    return_spec_tokens_details: bool | None = Field(False, description="Counts of rounds, in sglext.")
    return_token_ids: bool | None = False
    return_token_sources: bool | None = Field(False, description="How each output token came to be.")
    max_drafts: int | None = Field(None, description="Most draft tokens a round; 0 decodes plainly. Speed only.")
    priority: int | None = None
    user: str | None = None
    lora_path: Any = None
    custom_logit_processor: Any = None
    session_params: Any = None


class CompletionBody(OpenAIBody):
    """POST /v1/completions."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    max_tokens: int | None = 16
    logprobs: Annotated[int, Field(strict=True)] | None = None
    echo: bool | None = False
    best_of: int | None = None
    suffix: str | None = None
    json_schema: str | None = None
    rid: StrOrList = Field(None, description="One per prompt, or the beginning of all.")
    extra_key: StrOrList = None
    cache_salt: StrOrList = None


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[dict[str, Any]] | None = None


class ChatBody(OpenAIBody):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = False
    input_ids: list[TokenId] | None = None
    rid: str | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    return_meta_info: bool | None = False
    return_prompt_token_ids: bool | None = False


class AbortBody(Body):
    rid: str | None = ""
    abort_all: bool | None = False


class PauseBody(Body):
    mode: str | None = "abort"


class TokenizeBody(Body):
    prompt: str | list[str] | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: bool | None = True


class DetokenizeBody(Body):
    tokens: list[TokenId] | list[list[TokenId]]
    skip_special_tokens: bool | None = True


class SchemaError(ApiError):
    """The body itself is refused: no JSON, a wrong type, a missing key."""


B = TypeVar("B", bound=Body)


def parse_body(kind: type[B], data: bytes) -> B:
    """Raises SchemaError with the first problems, each naming its key."""
    try:
        return kind.model_validate_json(data or b"{}")
    except pydantic.ValidationError as error:
        problems = []
        for item in error.errors(include_url=False, include_input=False)[:4]:
            where = ".".join(str(part) for part in item["loc"]) or "body"
            problems.append(f"{where}: {item['msg']}")
        raise SchemaError(400, "; ".join(problems)) from None


REF = "#/components/schemas/{model}"


def schema_of(kind: type[Body]) -> dict[str, Any]:
    """The OpenAPI requestBody of a route; the parts it refers to are in `schema_parts`."""
    schema = kind.model_json_schema(ref_template=REF)
    schema.pop("$defs", None)
    if kind is GenerateBody:
        one = {"$ref": REF.format(model=SamplingBody.__name__)}
        schema["properties"]["sampling_params"] = {"anyOf": [one, {"type": "array", "items": one}, {"type": "null"}]}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def schema_parts() -> dict[str, Any]:
    """The OpenAPI components of all bodies."""
    kinds = (StreamOptions, ChatMessage, SamplingBody)
    return {kind.__name__: kind.model_json_schema(ref_template=REF) for kind in kinds}
