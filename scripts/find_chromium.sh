#!/bin/sh
# Print the path of a Chromium that the end-to-end tests can drive; say what to install where there is none.
set -eu
for name in "${COREAD_CHROMIUM:-}" chromium chromium-browser google-chrome; do
    if [ -n "$name" ] && command -v "$name" 2>/dev/null; then
        exit 0
    fi
done
echo "No Chromium found. On Debian: apt install chromium; or name one: COREAD_CHROMIUM=/path/to/chromium make e2e" >&2
exit 1
