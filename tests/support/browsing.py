"""Pages in a real browser: headless Chromium, without a network."""

import pathlib
import shutil

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

FLAGS = (
  '--headless=new',
  '--no-sandbox',
  '--disable-gpu',
  '--disable-quic',
  '--no-first-run',
  '--disable-background-networking',
  '--disable-component-update',
  '--disable-sync',
)
BINARIES = ('chromium', 'chromium-browser', 'google-chrome')


def start_browser(profile: pathlib.Path) -> webdriver.Chrome:
  """Returns a browser that records its console. The caller must quit it. Skips the test if no
  browser is installed.
  """
  binary = next(filter(None, map(shutil.which, BINARIES)), None)
  if binary is None:
    pytest.skip('no chromium on this machine (Debian: apt-get install chromium chromium-driver)')
  options = webdriver.ChromeOptions()
  options.binary_location = binary
  for flag in (*FLAGS, f'--user-data-dir={profile}'):
    options.add_argument(flag)
  options.set_capability('goog:loggingPrefs', {'browser': 'ALL'})
  return webdriver.Chrome(options=options, service=Service(shutil.which('chromedriver')))


def open_page(
  browser: webdriver.Chrome, page: pathlib.Path, *, width: int = 1280, scheme: str = 'light'
) -> None:
  """Opens a file in a window that is `width` pixels wide."""
  browser.execute_cdp_cmd(
    'Emulation.setEmulatedMedia', {'features': [{'name': 'prefers-color-scheme', 'value': scheme}]}
  )
  metrics = {'width': width, 'height': 1000, 'deviceScaleFactor': 1, 'mobile': False}
  browser.execute_cdp_cmd('Emulation.setDeviceMetricsOverride', metrics)
  browser.get(page.as_uri())


def wait_for_count(browser: webdriver.Chrome, selector: str, count: int) -> None:
  """Waits until exactly `count` elements match. After a click, a page may draw later."""

  def matches(browser: webdriver.Chrome) -> bool:
    return len(browser.find_elements(By.CSS_SELECTOR, selector)) == count

  WebDriverWait(browser, 30).until(matches, f'{count} of {selector}')
