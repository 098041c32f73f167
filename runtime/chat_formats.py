"""Chat formats that every model can be given by name: jinja sources, and nothing that runs.

`bos` is the beginning-of-sequence token where the tokenizer uses one, else empty.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ChatFormat:
    """A template (jinja), and the strings that end an answer where the vocabulary has no token for it."""

    source: str
    stops: tuple[str, ...] = ()


_CHATML = """{{ bos }}{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] \
+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

_LLAMA3 = """{{ bos }}{% for message in messages %}\
{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' \
+ message['content'] | trim + '<|eot_id|>' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

_GEMMA = """{{ bos }}{% for message in messages %}\
{% if message['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}\
{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' \
+ message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""

_MISTRAL = """{{ bos }}{% for message in messages %}\
{% if message['role'] == 'system' %}{{ raise_exception('System role not supported') }}\
{% elif message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}\
{% else %}{{ ' ' + message['content'] | trim + (eos_token or '</s>') }}{% endif %}{% endfor %}"""

_ALPACA = """{{ bos }}{% for message in messages %}\
{% if message['role'] == 'system' %}{{ message['content'] + '\n\n' }}\
{% elif message['role'] == 'user' %}{{ '### Instruction:\n' + message['content'] + '\n\n' }}\
{% else %}{{ '### Response:\n' + message['content'] + '\n\n' }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '### Response:\n' }}{% endif %}"""

_PLAIN = """{{ bos }}{% for message in messages %}\
{% if message['role'] == 'system' %}{{ message['content'] + '\n\n' }}\
{% else %}\
{{ ('User: ' if message['role'] == 'user' else 'Assistant: ') + message['content'] | trim + '\n' }}{% endif %}\
{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""

BUILT_IN: Mapping[str, ChatFormat] = {
    "chatml": ChatFormat(_CHATML, ("<|im_end|>",)),
    "llama3": ChatFormat(_LLAMA3, ("<|eot_id|>",)),
    "gemma": ChatFormat(_GEMMA, ("<end_of_turn>",)),
    "mistral": ChatFormat(_MISTRAL, ("</s>", "[INST]")),
    "alpaca": ChatFormat(_ALPACA, ("### Instruction:",)),
    "plain": ChatFormat(_PLAIN, ("\nUser:",)),
}
"""By the name that `--chat-template` takes."""
