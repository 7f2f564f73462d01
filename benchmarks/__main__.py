"""Run the benchmarks named on the command line, or all of them."""

import importlib
import sys

NAMES = ("one_rank", "compile_time", "memory")

for name in sys.argv[1:] or NAMES:
    if name not in NAMES:
        sys.exit(f"no benchmark {name!r}; there are {', '.join(NAMES)}")
    print(f"== {name}", flush=True)
    importlib.import_module(f"benchmarks.{name}").main()
