"""`python -m dplab`."""

import sys

from dplab.cli import main

sys.exit(main())
