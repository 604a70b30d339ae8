"""Chat SFT for the first time: conversations, a tiny checkpoint, training, a chat.

  python docs/start/chat_sft.py DIRECTORY [KEY=VALUE …]

KEY=VALUE changes the configuration, such as stages.sft.steps=300. The script needs PyTorch beside
jaxrl_llm, because transformers makes the checkpoint (tiny.py: a qwen2 of random weights) and chats
with the trained one.
"""

import itertools
import json
import pathlib

import tiny

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


def main(directory: pathlib.Path, changes: dict[str, str]) -> None:
  rows = [*conversations()]
  tiny.write_rows(directory / 'chat.jsonl', rows)
  tiny.make_checkpoint(directory / 'checkpoint', 'qwen2', [json.dumps(row) for row in rows])
  config = load_config(
    f'sft:{directory / "chat.jsonl"}',
    {'policy.init_from': str(directory / 'checkpoint'), **changes},
  )
  result = train(config, directory / 'run')
  print('loss on the held-out rows:', result.metrics[-1]['val-core/held_out/sft_loss'])
  tiny.chat(result.model, [QUESTIONS[0].format(city) for city in CITIES], TOOLS)


if __name__ == '__main__':
  main(*tiny.arguments(__doc__))
