"""Chat templates of the families in the field, written small after the behaviour that each publishes, over a tiny tokenizer.

A family's `source` names what its template follows. Tokenizers are byte-level BPE with a few merges, the family's own
special tokens and, where the family's tokenizer adds BOS by itself, one that does so too.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stages.contracts.params import Rendering
from stages.corpus.rendering import Renderer

# as Llama-3, Qwen and their kin cut words: line breaks stand together whatever follows
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
MERGES = ["Ċ Ċ", "t h", "th e", "Ġ the", "i n", "e r", "Ġ a", "Ġ s", "o u", "a n", "Ġa n", "r e", "Ġ t", "o n", "Ġ w"]


@dataclass(frozen=True, eq=False)
class Family:
    """A chat format. end: tokens that end a turn; added: tokens that are no special ones; bos: when the tokenizer adds it."""

    name: str
    source: str
    template: str
    special: tuple[str, ...]
    end: tuple[str, ...]
    bos: str | None = None
    eos: str = ""
    added: tuple[str, ...] = ()
    adds_bos: bool = False
    arguments: dict[str, Any] = field(default_factory=dict)
    date: str | None = None


def write_family(folder: Path, family: Family, **config: Any) -> Path:
    """tokenizer.json, tokenizer_config.json and config.json of a family, as a target's folder has them."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    folder.mkdir(parents=True, exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(m.replace(" ", "") for m in MERGES)]
    merges = [tuple(m.split(" ")) for m in MERGES]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(dict.fromkeys(words))}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in family.special])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in family.added])
    ids = {t: tokenizer.token_to_id(t) for t in family.special}
    if family.adds_bos and family.bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{family.bos} $A", special_tokens=[(family.bos, ids[family.bos])]
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    told = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": family.bos,
        "eos_token": family.eos or family.end[0],
        "clean_up_tokenization_spaces": False,
        "chat_template": family.template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps({**told, **config}))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": [ids[t] for t in family.end]}))
    return folder


def policy(**changes: Any) -> Rendering:
    """prepare.rendering as shipped, with changes."""
    shipped: dict[str, Any] = {
        "template_arguments": {},
        "date": None,
        "rewritten_history": "split",
        "think_tags": "split",
        "dropped_reasoning": "restore",
        "empty_reasoning": "skip",
        "unknown_tools": "as_text",
    }
    return Rendering(**{**shipped, **changes})


def renderer_of(folder: Path, family: Family, **changes: Any) -> Renderer:
    """The family's renderer, written to `folder` first."""
    own = {"template_arguments": family.arguments, "date": family.date}
    return Renderer(write_family(folder, family), policy(**{**own, **changes}))


CHATML = Family(
    "chatml",
    "HuggingFaceTB/SmolLM2-135M-Instruct, tokenizer_config.json: a default system prompt, no word for tools",
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}"
    "{% endif %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    end=("<|im_end|>",),
    bos="<|im_start|>",
)

LLAMA_3 = Family(
    "llama-3",
    "meta-llama/Llama-3.1-8B-Instruct, tokenizer_config.json: BOS in the template and from the tokenizer, a dated default"
    " system prompt, contents trimmed, schemas in the first user message, one call a turn, results under `ipython`",
    """{{- bos_token }}
{%- set day = strftime_now("%d %b %Y") %}
{%- set lead = '' %}{%- set rest = messages %}
{%- if messages[0]['role'] == 'system' %}{%- set lead = messages[0]['content'] | trim %}{%- set rest = messages[1:] %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}{%- if tools %}{{- 'Environment: ipython\\n' }}{%- endif %}
{{- 'Cutting Knowledge Date: December 2023\\nToday Date: ' + day + '\\n\\n' + lead + '<|eot_id|>' }}
{%- for m in rest %}
{%- if tools and loop.first %}
{{- '<|start_header_id|>user<|end_header_id|>\\n\\nGiven the following functions, answer with a JSON call.\\n\\n' }}
{%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}{{- m['content'] | trim + '<|eot_id|>' }}
{%- elif m['tool_calls'] %}
{%- if m['tool_calls'] | length != 1 %}{{- raise_exception('This model only supports single tool-calls at once!') }}{%- endif %}
{%- set f = m['tool_calls'][0]['function'] %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + f['name'] + '", "parameters": ' }}{{- f['arguments'] | tojson }}{{- '}<|eot_id|>' }}
{%- elif m['role'] == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}{{- m['content'] | tojson }}{{- '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}""",
    special=("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|end_of_text|>"),
    end=("<|eot_id|>", "<|end_of_text|>"),
    bos="<|begin_of_text|>",
    adds_bos=True,
    date="2026-01-31",
)

QWEN_3 = Family(
    "qwen3",
    "Qwen/Qwen3-8B, tokenizer_config.json: reasoning only behind the last question, results as user turns,"
    " enable_thinking=false writes an empty block into the prompt",
    """{%- if tools %}
{{- '<|im_start|>system\\n' }}{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n\\n<tools>' }}{%- for t in tools %}{{- '\\n' }}{{- t | tojson }}{%- endfor %}{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(last=messages | length - 1, seeking=true) %}
{%- for m in messages[::-1] %}{%- set i = messages | length - 1 - loop.index0 %}
{%- if ns.seeking and m.role == 'user' and not (m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}
{%- set ns.seeking = false %}{%- set ns.last = i %}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'assistant' %}
{%- set said = m.content %}{%- set thought = '' %}
{%- if m.reasoning_content is string %}{%- set thought = m.reasoning_content %}
{%- elif '</think>' in said %}
{%- set thought = said.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
{%- set said = said.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{%- if loop.index0 > ns.last and (loop.last or thought) %}
{{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + said.lstrip('\\n') }}
{%- else %}{{- '<|im_start|>assistant\\n' + said }}{%- endif %}
{%- for call in m.tool_calls or [] %}{%- if (loop.first and said) or not loop.first %}{{- '\\n' }}{%- endif %}
{%- if call.function %}{%- set call = call.function %}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}{{- call.arguments if call.arguments is string else call.arguments | tojson }}{{- '}\\n</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}""",
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    end=("<|im_end|>", "<|endoftext|>"),
    added=("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
)

KIMI_K2_5 = Family(
    "kimi-k2.5",
    "moonshotai/Kimi-K2.5, chat_template.jinja: reasoning only behind the last answer without calls, an empty block before"
    " every earlier one, the prompt opens the block; thinking=false closes it",
    """{%- macro turn(m) -%}{%- if m['role'] in ('user', 'assistant') -%}<|im_{{ m['role'] }}|>{{ m.get('name') or m['role'] }}<|im_middle|>
{%- else -%}<|im_system|>{{ m.get('name') or m['role'] }}<|im_middle|>{%- endif -%}{%- endmacro -%}
{%- macro calls(m) -%}{%- if m.get('tool_calls') -%}<|tool_calls_section_begin|>{%- for c in m['tool_calls'] -%}
<|tool_call_begin|>{{ c['id'] }}<|tool_call_argument_begin|>
{%- if c['function']['arguments'] is string -%}{{ c['function']['arguments'] }}{%- else -%}{{ c['function']['arguments'] | tojson }}{%- endif -%}
<|tool_call_end|>{%- endfor -%}<|tool_calls_section_end|>{%- endif -%}{%- endmacro -%}
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}{%- if m['role'] == 'assistant' and not m.get('tool_calls') -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- if tools -%}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(',', ':')) }}<|im_end|>{%- endif -%}
{%- for m in messages -%}{{ turn(m) }}
{%- if m['role'] == 'assistant' -%}
{%- if loop.index0 > ns.last and not (thinking is defined and thinking is false) -%}<think>{{ m.get('reasoning_content') or '' }}</think>
{%- else -%}<think></think>{%- endif -%}{{ m['content'] }}{{ calls(m) }}
{%- elif m['role'] == 'tool' -%}## Return of {{ m.get('tool_call_id') }}{{ '\\n' }}{{ m['content'] }}
{%- else -%}{{ m['content'] }}{%- endif -%}<|im_end|>{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>
{%- if thinking is defined and thinking is false -%}<think></think>{%- else -%}<think>{%- endif -%}{%- endif -%}""",
    special=(
        "[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>",
        "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    ),
    end=("<|im_end|>", "[EOS]"),
    bos="[BOS]",
    added=("<think>", "</think>"),
)  # fmt: skip

DEEPSEEK_R1 = Family(
    "deepseek-r1",
    "deepseek-ai/DeepSeek-R1, tokenizer_config.json: BOS in the template, the prompt opens the block, an answer is written"
    " without block or reasoning, so that it never goes on from its prompt",
    """{{ bos_token }}{%- for m in messages %}{%- if m['role'] == 'system' %}{{- m['content'] }}{%- endif %}{%- endfor %}
{%- for m in messages %}
{%- if m['role'] == 'user' %}{{- '<｜User｜>' + m['content'] }}
{%- elif m['role'] == 'assistant' and m['tool_calls'] %}
{{- '<｜Assistant｜><｜tool▁calls▁begin｜>' }}{%- for c in m['tool_calls'] %}
{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + c['function']['name'] + '\\n```json\\n' }}{{- c['function']['arguments'] | tojson }}{{- '\\n```<｜tool▁call▁end｜>' }}{%- endfor %}
{{- '<｜tool▁calls▁end｜><｜end▁of▁sentence｜>' }}
{%- elif m['role'] == 'assistant' %}{{- '<｜Assistant｜>' + m['content'].split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}
{%- elif m['role'] == 'tool' %}{{- '<｜tool▁output▁begin｜>' + m['content'] + '<｜tool▁output▁end｜>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\\n' }}{%- endif %}""",
    special=(
        "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁output▁begin｜>",
        "<｜tool▁output▁end｜>",
    ),
    end=("<｜end▁of▁sentence｜>",),
    bos="<｜begin▁of▁sentence｜>",
    added=("<think>", "</think>"),
    adds_bos=True,
)  # fmt: skip

HARMONY = Family(
    "gpt-oss",
    "openai/gpt-oss-20b, chat_template.jinja, and OpenAI's article on harmony: dated system message, instructions under"
    " `developer`, reasoning in channel analysis of the last turn alone, which ends with <|return|>, earlier ones with <|end|>",
    """{{- '<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\\nKnowledge cutoff: 2024-06\\nCurrent date: ' + strftime_now('%Y-%m-%d') }}
{{- '\\n\\nReasoning: ' + (reasoning_effort or 'medium') + '\\n\\n# Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>' }}
{%- set lead = '' %}{%- set rest = messages %}
{%- if messages[0].role in ('system', 'developer') %}{%- set lead = messages[0].content %}{%- set rest = messages[1:] %}{%- endif %}
{%- if lead or tools %}{{- '<|start|>developer<|message|>' }}{%- if lead %}{{- '# Instructions\\n\\n' + lead + '\\n\\n' }}{%- endif %}
{%- if tools %}{{- '# Tools\\n\\n## functions\\n\\nnamespace functions {\\n\\n' }}{%- for t in tools %}{{- '// ' + t.function.description + '\\ntype ' + t.function.name + ' = (_: any) => any;\\n\\n' }}{%- endfor %}{{- '} // namespace functions' }}{%- endif %}
{{- '<|end|>' }}{%- endif %}
{%- set ns = namespace(call=none) %}
{%- for m in rest %}
{%- if m.role == 'assistant' and m.tool_calls %}
{%- set call = m.tool_calls[0].function %}
{%- set ahead = namespace(final=false) %}{%- for n in rest[loop.index:] %}{%- if n.role == 'assistant' and not n.tool_calls %}{%- set ahead.final = true %}{%- endif %}{%- endfor %}
{%- if m.thinking and not ahead.final %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}{{- call.arguments | tojson }}{{- '<|call|>' }}
{%- set ns.call = call.name %}
{%- elif m.role == 'assistant' and loop.last and not add_generation_prompt %}
{%- if m.thinking %}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}{%- endif %}
{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|return|>' }}
{%- elif m.role == 'assistant' %}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
{%- elif m.role == 'tool' %}{{- '<|start|>functions.' + ns.call + ' to=assistant<|channel|>commentary<|message|>' }}{{- m.content | tojson }}{{- '<|end|>' }}
{%- elif m.role == 'user' %}{{- '<|start|>user<|message|>' + m.content + '<|end|>' }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}""",
    special=(
        "<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>",
        "<|message|>", "<|call|>",
    ),
    end=("<|return|>", "<|endoftext|>", "<|call|>"),
    bos="<|startoftext|>",
    date="2026-01-31",
)  # fmt: skip

GEMMA = Family(
    "gemma",
    "google/gemma-3-1b-it, tokenizer_config.json: BOS in the template and from the tokenizer, role `model`, the system"
    " prompt within the first user turn, contents trimmed, an exception where roles do not alternate",
    """{{ bos_token }}{%- set lead = '' %}{%- set rest = messages %}
{%- if messages[0]['role'] == 'system' %}{%- set lead = messages[0]['content'] + '\\n\\n' %}{%- set rest = messages[1:] %}{%- endif %}
{%- for m in rest %}
{%- if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif %}
{{- '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) + '\\n' + (lead if loop.first else '') + m['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}""",
    special=("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
    end=("<eos>", "<end_of_turn>"),
    bos="<bos>",
    eos="<eos>",
    adds_bos=True,
)

FAMILIES = (CHATML, LLAMA_3, QWEN_3, KIMI_K2_5, DEEPSEEK_R1, HARMONY, GEMMA)
