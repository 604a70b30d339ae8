"""What the tests of pages share."""

import pytest
from browsing import start_browser


@pytest.fixture(scope='package')
def browser(tmp_path_factory):
  driver = start_browser(tmp_path_factory.mktemp('browser'))
  yield driver
  driver.quit()
