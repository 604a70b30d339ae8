"""What the tests of pages share."""

import pytest
from browsing import start_browser


@pytest.fixture(scope='module')
def browser(tmp_path_factory):
  driver = start_browser(tmp_path_factory.mktemp('browser'))
  yield driver
  driver.quit()
