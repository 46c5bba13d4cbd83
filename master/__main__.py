"""`python -m dalsegno.master`."""

import sys

from .console import main

sys.exit(main())
