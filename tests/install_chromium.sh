#!/usr/bin/env bash
# Gets a Chromium for tests/test_browser.py: Debian's where this may install packages, else playwright's own.
# Where neither can be had it says so and succeeds; the tests then skip, or fail with REQUIRE_BROWSER=1.
set -uo pipefail

if command -v chromium > /dev/null; then
    exit 0
fi
if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium && exit 0
fi
playwright install chromium || echo "NO CHROMIUM: tests/test_browser.py WILL BE SKIPPED." >&2
