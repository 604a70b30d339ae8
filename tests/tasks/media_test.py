"""Media of tasks: read with the taskset, checked, part of what makes a task the same task."""

import base64
import json
import os

import pyarrow
import pyarrow.parquet
import pytest
import xxhash

from jaxrl_llm.core.errors import UserError
from jaxrl_llm.core.records.sample import media_of
from jaxrl_llm.core.records.task import Media
from jaxrl_llm.tasks.media import MAX_BYTES, media_bytes, read_media
from jaxrl_llm.tasks.processors import normalised
from jaxrl_llm.tasks.taskset import TasksetConfig, check_disjoint, load_taskset

# One pixel each, red and blue.
RED, BLUE = (
  base64.b64decode(
    f'iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8{middle}QAAAABJRU5ErkJggg=='
  )
  for middle in ('z8DwHwAFBQIAX8jx0g', 'z8BQDwAEhQGAhKmMIQ')
)


def load(tmp_path, *rows, **options):
  (tmp_path / 'images').mkdir(exist_ok=True)
  for name, data in (
    ('red.png', RED),
    ('blue.png', BLUE),
    ('text.png', b'hello'),
    ('empty.png', b''),
  ):
    (tmp_path / 'images' / name).write_bytes(data)
  file = tmp_path / 'tasks.jsonl'
  file.write_text(
    '\n'.join(json.dumps({'prompt': 'What colour?', 'answer': 'red', **row}) for row in rows)
  )
  return load_taskset(TasksetConfig(name='t', source=str(file), domain='vision', **options))


def image(path='images/red.png', **more):
  return {'kind': 'image', 'path': path, **more}


def test_a_picture_is_read_with_its_task(tmp_path):
  digest = xxhash.xxh3_128_hexdigest(RED)
  (task,) = load(tmp_path, {'media': [image(digest=digest)]}).tasks
  assert task.media == (Media(kind='image', digest=digest, reference='images/red.png'),)
  assert media_bytes(task.media[0].reference, tmp_path) == RED
  assert media_of(task) == ({'kind': 'image', 'digest': digest, 'span': [0, 0]},)


def test_bytes_stand_in_the_row(tmp_path):
  inline = {'kind': 'image', 'bytes': base64.b64encode(RED).decode()}
  (task,) = load(tmp_path, {'media': [inline]}).tasks
  assert media_bytes(task.media[0].reference, None) == RED


def test_one_text_with_two_pictures_is_two_tasks(tmp_path):
  rows = [
    {'media': [image()]},
    {'media': [image('images/blue.png')]},
    {},
    {'media': [image()]},
    {'media': []},
  ]
  taskset = load(tmp_path, *rows)
  assert (taskset.counts['kept'], taskset.counts['duplicate']) == (3, 2)
  assert (
    len({task.digest for task in taskset.tasks})
    == len({normalised(task) for task in taskset.tasks})
    == 3
  )
  check_disjoint(load(tmp_path, rows[0]), load(tmp_path, rows[1]))
  with pytest.raises(UserError, match='share 1 prompts'):
    check_disjoint(load(tmp_path, rows[0]), load(tmp_path, {'media': [image(kind='image')]}))


@pytest.mark.parametrize(
  ('media', 'message'),
  [
    ([image('images/none.png')], 'media[0]: {root}/images/none.png: No such file or directory'),
    ([image(), image('images')], 'media[1]: {root}/images: Is a directory'),
    (
      [image(digest='0' * 32)],
      'media[0]: images/red.png: digest is {digest}, but the row says 00000000',
    ),
    (
      [image('images/text.png')],
      'media[0]: images/text.png: 5 bytes that are not a PNG, JPEG, GIF, WebP, BMP',
    ),
    ([image('images/empty.png')], 'media[0]: images/empty.png: 0 bytes that are not a PNG'),
    ([image('/etc/hostname')], "media[0]: path '/etc/hostname' is absolute"),
    ([{**image(), 'kind': 'audio'}], "media[0]: kind is 'audio', wanted 'image'"),
    ([{'kind': 'image'}], 'media[0]: has no path and no bytes'),
    ([{'kind': 'image', 'bytes': 'a?'}], 'media[0]: bytes are not base64'),
    ([3], 'media[0]: is 3, wanted {{kind'),
    ('images/red.png', 'media is "images/red.png", wanted a list'),
  ],
)
def test_what_is_wrong_with_a_picture_is_one_line(tmp_path, media, message):
  with pytest.raises(UserError) as raised:
    load(tmp_path, {'media': media})
  said = str(raised.value)
  assert message.format(root=tmp_path, digest=xxhash.xxh3_128_hexdigest(RED)) in said
  assert said.startswith(f'{tmp_path}/tasks.jsonl:1: ') and '\n' not in said
  assert load(tmp_path, {'media': media}, {}, on_corrupt='skip').counts['corrupt'] == 1


def test_links_of_a_hub_snapshot_to_its_blobs_are_inside(tmp_path):
  snapshot, blobs = (
    tmp_path / 'datasets--x' / 'snapshots' / 'abc',
    tmp_path / 'datasets--x' / 'blobs',
  )
  (snapshot / 'images').mkdir(parents=True)
  blobs.mkdir()
  (blobs / '0123').write_bytes(RED)
  (snapshot / 'images' / 'x.png').symlink_to('../../../blobs/0123')
  assert media_bytes('images/x.png', snapshot) == RED
  (tmp_path / 'secret').write_bytes(RED)
  (snapshot / 'images' / 'y.png').symlink_to('../../../../secret')
  with pytest.raises(ValueError, match='leads out of'):
    media_bytes('images/y.png', snapshot)


def outside(tmp_path):
  (tmp_path / 'outside.png').write_bytes(RED)
  return '../outside.png'


def link_outside(tmp_path):
  (tmp_path / 'outside.png').write_bytes(RED)
  (tmp_path / 'data' / 'link.png').symlink_to(tmp_path / 'outside.png')
  return 'link.png'


def device(tmp_path):
  (tmp_path / 'data' / 'zero.png').symlink_to('/dev/zero')
  return 'zero.png'


def fifo(tmp_path):
  os.mkfifo(tmp_path / 'data' / 'fifo.png')
  return 'fifo.png'


def large(tmp_path):
  with (tmp_path / 'data' / 'large.png').open('wb') as file:
    file.write(RED)
    file.truncate(MAX_BYTES + 1)
  return 'large.png'


@pytest.mark.parametrize('key', ['media', 'images'])
@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (
      outside,
      "path '../outside.png' leads out of {data}, wanted a file in it; copy the file there",
    ),
    (link_outside, "path 'link.png' leads out of {data}"),
    (device, "path 'zero.png' leads out of {data}"),
    (fifo, '{data}/fifo.png is a FIFO, wanted a regular file'),
    (large, '{data}/large.png has 33,554,433 bytes, wanted at most 33,554,432'),
  ],
)
def test_a_path_that_escapes_or_exhausts_the_host_is_one_line(tmp_path, make, message, key):
  data = tmp_path / 'data'
  data.mkdir()
  name = make(tmp_path)
  with pytest.raises(UserError) as raised:
    load(data, {key: [image(name) if key == 'media' else name]})
  said = str(raised.value)
  assert (
    said.startswith(f'{data}/tasks.jsonl:1: {key}[0]: {message.format(data=data)}')
    and '\n' not in said
  )


def test_pictures_of_a_dataset_are_opened_by_us_alone(tmp_path):
  import datasets

  os.mkfifo(tmp_path / 'fifo')  # To open it would block for ever.
  rows = [
    {'prompt': 'a', 'images': [{'bytes': RED, 'path': None}]},
    {'prompt': 'b', 'images': [{'bytes': None, 'path': str(tmp_path / 'fifo')}]},
  ]
  features = datasets.Features(
    prompt=datasets.Value('string'), images=datasets.List(datasets.Image())
  )
  table = pyarrow.Table.from_pylist(rows, schema=features.arrow_schema)
  pyarrow.parquet.write_table(table, tmp_path / 'rows.parquet')
  options = {'data_files': str(tmp_path / 'rows.parquet'), 'cache_dir': str(tmp_path / 'cache')}
  config = TasksetConfig(
    name='t', source='datasets:parquet#train', options=options, on_corrupt='skip'
  )
  taskset = load_taskset(config)
  assert [media_bytes(task.media[0].reference, None) for task in taskset.tasks] == [RED]
  assert taskset.counts['corrupt'] == 1


def test_verls_rows_have_images(tmp_path):
  rows = [
    {'prompt': 'What colour?', 'images': [{'bytes': RED, 'path': None}], 'answer': 'red'},
    {'prompt': 'And this?', 'images': [{'bytes': None, 'path': 'blue.png'}], 'answer': 'blue'},
  ]
  (tmp_path / 'blue.png').write_bytes(BLUE)
  pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / 'rows.parquet')
  tasks = load_taskset(TasksetConfig(name='t', source=str(tmp_path / 'rows.parquet'))).tasks
  assert [media_bytes(task.media[0].reference, tmp_path) for task in tasks] == [RED, BLUE]
  assert read_media({'images': ['blue.png']}, tmp_path)[0].digest == tasks[1].media[0].digest


def test_a_source_without_a_directory_has_only_bytes(tmp_path):
  with pytest.raises(ValueError, match='the source has no directory to which it could be'):
    read_media({'media': [image()]}, None)
