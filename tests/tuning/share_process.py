"""One of several processes that fill one cache folder: waits until all are there, compiles, prints how many kernels it compiled and found."""

import json
import sys
import time
from pathlib import Path

from tritonattn import warmup
from tritonattn.tuning.arch import by_name
from tritonattn.tuning.cases import Case, run
from tritonattn.tuning.codegen import capture
from tritonattn.tuning.models import MODELS

CASES = (Case("merge", MODELS["llama-3-8b"], query_len=64), Case("cache_write", MODELS["llama-3-8b"], layout="nhd"),
         Case("decode", MODELS["llama-3-8b"], layout="nhd", num_splits=2))  # fmt: skip


def main(meeting: Path, number: str, processes: str) -> None:
    arch = by_name("gfx942")
    (meeting / number).touch()
    while len(list(meeting.iterdir())) < int(processes):
        time.sleep(0.01)
    with warmup.Compilations() as seen, capture(arch) as launches:
        for case in CASES:
            run(case, arch)
    sound = all(launch.compiled.asm["hsaco"][:4] == b"\x7fELF" and launch.assembly for launch in launches)
    print(json.dumps({"compiled": len(seen.new), "found": len(seen.found), "sound": sound, "keys": sorted(launch.key for launch in launches)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
