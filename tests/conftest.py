import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from ranks import ranks  # noqa: E402, F401, the fixture for every test
