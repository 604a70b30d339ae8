"""Maps of files in the memory of this process."""

import pathlib


def maps_of(path):
  """Returns the number of maps of the file `path`, or of files that are or were in the directory
  `path`.
  """
  files = [
    line.split(maxsplit=5)[5].removesuffix(' (deleted)')
    for line in pathlib.Path('/proc/self/maps').read_text().splitlines()
    if '/' in line
  ]
  return sum(file == str(path) or file.startswith(f'{path}/') for file in files)
