"""Fields of other servers that would change the answer and that castiron does not support."""

from typing import Annotated, Any

from castiron.pipelines.api.request_body import Body, Unsupported

# llama.cpp's default sequences of samplers; castiron's sampler has the same order.
SAMPLERS = (
    ["dry", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
    ["penalties", "dry", "top_n_sigma", "top_k", "typ_p", "top_p", "min_p", "xtc", "temperature"],
)


class UnsupportedFields(Body):
    """Fields of vLLM and llama.cpp; a value that changes nothing is accepted."""

    # vLLM.
    include_stop_str_in_output: Annotated[Any, Unsupported(False)] = None
    length_penalty: Annotated[Any, Unsupported(1)] = None
    logprob_token_ids: Annotated[Any, Unsupported([])] = None
    repetition_detection: Annotated[Any, Unsupported()] = None
    return_prompt_text: Annotated[Any, Unsupported(False)] = None
    return_tokens_as_token_ids: Annotated[Any, Unsupported(False)] = None
    skip_special_tokens: Annotated[Any, Unsupported(True)] = None
    spaces_between_special_tokens: Annotated[Any, Unsupported(True)] = None
    use_beam_search: Annotated[Any, Unsupported(False)] = None
    vllm_xargs: Annotated[Any, Unsupported({})] = None
    watermarking: Annotated[Any, Unsupported(False)] = None
    guided_whitespace_pattern: Annotated[Any, Unsupported()] = None
    # llama.cpp.
    dry_multiplier: Annotated[Any, Unsupported(0)] = None
    dynatemp_range: Annotated[Any, Unsupported(0)] = None
    lora: Annotated[Any, Unsupported([])] = None
    min_keep: Annotated[Any, Unsupported(0)] = None
    mirostat: Annotated[Any, Unsupported(0)] = None
    n_cmpl: Annotated[Any, Unsupported(1)] = None
    n_probs: Annotated[Any, Unsupported(0)] = None
    post_sampling_probs: Annotated[Any, Unsupported(False)] = None
    repeat_last_n: Annotated[Any, Unsupported(64)] = None
    return_tokens: Annotated[Any, Unsupported(False)] = None
    samplers: Annotated[Any, Unsupported(*SAMPLERS)] = None
    top_n_sigma: Annotated[Any, Unsupported(-1, 0)] = None
    typical_p: Annotated[Any, Unsupported(1)] = None
    typ_p: Annotated[Any, Unsupported(1)] = None
    xtc_probability: Annotated[Any, Unsupported(0)] = None


class UnsupportedChatFields(Body):
    """Fields of chat completions of OpenAI, vLLM and llama.cpp, as in `UnsupportedFields`."""

    # OpenAI.
    audio: Annotated[Any, Unsupported()] = None
    modalities: Annotated[Any, Unsupported(["text"])] = None
    moderation: Annotated[Any, Unsupported()] = None
    verbosity: Annotated[Any, Unsupported("medium")] = None
    web_search_options: Annotated[Any, Unsupported()] = None
    # vLLM.
    add_special_tokens: Annotated[Any, Unsupported(False)] = None
    chat_template: Annotated[Any, Unsupported()] = None
    documents: Annotated[Any, Unsupported([])] = None
    echo: Annotated[Any, Unsupported(False)] = None
    # llama.cpp.
    parse_tool_calls: Annotated[Any, Unsupported(True)] = None
    reasoning_format: Annotated[Any, Unsupported("auto", "deepseek")] = None
