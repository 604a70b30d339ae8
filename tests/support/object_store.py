"""An S3 server on this machine, which keeps its objects in memory."""

import functools
from collections.abc import Mapping

import pytest


@functools.cache
def serve() -> Mapping[str, str]:
  """Starts the server, which lives as long as this process, with an empty bucket named `bucket`.

  Returns the environment variables with which clients find the server. Skips the test if the server
  is not installed. fsspec caches its clients, so each process has only one server.
  """
  boto3 = pytest.importorskip('boto3')
  server = pytest.importorskip('moto.server').ThreadedMotoServer(ip_address='127.0.0.1', port=0)
  server.start()
  environment = {
    'AWS_ACCESS_KEY_ID': 'key',
    'AWS_SECRET_ACCESS_KEY': 'secret',
    'AWS_DEFAULT_REGION': 'us-east-1',
    'AWS_ENDPOINT_URL': f'http://127.0.0.1:{server.get_host_and_port()[1]}',
  }
  with pytest.MonkeyPatch.context() as patch:
    for name, value in environment.items():
      patch.setenv(name, value)
    boto3.client('s3').create_bucket(Bucket='bucket')
  return environment
