"""`python -m pyg_dfgnn`, and the console script `pyg-dfgnn`: see :mod:`pyg_dfgnn.command`."""

import sys

from pyg_dfgnn.command import main

if __name__ == "__main__":
    sys.exit(main())
