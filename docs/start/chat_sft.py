"""Chat SFT for the first time: conversations, a tiny checkpoint, training, a chat.

  python docs/start/chat_sft.py DIRECTORY [KEY=VALUE …]

KEY=VALUE changes the configuration, such as stages.sft.steps=300. The script needs PyTorch beside
jaxrl_llm, because transformers makes the checkpoint (a qwen2 with 150,000 random parameters; in its
place you would name a model of yours) and chats with the trained one.
"""

import itertools
import json
import pathlib
import sys

import tokenizers
import torch
import transformers

from jaxrl_llm.api import load_config, train

TOOLS = [
  {
    'type': 'function',
    'function': {
      'name': 'get_weather',
      'description': 'The weather of a city.',
      'parameters': {'type': 'object', 'properties': {'city': {'type': 'string'}}},
    },
  }
]
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
CITIES = ('Paris', 'Oslo', 'Lima', 'Cairo', 'Delhi', 'Quito')
WEATHER = ('sunny', 'rainy', 'windy')
QUESTIONS = ('How is {}?', 'The weather in {}?', 'And {} now?')


def conversations():
  """Rows of two forms: a tool call with its result, and two turns after a system prompt."""
  for city, weather in itertools.product(CITIES, WEATHER):
    call = {'type': 'function', 'function': {'name': 'get_weather', 'arguments': {'city': city}}}
    for question in QUESTIONS:
      messages = [
        {'role': 'user', 'content': question.format(city)},
        {'role': 'assistant', 'content': None, 'tool_calls': [call]},
        {'role': 'tool', 'content': weather},
        {'role': 'assistant', 'content': f'It is {weather} in {city}.'},
      ]
      yield {'messages': messages, 'tools': TOOLS}
    yield {
      'messages': [
        {'role': 'system', 'content': 'Answer in one word.'},
        {'role': 'user', 'content': f'It is {weather} in {city}. How is it?'},
        {'role': 'assistant', 'content': weather},
        {'role': 'user', 'content': 'Where?'},
        {'role': 'assistant', 'content': city},
      ]
    }


def make_checkpoint(directory: pathlib.Path, texts) -> None:
  """Writes what a model's directory on the hub has: weights, configuration and tokenizer."""
  table = tokenizers.Tokenizer(tokenizers.models.BPE())
  table.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
  table.decoder = tokenizers.decoders.ByteLevel()
  specials = ['<|endoftext|>', '<|im_start|>', '<|im_end|>']
  trainer = tokenizers.trainers.BpeTrainer(
    vocab_size=600,
    special_tokens=specials,
    initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
    show_progress=False,
  )
  table.train_from_iterator(texts, trainer)
  model = json.loads(table.to_str())['model']
  tokenizer = transformers.Qwen2Tokenizer(
    vocab=model['vocab'],
    merges=[tuple(pair) for pair in model['merges']],
    eos_token='<|im_end|>',
    pad_token='<|endoftext|>',
    additional_special_tokens=['<|im_start|>'],
    chat_template=TEMPLATE,
  )
  torch.manual_seed(0)
  config = transformers.Qwen2Config(
    vocab_size=len(tokenizer),
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    eos_token_id=tokenizer.eos_token_id,
    pad_token_id=tokenizer.pad_token_id,
  )
  transformers.Qwen2ForCausalLM(config).save_pretrained(directory)
  tokenizer.save_pretrained(directory)


def chat(model, tokenizer, messages, tools=None) -> str:
  """Returns the model's greedy answer."""
  prompt = tokenizer.apply_chat_template(
    messages, tools=tools, add_generation_prompt=True, return_tensors='pt', return_dict=True
  )
  answer = model.generate(**prompt, max_new_tokens=40, do_sample=False)
  return tokenizer.decode(answer[0, prompt['input_ids'].shape[1] :], skip_special_tokens=True)


def main(directory: pathlib.Path, *changes: str) -> None:
  directory.mkdir(parents=True, exist_ok=True)
  rows = [json.dumps(row) for row in conversations()]
  (directory / 'chat.jsonl').write_text('\n'.join(rows) + '\n')
  make_checkpoint(directory / 'checkpoint', rows)
  changed = dict(change.split('=', 1) for change in changes)
  config = load_config(
    f'sft:{directory / "chat.jsonl"}',
    {'policy.init_from': str(directory / 'checkpoint'), **changed},
  )
  result = train(config, directory / 'run')
  print('loss on the held-out rows:', result.metrics[-1]['val-core/held_out/sft_loss'])
  model = transformers.AutoModelForCausalLM.from_pretrained(result.model)
  tokenizer = transformers.AutoTokenizer.from_pretrained(result.model)
  for city in CITIES:
    question = QUESTIONS[0].format(city)
    print(question, chat(model, tokenizer, [{'role': 'user', 'content': question}], TOOLS))


if __name__ == '__main__':
  main(pathlib.Path(sys.argv[1]), *sys.argv[2:])
