"""Rendering with real tokenizers and the templates that models bring: prompts, continuations by exact ids, stop tokens."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slipstream.errors import DataError, ModelError
from slipstream.protocols import Message
from slipstream.rollout.rendering import PromptDoesNotFit, Renderer, as_template_messages

CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1]['role'] != 'tool' %}<|im_start|>user{% endif %}"
    "<tool_response>{{ m['content'] }}</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1]['role'] != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LABELS = (
    "{{ bos_token or '' }}{% for message in messages %}{{ message['role'] | capitalize }}: {{ message['content'] }}\n"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
NO_NEWLINE = (  # Llama 3: nothing between the end token and the next header
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n\n{{ m['content'] | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}"
)
COUNTS = "{{ messages | length }} {% for m in messages %}{{ m['content'] }};{% endfor %}"  # what came before changes
HIDES = "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}"
STRICT = (
    "{% for m in messages %}{% if m['role'] not in ['user', 'assistant'] %}{{ raise_exception('only user and assistant') }}{% endif %}"
    "{{ m['content'] }}<|im_end|>{% endfor %}"
)

SPECIAL = ("<|pad|>", "<|eos|>", "<|bos|>", "<|im_start|>", "<|im_end|>")
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}}
HELLO = [{"role": "user", "content": "hi"}]


def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    vocabulary = {byte: index for index, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    out = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<|pad|>",
        eos_token="<|eos|>",
        bos_token="<|bos|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    out.chat_template = template
    return out


def renderer(template: str | None, max_context: int = 1000) -> Renderer:
    return Renderer(tokenizer(template), max_context)


def text_of(render: Renderer, ids) -> str:
    return render.tokenizer.decode(ids, skip_special_tokens=False)


def id_of(render: Renderer, token: str) -> int:
    return render.tokenizer.convert_tokens_to_ids(token)


def test_a_prompt_ends_where_the_model_begins_to_speak():
    render = renderer(CHATML)
    ids = render.prompt(HELLO, 10)
    assert ids.dtype.name == "int32"
    assert text_of(render, ids) == "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert (ids == id_of(render, "<|im_start|>")).sum() == 3  # special tokens are single tokens


def test_special_tokens_are_not_added_beside_the_template():
    render = renderer(NO_NEWLINE)
    assert (render.prompt(HELLO, 10) == id_of(render, "<|bos|>")).sum() == 1


def test_a_prompt_that_does_not_fit_is_refused_with_the_arithmetic():
    render = renderer(CHATML, max_context=60)
    length = len(renderer(CHATML).prompt(HELLO, 1))
    assert len(render.prompt(HELLO, 60 - length)) == length
    with pytest.raises(PromptDoesNotFit, match=rf"prompt of {length} tokens \+ max_new_tokens {61 - length} exceed the context 60"):
        render.prompt(HELLO, 61 - length)


@pytest.mark.parametrize("messages", [[], [{"role": "user", "content": " "}], [{"role": "system", "content": "x"}]])
def test_an_empty_prompt_is_refused(messages):
    with pytest.raises(DataError, match="the prompt is empty"):
        renderer(CHATML).prompt(messages, 1)


def test_messages_that_end_with_the_assistant_are_refused():
    with pytest.raises(DataError, match="end with the assistant"):
        renderer(CHATML).prompt([*HELLO, {"role": "assistant", "content": "x"}], 1)


@pytest.mark.parametrize("template", [CHATML, TOOLS, NO_NEWLINE, LABELS])
def test_prompt_reply_and_continuation_together_are_the_rendered_conversation(template):
    """Where the sampled tokens are what the template would write, growing by exact ids gives the template's own text."""
    render = renderer(template)
    added = [{"role": "user", "content": "and 3?"}]
    end = [id_of(render, "<|im_end|>")] if "im_end" in template else []
    sampled = [*render.tokenizer.encode(" 4 " if not end else "4", add_special_tokens=False), *end]
    ids = [*render.prompt(HELLO, 1), *sampled, *render.continuation(sampled[-1], added)]
    reply = {"role": "assistant", "content": render.decode(sampled).strip()}
    whole = render.prompt([*HELLO, reply, *added], 1)
    expected = text_of(render, whole) if end else text_of(render, whole).replace("Assistant: 4", "Assistant: 4 ")
    assert text_of(render, ids) == expected
    if end:
        assert ids == whole.tolist()


def test_the_sampled_end_token_closes_the_turn_and_is_not_doubled():
    render = renderer(CHATML)
    added = [{"role": "user", "content": "x"}]
    end = id_of(render, "<|im_end|>")
    assert text_of(render, render.continuation(end, added)) == "\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    other = render.continuation(id_of(render, "<|eos|>"), added)  # ended by another token: the template's end is put behind it
    assert other[0] == end and other.tolist()[1:] == render.continuation(end, added).tolist()


def test_tool_replies_of_one_turn_are_rendered_together():
    render = renderer(TOOLS)
    replies = as_template_messages([Message(role="tool", content="1", name="add"), Message(role="tool", content="2", name="add")])
    text = text_of(render, render.continuation(id_of(render, "<|im_end|>"), replies, [TOOL]))
    replies = "<tool_response>1</tool_response><tool_response>2</tool_response>"
    assert text == f"\n<|im_start|>user{replies}<|im_end|>\n<|im_start|>assistant\n"


def test_templates_that_take_tools_get_them():
    render = renderer(TOOLS)
    text = text_of(render, render.prompt(HELLO, 1, [TOOL]))
    assert text.startswith('<|im_start|>system\n{"type": "function"') and "You may call" not in text


def test_templates_that_take_none_get_a_description_in_the_system_message():
    render = renderer(CHATML)
    text = text_of(render, render.prompt(HELLO, 1, [TOOL]))
    assert text.startswith("<|im_start|>system\nYou may call these tools:") and '"name": "add"' in text and "<tool_call>" in text
    with_system = render.prompt([{"role": "system", "content": "Be brief."}, *HELLO], 1, [TOOL])
    assert text_of(render, with_system).startswith("<|im_start|>system\nBe brief.\n\nYou may call")
    continued = text_of(render, render.continuation(id_of(render, "<|im_end|>"), [{"role": "tool", "content": "3"}], [TOOL]))
    assert continued == "\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n"


def test_a_template_that_is_not_prefix_stable_is_refused():
    with pytest.raises(ModelError, match="not prefix-stable"):
        renderer(COUNTS).continuation(0, [{"role": "user", "content": "x"}])


def test_a_template_that_hides_the_reply_is_refused():
    with pytest.raises(ModelError, match="leaves out or rewrites"):
        renderer(HIDES).continuation(0, [{"role": "user", "content": "x"}])


def test_a_template_that_refuses_the_role_says_so():
    with pytest.raises(ModelError, match=r"messages added: tool.*only user and assistant"):
        renderer(STRICT).continuation(0, [{"role": "tool", "content": "x"}])


def test_stop_tokens_are_those_of_tokenizer_and_template():
    render = renderer(CHATML)
    eos, end = id_of(render, "<|eos|>"), id_of(render, "<|im_end|>")
    assert render.stop_token_ids() == tuple(sorted({eos, end}))
    assert renderer(LABELS).stop_token_ids() == (eos,)  # a newline ends no turn
    assert renderer(HIDES).stop_token_ids() == (eos,)
