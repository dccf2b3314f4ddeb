import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "pytorch"), str(HERE / "fabric")]

from flavours import pl  # noqa: E402, F401, a fixture for every test
from ranks import ranks  # noqa: E402, F401, another one
