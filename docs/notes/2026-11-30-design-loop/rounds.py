"""What the rounds of a ledger brought and cost, and what became of their hypotheses.

python docs/notes/2026-11-30-design-loop/rounds.py docs/notes/2026-11-30-design-loop/example-512-tokens.jsonl
"""

import sys
from collections import Counter
from pathlib import Path

from kda2.workbench import ledger
from kda2.workbench.rounds import Round

ledger_file = Path(sys.argv[1])
hypotheses: Counter[str] = Counter()
for line in ledger.read(ledger_file):
    if line.kind == "round":
        r = Round.from_plain(line.payload)
        print(f"round {r.round}: {r.stage}, {r.gain_percent} % in {r.seconds} s, best {r.best_us} us ({r.best})")
        hypotheses.update(r.hypotheses.values())
    if line.kind == "choice":
        times = {entry["name"]: entry["us"] for entry in line.payload["ranking"]}
        print(f"chosen: {line.payload['chosen']}, {times[line.payload['chosen']]} us; as shipped {times['triton']} us")
print(", ".join(f"{n} {word}" for word, n in hypotheses.items()))
