"""Whether a vLLM that lies unpacked in a folder has the parts that the plugin's hooks need; nothing of it is run.

python benchmarks/vllm_parts.py FOLDER        # FOLDER holds the package `vllm`
"""

import sys
from pathlib import Path

from reprieve.errors import ReprieveError
from reprieve.vllm_plugin import probing


def main() -> int:
    status = 0
    for folder in sys.argv[1:]:
        for kind in probing.runners():
            try:
                probing.require_parts(kind, probing.in_source(Path(folder)))
                print(f"{folder}: {kind} fits")
            except ReprieveError as error:
                print(f"{folder}: {kind}: {error}")
                status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
