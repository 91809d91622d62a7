import sys

from pyg_dfgnn.bench.run import main

if __name__ == "__main__":
    sys.exit(main())
