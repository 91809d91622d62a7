"""Where tests look for real data files."""

import os

SEARCH = [os.environ.get("PYG_DFGNN_DATA", "data"), "data", "../shared/data"]
