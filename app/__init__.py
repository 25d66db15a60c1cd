"""The browser product, the HTTP API and the command line."""

import engine as engine  # decides how idle threads wait, before anything imports torch
