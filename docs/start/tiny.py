"""Tiny checkpoints, made with transformers, and other help for the scripts beside this file.

A checkpoint is what a model's directory on the hub has: weights, configuration, tokenizer and chat
template. In its place you would name a model of yours.
"""

import itertools
import json
import pathlib
import random
import string
import sys

import tokenizers
import torch
import transformers

transformers.utils.logging.disable_progress_bar()
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}
{%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}{% generation %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}
{%- endfor %}{{ '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""Marks the assistant's turns by `{% generation %}`. Templates without it work as well."""


def arguments(usage: str) -> tuple[pathlib.Path, dict[str, str]]:
  """Returns a script's directory, which it makes if it is missing, and changes to its
  configuration; ends a script that has no directory.
  """
  if len(sys.argv) < 2 or not all('=' in change for change in sys.argv[2:]):
    sys.exit(usage)
  directory = pathlib.Path(sys.argv[1])
  directory.mkdir(parents=True, exist_ok=True)
  return directory, dict(change.split('=', 1) for change in sys.argv[2:])


def write_rows(file: pathlib.Path, rows) -> None:
  """Writes JSONL."""
  file.write_text(''.join(json.dumps(row) + '\n' for row in rows))


def questions(seed: int = 0) -> list[tuple[str, str, str]]:
  """Returns questions about the alphabet in random order, each with its right answer and a wrong
  one.
  """
  pairs = itertools.permutations(string.ascii_lowercase, 2)
  asked = [(f'First: {a} or {b}?', min(a, b), max(a, b)) for a, b in pairs]
  random.Random(seed).shuffle(asked)
  return asked


def said(question: str, answer: str) -> list[dict[str, str]]:
  """Returns a conversation of one turn."""
  return [{'role': 'user', 'content': question}, {'role': 'assistant', 'content': answer}]


def make_checkpoint(
  directory: pathlib.Path, family: str, texts: list[str], *, conversations=(), steps: int = 0
) -> None:
  """Writes a model of 150,000 parameters, unless a script that was interrupted has written it.

  Args:
    family: 'llama', 'qwen2' or 'qwen3'.
    texts: what the tokenizer learns its vocabulary from.
    conversations: lists of messages.
    steps: how many batches of conversations the model has seen; 0 leaves its weights random.
  """
  if (directory / 'tokenizer_config.json').exists():  # The last file that is written.
    return
  tokenizer = make_tokenizer(texts)
  torch.manual_seed(0)
  torch.set_num_threads(1)  # A model of this size gains nothing from more.
  config = transformers.AutoConfig.for_model(
    family,
    vocab_size=len(tokenizer),
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    eos_token_id=tokenizer.eos_token_id,
    pad_token_id=tokenizer.pad_token_id,
  )
  model = transformers.AutoModelForCausalLM.from_config(config)
  optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
  rendered = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in conversations]
  for step in range(steps):
    batch = random.Random(step).sample(rendered, 32)
    inputs = tokenizer(batch, return_tensors='pt', padding=True)
    labels = inputs['input_ids'].masked_fill(inputs['attention_mask'] == 0, -100)
    model(**inputs, labels=labels).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
  model.save_pretrained(directory)
  tokenizer.save_pretrained(directory)


def make_tokenizer(texts: list[str]) -> transformers.PreTrainedTokenizerBase:
  table = tokenizers.Tokenizer(tokenizers.models.BPE())
  table.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  table.decoder = tokenizers.decoders.ByteLevel()
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=600,
    special_tokens=['<|endoftext|>', '<|im_start|>', '<|im_end|>'],
    initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
    show_progress=False,
  )
  table.train_from_iterator(texts, trainer)
  model = json.loads(table.to_str())['model']
  return transformers.Qwen2Tokenizer(
    vocab=model['vocab'],
    merges=[tuple(pair) for pair in model['merges']],
    eos_token='<|im_end|>',
    pad_token='<|endoftext|>',
    additional_special_tokens=['<|im_start|>'],
    chat_template=TEMPLATE,
  )


def chat(directory: pathlib.Path, questions: list[str], tools=None) -> None:
  """Asks a model questions through transformers, and prints its greedy answers."""
  model = transformers.AutoModelForCausalLM.from_pretrained(directory)
  tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
  for question in questions:
    prompt = tokenizer.apply_chat_template(
      [{'role': 'user', 'content': question}],
      tools=tools,
      add_generation_prompt=True,
      return_tensors='pt',
      return_dict=True,
    )
    answer = model.generate(**prompt, max_new_tokens=40, do_sample=False)
    answer = answer[0, prompt['input_ids'].shape[1] :]
    print(question, tokenizer.decode(answer, skip_special_tokens=True))
