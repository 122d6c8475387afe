"""Chat templates in the style of well-known families, rendered as transformers renders them."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from inferplane.tokenizer import ChatTemplateError, Tokenizer
from inferplane.tokenizer.chat_template import ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}

LLAMA3_STYLE = """{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set rest = messages[1:] %}
{%- else %}
    {%- set system = "" %}
    {%- set rest = messages %}
{%- endif %}
{{- "[head]system[/head]\\n\\n" }}
{%- if tools is not none and tools %}
    {{- "Tools:\\n" }}
    {%- for tool in tools %}
        {{- tool | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system + "[eot]" }}
{%- for message in rest %}
    {%- if message.tool_calls is defined %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception("Only one call at once") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '[head]assistant[/head]\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}
        {{- "}[eot]" }}
    {%- elif message.role == "tool" %}
        {{- "[head]ipython[/head]\\n\\n" }}
        {%- if message.content is mapping or message.content is iterable and message.content is not string %}
            {{- message.content | tojson }}
        {%- else %}
            {{- message.content }}
        {%- endif %}
        {{- "[eot]" }}
    {%- else %}
        {{- '[head]' + message['role'] + '[/head]\\n\\n' + message['content'] | trim + '[eot]' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '[head]assistant[/head]\\n\\n' }}
{%- endif %}
"""

QWEN_STYLE = """{%- set state = namespace(last=-1, seen=false) %}
{%- for message in messages[::-1] %}
    {%- if not state.seen and message.role == "user" %}
        {%- set state.seen = true %}
        {%- set state.last = messages | length - 1 - loop.index0 %}
    {%- endif %}
{%- endfor %}
{% for message in messages %}
    {% if message.role == "assistant" %}
        {%- set answer = message.content or "" %}
        {%- if message.reasoning_content is defined and loop.index0 > state.last %}
            {{- '<|im_start|>assistant\\n<think>\\n' + message.reasoning_content.strip('\\n') }}
            {{- '\\n</think>\\n' + answer }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + answer.split('</think>')[-1].lstrip('\\n') }}
        {%- endif %}
        {%- if message.tool_calls %}
            {%- for tool_call in message.tool_calls %}
                {%- if (loop.first and answer) or not loop.first %}{{- '\\n' }}{%- endif %}
                {{- '<tool_call>\\n{"name": "' ~ tool_call.function.name ~ '", "arguments": ' }}
                {%- if tool_call.function.arguments is string %}
                    {{- tool_call.function.arguments }}
                {%- else %}
                    {{- tool_call.function.arguments | tojson }}
                {%- endif %}
                {{- '}\\n</tool_call>' }}
            {%- endfor %}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{% endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""

MISTRAL_STYLE = """{{ bos_token }}{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% if message['role'] == 'user' %}
        {{ '[INST] ' + message['content'] + ' [/INST]' }}
    {% elif message['role'] == 'assistant' %}
        {% generation %}{{ message['content'] + eos_token }}{% endgeneration %}
    {% else %}
        {% continue %}
    {% endif %}
{% endfor %}
"""

PARTS_STYLE = """{% for message in messages %}{{ message.role }}:
{% if message.content is string %}{{ message.content }}{% else %}
{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}[{{ part.type }}]{% endif %}
{% endfor %}{% endif %}{{ eos_token }}{% endfor %}{{ unknown_variable }}{{ custom | default('none') }}"""

TEMPLATES = {"llama3": LLAMA3_STYLE, "qwen": QWEN_STYLE, "mistral": MISTRAL_STYLE, "parts": PARTS_STYLE}

USER = {"role": "user", "content": "  What is <b>2 + 2</b>? 'Quoted' \"é\" 日本  "}
ANSWER = {"role": "assistant", "content": "<think>hm</think>\n\n4"}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": "é<&>"}}}],
}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one": [USER],
    "system": [{"role": "system", "content": " Be brief. "}, USER],
    "long": [USER, ANSWER, USER, ANSWER, USER],
    "reasoning": [USER, {"role": "assistant", "reasoning": "easy", "content": "4"}],
    "call": [USER, CALL, {"role": "tool", "content": "4"}, USER],
    "call twice": [USER, {**CALL, "tool_calls": CALL["tool_calls"] * 2}],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "Look"}, {"type": "image"}]}],
    "empty": [],
}


def backend() -> tokenizers.Tokenizer:
    """Knows bytes and the special tokens, and puts a BOS before every text."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made = tokenizers.Tokenizer(
        models.BPE({character: i for i, character in enumerate(sorted(alphabet))}, [])
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens([*SPECIAL.values(), "<|im_start|>", "<|im_end|>"])
    bos = (SPECIAL["bos_token"], made.token_to_id(SPECIAL["bos_token"]))
    made.post_processor = TemplateProcessing(single=["<s>", "$A"], special_tokens=[bos])
    return made


def ours_of(template: str | dict[str, str] | None) -> Tokenizer:
    templates = {"default": template} if isinstance(template, str) else template
    return Tokenizer(backend(), special_tokens=SPECIAL, chat_templates=templates)


def theirs_of(template: Any):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=backend(), chat_template=template, **SPECIAL)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["no tools", "tools"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("style", TEMPLATES)
def test_text_and_ids_are_those_of_transformers(style, conversation, tools, add_generation_prompt) -> None:
    messages = CONVERSATIONS[conversation]
    ours, theirs = ours_of(TEMPLATES[style]), theirs_of(TEMPLATES[style])
    arguments = {"add_generation_prompt": add_generation_prompt, "tools": tools, "enable_thinking": False}
    try:
        expected = theirs.apply_chat_template(messages, tokenize=False, **arguments)
    # whatever the template stumbles over there, it should stumble over here
    except Exception:
        with pytest.raises(ChatTemplateError):
            ours.apply_chat_template(messages, **arguments)
        return
    assert ours.apply_chat_template(messages, **arguments) == expected
    ids = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **arguments)
    assert ours.apply_chat_template(messages, tokenize=True, **arguments) == ids


@pytest.mark.parametrize("style", ["llama3", "mistral"])
def test_a_template_that_writes_bos_gives_exactly_one(style: str) -> None:
    ours = ours_of(TEMPLATES[style])
    ids = ours.apply_chat_template([USER], tokenize=True)
    assert ids.count(ours.bos_token_id) == 1 and ids[0] == ours.bos_token_id
    # a raw text gets its BOS from the tokenizer, and none when it is told so
    assert ours.encode("x").count(ours.bos_token_id) == 1
    assert ours.encode("x", add_special_tokens=False).count(ours.bos_token_id) == 0


def test_named_templates() -> None:
    named = {"default": "plain", "tool_use": "with tools"}
    ours, theirs = ours_of(named), theirs_of(named)
    for tools in (None, [TOOL]):
        expected = theirs.apply_chat_template([USER], tools=tools, tokenize=False)
        assert ours.apply_chat_template([USER], tools=tools) == expected
    assert ours.chat_template == "plain"
    assert ours_of({"only": "this"}).apply_chat_template([USER]) == "this"
    with pytest.raises(
        ChatTemplateError, match=r"none of the model's chat templates \(a, b\) is the default one"
    ):
        ours_of({"a": "1", "b": "2"}).apply_chat_template([USER])


@pytest.mark.parametrize("style", ["llama3", "qwen", "mistral"])
def test_the_last_message_can_be_continued(style: str) -> None:
    messages = [USER, {"role": "assistant", "content": "The answer is"}]
    ours, theirs = ours_of(TEMPLATES[style]), theirs_of(TEMPLATES[style])
    got = ours.apply_chat_template(messages, add_generation_prompt=False, continue_final_message=True)
    assert got == theirs.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert got.endswith("The answer is")


@pytest.mark.parametrize(
    ("messages", "arguments", "message"),
    [
        ([USER], {"continue_final_message": True}, "exclude each other"),
        ([], {}, "at least one message"),
        (
            [CALL],
            {"continue_final_message": True, "add_generation_prompt": False},
            "needs a last message with text",
        ),
        ([USER], {"chat_template": "{{ 1 }}"}, "chosen when the model is loaded"),
        ([3], {}, "a message should be an object with role and content, not int"),
        ([{"role": "user", "content": object()}], {}, "takes JSON values only, not object"),
        ([USER], {"extra": {1, 2}}, "takes JSON values only, not set"),
    ],
)
def test_calls_that_make_no_sense(messages, arguments, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        ours_of(QWEN_STYLE).apply_chat_template(messages, **arguments)


def test_what_a_template_leaves_out_cannot_be_continued() -> None:
    with pytest.raises(ChatTemplateError, match="leaves out the last message"):
        ours_of("fixed").apply_chat_template([USER], add_generation_prompt=False, continue_final_message=True)


def test_text_parts_are_joined_for_templates_that_want_a_text() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    message = {"role": "user", "content": parts}
    assert "one\ntwo" in ours_of(QWEN_STYLE).apply_chat_template([message])
    assert "onetwo" in ours_of(PARTS_STYLE).apply_chat_template([message])
    assert ChatTemplate({"default": PARTS_STYLE}).accepts_parts
    for style in (
        LLAMA3_STYLE,
        QWEN_STYLE,
        MISTRAL_STYLE,
        "{{ messages }}",
        "{{ messages | tojson }}",
        "{{ 1 + 'a' }}",
    ):
        assert not ChatTemplate({"default": style}).accepts_parts


def test_messages_are_not_changed() -> None:
    message = {"role": "assistant", "content": [{"type": "text", "text": "x"}]}
    ours_of(PARTS_STYLE).apply_chat_template(
        [message], add_generation_prompt=False, continue_final_message=True
    )
    assert message == {"role": "assistant", "content": [{"type": "text", "text": "x"}]}


def test_a_model_without_a_template_says_how_to_give_one() -> None:
    ours = ours_of(None)
    assert ours.chat_template is None
    with pytest.raises(ChatTemplateError, match=r"no chat template; give one with --chat-template"):
        ours.apply_chat_template([USER])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{{ raise_exception('no system prompt, please') }}",
            "refuses these messages: no system prompt, please",
        ),
        ("{{ messages[0].content + 1 }}", "fails on these messages: TypeError"),
        ("{{ messages[7].content }}", "refuses these messages: .*list object has no element 7"),
        ("{{ nothing.at.all }}", "refuses these messages: 'nothing' is undefined"),
        ("{% for %}", "is no valid Jinja: line 1"),
        ("one\n{{ x", "is no valid Jinja: line 2"),
        ("{% generation %}", "is no valid Jinja"),
        ("{{ 1 // 0 }}", "ZeroDivisionError"),
        ("{{ range(10**9) | list }}", "OverflowError"),
        ("{{ ''.__class__.__mro__ }}", "refuses these messages"),
        ("{{ messages.append(1) }}", "refuses these messages"),
        ("{{ cycler.__init__.__globals__ }}", "refuses these messages"),
        ("{% include '/etc/passwd' %}", "fails on these messages|refuses these messages"),
        ("{% import 'os' as os %}", "fails on these messages|refuses these messages"),
    ],
)
def test_a_template_that_fails_is_a_clear_error(template: str, message: str) -> None:
    with pytest.raises(ChatTemplateError, match=message):
        ours_of(template).apply_chat_template([USER])


def test_times_and_loop_controls() -> None:
    from datetime import datetime

    assert ours_of("{{ strftime_now('%Y') }}").apply_chat_template([USER]) == str(datetime.now().year)
    loop = "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert ours_of(loop).apply_chat_template([USER]) == "01"
